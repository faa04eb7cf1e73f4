"""`hf-ssd check-sampling`: is any verification rule told from transformers' own sampling?

How it is measured. Every sampler draws many short texts for the same prompts. Each is then compared with the first AR
sampler in four ways, chosen before any result was seen:

- *first token*: total variation of first tokens;
- *opening*: total variation of the first three tokens together;
- *likeliest*: how much more often the target's likeliest token was drawn than its probability says, over all tokens.
  This is 0 for the target's distribution whatever the texts are, and errors of verification, such as accepting too
  much, move it. It is the one with power against small biases: all tokens count, and the texts' own differences cancel;
- *score*: share of texts with the right word.

P-values come from exchanging labels within each prompt, and are corrected together for their number (Holm). A second AR
sampler shows what no difference looks like; a sampler that is biased on purpose shows that one would be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ..bench.arms import Inputs, Runner, torch_threads
from ..bench.compare import generation_kwargs, load
from ..bench.environment import environment
from ..bench.schedule import Progress
from ..config import SSDConfig
from ..runtime import placement
from .biased import BiasedLogitsProcessor
from .cloze import CLOZE
from .modules import load_metric
from .records import RecordFile, key_of
from .sampling_settings import SamplingSettings
from .statistics import holm, mean_difference_test

REFERENCE, AGAIN, BIASED = "AR", "AR again", "biased on purpose"
OPENING_TOKENS = 3
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Draws:
    """What a sampler drew for a prompt.

    Args:
        tokens: Token ids of each sample, prompt excluded.
        surplus: For each sample the sum, over its tokens, of 1 where the target's likeliest token was drawn, less that
            token's probability; by plain forwards of the target.
        scores: For each sample 1 if it has the right word.
        room: Mean over all tokens of what the bias could move there: `min(bias, 1 - likeliest probability)`.
    """

    tokens: tuple[tuple[int, ...], ...]
    surplus: tuple[float, ...]
    scores: tuple[float, ...]
    room: float


@dataclass(frozen=True)
class Test:
    """A comparison of a sampler with AR.

    Args:
        sampler: Which sampler.
        what: Which of the four ways.
        value: Total variation, or the difference of the means (for *likeliest* per token).
        if_equal: What it comes to on average for two equal samplers.
        p_value: By permutation, for this test alone.
        sd_if_equal: Its standard deviation for two equal samplers, where it is a difference of means.
        corrected: Corrected for the number of tests.
        chi_square_p_value: By Pearson's chi-square, for the two total variations; not among those that decide.
    """

    sampler: str
    what: str
    value: float
    if_equal: float
    p_value: float
    sd_if_equal: float | None = None
    corrected: float = 1.0
    chi_square_p_value: float | None = None


@dataclass(frozen=True)
class SamplingCheck:
    """The result of a check."""

    pair: dict[str, str]
    dtype: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    mean_bias: float
    mean_scores: dict[str, float]
    tests: tuple[Test, ...]

    @property
    def told(self) -> tuple[str, ...]:
        """The samplers that are told from AR."""
        found = [test.sampler for test in self.tests if test.corrected < self.settings["significance"]]
        return tuple(dict.fromkeys(found))

    @property
    def passed(self) -> bool:
        """Whether the biased sampler is told from AR, and no other."""
        return self.told == (BIASED,)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, ready for JSON."""
        return {**asdict(self), "told": list(self.told), "passed": self.passed}


def check_sampling(settings: SamplingSettings, progress: Progress | None = None) -> SamplingCheck:
    """Runs a check, or what is left of it.

    Finished samples are kept. Those that are not are drawn anew; under the token and the block rule they may then be
    others, since what these draw depends on how much was drafted.

    Raises:
        OSError: If a model is not found, or the records cannot be written.
        ValueError: If the models do not fit each other, or `out` holds something else.
        ImportError: If `evaluate` is missing.
    """
    report = progress or (lambda what, done, total: None)
    report("reading the models", 0, 0)
    pair, names = load(settings)
    samplers = (REFERENCE, AGAIN, *settings.rules, BIASED)
    path = None if settings.out is None else settings.out / SAMPLES_FILE
    draws: dict[str, list[Draws]] = {sampler: [] for sampler in samplers}
    with (
        RecordFile(path) as records,
        Runner(pair.target, pair.assistant, generation_kwargs(pair, settings.sampling)) as runner,
    ):
        sampler_of_texts = TextSampler(settings, runner, pair.tokenizer)
        for prompt in range(settings.num_prompts):
            for place, sampler in enumerate(samplers):
                report(
                    f"{sampler}, prompt {prompt + 1}",
                    prompt * len(samplers) + place,
                    settings.num_prompts * len(samplers),
                )
                key = _key(settings, names, sampler, prompt)
                if key not in records:
                    made = sampler_of_texts.draw(sampler, prompt, seed=int(key[:12], 16))
                    records.add(key, {"sampler": sampler, "prompt": prompt, "draws": asdict(made)})
                draws[sampler].append(_draws_of(records[key]["draws"]))
    report("comparing the samplers", 1, 1)
    tests = [test for sampler in samplers[1:] for test in compare(sampler, draws[sampler], draws[REFERENCE], settings)]
    corrected = holm([test.p_value for test in tests])
    return SamplingCheck(
        pair=names,
        dtype=settings.dtype,
        settings={
            name: getattr(settings, name)
            for name in (
                "temperature", "num_prompts", "num_samples", "max_new_tokens", "bias", "significance",
                "num_permutations", "seed",
            )
        },
        environment=environment(),
        mean_bias=_mean([d.room for d in draws[REFERENCE]]),
        mean_scores={name: _mean([score for d in group for score in d.scores]) for name, group in draws.items()},
        tests=tuple(Test(**{**asdict(test), "corrected": c}) for test, c in zip(tests, corrected, strict=True)),
    )  # fmt: skip


