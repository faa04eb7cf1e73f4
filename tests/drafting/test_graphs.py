"""Static steps against the assistant that they stand in for: without graphs on the CPU, as graphs on CUDA."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tiny_zoo
import torch
from plain import assert_equals_plain
from streamers import take_time
from tiny_models import VOCAB_SIZE, make_noisy, prompt
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel

from hf_ssd import SSDConfig
from hf_ssd.drafting import AssistantModel, GraphedAssistant, graphs, make_fast_assistant
from hf_ssd.drafting.static_slabs import RowCache
from hf_ssd.kv_cache import keep_branch
from hf_ssd.protocol import DraftRequest
from hf_ssd.runtime import pool, server

STATIC = [
    "mistral, window of 8",
    "gemma3, mixed layers",
    "gpt2",
    "opt",
    "granite, scaled logits",
]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CAPACITIES", (64, 96, 128))
    monkeypatch.setattr(graphs, "NUM_SPARE", 40)


def request(num_tokens: int = 6, max_new_tokens: int = 60) -> DraftRequest:
    return DraftRequest(
        prompt_ids=(2,) * num_tokens,
        num_padding=0,
        max_new_tokens=max_new_tokens,
        vocab_size=VOCAB_SIZE,
        takes_trees=False,
        do_sample=False,
        processors=(),
        seed=0,
        config=SSDConfig(),
    )


def static(model: PreTrainedModel, **kwargs: int) -> GraphedAssistant:
    assistant = GraphedAssistant(model, capture=model.device.type == "cuda")
    assistant.prepare(request(**kwargs))
    return assistant


class Pair:
    """A static assistant and a plain one that are given the same."""

    def __init__(self, assistant: GraphedAssistant, seed: int) -> None:
        self.both = assistant, AssistantModel(assistant.model)
        self.caches = [each.new_cache() for each in self.both]
        self.random = random.Random(seed)
        self.tolerance = 1e-5 if assistant.dtype == torch.float32 else 0.05

    @property
    def length(self) -> int:
        return self.caches[0].get_seq_length()

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]

    def forward(self, tokens: list[int], positions=None, masks=(None, None), num_hidden=None) -> None:
        found, expected = (
            each.forward(tokens, cache, positions, mask, num_hidden).float()
            for each, cache, mask in zip(self.both, self.caches, masks, strict=True)
        )
        assert (found - expected).abs().max() <= self.tolerance * expected.abs().max()

    def round(self, num_branches: int, depth: int) -> None:
        """Branches that leave the trunk anywhere, grow together, and of which one is kept."""
        num_trunk = self.length
        slots: list[list[int]] = [[] for _ in range(num_branches)]
        seen = [self.random.randint(max(1, num_trunk - 4), num_trunk) for _ in slots]
        for _ in range(depth):
            first = self.length
            for i, branch in enumerate(slots):
                branch.append(first + i)
            positions = [num + len(branch) - 1 for num, branch in zip(seen, slots, strict=True)]
            arguments = {
                "num_trunk": num_trunk,
                "num_slots": first + num_branches,
                "visible": list(zip(seen, map(tuple, slots), strict=True)),
                "positions": positions,
            }
            masks = [each.mask.build(**arguments) for each in self.both]
            self.forward(self.tokens(num_branches), positions, masks)
        kept, num_kept = self.random.randrange(num_branches), self.random.randint(0, depth)
        for cache in self.caches:
            keep_branch(cache, seen[kept], slots[kept][:num_kept])


def play(pair: Pair, num_rounds: int) -> None:
    pair.forward(pair.tokens(6), num_hidden=1)
    for _ in range(num_rounds):
        pair.round(pair.random.randint(1, 40), pair.random.randint(1, 3))
        pair.forward(pair.tokens(pair.random.randint(3, 8)), num_hidden=pair.random.choice([None, 1]))


@pytest.mark.usefixtures("small_stages")
class TestSteps:
    @pytest.mark.parametrize("seed", range(3))
    def test_random_trees_equal_the_plain_assistants(self, seed: int) -> None:
        assistant = static(make_noisy())
        pair = Pair(assistant, seed)
        play(pair, 40)
        assert isinstance(pair.caches[0], RowCache)
        assert pair.length > 96, "no stage was left"

    @pytest.mark.parametrize("family", STATIC)
    def test_families(self, family: str) -> None:
        assistant = static(tiny_zoo.make(family))
        assert [stage.capacity for stage in assistant._stages] == [64, 96, 128]
        play(Pair(assistant, 0), 12)

    @pytest.mark.parametrize("family", ["gemma2, mixed layers and capped logits", "bloom, ALiBi"])
    def test_models_that_need_another_attention_are_run_plainly(self, family: str) -> None:
        assistant = static(tiny_zoo.make(family))
        assert assistant._stages == []
        assert not isinstance(assistant.new_cache(), RowCache)
        pair = Pair(assistant, 0)
        pair.forward(pair.tokens(6))
        pair.forward(pair.tokens(1))

    def test_a_row_that_outgrows_all_stages_goes_on(self) -> None:
        pair = Pair(static(make_noisy()), 0)
        pair.forward(pair.tokens(100))
        play(pair, 12)
        assert pair.length > 128

    def test_nothing_of_the_row_before_is_seen(self) -> None:
        assistant = static(make_noisy())
        for seed in range(3):
            play(Pair(assistant, seed), 5)

    def test_hidden_states_outlive_the_next_step(self) -> None:
        """The output of a graph is one place: what is not copied changes under its reader."""

        class Maker:
            def capture(self, function: Callable[[], torch.Tensor]):
                output = function().clone()
                return lambda: output.copy_(function()), output

        assistant = GraphedAssistant(make_noisy(), capture=False)
        assistant._graphs = Maker()
        assistant.prepare(request())
        cache = assistant.new_cache()
        first = assistant.forward([5], cache)
        before = first.clone()
        assistant.forward([7], cache)
        assert torch.equal(first, before)
        play(Pair(assistant, 0), 5)


class TestPreparing:
    def capacities(self, assistant: GraphedAssistant) -> list[int]:
        return [stage.capacity for stage in assistant._stages]

    def test_it_makes_what_the_row_may_come_to(self) -> None:
        assistant = static(make_noisy(max_position_embeddings=8192), num_tokens=100, max_new_tokens=50)
        assert self.capacities(assistant) == [1024]
        assistant.prepare(request(1200, 1000))
        assert self.capacities(assistant) == [1024, 2048, 4096]
        assert assistant.new_cache().is_on(assistant._stages[1].slabs)

    def test_a_prompt_that_is_too_long_is_left_to_the_plain_cache(self) -> None:
        assistant = static(make_noisy(max_position_embeddings=32_768), num_tokens=20_000)
        assert self.capacities(assistant) == []
        assert not isinstance(assistant.new_cache(), RowCache)

    def test_a_failure_is_no_failure(self, monkeypatch) -> None:
        def fail(*args: object) -> None:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(graphs, "make_slabs", fail)
        assistant = static(make_noisy())
        assert assistant._stages == []
        pair = Pair(assistant, 0)
        pair.forward(pair.tokens(6))

    def test_the_model_keeps_its_attention(self) -> None:
        model = make_noisy()
        own = model.config._attn_implementation
        static(model)
        assert model.config._attn_implementation == own

    def test_only_cuda_gets_graphs_by_itself(self) -> None:
        assert type(make_fast_assistant(make_noisy(), None)) is AssistantModel


class TestWhole:
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_ssd_by_a_thread_with_static_steps_equals_plain_generate(self, target, monkeypatch, do_sample) -> None:
        made: list[GraphedAssistant] = []

        def make(model: PreTrainedModel, quantization: str | None) -> GraphedAssistant:
            made.append(GraphedAssistant(model, capture=False))
            return made[-1]

        monkeypatch.setattr(server, "make_fast_assistant", make)
        assistant = make_noisy()
        # With one token left to choose from, sampling has one outcome too, and goes through the rule for draws.
        sampling = {"do_sample": True, "top_k": 1} if do_sample else {}
        config = SSDConfig(backend="stream", num_assistant_tokens=4)
        arguments = {"max_new_tokens": 60, "stopping_criteria": take_time, **sampling}
        stats = assert_equals_plain(target, assistant, prompt(6), config, **arguments)
        assert stats.num_hits
        assert made[0]._stages
        pool.close_worker(assistant)


class Waits(LlamaModel):
    """Waits for the device in each forward, which no graph can."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.last_hidden_state.sum().item()
        return outputs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestCuda:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.usefixtures("small_stages")
    def test_graphs_equal_the_plain_assistant(self, dtype) -> None:
        assistant = static(make_noisy().to("cuda", dtype))
        assert [stage.capacity for stage in assistant._stages] == [64, 96, 128]
        for seed in range(3):
            play(Pair(assistant, seed), 30)

    def test_captures_leave_the_default_generator_alone(self) -> None:
        torch.cuda.manual_seed(0)
        expected = torch.rand(8, device="cuda")
        torch.cuda.manual_seed(0)
        static(make_noisy().to("cuda"))
        assert torch.equal(torch.rand(8, device="cuda"), expected)

    @pytest.mark.parametrize("is_noticed", [True, False])
    def test_a_model_that_cannot_be_captured_is_run_plainly(self, monkeypatch, is_noticed) -> None:
        if not is_noticed:
            monkeypatch.setattr(graphs._GraphMaker, "_try", lambda self, function: None)
        model: LlamaForCausalLM = make_noisy().to("cuda")
        model.model.__class__ = Waits
        assistant = static(model)
        assert assistant._stages == []
        pair = Pair(assistant, 0)
        pair.forward(pair.tokens(6))
        torch.rand(8, device="cuda")  # which a capture that failed would make impossible
        assert torch.cuda.get_sync_debug_mode() == 0
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
