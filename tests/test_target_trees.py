"""Token trees on the target's side: each text is plain `generate()`'s, and so is what is left in the cache."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import tiny_zoo
import torch
from grammar import words_only
from lookup_model import LookupForCausalLM
from streamers import Listener
from tiny_models import VOCAB_SIZE, make_noisy, make_target, padded_batch, prompt
from tiny_pair import byte_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

from hf_ssd import SSDConfig, orchestration
from hf_ssd.compat import CACHE_KEY
from hf_ssd.generation import generate_with_ssd
from hf_ssd.protocol import DraftRequest
from hf_ssd.runtime import staff
from hf_ssd.target_trees import Masks, keeps_everything, masks_of, tree_inputs
from hf_ssd.types import Origin, Outcome, Speculation

K = 4
CONFIG = SSDConfig(backend="inline", num_assistant_tokens=K)


class Oracle:
    """A speculator that drafts random trees through which the true text may run, and checks what it is told.

    Args:
        texts: What plain decoding gives for each row, prompts included.
        seed: Of the trees.
        chance: How often a draft token on the true text goes on with it.
    """

    threads, device = None, "cpu"

    def __init__(self, texts: list[list[int]], seed: int = 0, chance: float = 0.8, num_nodes: int = 10) -> None:
        self.texts, self.chance, self.num_nodes = texts, chance, num_nodes
        self.generator = random.Random(seed)
        self.num_trees = self.num_off_the_first_branch = 0
        self.requests: list[DraftRequest] = []

    def another(self) -> Oracle:
        return Oracle(self.texts, self.generator.randrange(1000), self.chance, self.num_nodes)

    def start(self, request: DraftRequest) -> None:
        self.requests.append(request)
        self.row = list(request.prompt_ids)
        self.text = next(text for text in self.texts if text[: len(self.row)] == self.row)
        self.sent = Speculation()

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> None:
        path, node = [], outcome.node
        while node:
            path.append(self.sent.tokens[node - 1])
            node = self.sent.parents[node - 1] + 1
        if outcome.node != len(path):
            self.num_off_the_first_branch += 1
        self.row += [*path[::-1], outcome.bonus_token]
        known = min(len(self.row), len(self.text))  # a stop string may end the text before the tokens do
        assert self.row[:known] == self.text[:known]

    def receive(self) -> Speculation:
        tokens: list[int] = []
        parents: list[int] = []
        is_true: list[bool] = []
        while len(tokens) < self.generator.randint(1, self.num_nodes):
            parent = self.generator.randint(-1, len(tokens) - 1)
            depth, node = 1, parent
            while node >= 0:
                depth, node = depth + 1, parents[node]
            place = len(self.row) + depth - 1
            is_on_text = parent < 0 or is_true[parent]
            token = self.generator.randrange(VOCAB_SIZE)
            if is_on_text and place < len(self.text) and self.generator.random() < self.chance:
                token = self.text[place]
            if (parent, token) in set(zip(parents, tokens, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
            is_true.append(is_on_text and place < len(self.text) and token == self.text[place])
        self.sent = Speculation(tuple(tokens), tuple(parents), origin=Origin.CACHE)
        self.num_trees += not self.sent.is_chain
        return self.sent

    def stop(self) -> None:
        pass


@pytest.fixture
def with_oracle(monkeypatch: pytest.MonkeyPatch):
    """Generates plainly and with random trees; returns both outputs and the oracle."""

    def run(target: PreTrainedModel, inputs: dict[str, Any], *, seed: int = 0, num_nodes: int = 10, **settings: Any):
        def arguments() -> dict[str, Any]:
            made = {
                key: value() if key in ("logits_processor", CACHE_KEY) else value for key, value in settings.items()
            }
            return {"do_sample": False, **made}

        expected = target.generate(**inputs, **arguments())
        ids = expected if isinstance(expected, torch.Tensor) else expected.sequences
        oracle = Oracle(ids.tolist(), seed, num_nodes=num_nodes)

        class Scope:
            def __enter__(self) -> Oracle:
                return oracle

            def __exit__(self, *_: object) -> None:
                pass

        streamer = Listener() if len(ids) == 1 else None
        with monkeypatch.context() as patch:
            patch.setattr(staff, "speculator_for", lambda *_, **__: Scope())
            output = generate_with_ssd(
                target, assistant_model=target, ssd_config=CONFIG, streamer=streamer, **inputs, **arguments()
            )
        actual = output if isinstance(output, torch.Tensor) else output.sequences
        assert actual.tolist() == ids.tolist()
        assert target.ssd_stats.degraded is None
        assert all(r.num_accepted <= min(r.depth, r.num_draft_tokens) for r in target.ssd_stats.rounds)
        if streamer is not None:
            assert [token for put in streamer.puts for token in put] == ids[0].tolist()
        return expected, output, oracle

    return run


class Bans(LogitsProcessor):
    """In place, as some do."""

    def __call__(self, input_ids, scores):
        scores[:, 1::7] = float("-inf")
        return scores


class Alternates(LogitsProcessor):
    """Wrong at once with a prefix of a wrong length."""

    def __call__(self, input_ids, scores):
        forbidden = torch.arange(scores.shape[1]) % 2 != input_ids.shape[1] % 2
        return scores.masked_fill(forbidden, float("-inf"))


def only_near(batch_id: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 3 + step + batch_id) % VOCAB_SIZE for step in (1, 2, 5)]


class TestRandomTrees:
    @pytest.fixture(autouse=True)
    def one_by_one(self, monkeypatch) -> None:
        """Rows that are decoded together get chains."""
        monkeypatch.setattr(orchestration, "decodes_together", lambda *args: False)

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("seed", range(3))
    def test_equal_to_plain(self, attention: str, seed: int, with_oracle) -> None:
        target = make_target(attn_implementation=attention)
        _, _, oracle = with_oracle(target, {"input_ids": prompt(6)}, seed=seed, max_new_tokens=60)
        assert oracle.num_trees > 5
        assert oracle.num_off_the_first_branch > 3
        assert target.ssd_stats.tokens_per_round > 1.5

    @pytest.mark.parametrize(
        "settings",
        [
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [9, 11]]},
            {"prefix_allowed_tokens_fn": only_near},
            {"logits_processor": lambda: LogitsProcessorList([Bans()])},
            {"logits_processor": lambda: LogitsProcessorList([Alternates(), Bans()])},
            {"min_new_tokens": 11, "eos_token_id": [4, 9, 17, 30]},
            {"sequence_bias": {(9,): 3.0, (4, 6): -5.0}},
        ],
        ids=lambda settings: "+".join(settings),
    )
    def test_processors(self, settings: dict, with_oracle) -> None:
        for seed in range(2):
            _, _, oracle = with_oracle(
                make_target(), {"input_ids": prompt(6)}, seed=seed, max_new_tokens=40, **settings
            )
            assert oracle.num_trees >= 1

    def test_a_grammar_is_asked_about_no_prefix_off_the_text(self, with_oracle) -> None:
        """It raises there, and after the end too."""
        allowed = words_only([[11, 12, 13, 1], [11, 15, 16, 17, 1], [21, 22, 23, 1]], num_prompt_tokens=3)

        for seed in range(4):
            settings = {"max_new_tokens": 20, "eos_token_id": 1, "prefix_allowed_tokens_fn": allowed}
            with_oracle(make_target(), {"input_ids": prompt(3, seed=seed)}, seed=seed, **settings)

    @pytest.mark.parametrize("position", [0, 1, 2, 3, 5, 8])
    @pytest.mark.parametrize("seed", range(2))
    def test_an_eos_on_the_path_ends_everything_there(self, position: int, seed: int, with_oracle) -> None:
        """HF48981. Trees are large here, so that the end falls inside one."""
        target = make_target()
        text = target.generate(prompt(6), max_new_tokens=12, do_sample=False)[0, 6:].tolist()
        expected, output, _ = with_oracle(
            target, {"input_ids": prompt(6)}, seed=seed, num_nodes=20, max_new_tokens=40, eos_token_id=text[position],
            return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.01,
        )  # fmt: skip
        assert len(output.scores) == len(expected.scores) == len(output.logits)
        assert output[CACHE_KEY].get_seq_length() == output.sequences.shape[1] - 1

    def test_an_eos_off_the_path_ends_nothing(self, with_oracle) -> None:
        target = make_target()
        text = target.generate(prompt(6), max_new_tokens=40, do_sample=False)[0].tolist()
        unused = next(token for token in range(VOCAB_SIZE) if token not in text)
        for seed in range(3):
            # Any token may be in the trees; with so many ends most trees hold one.
            eos = [token for token in range(VOCAB_SIZE) if token not in text]
            assert unused in eos
            _, output, _ = with_oracle(target, {"input_ids": prompt(6)}, seed=seed, max_new_tokens=34, eos_token_id=eos)
            assert output.shape[1] == 40

    @pytest.mark.parametrize("max_new_tokens", range(1, K + 3))
    def test_never_more_than_max_new_tokens(self, max_new_tokens: int, with_oracle) -> None:
        for seed in range(3):
            with_oracle(make_target(), {"input_ids": prompt(6)}, seed=seed, max_new_tokens=max_new_tokens)

    def test_stop_strings(self, with_oracle) -> None:
        tokenizer = byte_tokenizer()
        target = make_target(vocab_size=len(tokenizer))
        text = target.generate(prompt(6), max_new_tokens=40, do_sample=False)[0, 6:]
        stop = next(t for t in (tokenizer.decode(text[i : i + 2]) for i in range(9, 38)) if t.isascii())
        for seed in range(3):
            _, output, _ = with_oracle(
                target, {"input_ids": prompt(6)}, seed=seed, max_new_tokens=40, stop_strings=[stop], tokenizer=tokenizer
            )
            assert output.shape[1] < 46

    def test_left_padding(self, with_oracle) -> None:
        """VL26498. In batches of rows of unlike lengths, and alone."""
        target = make_target()
        batch = padded_batch([prompt(9), prompt(4, seed=1), prompt(1, seed=2)])
        _, _, oracle = with_oracle(target, batch, max_new_tokens=30)
        assert [request.num_padding for request in oracle.requests] == [0, 5, 8]
        assert all(request.takes_trees for request in oracle.requests)
        assert oracle.num_trees > 10
        for row in range(3):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            with_oracle(target, one, seed=row, max_new_tokens=30, repetition_penalty=1.2)

    @pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}, {"prefix_allowed_tokens_fn": only_near}])
    def test_scores_logits_and_cache_are_plains(self, processors: dict, with_oracle) -> None:
        target = make_target()
        for seed in range(2):
            expected, output, oracle = with_oracle(
                target, {"input_ids": prompt(6)}, seed=seed, max_new_tokens=30, return_dict_in_generate=True,
                output_scores=True, output_logits=True, **processors,
            )  # fmt: skip
            assert oracle.num_off_the_first_branch > 0
            for name in ("scores", "logits"):
                assert len(output[name]) == len(expected[name])
                torch.testing.assert_close(output[name], expected[name], atol=1e-4, rtol=1e-4)
            assert_same_cache(output[CACHE_KEY], expected[CACHE_KEY])

    def test_a_cache_of_the_callers_own(self, with_oracle) -> None:
        target = make_target()
        made: list[DynamicCache] = []

        def cache() -> DynamicCache:
            made.append(DynamicCache(config=target.config))
            return made[-1]

        _, output, oracle = with_oracle(target, {"input_ids": prompt(6)}, max_new_tokens=25, **{CACHE_KEY: cache})
        assert oracle.num_trees > 2
        assert_same_cache(made[1], made[0])
        # It goes on from there, plainly and with trees.
        longer = torch.cat([output, prompt(3)], dim=1)
        plain = target.generate(longer, max_new_tokens=10, do_sample=False)
        assert target.generate(longer, max_new_tokens=10, do_sample=False, **{CACHE_KEY: made[1]}).equal(plain)
        assert made[0].get_seq_length() == output.shape[1] - 1
        ids = generate_with_ssd(
            target, inputs=longer, assistant_model=make_noisy(), ssd_config=CONFIG, max_new_tokens=10, do_sample=False,
            **{CACHE_KEY: made[0]},
        )  # fmt: skip
        assert ids.equal(plain)

    @pytest.mark.parametrize("family", ["gpt2", "opt", "granite, scaled logits"])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_families_that_take_trees(self, family: str, attention: str, with_oracle) -> None:
        target = tiny_zoo.make(family, attn_implementation=attention)
        _, _, oracle = with_oracle(target, {"input_ids": prompt(12)}, max_new_tokens=30)
        assert oracle.requests[0].takes_trees
        batch = padded_batch([prompt(9), prompt(4, seed=1)])
        with_oracle(target, batch, max_new_tokens=15)


def assert_same_cache(cache: DynamicCache, expected: DynamicCache) -> None:
    assert type(cache) is type(expected)
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, right in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, right.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values, right.values, atol=1e-4, rtol=1e-4)


def takes_trees(model) -> bool:
    return masks_of(model) is not Masks.OWN


class TestWhoTakesTrees:
    @pytest.mark.parametrize("family", tiny_zoo.FAMILIES)
    def test_windows_and_alibi_do_not(self, family: str) -> None:
        expected = family in ("gpt2", "opt", "granite, scaled logits")
        assert takes_trees(tiny_zoo.make(family, attn_implementation="eager")) is expected

    def test_it_is_tried_once_per_model_and_attention(self, monkeypatch) -> None:
        target = make_target()
        assert takes_trees(target)
        forward = type(target).forward
        calls = []

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(*args, **kwargs)

        monkeypatch.setattr(type(target), "forward", counted)
        assert takes_trees(target)
        assert not calls
        target.set_attn_implementation("eager")
        assert takes_trees(target)
        assert calls

    def test_a_model_that_is_told_no_positions_does_not(self) -> None:
        """`generate()` gives it none, so the tokens of a tree could not be put where they belong."""

        class WithoutPositions(LookupForCausalLM):
            def forward(self, input_ids=None, attention_mask=None, use_cache=None, logits_to_keep=0, **kwargs):
                return super().forward(
                    input_ids, attention_mask, use_cache=use_cache, logits_to_keep=logits_to_keep, **kwargs
                )

        table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        model = WithoutPositions.of(table)
        expected = model.generate(torch.tensor([[3, 5, 1]]), max_new_tokens=20, do_sample=False)
        ids = generate_with_ssd(
            model, inputs=torch.tensor([[3, 5, 1]]), assistant_model=LookupForCausalLM.of(table), ssd_config=CONFIG,
            max_new_tokens=20, do_sample=False,
        )  # fmt: skip
        assert ids.equal(expected)
        assert not takes_trees(model)

    def test_another_attention_takes_chains(self) -> None:
        target = make_target()
        target.config._attn_implementation = "flex_attention"
        assert not takes_trees(target)

    def test_caches(self) -> None:
        target = make_target()
        assert keeps_everything(None)
        assert keeps_everything(DynamicCache())
        assert keeps_everything(DynamicCache(config=target.config))
        assert not keeps_everything(DynamicCache(config=tiny_zoo.make("mistral, window of 8").config))
        assert not keeps_everything(StaticCache(config=target.config, max_cache_len=16))

        class Own(DynamicLayer):
            pass

        cache = DynamicCache(config=target.config)
        cache.layers[0] = Own()
        assert not keeps_everything(cache)

    @pytest.mark.parametrize(
        ("settings", "takes"),
        [
            ({}, True),
            ({"output_scores": True, "return_dict_in_generate": True}, True),
            ({"output_hidden_states": True, "return_dict_in_generate": True}, False),
            ({"output_attentions": True, "return_dict_in_generate": True}, False),
            ({"do_sample": True}, True),
        ],
    )
    def test_calls(self, settings: dict, takes: bool, monkeypatch) -> None:
        target = make_target(attn_implementation="eager")
        requests, make = [], orchestration.draft_request
        monkeypatch.setattr(
            orchestration, "draft_request", lambda *a, **k: requests.append(make(*a, **k)) or requests[-1]
        )
        options = {"max_new_tokens": 8, "do_sample": False, **settings}
        generate_with_ssd(target, inputs=prompt(6), assistant_model=make_noisy(), ssd_config=CONFIG, **options)
        assert [request.takes_trees for request in requests] == [takes]
        without = SSDConfig(backend="inline", draft_tree_size=None)
        generate_with_ssd(target, inputs=prompt(6), assistant_model=make_noisy(), ssd_config=without, **options)
        assert not requests[-1].takes_trees

    def test_the_model_is_left_as_it_was(self) -> None:
        target = make_target().train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            before = torch.random.get_rng_state()
            takes_trees(target)
            assert torch.equal(torch.random.get_rng_state(), before)
        assert target.training
        assert target.config._attn_implementation == "sdpa"


class TestInputs:
    TREE = Speculation((7, 8, 9, 10), (-1, 0, 0, -1))

    def inputs(self, padding: torch.Tensor | None) -> dict[str, Any]:
        cache = DynamicCache()
        cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
        values = {"input_ids": torch.ones(1, 5, dtype=torch.long), "position_ids": torch.arange(3, 8)[None]}
        values |= {CACHE_KEY: cache, "attention_mask": padding}
        return tree_inputs(make_target(), values, self.TREE, Masks.FULL)

    def test_each_token_sees_its_ancestors_and_itself(self) -> None:
        mask = self.inputs(None)["attention_mask"]
        assert mask.shape == (1, 1, 5, 8)
        assert mask.dtype == torch.float32  # a boolean one is silently wrong under eager attention
        sees = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4]]
        expected = torch.full((5, 8), float("-inf"))
        for row, nodes in enumerate(sees):
            expected[row, [0, 1, 2, *(3 + node for node in nodes)]] = 0.0
        assert torch.equal(mask[0, 0], expected)

    def test_padding_is_not_seen(self) -> None:
        padding = torch.ones(1, 8, dtype=torch.long)
        padding[0, :2] = 0
        mask = self.inputs(padding)["attention_mask"]
        assert (mask[..., :2] == float("-inf")).all()
        assert torch.equal(mask[..., 2:], self.inputs(None)["attention_mask"][..., 2:])

    def test_positions_go_by_depth(self) -> None:
        assert self.inputs(None)["position_ids"].tolist() == [[3, 4, 5, 5, 4]]


class TestSpeculation:
    def test_depths(self) -> None:
        assert TestInputs.TREE.depths == (1, 2, 2, 1)
        assert TestInputs.TREE.depth == 2
        assert Speculation().depth == 0
        assert not TestInputs.TREE.is_chain
        assert Speculation.chain((1, 2, 3)).is_chain
        assert Speculation().is_chain

    def test_a_cut_goes_by_depth_and_keeps_the_tree(self) -> None:
        probs = torch.rand(4, 16)
        tree = Speculation((7, 8, 9, 10), (-1, 0, 0, -1), probs)
        cut = tree.cut(1)
        assert (cut.tokens, cut.parents) == ((7, 10), (-1, -1))
        assert torch.equal(cut.draft_probs, probs[[0, 3]])
        assert tree.cut(2) is tree
        assert tree.cut(0).tokens == ()


@pytest.mark.parametrize("assistant", ["noisy", "unrelated", "twin"])
@pytest.mark.parametrize("settings", [{}, {"ngram_drafts": False}, {"num_assistant_tokens": "auto"}, {"mode": "sd"}])
def test_with_the_assistants_own_trees(assistant: str, settings: dict, request) -> None:
    """The whole loop."""
    target, model = make_target(), request.getfixturevalue(assistant)
    config = SSDConfig(**{"backend": "inline", "num_assistant_tokens": K, **settings})
    expected = target.generate(prompt(6), max_new_tokens=60, do_sample=False)
    ids = generate_with_ssd(
        target, inputs=prompt(6), assistant_model=model, ssd_config=config, max_new_tokens=60, do_sample=False
    )
    assert ids.equal(expected)
    assert any(r.num_draft_tokens > r.depth for r in target.ssd_stats.rounds)
