"""Random calls of `generate()`: what may be given to it, drawn from a seed, valid or with one thing wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .zoo import VOCAB_SIZE

TARGETS = ("llama", "gpt2", "mistral", "gemma3_text", "bloom", "qwen3_moe", "deepseek_v3", "qwen2")
ASSISTANTS = ("noisy", "twin", "gpt2")  # the last one has nothing to do with most targets

Draw = Callable[[random.Random], Any]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.sample(range(1, VOCAB_SIZE), count)


# Arguments of `generate()`, and how a valid value is drawn. Each is left out more often than not.
COMMON: dict[str, Draw] = {
    "repetition_penalty": lambda draw: draw.choice([0.8, 1.1, 1.5]),
    "no_repeat_ngram_size": lambda draw: draw.randint(1, 4),
    "bad_words_ids": lambda draw: [_tokens(draw, draw.randint(1, 2)) for _ in range(3)],
    "suppress_tokens": lambda draw: _tokens(draw, 4),
    "begin_suppress_tokens": lambda draw: _tokens(draw, 4),
    "sequence_bias": lambda draw: [[_tokens(draw, draw.randint(1, 2)), draw.choice([-2.0, 3.0])]],
    "min_new_tokens": lambda draw: draw.randint(1, 6),
    "min_length": lambda draw: draw.randint(1, 20),
    "eos_token_id": lambda draw: _tokens(draw, draw.randint(1, 12)),
    "forced_eos_token_id": lambda draw: draw.randint(1, VOCAB_SIZE - 1),
    "exponential_decay_length_penalty": lambda draw: (draw.randint(1, 8), 1.2),
    "renormalize_logits": lambda draw: True,
    "remove_invalid_values": lambda draw: True,
    "cache_implementation": lambda draw: "dynamic",
    "prefill_chunk_size": lambda draw: draw.randint(1, 8),
    "max_time": lambda draw: 1000.0,
}
SAMPLING: dict[str, Draw] = {
    "temperature": lambda draw: draw.choice([0.3, 0.7, 1.0, 1.5]),
    "top_k": lambda draw: draw.choice([0, 1, 5, 20]),
    "top_p": lambda draw: draw.choice([0.3, 0.8, 0.95]),
    "min_p": lambda draw: draw.choice([0.02, 0.1]),
    "typical_p": lambda draw: draw.choice([0.5, 0.9]),
    "epsilon_cutoff": lambda draw: 0.01,
    "eta_cutoff": lambda draw: 0.01,
}
OF_SSD: dict[str, Draw] = {
    "num_assistant_tokens": lambda draw: draw.choice([1, 2, 5, 9, "auto"]),
    "draft_tree_size": lambda draw: draw.choice([None, 1, 6, "auto"]),
    "ngram_drafts": lambda draw: draw.choice([True, False]),
    "cache_budget": lambda draw: draw.choice([1, 5, "auto"]),
    "fan_out": lambda draw: draw.choice(["per_instance", "geometric", "uniform", [2, 1, 0], [1]]),
    "backup": lambda draw: draw.choice(["auto", "jit", "ngram", "none"]),
    "draft_vocab_size": lambda draw: draw.choice([None, 8, 40]),
    "saguaro_coefficient": lambda draw: draw.choice([0.5, 1.0]),
    "assistant_temperature": lambda draw: draw.choice([None, 0.6, 1.3]),
    "expected_acceptance": lambda draw: draw.choice([0.2, 0.9]),
    "trace": lambda draw: True,
}


@dataclass(frozen=True)
class DrawnCall:
    """One call.

    Args:
        number: Which of the seed's calls.
        target: A family.
        assistant: `"noisy"`, `"twin"`, or a family.
        lengths: Prompt length of each row.
        arguments: Of `generate()`, but for models and prompts.
        ssd: Fields of [`SSDConfig`].
        fault: What is wrong with it, as the error has to name it; `None` for a valid call.
    """

    number: int
    target: str
    assistant: str
    lengths: tuple[int, ...]
    arguments: dict[str, Any]
    ssd: dict[str, Any]
    fault: str | None = None

    def __str__(self) -> str:
        arguments = {**self.arguments, "ssd_config": self.ssd}
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"call {self.number}: {self.target} with {self.assistant}, prompts of {self.lengths}, {given}"


def draw_valid(seed: int, number: int) -> DrawnCall:
    """A call that `generate()` allows, greedy or by coupled sampling."""
    draw = random.Random(f"{seed} {number}")
    num_rows = draw.choice([1, 1, 1, 2, 3])
    samples = draw.random() < 0.5
    arguments: dict[str, Any] = {"do_sample": samples, **_some(draw, COMMON, 0.15)}
    if samples:
        arguments.update(_some(draw, SAMPLING, 0.3))
        if num_rows == 1 and draw.random() < 0.2:
            arguments["num_return_sequences"] = draw.randint(2, 3)
    if "eos_token_id" not in arguments:
        arguments.pop("exponential_decay_length_penalty", None)  # makes the end of a text likelier
    if num_rows > 1 or "num_return_sequences" in arguments:
        arguments.pop("max_time", None)  # refused for several rows
    lengths = tuple(draw.randint(1, 14) for _ in range(num_rows))
    if draw.random() < 0.8:
        arguments["max_new_tokens"] = draw.randint(1, 24)
    else:
        arguments["max_length"] = max(lengths) + draw.randint(1, 24)
    if draw.random() < 0.3:
        arguments.update(return_dict_in_generate=True, output_scores=draw.random() < 0.6, output_logits=True)
    ssd = {"mode": draw.choice(["ssd", "ssd", "sd"]), **_some(draw, OF_SSD, 0.3)}
    if samples:
        ssd["seed"] = draw.randint(0, 2**40)
    return DrawnCall(number, draw.choice(TARGETS), draw.choice(ASSISTANTS), lengths, arguments, ssd)


# What is wrong, by the name that the error must say; arguments of `generate()`, ...
WRONG_ARGUMENTS: tuple[tuple[str, dict[str, Draw]], ...] = (
    ("temperature", {"do_sample": lambda draw: True, "temperature": lambda draw: -draw.random()}),
    ("top_k", {"do_sample": lambda draw: True, "top_k": lambda draw: -draw.randint(1, 9)}),
    ("top_p", {"do_sample": lambda draw: True, "top_p": lambda draw: -draw.random()}),
    ("min_p", {"do_sample": lambda draw: True, "min_p": lambda draw: 1 + draw.random()}),
    ("typical_p", {"do_sample": lambda draw: True, "typical_p": lambda draw: -draw.random()}),
    ("penalty", {"repetition_penalty": lambda draw: -draw.random()}),
    ("bad_words_ids", {"bad_words_ids": lambda draw: draw.choice([[], [[-3]], "no"])}),
    ("sequence_bias", {"sequence_bias": lambda draw: draw.choice([[], [[[1], "much"]], {}])}),
    ("max_new_tokens", {"max_new_tokens": lambda draw: -draw.randint(0, 9)}),
    ("beam", {"num_beams": lambda draw: draw.randint(2, 4), "num_return_sequences": lambda draw: 1}),
    ("use_cache", {"use_cache": lambda draw: False}),
    ("cache_implementation", {"cache_implementation": lambda draw: draw.choice(["quantized", "no such cache"])}),
    ("guidance_scale", {"guidance_scale": lambda draw: 1 + draw.random()}),
    ("assisted generation", {"prompt_lookup_num_tokens": lambda draw: draw.randint(1, 9)}),
    ("synced_gpus", {"synced_gpus": lambda draw: True}),
    ("assistant_tokenizer", {"assistant_tokenizer": lambda draw: "tokenizer"}),
    ("temperatur", {"temperatur": lambda draw: draw.random()}),
    ("assistant", {"assistant_model": lambda draw: draw.choice(["gpt2", 7, object()])}),
)
# ... and fields of SSDConfig.
WRONG_FIELDS: tuple[tuple[str, Draw], ...] = (
    ("mode", lambda draw: draw.choice(["fast", "SSD", 1])),
    ("verification", lambda draw: draw.choice(["typical", None])),
    ("seed", lambda draw: draw.choice([-1, 2**64, 0.5, [], [1, 2, 3, 4, 5]])),
    ("assistant_temperature", lambda draw: draw.choice([0, -1.0, "warm", float("inf")])),
    ("saguaro_coefficient", lambda draw: draw.choice([0, 1.5, "c"])),
    ("num_assistant_tokens", lambda draw: draw.choice([0, -2, 2.5, "many", True])),
    ("draft_tree_size", lambda draw: draw.choice([0, -1, 1.5])),
    ("ngram_drafts", lambda draw: draw.choice([1, "yes", None])),
    ("cache_budget", lambda draw: draw.choice([0, -4, None, "large"])),
    ("fan_out", lambda draw: draw.choice(["best", [], [0, 0], [-1], 3])),
    ("backup", lambda draw: draw.choice(["spare", None])),
    ("expected_acceptance", lambda draw: draw.choice([0, 1, 2.0, "high"])),
    ("power_law_exponent", lambda draw: draw.choice([0, -1.0, float("nan")])),
    ("draft_vocab_size", lambda draw: draw.choice([0, -5, 0.5])),
    ("assistant_quantization", lambda draw: draw.choice(["int4", 8])),
    ("backend", lambda draw: draw.choice(["gpu", None])),
    ("assistant_device", lambda draw: draw.choice(["tpux", -1, "cuda:x"])),
    ("target_threads", lambda draw: draw.choice([0, -1, 1.5])),
    ("timeout_s", lambda draw: draw.choice([0, -1.0, float("inf")])),
    ("trace", lambda draw: draw.choice([1, "all"])),
    ("gamma", lambda draw: draw.randint(1, 9)),
)


def draw_invalid(seed: int, number: int) -> DrawnCall:
    """A call that would be valid but for one thing."""
    valid = draw_valid(seed, number)
    draw = random.Random(f"{seed} {number} wrong")
    arguments, ssd = dict(valid.arguments), dict(valid.ssd)
    if number % 2:
        fault, wrong = WRONG_ARGUMENTS[number // 2 % len(WRONG_ARGUMENTS)]
        arguments.update({key: value(draw) for key, value in wrong.items()})
    else:
        fault, value = WRONG_FIELDS[number // 2 % len(WRONG_FIELDS)]
        ssd[fault] = value(draw)
        if fault == "seed":
            arguments["do_sample"] = True
    return DrawnCall(number, valid.target, valid.assistant, valid.lengths, arguments, ssd, fault)


def _some(draw: random.Random, values: dict[str, Draw], chance: float) -> dict[str, Any]:
    return {key: value(draw) for key, value in values.items() if draw.random() < chance}
