"""`hf-ssd bench`: a suite of prompts through every arm, at several temperatures, with intervals.

How it is measured. As in `hf-ssd compare`: all arms take turns prompt by prompt after a warm-up, and the clock runs
around generate(). Beyond that, EOS is a token like any other unless asked otherwise, so that all texts have the same
number of tokens, and every figure comes with the interval that it spans when prompts and repeats are drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import SSDConfig
from ..drafting import AssistantModel, make_assistant
from ..drafting.int8 import copy_modules, may_pay, quantize_linears
from ..eagle3 import Eagle3Head
from ..metrics import SSDStats
from ..pairs import Pair
from ..runtime import placement
from ..trace import measure_overlap
from .arms import PEER_METHODS, Arm, Inputs, Method, Runner, build_arms, choose_arms
from .batches import BatchFigures, batch_arms, measure_batches, num_batch_steps
from .bench_settings import BenchSettings
from .compare import generation_kwargs, load, measure_differences, trace
from .encoding import encode
from .environment import environment
from .fan_outs import ChainDrafter, record_rounds
from .figures import BenchResult, Measurement, measured
from .replay import FanOutFigures, compare_fan_outs
from .results import Difference, fastest_variants, summarise_prompts
from .schedule import Progress, run_schedule, schedule
from .settings import ALL_CORES, AR, SSD, sampling_arguments

NO_EOS = 2**31 - 1  # an id that no token has
MAX_SHOWN_CHARACTERS = 200  # of a prompt, in the JSON


class Benchmark:
    """One benchmark: the models, the prompts, and what has been done of it.

    Args:
        settings: What to measure.
        progress: Called before each step with what comes next, the steps done and the steps in all (0: not known yet).
    """

    def __init__(self, settings: BenchSettings, progress: Progress | None = None) -> None:
        self.settings = settings
        self._report: Progress = progress or (lambda what, done, total: None)
        self._num_done = 0

    def run(self) -> BenchResult:
        """Runs it.

        Raises:
            OSError: If a model is not found.
            ValueError: If the models do not fit each other, or the prompts do not fit the models.
        """
        settings = self.settings
        self._report("reading the models", 0, 0)
        self._pair, names = load(settings)
        if settings.replay and self._pair.assistant_tokenizer is not None:
            raise ValueError(
                "`replay` must be False for an assistant with another tokenizer, but got True: outcomes are replayed "
                "in the target's tokens, one by one. Pass `--no-replay`."
            )
        if settings.replay and isinstance(self._pair.assistant, Eagle3Head):
            raise ValueError(
                "`replay` must be False for an EAGLE-3 head, but got True: outcomes are replayed without the target's "
                "states. Pass `--no-replay`."
            )
        self._inputs = [encode(self._pair.tokenizer, prompt) for prompt in settings.prompts]
        check_lengths(self._pair, self._inputs, settings.max_new_tokens)
        self._int8_assistant = None
        self._arms = self._build_arms()
        if any(arm.method is Method.ASSISTED_INT8 for arm in self._arms):
            self._int8_assistant = int8_copy(self._pair.assistant)
        num_prompts = len(self._inputs)
        self._num_steps = sum(
            len(schedule(self._arms_at(temperature), num_prompts, settings.repeats)) + settings.replay * num_prompts
            for temperature in settings.temperatures
        ) + sum(self._num_batch_steps(size) for size in settings.batch_sizes)
        measurements, fan_outs = [], []
        for temperature in settings.temperatures:
            measurements.append(self._measure(temperature))
            if settings.replay:
                fan_outs.append(self._try_fan_outs(temperature))
        batches = tuple(map(self._measure_batches, settings.batch_sizes))
        stats = self._trace()
        return BenchResult(
            pair=names,
            dtype=settings.dtype,
            suite=settings.suite,
            generation={
                "max_new_tokens": settings.max_new_tokens,
                "repeats": settings.repeats,
                "temperatures": list(settings.temperatures),
                "stop_at_eos": settings.stop_at_eos,
                "num_prompts": num_prompts,
                "seed": settings.seed,
            },
            environment=environment(),
            measurements=tuple(measurements),
            fan_outs=tuple(fan_outs),
            batches=batches,
            trace=stats,
            overlap=None if stats is None else measure_overlap(stats),
        )

    def _build_arms(self) -> tuple[Arm, ...]:
        settings, config = self.settings, self.settings.ssd_config
        cores = placement.available_cores()
        self._threads, assistant_threads = placement.split_threads(
            config.target_threads, config.assistant_threads, cores
        )
        names = choose_arms(settings.arms, settings.KNOWN_ARMS, self._pair.assistant)
        is_default = len(settings.arms) == len(settings.KNOWN_ARMS)
        if is_default and not runs_int8(config.assistant_quantization, self._pair.assistant):
            names = [name for name in names if PEER_METHODS.get(name.removesuffix(ALL_CORES)) != Method.ASSISTED_INT8]
        return build_arms(
            names,
            config,
            self._threads,
            assistant_threads,
            cores,
            draft_lengths=settings.draft_lengths,
            ssd_variants=settings.ssd_variants,
        )

    def _arms_at(self, temperature: float) -> tuple[Arm, ...]:
        """The arms to run: greedily none that differs from an earlier one in how it samples only."""
        if temperature > 0:
            return self._arms
        arms: list[Arm] = []
        for arm in self._arms:
            others = [other.config for other in arms if other.config is not None and other.config != arm.config]
            if arm.config is None or greedy_settings(arm.config) not in map(greedy_settings, others):
                arms.append(arm)
        return tuple(arms)

    def _measure(self, temperature: float) -> Measurement:
        """Times all arms at one temperature."""
        settings, inputs = self.settings, self._inputs
        with self._runner(temperature) as runner:
            first = self._num_done
            calls = run_schedule(
                runner,
                self._arms_at(temperature),
                inputs,
                repeats=settings.repeats,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                report=lambda what, done, _: self._say(temperature, what, first + done),
            )
            self._num_done += len(schedule(self._arms_at(temperature), len(inputs), settings.repeats))
            best = fastest_variants(calls)
            differences: dict[str, Sequence[Difference]] | None = None
            if AR in best and temperature == 0:
                self._say(temperature, "comparing the texts", self._num_done)
                differences = {
                    name: measure_differences(runner, calls[arm], calls[best[AR]], inputs, self._threads)
                    for name, arm in best.items()
                }
        arms, categories = measured(calls, [prompt.kind for prompt in settings.prompts], differences)
        shown = [replace(prompt, text=prompt.text[:MAX_SHOWN_CHARACTERS]) for prompt in settings.prompts]
        lengths = [tokens["input_ids"].shape[1] for tokens in inputs]
        prompts = summarise_prompts(shown, lengths, {name: calls[arm] for name, arm in best.items()})
        return Measurement(temperature, arms, categories, prompts)

    def _num_batch_steps(self, batch_size: int) -> int:
        return num_batch_steps(self._batch_arms, len(self._inputs), batch_size, self.settings.repeats)

    @property
    def _batch_arms(self) -> list[Arm]:
        return batch_arms(self._arms_at(self.settings.temperatures[0]), placement.available_cores())

    def _measure_batches(self, batch_size: int) -> BatchFigures:
        """Times all arms that take several rows, at the first temperature."""
        settings, temperature, first = self.settings, self.settings.temperatures[0], self._num_done
        with self._runner(temperature) as runner:
            figures = measure_batches(
                runner,
                self._batch_arms,
                self._inputs,
                batch_size,
                repeats=settings.repeats,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                report=lambda what, done, _: self._say(temperature, what, first + done),
            )
        self._num_done += self._num_batch_steps(batch_size)
        return figures

    def _try_fan_outs(self, temperature: float) -> FanOutFigures:
        """Records rounds on all prompts, then replays them."""
        settings = self.settings
        drafter = ChainDrafter(self._drafting_assistant)
        for index, inputs in enumerate(self._inputs):
            self._say(temperature, f"recording rounds, prompt {index + 1} of {len(self._inputs)}", self._num_done)
            arguments, seed = self._generation_kwargs(temperature), settings.seed + index
            record_rounds(self._pair.target, drafter, inputs, arguments, settings.max_new_tokens, seed)
            self._num_done += 1
        return compare_fan_outs(drafter.rounds, settings.ssd_config, temperature)

    @cached_property
    def _drafting_assistant(self) -> AssistantModel:
        """The assistant as SSD drafts with it."""
        with torch.inference_mode():
            return make_assistant(self._pair.assistant, self.settings.ssd_config.assistant_quantization)

    def _trace(self) -> SSDStats | None:
        """One more SSD call with its time line, at the first temperature."""
        arm = next((arm for arm in self._arms if arm.name == SSD), None)
        if arm is None:
            return None
        self._say(self.settings.temperatures[0], "keeping a time line", self._num_done)
        with self._runner(self.settings.temperatures[0]) as runner:
            return trace(runner, arm, self._inputs[0], self.settings)

    def _runner(self, temperature: float) -> Runner:
        kwargs = self._generation_kwargs(temperature)
        return Runner(self._pair.target, self._pair.assistant, kwargs, self._int8_assistant)

    def _generation_kwargs(self, temperature: float) -> dict[str, Any]:
        kwargs = generation_kwargs(self._pair, sampling_arguments(temperature))
        if not self.settings.stop_at_eos:
            # Unlike min_new_tokens this needs no logits processor, which would cost some arms more than others.
            kwargs["eos_token_id"] = NO_EOS
        return kwargs

    def _say(self, temperature: float, what: str, num_done: int) -> None:
        self._report(f"T={temperature:g}: {what}", num_done, self._num_steps)


def runs_int8(quantization: str | None, assistant: PreTrainedModel) -> bool:
    """Whether the SSD arm drafts with 8-bit weights: then transformers' assisted generation is to have them too."""
    return quantization == "int8" or (quantization == "auto" and may_pay(assistant))


def greedy_settings(config: SSDConfig) -> SSDConfig:
    """The settings without those that only act when sampling."""
    return replace(config, verification="auto", seed=None, assistant_temperature=None, saguaro_coefficient=1.0)


def int8_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its linear layers in 8 bits; `model` is left as it is, and shares the other weights."""
    copied = copy_modules(model)
    quantize_linears(copied)
    return copied


def check_lengths(pair: Pair, inputs: Sequence[Inputs], max_new_tokens: int) -> None:
    """Refuses prompts that are too long for the target.

    Raises:
        ValueError: If one is, with the texts to be generated.
    """
    limit: int | None = getattr(pair.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(tokens["input_ids"].shape[1] for tokens in inputs)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"`suite` must hold prompts that leave room for {max_new_tokens} new tokens within the {limit} that the "
            f"target can read, but the longest has {longest}. Take shorter prompts or fewer new tokens."
        )