def compare(sampler: str, own: Sequence[Draws], theirs: Sequence[Draws], settings: SamplingSettings) -> list[Test]:
    """The four comparisons of a sampler with AR, not yet corrected."""
    tests = []
    for what, num_tokens in (("first token", 1), ("opening", OPENING_TOKENS)):
        metric = load_metric("distribution_match")
        for prompt, (left, right) in enumerate(zip(own, theirs, strict=True)):
            metric.add_batch(predictions=left.tokens, references=right.tokens, prompts=[prompt] * len(left.tokens))
        found = metric.compute(num_tokens=num_tokens, num_permutations=settings.num_permutations, seed=settings.seed)
        tests.append(
            Test(
                sampler,
                what,
                found["total_variation"],
                found["total_variation_if_equal"],
                found["permutation_p_value"],
                chi_square_p_value=found["chi_square_p_value"],
            )
        )
    for what, field, scale in (("likeliest", "surplus", settings.max_new_tokens), ("score", "scores", 1)):
        test = mean_difference_test(
            [getattr(d, field) for d in own],
            [getattr(d, field) for d in theirs],
            settings.num_permutations,
            settings.seed,
        )
        tests.append(
            Test(sampler, what, test.value / scale, test.mean_if_equal / scale, test.p_value, test.sd_if_equal / scale)
        )
    return tests


class TextSampler:
    """Draws texts by any sampler and looks them up in the target's own distribution.

    Args:
        settings: What to draw.
        runner: Holds the models.
        tokenizer: The target's.
    """

    def __init__(self, settings: SamplingSettings, runner: Runner, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings = settings
        self._runner = runner
        self._tokenizer = tokenizer
        cores = placement.available_cores()
        self._threads, _ = placement.split_threads(settings.target_threads, settings.assistant_threads, cores)

    def draw(self, sampler: str, prompt: int, seed: int) -> Draws:
        """All samples of a sampler for a prompt."""
        text, answer = CLOZE[prompt]
        inputs = self._tokenizer(text, return_tensors="pt")
        tokens = self._generate(sampler, inputs, seed)
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        surplus, room = self._look_up(inputs["input_ids"], tokens)
        return Draws(tokens, surplus, tuple(float(answer.lower() in text.lower()) for text in texts), room)

    def _generate(self, sampler: str, inputs: Inputs, seed: int) -> tuple[tuple[int, ...], ...]:
        settings, runner = self._settings, self._runner
        kwargs: dict[str, Any] = {
            **runner.generation_kwargs,
            **inputs,
            "max_new_tokens": settings.max_new_tokens,
            "num_return_sequences": settings.num_samples,
        }
        model = runner.plain_target if sampler in (REFERENCE, AGAIN) else runner.target
        if model is runner.target:
            rule: Any = "token" if sampler == BIASED else sampler
            kwargs["ssd_config"] = SSDConfig.from_dict(
                {**settings.ssd_config.to_dict(), "verification": rule, "seed": seed}
            )
        if sampler == BIASED:
            kwargs["logits_processor"] = [BiasedLogitsProcessor(settings.bias, settings.temperature)]
        torch.manual_seed(seed)
        with torch_threads(self._threads):
            output = model.generate(**kwargs)
        return tuple(map(self._until_eos, output[:, inputs["input_ids"].shape[1] :].tolist()))

    def _until_eos(self, tokens: list[int]) -> tuple[int, ...]:
        """Tokens up to EOS, without the padding of rows that ended before others."""
        eos = self._runner.target.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return tuple(tokens[:length])

    def _look_up(self, prompt_ids: torch.Tensor, samples: Sequence[tuple[int, ...]]) -> tuple[tuple[float, ...], float]:
        """Surplus of each sample, and the mean room, by one plain forward of the target over the distinct samples."""
        distinct = sorted(set(samples))
        longest = max(map(len, distinct))
        rows = torch.tensor(
            [[*tokens, *[0] * (longest - len(tokens))] for tokens in distinct]
        )  # what follows is not read
        ids = torch.cat([prompt_ids.expand(len(rows), -1), rows], dim=1)
        with torch_threads(self._threads), torch.inference_mode():
            logits = self._runner.plain_target(input_ids=ids[:, :-1], logits_to_keep=longest).logits
        probs, places = (logits.float() / self._settings.temperature).softmax(dim=-1).max(dim=-1)
        surpluses = (places == rows).float() - probs
        rooms = (1 - probs).clamp(max=self._settings.bias)
        found = {
            tokens: (float(surplus[: len(tokens)].sum()), float(room[: len(tokens)].sum()))
            for tokens, surplus, room in zip(distinct, surpluses, rooms, strict=True)
        }
        num_tokens = sum(map(len, samples))
        return tuple(found[tokens][0] for tokens in samples), sum(found[tokens][1] for tokens in samples) / num_tokens


def _key(settings: SamplingSettings, names: dict[str, str], sampler: str, prompt: int) -> str:
    return key_of(
        models=names,
        dtype=settings.dtype,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        versions=[torch.__version__, transformers.__version__],
        num_samples=settings.num_samples,
        sampler=sampler,
        config=None if sampler in (REFERENCE, AGAIN) else settings.ssd_config.to_dict(),
        bias=settings.bias,
        prompt=CLOZE[prompt],
        seed=settings.seed,
    )


def _draws_of(record: dict[str, Any]) -> Draws:
    return Draws(
        tokens=tuple(map(tuple, record["tokens"])),
        surplus=tuple(record["surplus"]),
        scores=tuple(record["scores"]),
        room=record["room"],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
