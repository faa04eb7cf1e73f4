"""Whether SSD returns what `generate()` does, tried on a tiny model of each family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..batch_decoding import decodes_together
from ..compat import CACHE_KEY
from ..config import Backend, Mode, SSDConfig
from ..drafting import AssistantModel
from ..generation import generate_with_ssd
from ..kv_cache import keeps_everything
from ..metrics import SSDStats
from ..target_trees import Masks, masks_of
from ..vocabulary import UnsupportedError
from .zoo import SEED, Family, Tried

PASSES, REFUSED, FAILS, SKIPPED = "passes", "refused", "fails", "skipped"

ATTENTIONS = ("eager", "sdpa")
NUM_TOKENS = 20
# Rows, mode, and whether tokens are sampled. Mode "sd" is compared with what the call before it was.
CALLS: tuple[tuple[int, Mode, bool], ...] = (
    (1, "ssd", False),
    (1, "sd", False),
    (1, "ssd", True),
    (3, "ssd", False),
    (3, "ssd", True),
)
MIN_OWN_ACCEPTANCE = 0.9  # of drafts by the target itself, which are all right but for what rounding does


@dataclass(frozen=True)
class FamilyResult:
    """What came of one family. `None` stands for what was not tried.

    Args:
        model_type: The family.
        remark: What is special about it.
        kind: What sort of model it is.
        architecture: Class of the model.
        result: `"passes"`, `"refused"`, `"fails"` or `"skipped"`.
        reason: Why it does not pass.
        attentions: Those that the family has, of eager and sdpa.
        drafts: `"trees"` or `"chains"`: what its targets verify when decoding greedily.
        drafts_ahead: Whether its assistants draft for several outcomes at once.
        rows: `"together"` or `"one by one"`.
        acceptance: Share of draft tokens that were right, from an assistant with noise in its weights.
        own_acceptance: The same from the target itself.
    """

    model_type: str
    remark: str
    kind: str = "decoder-only"
    architecture: str | None = None
    result: str = PASSES
    reason: str | None = None
    attentions: tuple[str, ...] = ()
    drafts: str | None = None
    drafts_ahead: bool | None = None
    rows: str | None = None
    acceptance: float | None = None
    own_acceptance: float | None = None

    @property
    def passes(self) -> bool:
        return self.result == PASSES

    def to_dict(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)


class Difference(Exception):
    """SSD returned something else than `generate()`."""


def try_family(family: Tried, backend: Backend = "inline", attentions: Sequence[str] = ATTENTIONS) -> FamilyResult:
    """Compares SSD with plain `generate()`, and coupled sampling with mode `"ar"`, for one row and for three.

    Args:
        family: The family, both as target and as assistant.
        backend: Where the assistant runs.
        attentions: What to try; what the family does not have is left out.
    """
    result = FamilyResult(family.model_type, family.remark, family.kind)
    if not family.is_known:
        return replace(result, result=SKIPPED, reason="not in this version of transformers")
    for attention in attentions:
        try:
            target = family.make(attn_implementation=attention)
            target.generate(**family.prompts(1), max_new_tokens=2, do_sample=False)
        except Exception as error:  # not SSD's doing; it says why
            if isinstance(error, ValueError) and ("implementation" in str(error) or "does not support" in str(error)):
                continue
            return replace(result, result=SKIPPED, reason=f"transformers cannot run it: {error!r}")
        assistant = family.make_assistant(attn_implementation=attention)
        result = replace(result, architecture=type(target).__name__, attentions=(*result.attentions, attention))
        try:
            acceptance = _compare(family, target, assistant, backend)
            own_acceptance = None
            if family.drafts_for_itself:
                twin = family.make(attn_implementation=attention)
                own_acceptance = _draft_for_itself(family, target, twin, backend)
        except UnsupportedError as error:
            return _refused(family, result, target, error)
        except Exception as error:  # whatever it is, the table says so and goes on
            return replace(result, result=FAILS, reason=f"{attention}: {error!r}")
        result = replace(result, acceptance=acceptance, own_acceptance=own_acceptance)
        result = replace(result, **_ways(family, target, assistant))
    if not result.attentions:
        return replace(result, result=SKIPPED, reason=f"has no {' or '.join(attentions)} attention")
    return result


def _compare(family: Tried, target: PreTrainedModel, assistant: PreTrainedModel, backend: Backend) -> float | None:
    """The acceptance of greedy decoding of one row.

    Raises:
        Difference: If any text differs.
        UnsupportedError: If SSD refuses the models.
    """
    acceptance, expected = None, torch.empty(0)
    for num_rows, mode, samples in CALLS:
        if num_rows > family.max_rows:
            continue
        config = SSDConfig(backend=backend, mode=mode, num_assistant_tokens=4, seed=SEED if samples else None)
        kwargs: dict[str, Any] = {**family.prompts(num_rows), "max_new_tokens": NUM_TOKENS, "do_sample": samples}
        if samples:
            kwargs["temperature"] = 1.0  # Whisper goes by this
        streamer = _Counter()
        kwargs["streamer"] = streamer if num_rows == 1 else None
        try:
            found = generate_with_ssd(target, assistant_model=assistant, ssd_config=config, **kwargs)
        except UnsupportedError as error:
            if streamer.num_tokens > 0:
                raise Difference(f"refused after {streamer.num_tokens} tokens: {error}") from error
            raise
        stats: SSDStats = target.ssd_stats
        name = f"{mode}, {'coupled' if samples else 'greedy'}, {num_rows} row(s)"
        if stats.degraded is not None:
            raise Difference(f"{name}: the assistant failed: {stats.degraded}")
        kwargs["streamer"] = None
        if samples:
            expected = generate_with_ssd(target, ssd_config=replace(config, mode="ar"), **kwargs)
        elif mode == "ssd":
            expected = target.generate(**kwargs)
        num_given = 0 if target.config.is_encoder_decoder else kwargs["input_ids"].shape[1]
        _check_equal(name, expected, found, num_given)
        if acceptance is None:
            acceptance = stats.acceptance
    return acceptance


def _draft_for_itself(family: Tried, target: PreTrainedModel, twin: PreTrainedModel, backend: Backend) -> float | None:
    """The acceptance of an assistant that is the target: a wrong mask or position costs acceptance and nothing else.

    Raises:
        Difference: If it is too low.
    """
    config = SSDConfig(backend=backend, num_assistant_tokens=4)
    kwargs: dict[str, Any] = {**family.prompts(1), "max_new_tokens": NUM_TOKENS, "do_sample": False}
    generate_with_ssd(target, assistant_model=twin, ssd_config=config, **kwargs)
    acceptance: float | None = target.ssd_stats.acceptance
    if acceptance is None or acceptance < MIN_OWN_ACCEPTANCE:
        raise Difference(f"a copy of the target drafts for it with acceptance {acceptance}")
    return acceptance


def _refused(family: Tried, result: FamilyResult, target: PreTrainedModel, error: UnsupportedError) -> FamilyResult:
    """Also checks that it is refused as an assistant, by name, and that plain generation does work."""
    name = type(target).__name__
    result = replace(result, result=REFUSED, reason=str(error), attentions=())
    if name not in str(error):
        return replace(result, result=FAILS, reason=f"refused without its name: {error}")
    llama = Family("llama").make()
    kwargs: dict[str, Any] = {**family.prompts(1), "max_new_tokens": 4, "do_sample": False}
    text = {**Family("llama").prompts(1), "max_new_tokens": 4}
    try:
        generate_with_ssd(llama, assistant_model=target, ssd_config={"backend": "inline"}, **text)
    except UnsupportedError as refusal:
        if name not in str(refusal):
            return replace(result, result=FAILS, reason=f"refused without its name: {refusal}")
    else:
        return replace(result, result=FAILS, reason="refused as a target, but not as an assistant")
    found = generate_with_ssd(target, ssd_config={"mode": "ar"}, **kwargs)
    try:
        _check_equal('mode "ar"', target.generate(**kwargs), found)
    except Difference as difference:
        return replace(result, result=FAILS, reason=str(difference))
    return result


def _ways(family: Tried, target: PreTrainedModel, assistant: PreTrainedModel) -> dict[str, Any]:
    """How the family is decoded, as [`FamilyResult`] has it."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    together = "together" if decodes_together(target, {CACHE_KEY: cache}) else "one by one"
    takes_trees = keeps_everything(cache) and masks_of(target) is not Masks.OWN
    return {
        "drafts": "trees" if takes_trees else "chains",
        "drafts_ahead": AssistantModel(assistant).takes_trees,
        "rows": together if family.max_rows > 1 else "one",
    }


class _Counter(BaseStreamer):
    """Counts the tokens that come after the prompt."""

    def __init__(self) -> None:
        self.num_tokens = -1

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1

    def end(self) -> None:
        pass


def _check_equal(name: str, expected: torch.Tensor, found: torch.Tensor, num_given: int = 0) -> None:
    if expected.tolist() == found.tolist():
        return
    if expected.shape != found.shape:
        raise Difference(f"{name}: {tuple(found.shape)} instead of {tuple(expected.shape)} tokens")
    row, position = (expected != found).nonzero()[0].tolist()
    raise Difference(f"{name}: token {position - num_given} of row {row} differs")
