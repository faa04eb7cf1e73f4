"""Random calls, tried: SSD returns what plain decoding does, and what is wrong is said before the target runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import SSDConfig
from ..generation import generate_with_ssd
from .drawn_calls import DrawnCall, draw_invalid, draw_valid
from .families import FAMILIES
from .zoo import VOCAB_SIZE

EQUAL, RAISES_TOO, REFUSED, FAILS = "equal", "raises as plain generate() does", "refused", "fails"

TIMEOUT_S = 60.0  # a call takes milliseconds


@dataclass(frozen=True)
class CallResult:
    """What came of one call.

    Args:
        call: The call.
        result: `"equal"` to plain decoding, which may have `"raises as plain generate() does"`; `"refused"` before the
            target ran; or `"fails"`.
        reason: Why it fails, or what the error says.
    """

    call: DrawnCall
    result: str
    reason: str | None = None


def try_valid(seed: int, number: int) -> CallResult:
    """Compares a random valid call of SSD with plain `generate()`; where it samples, with mode `"ar"`."""
    call = draw_valid(seed, number)
    target, assistant = _models(call)
    config = SSDConfig(backend="inline", **call.ssd)
    try:
        if call.arguments["do_sample"]:
            plain = SSDConfig(mode="ar", seed=config.seed)
            expected = _in_time(generate_with_ssd, target, ssd_config=plain, **_prompts(call), **call.arguments)
        else:
            expected = _in_time(target.generate, **_prompts(call), **call.arguments)
    except Exception as error:  # then SSD has to raise the same
        return _raises_too(call, error)
    try:
        found = _in_time(
            generate_with_ssd, target, assistant_model=assistant, ssd_config=config, **_prompts(call), **call.arguments
        )
    except Exception as error:  # whatever it is, the others go on
        return CallResult(call, FAILS, repr(error))
    stats: Any = target.ssd_stats
    if stats.degraded is not None:
        return CallResult(call, FAILS, f"the assistant failed: {stats.degraded}")
    difference = _difference(expected, found)
    return CallResult(call, EQUAL if difference is None else FAILS, difference)


def try_invalid(seed: int, number: int) -> CallResult:
    """Tries a call with one thing wrong. It must be named by an error before the target runs."""
    call = draw_invalid(seed, number)
    assert call.fault is not None
    target, assistant = _models(call)
    runs: list[None] = []
    hook = target.register_forward_pre_hook(lambda *_: runs.append(None))
    arguments = {"assistant_model": assistant, **call.arguments}
    ssd = {"backend": "inline", **call.ssd}
    try:
        _in_time(generate_with_ssd, target, ssd_config=ssd, **_prompts(call), **arguments)
    except Exception as error:
        if runs:
            return CallResult(call, FAILS, f"after the target ran: {error!r}")
        if call.fault not in str(error):
            return CallResult(call, FAILS, f"does not name `{call.fault}`: {error!r}")
        return CallResult(call, REFUSED, f"{type(error).__name__}: {error}")
    finally:
        hook.remove()
    return CallResult(call, FAILS, f"`{call.fault}` was accepted")


def _raises_too(call: DrawnCall, expected: Exception) -> CallResult:
    target, assistant = _models(call)
    try:
        generate_with_ssd(
            target,
            assistant_model=assistant,
            ssd_config={"backend": "inline", **call.ssd},
            **_prompts(call),
            **call.arguments,
        )
    except type(expected) as error:
        return CallResult(call, RAISES_TOO, str(error))
    except Exception as error:
        return CallResult(call, FAILS, f"plain decoding raises {expected!r}, SSD {error!r}")
    return CallResult(call, FAILS, f"plain decoding raises {expected!r}, SSD does not")


def _models(call: DrawnCall) -> tuple[PreTrainedModel, PreTrainedModel]:
    assistant = call.assistant if call.assistant in ("noisy", "twin") else "other"
    target = _model(call.target, "target")
    return target, _model(call.target if assistant != "other" else call.assistant, assistant)


@cache
def _model(model_type: str, kind: str) -> PreTrainedModel:
    family = next(each for each in FAMILIES if each.model_type == model_type)
    return family.make_assistant() if kind == "noisy" else family.make()


def _prompts(call: DrawnCall) -> dict[str, torch.Tensor]:
    """Left-padded prompts of a call, the same each time."""
    generator = torch.Generator().manual_seed(call.number)
    longest = max(call.lengths)
    input_ids = torch.randint(1, VOCAB_SIZE, (len(call.lengths), longest), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate(call.lengths):
        input_ids[row, : longest - length] = 0
        attention_mask[row, : longest - length] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _in_time(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function in a thread.

    Raises:
        TimeoutError: If it does not come back within `TIMEOUT_S`.
    """
    outcome: list[Any] = []

    def run() -> None:
        torch.set_num_threads(1)  # is set per thread; threads that wait for each other make a tiny model very slow
        try:
            outcome.append(function(*args, **kwargs))
        except BaseException as error:  # handed on below
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if not outcome:
        raise TimeoutError(f"No answer within {TIMEOUT_S:.0f} s.")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _difference(expected: Any, found: Any) -> str | None:
    """What differs between two outputs of `generate()`."""
    if isinstance(expected, torch.Tensor):
        return None if torch.equal(expected, found) else f"{found.tolist()} instead of {expected.tolist()}"
    if not torch.equal(expected.sequences, found.sequences):
        return f"{found.sequences.tolist()} instead of {expected.sequences.tolist()}"
    for name in ("scores", "logits"):
        plain, own = expected.get(name), found.get(name)
        if (plain is None) != (own is None):
            return f"`{name}` is {type(own).__name__}"
        if plain is None:
            continue
        if len(plain) != len(own):
            return f"{len(own)} `{name}` instead of {len(plain)}"
    return None
