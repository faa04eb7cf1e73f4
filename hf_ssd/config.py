"""`SSDConfig`: everything that can be set about speculative speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Mode = Literal["ssd", "sd", "ar", "auto"]
Backend = Literal["auto", "process", "stream", "inline"]
Rule = Literal["coupled", "token", "block"]

MODES = ("ssd", "sd", "ar", "auto")
BACKENDS = ("auto", "process", "stream", "inline")
FAN_OUTS = ("per_instance", "geometric", "uniform")
VERIFICATIONS = ("auto", "coupled", "token", "block", "hierarchical")
MAX_SEED = 2**64 - 1
QUANTIZATIONS = ("auto", "int8", None)
BACKUPS = ("auto", "jit", "ngram", "none")


@dataclass(frozen=True, kw_only=True)
class SSDConfig:
    """Settings of one call. Immutable; every value is checked when the object is made.

    Args:
        mode: `"ssd"` drafts for the likely outcomes while the target verifies, `"sd"` drafts only after each outcome
            (the same code without the speculation cache), `"ar"` uses no assistant. `"auto"` goes on with whichever of
            the three costs least per token, as measured in the call itself and in earlier ones, and goes back when the
            text changes; `ssd_stats.switches` says when and why.
        verification: How sampled draft tokens are verified, each rule exactly. `"coupled"` lets both models share
            noise, so that a seed gives the same tokens in every mode, with any assistant and timing; token trees work
            under it. `"token"` accepts one by one (speculative sampling), `"block"` all together (alias
            `"hierarchical"`). `"auto"` is `"coupled"`. Greedy decoding needs no rule.
        seed: Seed of sampling: one for the call, or one per row. `None` draws it from torch's default generator.
        assistant_temperature: Temperature of the assistant when sampling; `None` is the call's.
        saguaro_coefficient: What the likeliest draft tokens' probabilities are multiplied with, so that bonus tokens
            after a rejection are among those prepared for more often ([`SaguaroLogitsProcessor`]); 1 is off.
        num_assistant_tokens: Most draft tokens in one speculation (K). `"auto"` allows up to 16 and, when drafting
            just in time, picks the number that the measured times and acceptance favour.
        draft_tree_size: Most draft tokens in one speculation where it is a tree, whose branches are K tokens long at
            most: greedy decoding with a target that takes a mask. `"auto"` lets the measured times decide how many
            pay; `None` drafts chains only.
        ngram_drafts: Whether trees, and chains that are drafted after a miss, also get what followed earlier in the
            text where it ended the same way.
        cache_budget: Outcomes that are prepared per round (B), the sum of the fan-out. `"auto"` lets the measured
            times and the outcomes' chances decide, step by step.
        fan_out: Which outcomes get the budget: `"per_instance"` the likeliest ones, `"geometric"` a number per
            accepted length by its probability (arXiv 2603.03251, theorem 12), `"uniform"` the same number for each, or
            numbers for 0, 1, 2, ... accepted tokens, of which the last stands for all longer ones; a list is its own
            budget.
        backup: What answers an outcome that was not prepared for: `"jit"` lets the assistant draft just in time, for
            which all rows wait, `"ngram"` copies at once what followed in the text, or in what was prepared for other
            outcomes, `"none"` verifies the next token alone. `"auto"` chooses between the first and the second (without
            `ngram_drafts` the third) by the critical batch size, the number of rows from which on not waiting wins, as
            measured (arXiv 2603.03251, theorem 17). An assistant that cannot draft ahead drafts just in time.
        expected_acceptance: Chance that a draft token is accepted, believed until enough rounds were measured.
        power_law_exponent: `r` in "F prepared bonus tokens miss with probability F^-r".
        draft_vocab_size: Tokens that draft continuations are chosen from; outcomes always use the full vocabulary.
            `"auto"` is a quarter of a vocabulary of 32,768 or more, otherwise off; `None` is off.
        assistant_quantization: `"int8"` runs a copy of the assistant whose linear layers are in 8 bits, which reads
            half or a quarter of the memory per step; drafts differ slightly, the output does not. `"auto"` does so
            where the assistant is large enough and has a process or thread of its own on the CPU; `None` leaves it as
            it is.
        backend: `"process"` runs the assistant in a process of its own, `"stream"` in a thread of the caller's, on CUDA
            with a stream of its own, `"inline"` in the caller's thread, where nothing overlaps. `"auto"` is
            `"process"`, or `"stream"` where the system or the assistant does not allow that.
        assistant_device: `"auto"` takes the device with most free memory that the target does not use, and shares the
            target's where there is none. Anything that `torch.device` takes is obeyed. Only a process moves the
            assistant (a copy); the other backends use it where it is, and refuse another device.
        target_threads: CPU threads of the target while it is assisted. `None` is what the assistant leaves.
        assistant_threads: CPU threads of the assistant, where it does not share the caller's. `None` is a quarter of
            the cores, at least one.
        draft_threshold: Nothing is drafted after a token that the text goes through with less than this chance, the
            product of the chances on the way to it. The token itself is kept. At 0 the measured times decide alone.
        memory_budget: Most bytes of keys and values that the assistant keeps for what is not certain yet, for each row.
            With few of them only the likeliest outcomes are prepared. `None` sets no limit of its own.
        sla_ms_per_token: Milliseconds that a token of a row may take, on average over 16 rounds. While it is more,
            fewer tokens are drafted per round, and none at last; a limit that does not help is lifted. `None` is off.
        token_budget: Tokens of a row after which the assistant is left alone and the target goes on plainly. `None` is
            no limit.
        timeout_s: Seconds without an answer after which the assistant is given up; the call then goes on without it.
        trace: Keep time stamps of what both sides did in `ssd_stats`.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
        TypeError: If a value is of the wrong type.
    """

    mode: Mode = "ssd"
    verification: Literal["auto", "coupled", "token", "block", "hierarchical"] = "auto"
    seed: int | tuple[int, ...] | None = None
    assistant_temperature: float | None = None
    saguaro_coefficient: float = 1.0
    num_assistant_tokens: int | Literal["auto"] = "auto"
    draft_tree_size: int | Literal["auto"] | None = "auto"
    ngram_drafts: bool = True
    cache_budget: int | Literal["auto"] = "auto"
    fan_out: Literal["per_instance", "geometric", "uniform"] | tuple[int, ...] = "per_instance"
    backup: Literal["auto", "jit", "ngram", "none"] = "auto"
    expected_acceptance: float = 0.7
    power_law_exponent: float = 0.8
    draft_vocab_size: int | Literal["auto"] | None = "auto"
    assistant_quantization: Literal["auto", "int8"] | None = "auto"
    backend: Backend = "auto"
    assistant_device: str = "auto"
    target_threads: int | None = None
    assistant_threads: int | None = None
    draft_threshold: float = 0.0
    memory_budget: int | None = None
    sla_ms_per_token: float | None = None
    token_budget: int | None = None
    timeout_s: float = 60.0
    trace: bool = False

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("verification", self.verification, VERIFICATIONS)
        self._check_seed()
        if self.assistant_temperature is not None:
            _check_number("assistant_temperature", self.assistant_temperature)
            if not 0.0 < self.assistant_temperature < float("inf"):
                raise ValueError(
                    f"`assistant_temperature` must be a positive number, but got {self.assistant_temperature}. Use "
                    "None for the call's own."
                )
        _check_number("saguaro_coefficient", self.saguaro_coefficient)
        if not 0.0 < self.saguaro_coefficient <= 1.0:
            raise ValueError(
                f"`saguaro_coefficient` must lie above 0 and be at most 1, but got {self.saguaro_coefficient}. 1 is "
                "off."
            )
        if self.num_assistant_tokens != "auto":
            _check_int("num_assistant_tokens", self.num_assistant_tokens, 1, 'Or use "auto".')
        if self.draft_tree_size is not None and self.draft_tree_size != "auto":
            _check_int("draft_tree_size", self.draft_tree_size, 1, 'Or use "auto", or None for chains.')
        if self.cache_budget != "auto":
            _check_int("cache_budget", self.cache_budget, 1, 'Or use "auto", or mode="sd" to prepare no outcomes.')
        _check_choice("assistant_quantization", self.assistant_quantization, QUANTIZATIONS)
        _check_choice("backup", self.backup, BACKUPS)
        self._check_fan_out()
        if self.draft_vocab_size is not None and self.draft_vocab_size != "auto":
            _check_int("draft_vocab_size", self.draft_vocab_size, 1, 'Or use "auto", or None for all tokens.')
        _check_number("expected_acceptance", self.expected_acceptance)
        if not 0.0 < self.expected_acceptance < 1.0:
            raise ValueError(
                f"`expected_acceptance` must lie between 0 and 1, both excluded, but got {self.expected_acceptance}. "
                "It is only a start: measured acceptance replaces it."
            )
        _check_number("power_law_exponent", self.power_law_exponent)
        if not 0.0 < self.power_law_exponent < float("inf"):
            raise ValueError(
                f"`power_law_exponent` must be a positive number, but got {self.power_law_exponent}. Typical are 0.4 "
                "to 1.5."
            )
        for name in ("target_threads", "assistant_threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, "Use None to split the cores automatically.")
        self._check_limits()
        _check_number("timeout_s", self.timeout_s)
        if not 0.0 < self.timeout_s < float("inf"):
            raise ValueError(f"`timeout_s` must be a positive number of seconds, but got {self.timeout_s}.")
        for name in ("ngram_drafts", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, but got {getattr(self, name)!r}.")
        # `torch.device` objects and indices are welcome; the field itself is a string, so that it can be written to
        # JSON.
        device: Any = self.assistant_device
        _check_device(device)
        object.__setattr__(self, "assistant_device", f"cuda:{device}" if isinstance(device, int) else str(device))

    def _check_limits(self) -> None:
        _check_number("draft_threshold", self.draft_threshold)
        if not 0.0 <= self.draft_threshold < 1.0:
            raise ValueError(
                f"`draft_threshold` must be at least 0 and below 1, but got {self.draft_threshold}. It is a chance; 0 "
                "is off."
            )
        if self.memory_budget is not None:
            _check_int("memory_budget", self.memory_budget, 1, 'It is in bytes. Use None, or mode="sd".')
        if self.token_budget is not None:
            _check_int("token_budget", self.token_budget, 1, 'Use None for no limit, or mode="ar".')
        if self.sla_ms_per_token is not None:
            _check_number("sla_ms_per_token", self.sla_ms_per_token)
            if not 0.0 < self.sla_ms_per_token < float("inf"):
                raise ValueError(
                    "`sla_ms_per_token` must be a positive number of milliseconds, but got "
                    f"{self.sla_ms_per_token}. Use None for no limit."
                )

    def _check_fan_out(self) -> None:
        if isinstance(self.fan_out, str):
            _check_choice("fan_out", self.fan_out, FAN_OUTS)
            return
        if not isinstance(self.fan_out, (list, tuple)) or not self.fan_out:
            raise TypeError(f"`fan_out` must be one of {FAN_OUTS} or a list of numbers, but got {self.fan_out!r}.")
        object.__setattr__(self, "fan_out", tuple(self.fan_out))
        for value in self.fan_out:
            _check_int("fan_out", value, 0, "Give the number of bonus tokens for 0, 1, 2, ... accepted draft tokens.")
        if not any(self.fan_out):
            raise ValueError(
                f'`fan_out` must hold a number above 0, but got {self.fan_out}. Use mode="sd" to prepare nothing.'
            )

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        if isinstance(self.seed, (list, tuple)):
            object.__setattr__(self, "seed", tuple(self.seed))
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        if not seeds:
            raise ValueError("`seed` must hold one number per row, but got none. Use None to draw it.")
        for seed in seeds:
            _check_int("seed", seed, 0, "Give one number, or one per row; None draws it.")
            if seed > MAX_SEED:
                raise ValueError(f"`seed` must be at most {MAX_SEED}, but got {seed}.")

    @property
    def rule(self) -> Rule:
        """The verification rule under sampling."""
        if self.verification == "token":
            return "token"
        return "block" if self.verification in ("block", "hierarchical") else "coupled"

    @property
    def max_tree_tokens(self) -> int:
        """The most draft tokens that a tree may hold; 0 for chains only."""
        return 0 if self.draft_tree_size is None else 24 if self.draft_tree_size == "auto" else self.draft_tree_size

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens that may follow each other in a speculation (K)."""
        return 16 if self.num_assistant_tokens == "auto" else self.num_assistant_tokens

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, ready for JSON."""
        values = asdict(self)
        for name in ("fan_out", "seed"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SSDConfig:
        """Makes a config from a mapping.

        Raises:
            ValueError: If a key is not a setting, or a value is not allowed.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(map(str, set(values) - set(known)))
        if unknown:
            raise ValueError(f"`ssd_config` has unknown keys {unknown}. Known keys are {known}.")
        return cls(**values)

    @classmethod
    def of(cls, value: SSDConfig | Mapping[str, Any] | None) -> SSDConfig:
        """An `SSDConfig` from itself, from a dict, or from `None` for the defaults.

        Raises:
            TypeError: If `value` is anything else.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise TypeError(f"`ssd_config` must be an SSDConfig or a dict, but got {type(value).__name__}.")


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}, but got {value!r}.")


def _check_device(device: Any) -> None:
    if device == "auto" or (type(device) is int and device >= 0):
        return
    import torch  # not with the module: the command line reads the defaults before it needs torch

    try:
        is_device = not isinstance(device, int) and torch.device(device) is not None
    except (RuntimeError, TypeError):
        is_device = False
    if not is_device:
        raise ValueError(
            f'`assistant_device` must be "auto" or a device such as "cpu" or "cuda:1", but got {device!r}.'
        )


def _check_int(name: str, value: object, least: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, but got {value!r}. {remedy}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but got {value}. {remedy}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, but got {value!r}.")
