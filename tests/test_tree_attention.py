"""Tree attention against attention in float64 and against models that run each branch alone, without a cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import tiny_zoo
import torch
from tiny_models import VOCAB_SIZE, make_target
from transformers import LlamaConfig, PreTrainedModel

from hf_ssd import tree_attention
from hf_ssd.drafting import AssistantModel
from hf_ssd.drafting.tree_mask import TreeMask
from hf_ssd.kv_cache import keep_branch

MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "four heads a key head": lambda **settings: make_target(num_key_value_heads=1, **settings),
    "two heads a key head": make_target,
    "a key head each": lambda **settings: make_target(num_key_value_heads=4, **settings),
    **{
        family: lambda family=family, **settings: tiny_zoo.make(family, **settings)
        for family in ("mistral, window of 8", "gemma3, mixed layers", "gpt2", "opt", "granite, scaled logits")
    },
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["fused", "products", "merged"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The three ways in which attention is computed; the last with the CPU's kernel for what runs on a GPU."""
    if request.param != "fused":
        monkeypatch.setattr(tree_attention, "FEW_SCORES", 0)
    if request.param == "merged":
        monkeypatch.setattr(tree_attention, "prefix_kernel", lambda query, value: cpu_kernel)
    return request.param


def cpu_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> tuple[torch.Tensor, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scaling)


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """The naive rival, head by head; `sees` is boolean, of shape `(num_tokens, num_keys)`."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[0, head].double() @ key[0, head // group].double().T / query.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~sees, float("-inf")).softmax(-1) @ value[0, head // group].double())
    return torch.stack(heads)[None]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_prefix", [0, 1, 50, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_tails(path: str, num_kv_heads: int, num_prefix: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_prefix)
    for num_tokens, num_tail in ((1, 0), (1, 1), (3, 0), (3, 7), (9, 30)):
        if num_prefix + num_tail == 0:
            continue
        query = torch.randn(1, num_tokens, 4, 16, generator=generator).transpose(1, 2).to(dtype)
        slab = torch.randn(2, 1, num_kv_heads, 800, 16, generator=generator).to(dtype)
        key, value = slab[..., : num_prefix + num_tail, :]
        tail = torch.rand(num_tokens, num_tail, generator=generator) < 0.3
        if num_prefix == 0:
            tail[:, 0] = True
        elif num_tail:
            tail[0] = False  # a token that sees the prefix only
        sees = torch.cat([torch.ones(num_tokens, num_prefix, dtype=torch.bool), tail], dim=1)
        mask = torch.zeros(tail.shape, dtype=dtype).masked_fill(~tail, float("-inf"))
        kernel = tree_attention.prefix_kernel(query, value)
        output = tree_attention.tree_attention(query, key, value, mask, kernel=kernel)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        expected = exact(query, key, value, sees)
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def test_scores_too_large_for_a_half() -> None:
    """Qwen's keys have large biases: with scores rounded to bfloat16 its draft tokens would not be its own."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 2, 64, generator=generator).bfloat16() + 4
    key = torch.randn(1, 2, 5000, 64, generator=generator).bfloat16() + 4
    value = torch.randn(1, 2, 5000, 64, generator=generator).bfloat16()
    mask = torch.zeros(2, 0, dtype=torch.bfloat16)
    output = tree_attention.tree_attention(query, key, value, mask)
    expected = exact(query, key, value, torch.ones(2, 5000, dtype=torch.bool))
    assert (output - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    query = torch.randn(1, 14, 9, 64, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 1, 2, 4200, 64, device="cuda", dtype=dtype)[..., :4140, :]
    tail = torch.rand(9, 44, device="cuda") < 0.3
    mask = torch.zeros(tail.shape, device="cuda", dtype=dtype).masked_fill(~tail, float("-inf"))
    sees = torch.cat([torch.ones(9, 4096, dtype=torch.bool, device="cuda"), tail], dim=1)
    kernels = [None, tree_attention.prefix_kernel(query, value)]
    if kernels[1] is not None:
        kernels.append(tree_attention._torch_flash)
    for kernel in kernels:
        output = tree_attention.tree_attention(query, key, value, mask, kernel=kernel)
        torch.testing.assert_close(output.double(), exact(query, key, value, sees), atol=1e-2, rtol=1e-2)


class Tree:
    """Random branches on a random trunk, grown a step at a time as the engine does."""

    def __init__(self, assistant: AssistantModel, seed: int) -> None:
        self.random = random.Random(seed)
        self.assistant = assistant
        self.trunk = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(5, 40))]
        self.cache = assistant.new_cache()
        self.branches: list[tuple[int, list[int], list[int]]] = []  # trunk tokens seen, tokens, slots
        # The last two are run with the first step of the branches.
        self.assistant.forward(self.trunk[:-2], self.cache)
        self.pending = self.trunk[-2:]

    def grow(self) -> list[tuple[list[int], torch.Tensor]]:
        """Runs a step; the sequences that it extended and the hidden states at their ends."""
        num_trunk, first_slot = len(self.trunk), self.cache.get_seq_length()
        tokens, sequences = list(self.pending), []
        positions = list(range(num_trunk - len(self.pending), num_trunk))
        visible: list[tuple[int, tuple[int, ...]]] = [(position + 1, ()) for position in positions]
        sequences = [self.trunk[: position + 1] for position in positions]
        for _ in range(self.random.randint(0, 3)):
            self.branches.append((num_trunk - self.random.randint(0, 2), [], []))
        for num_seen, branch, slots in self.branches:
            if self.random.random() < 0.3 and branch:
                continue  # left alone this time; its slots stay
            branch.append(self.random.randrange(VOCAB_SIZE))
            slots.append(first_slot + len(tokens))
            tokens.append(branch[-1])
            positions.append(num_seen + len(branch) - 1)
            visible.append((num_seen, tuple(slots)))
            sequences.append([*self.trunk[:num_seen], *branch])
        if not tokens:
            return []
        self.pending = []
        num_slots = first_slot + len(tokens)
        mask = self.assistant.mask.build(num_trunk=num_trunk, num_slots=num_slots, visible=visible, positions=positions)
        hidden = self.assistant.forward(tokens, self.cache, positions, mask)
        return list(zip(sequences, hidden, strict=True))

    def keep(self) -> None:
        """Makes the trunk what one of the branches says, as after a hit."""
        num_seen, branch, slots = self.random.choice(self.branches)
        keep_branch(self.cache, num_seen, slots)
        self.trunk = [*self.trunk[:num_seen], *branch]
        self.branches = []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_trees_against_each_branch_alone(path: str, name: str, implementation: str) -> None:
    model = MODELS[name](attn_implementation=implementation)
    assistant = AssistantModel(model)
    assert assistant.takes_trees
    assert assistant.mask.omits_prefix
    num_checked = 0
    for seed in range(3):
        tree = Tree(assistant, seed)
        for _ in range(3):
            for _ in range(4):
                for sequence, hidden in tree.grow():
                    alone = assistant.model(torch.tensor([sequence]), use_cache=False).logits[0, -1]
                    logits = assistant.logits(hidden[None])[0]
                    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-5)
                    num_checked += 1
            if tree.branches:
                tree.keep()
    assert num_checked > 50
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", MODELS)
def test_chains_against_no_cache(path: str, name: str) -> None:
    assistant = AssistantModel(MODELS[name]())
    tokens = [(5 * i) % VOCAB_SIZE for i in range(40)]
    alone = assistant.model(torch.tensor([tokens]), use_cache=False).logits[0]
    cache, first = assistant.new_cache(), 0
    for last in (20, 21, 22, 30, 40):
        hidden = assistant.forward(tokens[first:last], cache)
        torch.testing.assert_close(assistant.logits(hidden), alone[first:last], atol=1e-4, rtol=1e-5)
        first = last


