"""One line on what an examination means, with the next step. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .findings import Finding
    from .probe import Probe

WORTH_IT = 1.05  # ratios below are within what a short probe can be wrong by
FEW_TOKENS = 1.5  # per target forward: the second core then does more elsewhere
LONG_WAIT = 0.3  # of a verification
SD_SETTINGS = ', ssd_config={"mode": "sd"}'
SIZE_RATIO = 4  # a target is slow enough for assistants that are faster by this


def refused(finding: Finding) -> str:
    return f"refused: {finding.subject}. {finding.text}"


def without_assistant(vocab_size: int, num_parameters: int, tokens_per_s: float | None) -> str:
    """What kind of assistant a target needs."""
    text = (
        f"The target is fit for SSD. It needs --assistant: a model with its tokenizer ({vocab_size} tokens), as the "
        f"smallest of its own family, of at most about {num_parameters / SIZE_RATIO / 1e6:,.0f} M parameters"
    )
    if tokens_per_s:
        text += f", whose forward takes at most about {1e3 / tokens_per_s / SIZE_RATIO:.1f} ms here"
    return f"{text}."


def unprobed(*, is_translated: bool = False) -> str:
    return f"Nothing speaks against it: use {_call(is_translated)}. Without --no-probe the speed-up is measured."


def _call(is_translated: bool, settings: str = "") -> str:
    """How to enable SSD; where the tokenizers differ it needs both."""
    tokenizers = ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer" if is_translated else ""
    return f"enable_ssd(model, assistant_model=assistant{tokenizers}{settings})"


def measured(probe: Probe, *, is_translated: bool = False) -> str:
    """What the probe's figures mean, and what to do."""
    if probe.degraded:
        return f"The assistant failed, and generation went on without it: {probe.degraded.splitlines()[-1]}"
    sd_speed_up = probe.sd_tokens_per_s / probe.ar_tokens_per_s if probe.ar_tokens_per_s else 0.0
    if probe.speed_up >= WORTH_IT and probe.speed_up * WORTH_IT >= sd_speed_up:
        return f"Use {_call(is_translated)}: {probe.speed_up:.2f} times the speed of generate()."
    if sd_speed_up >= WORTH_IT:
        return (
            f"Use {_call(is_translated, SD_SETTINGS)}: "
            f"{sd_speed_up:.2f} times the speed of generate(), and SSD {probe.speed_up:.2f}."
        )
    return f"Not worth it here, {probe.speed_up:.2f} times the speed of generate(). {_cause(probe)}"


def _cause(probe: Probe) -> str:
    if (probe.tokens_per_round or 1.0) < FEW_TOKENS:
        return (
            f"The assistant agrees too seldom: {probe.tokens_per_round or 1.0:.2f} tokens per target forward. Take one "
            "of the target's own family and tuning."
        )
    verify_ms, wait_ms, step_ms = probe.verify_ms or 0.0, probe.wait_ms or 0.0, probe.draft_step_ms or 0.0
    if wait_ms > LONG_WAIT * verify_ms:
        return (
            f"The assistant is too slow: a step takes {step_ms:.1f} ms beside {verify_ms:.1f} ms of the target's "
            f"forward, which waits for {wait_ms:.1f} ms per round. Take a smaller one, or a device of its own."
        )
    return (
        "The target is fast by itself: the assistant's cores would do as much for it as the drafts do. Take a larger "
        "target, or a machine with more cores."
    )
