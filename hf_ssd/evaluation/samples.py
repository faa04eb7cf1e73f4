"""Answers: every arm on every item, one after the other, each kept as soon as it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ..bench.arms import Arm, Call, Inputs, Runner, build_arms, torch_threads
from ..bench.encoding import encode
from ..bench.prompts import Prompt
from ..bench.schedule import WARM_UP_TOKENS, Progress
from ..runtime import placement
from .modules import round_columns
from .records import RecordFile, key_of
from .settings import EvaluationSettings
from .tasks import TASKS, Item


@dataclass(frozen=True)
class Sample:
    """An answer of one arm.

    Args:
        tokens: Its token ids, prompt excluded.
        text: The same as text.
        score: What the task gives for it, between 0 and 1.
        note: What the task says about it.
        duration_s: Time of the call, in seconds.
        rounds: For SD and SSD the inputs of the module `acceptance`.
        degraded: Why SSD went on without its assistant, where it did.
    """

    tokens: tuple[int, ...]
    text: str
    score: float
    note: str
    duration_s: float
    rounds: dict[str, list[int]] | None = None
    degraded: str | None = None

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Sample:
        """A sample as it was kept."""
        return cls(**{**record["sample"], "tokens": tuple(record["sample"]["tokens"])})


@dataclass(frozen=True)
class Step:
    """One call to make. `seed` is the number of the sample; what is drawn with depends on arm and item too."""

    arm: Arm
    item: Item
    seed: int


Samples = dict[Step, Sample]


def arms_of(settings: EvaluationSettings) -> tuple[Arm, ...]:
    """The arms of an evaluation, on the cores that the library would give them."""
    cores = placement.available_cores()
    threads = placement.split_threads(settings.target_threads, settings.assistant_threads, cores)
    return build_arms(
        settings.arms, settings.ssd_config, *threads, cores, draft_lengths=(), ssd_variants=settings.ssd_variants
    )


def steps_of(settings: EvaluationSettings, arms: Sequence[Arm]) -> tuple[Step, ...]:
    """All calls: item by item, every arm in turn, another one first each time."""
    steps = []
    places: dict[str, int] = {}
    for turn, item in enumerate(settings.items):
        place = places[item.task] = places.get(item.task, -1) + 1
        skips_variants = settings.variant_limit is not None and place >= settings.variant_limit
        for seed in range(settings.seed, settings.seed + settings.seeds):
            for i in range(len(arms)):
                arm = arms[(turn + i) % len(arms)]
                if not (skips_variants and arm.name in settings.ssd_variants):
                    steps.append(Step(arm, item, seed))
    return tuple(steps)


class Sampler:
    """Makes samples, or takes them from the records of an earlier run.

    Args:
        settings: What to evaluate.
        names: What the models are called.
        runner: Runs calls.
        tokenizer: The target's.
        records: Where samples are kept.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        names: dict[str, str],
        runner: Runner,
        tokenizer: PreTrainedTokenizerBase,
        records: RecordFile,
    ) -> None:
        self._settings = settings
        self._names = names
        self._runner = runner
        self._tokenizer = tokenizer
        self._records = records
        self._warm: set[Arm] = set()

    def run(self, steps: Sequence[Step], report: Progress) -> Samples:
        """All samples."""
        samples: Samples = {}
        for done, step in enumerate(steps):
            report(f"{step.arm.label}, {step.item.task} {step.item.name}", done, len(steps))
            key = self._key(step)
            if key not in self._records:
                self._records.add(key, {**_names_of(step), "sample": asdict(self._sample(step))})
            samples[step] = Sample.from_record(self._records[key])
        return samples

    def reference_logits(self, step: Step, num_tokens: int) -> torch.Tensor:
        """The logits that AR chose its first tokens from, of shape `(num_tokens, vocab_size)`, float32.

        Made by decoding greedily once more, on as many threads as before: the same numbers.
        """
        inputs = self._encode(step.item)
        with torch_threads(step.arm.target_threads):
            output = self._runner.plain_target.generate(
                **self._runner.generation_kwargs,
                **inputs,
                max_new_tokens=num_tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return torch.cat([logits.float() for logits in output.logits])

    def _key(self, step: Step) -> str:
        settings = self._settings
        return key_of(
            models=self._names,
            dtype=settings.dtype,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            versions=[torch.__version__, transformers.__version__],
            arm=[step.arm.settings, step.arm.target_threads],
            item=[step.item.task, step.item.name, step.item.prompt, dict(step.item.reference)],
            seed=step.seed,
        )

    def _sample(self, step: Step) -> Sample:
        if step.arm not in self._warm:  # the assistant's process starts here, not in a timed call
            self._runner.run(step.arm, self._encode(step.item), WARM_UP_TOKENS)
            self._warm.add(step.arm)
        call: Call = self._runner.run(step.arm, self._encode(step.item), self._settings.max_new_tokens, seed_of(step))
        text = self._tokenizer.decode(call.tokens, skip_special_tokens=True)
        score = TASKS[step.item.task].score(text, step.item)
        return Sample(
            tokens=call.tokens,
            text=text,
            score=score.value,
            note=score.note,
            duration_s=call.duration_s,
            rounds=None if call.stats is None else round_columns(call.stats),
            degraded=None if call.stats is None else call.stats.degraded,
        )

    def _encode(self, item: Item) -> Inputs:
        return encode(self._tokenizer, Prompt(item.task, item.prompt))


def seed_of(step: Step) -> int:
    """What a sample is drawn with. Arms have seeds of their own: to be compared, their draws must be independent."""
    return int(key_of(**_names_of(step))[:12], 16)


def _names_of(step: Step) -> dict[str, Any]:
    return {"arm": step.arm.label, "task": step.item.task, "item": step.item.name, "seed": step.seed}