def test_masks_are_as_narrow_as_they_can_be() -> None:
    assistant = AssistantModel(make_target())
    visible = [(90, (100, 104)), (92, (101, 105))]
    mask = assistant.mask.build(num_trunk=100, num_slots=106, visible=visible, positions=[91, 93])
    assert mask.shape == (1, 1, 2, 16)
    assert assistant.mask.chain(90, 1).shape == (1, 1, 1, 0)
    mask = AssistantModel(MODELS["gemma3, mixed layers"]()).mask
    masks = mask.build(num_trunk=100, num_slots=106, visible=visible, positions=[91, 93])
    assert {kind: each.shape[-1] for kind, each in masks.items()} == {"full_attention": 16, "sliding_attention": 106}


@pytest.mark.parametrize("name", MODELS)
def test_narrow_masks_are_the_ends_of_wide_ones(name: str) -> None:
    assistant = AssistantModel(MODELS[name]())
    visible = [(3, ()), (4, (7, 9)), (2, (8, 10))]
    arguments = {"num_trunk": 5, "num_slots": 12, "visible": visible, "positions": [2, 5, 3]}
    narrow = assistant.mask.build(**arguments)
    wide = TreeMask(assistant.config, assistant.dtype, assistant.device).build(**arguments)
    if not isinstance(wide, dict):
        narrow, wide = {"all": narrow}, {"all": wide}
    for kind, mask in wide.items():
        width = narrow[kind].shape[-1]
        assert width == 10
        assert torch.equal(mask[..., -width:], narrow[kind])
        assert not mask[..., :-width].any()


def test_a_wrong_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tree_attention.tree_attention

    def wrong(query, key, value, mask, *rest):
        return right(query, key[:, :, 1:], value[:, :, 1:], mask, *rest)

    monkeypatch.setattr(tree_attention, "tree_attention", wrong)
    assistant = AssistantModel(make_target())
    assert assistant.takes_trees
    assert not assistant.mask.omits_prefix


def test_capped_scores_are_left_to_the_models_own_attention() -> None:
    """Gemma 2's attention caps its scores, which tree attention does not know."""
    model = tiny_zoo.make("gemma2, mixed layers and capped logits")
    own = model.config._attn_implementation
    assistant = AssistantModel(model)
    assert assistant.takes_trees
    assert not assistant.mask.omits_prefix
    assert model.config._attn_implementation == own


def test_threads_may_use_it_at_once() -> None:
    """The last one out puts the model's own attention back; one that needs another waits for that."""
    config = LlamaConfig(attn_implementation="sdpa")
    is_wrong = []

    def run(name: str) -> None:
        for _ in range(300):
            with tree_attention.use(config, name):
                if config._attn_implementation != name:
                    is_wrong.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "first", "second", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not is_wrong
    assert config._attn_implementation == "sdpa"
