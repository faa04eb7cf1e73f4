"""One call of `generate()`: backend, threads and rows around the decoding loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .checks import check_batch
from .compat import CACHE_KEY
from .config import SSDConfig
from .decoding import RowDecoder
from .metrics import SSDStats
from .protocol import DraftRequest
from .recorder import Recorder
from .runtime.placement import available_cores, split_threads
from .runtime.pool import speculator_for

logger = logging.get_logger(__name__)


@dataclass
class SSDGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the call's figures in `ssd_stats`."""

    ssd_stats: SSDStats | None = None


@dataclass(frozen=True)
class SSDCall:
    """Stands in `generate()` where the assistant would, so that nothing about a call is kept on the model."""

    assistant: PreTrainedModel
    config: SSDConfig
    recorder: Recorder


def decode_speculatively(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    call: SSDCall,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes a batch, row by row. The arguments are those that `generate()` prepares for a decoding method.

    Returns:
        Token ids of shape `(batch_size, sequence_length)`, or a `GenerateDecoderOnlyOutput`.
    """
    num_rows = input_ids.shape[0]
    has_cache = getattr(model_kwargs.get(CACHE_KEY), "_is_user_defined", False)
    check_batch(num_rows, has_cache=has_cache, has_streamer=streamer is not None)
    rows = []
    total = available_cores()
    target_threads, assistant_threads = split_threads(call.config.target_threads, call.config.assistant_threads, total)
    recorder = call.recorder
    try:
        with (
            speculator_for(call.assistant, model, call.config, assistant_threads) as speculator,
            _threads(target_threads if speculator.threads is not None else None) as restore_threads,
        ):
            recorder.target_threads = torch.get_num_threads()
            recorder.assistant_threads, recorder.assistant_device = speculator.threads, speculator.device
            for row in range(num_rows):
                decoder = RowDecoder(
                    model,
                    input_ids[row : row + 1],
                    generation_config=generation_config,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    model_kwargs=_row_kwargs(model, model_kwargs, generation_config, row, num_rows),
                    recorder=recorder,
                    streamer=streamer,
                    row=row,
                    num_rows=num_rows,
                )
                rows.append(decoder)
                request = _request(decoder, input_ids, call, model_kwargs)
                decoder.run(None if recorder.degraded else speculator, request, restore_threads)
    finally:
        # Also when something was raised: whoever reads the stream must not wait for ever.
        if streamer is not None:
            streamer.end()
    return _gather(rows, generation_config)


def decode_plainly(generate: Callable[..., Any], kwargs: dict[str, Any], recorder: Recorder) -> Any:
    """Runs transformers' own `generate()` and takes down its times."""
    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    criteria.append(_Observer(recorder))
    return generate(**kwargs, stopping_criteria=criteria)


def with_stats(output: Any, stats: SSDStats) -> Any:
    """The output of `generate()` with `ssd_stats` on it, where it is a dict."""
    if type(output) is not GenerateDecoderOnlyOutput:
        return output
    return SSDGenerateOutput(**output, ssd_stats=stats)


class _Observer(StoppingCriteria):
    """Notes when tokens come. Stops nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._is_running: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.recorder.token()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextlib.contextmanager
def _threads(num_threads: int | None) -> Iterator[Callable[[], None]]:
    """Sets torch's CPU threads; yields a function that restores them early."""
    before = torch.get_num_threads()

    def restore() -> None:
        torch.set_num_threads(before)

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield restore
    finally:
        restore()


def _request(decoder: RowDecoder, input_ids: torch.Tensor, call: SSDCall, model_kwargs: dict[str, Any]) -> DraftRequest:
    prompt = decoder.input_ids[0].tolist()
    mask = decoder.model_kwargs.get("attention_mask")
    num_padding = 0
    if mask is not None and mask.shape[1] == len(prompt):
        num_padding = int((mask[0].cumsum(0) == 0).sum())
    do_sample = bool(decoder.config.do_sample)
    return DraftRequest(
        prompt_ids=tuple(prompt),
        num_padding=num_padding,
        vocab_size=decoder.model.config.get_text_config(decoder=True).vocab_size,
        do_sample=do_sample,
        processors=tuple(decoder.processors),
        # From the default generator, so that `torch.manual_seed` reproduces it. Greedy calls leave that alone.
        seed=int(torch.randint(2**62, (1,))) if do_sample else 0,
        config=call.config,
    )


def _row_kwargs(
    model: PreTrainedModel, model_kwargs: dict[str, Any], config: GenerationConfig, row: int, num_rows: int
) -> dict[str, Any]:
    """The keyword arguments of one row, with a cache of its own."""
    if num_rows == 1:
        return dict(model_kwargs)
    sliced = {}
    for name, value in model_kwargs.items():
        is_batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == num_rows
        sliced[name] = value[row : row + 1] if is_batched else value
    sliced.pop(CACHE_KEY, None)
    config = copy.copy(config)
    config.num_return_sequences = 1
    model._prepare_cache_for_generation(config, sliced, GenerationMode.ASSISTED_GENERATION, 1, config.max_length - 1)
    return sliced


def _gather(rows: list[RowDecoder], config: GenerationConfig) -> Any:
    """The rows as one output. Rows that ended early are filled up: ids with the padding token, scores with zeros."""
    if len(rows) == 1 and not config.return_dict_in_generate:
        return rows[0].input_ids
    length = max(row.input_ids.shape[1] for row in rows)
    pad = config._pad_token_tensor
    sequences = []
    for row in rows:
        missing = length - row.input_ids.shape[1]
        filler = row.input_ids.new_full((1, missing), 0 if pad is None else int(pad))
        sequences.append(torch.cat([row.input_ids, filler], dim=1))
    ids = torch.cat(sequences)
    if not config.return_dict_in_generate:
        return ids
    single = rows[0] if len(rows) == 1 else None
    return GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=_stack([row.scores for row in rows]),
        logits=_stack([row.logits for row in rows]),
        attentions=single.attentions if single else None,
        hidden_states=single.hidden_states if single else None,
        **{CACHE_KEY: single.model_kwargs.get(CACHE_KEY) if single else None},
    )


def _stack(rows: list[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
    present = [row for row in rows if row is not None]
    if not present:
        return None
    num_steps = max(len(row) for row in present)
    padded = [row + (torch.zeros_like(row[0]),) * (num_steps - len(row)) for row in present]
    return tuple(torch.cat(step) for step in zip(*padded, strict=True))
