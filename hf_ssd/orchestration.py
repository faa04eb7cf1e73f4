"""One call of `generate()`: backend, threads and rows around the decoding loop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .batch_decoding import BatchDecoder, decodes_together
from .checks import check_batch, check_caches
from .compat import CACHE_KEY
from .config import SSDConfig
from .decoders import argument
from .decoding import RowDecoder
from .eagle3 import feature_layers
from .encoder_inputs import ENCODER_PROCESSORS, NoSpeech, OneEncoderRow, encoder_inputs, row_of
from .metrics import SSDStats
from .noise import derive_seed
from .planning import PlanMemory
from .protocol import DraftRequest, EncoderInputs
from .recorder import Recorder
from .row import Row
from .runtime.staff import Staff, staff_for
from .sampling import with_temperature
from .translation import Translation
from .vocabulary import placeholder_tokens

logger = logging.get_logger(__name__)


@dataclass
class SSDGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the call's figures in `ssd_stats`."""

    ssd_stats: SSDStats | None = None


@dataclass
class SSDGenerateEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with the call's figures in `ssd_stats`."""

    ssd_stats: SSDStats | None = None


@dataclass(frozen=True)
class Drafter:
    """An assistant, if there is one, and the translation where it has a tokenizer of its own."""

    assistant: PreTrainedModel | None
    translation: Translation | None = None


@dataclass(frozen=True)
class SSDCall:
    """Stands in `generate()` where the assistant would, so that nothing about a call is kept on the model."""

    drafters: tuple[Drafter, ...]
    config: SSDConfig
    recorder: Recorder
    memory: PlanMemory | None = None

    def drafter(self, assistant: int) -> Drafter:
        """That of an assistant, by its number."""
        return self.drafters[assistant] if self.drafters else Drafter(None)


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
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes a batch, its rows together where the target allows that.

    The arguments are those that `generate()` prepares for a decoding method.

    Returns:
        Token ids of shape `(batch_size, sequence_length)`, or a `GenerateDecoderOnlyOutput` (with an encoder a
        `GenerateEncoderDecoderOutput`).
    """
    num_rows, recorder = input_ids.shape[0], call.recorder
    decoder: RowDecoder | None = None
    try:
        has_cache = getattr(model_kwargs.get(CACHE_KEY), "_is_user_defined", False)
        samples = generation_config.do_sample
        seeds = _row_seeds(call.config.seed, num_rows, recorder.num_rows) if samples else [0] * num_rows
        check_batch(num_rows, generation_config, has_cache=has_cache, has_streamer=streamer is not None)
        if call.config.mode != "ar" and model_kwargs.get(CACHE_KEY) is not None:
            check_caches([model_kwargs[CACHE_KEY]])
        rows = [
            Row(
                input_ids[index : index + 1],
                num_padding=_count_padding(model_kwargs.get(argument(model, "attention_mask")), input_ids, index),
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                recorder=recorder,
                rule=call.config.rule,
                seed=seeds[index],
                streamer=streamer,
                index=index,
                num_rows=num_rows,
            )
            for index in range(num_rows)
        ]
        assistants = [each.assistant for each in call.drafters]
        with staff_for(assistants, model, call.config, recorder, call.memory) as staff:
            if num_rows > 1 and decodes_together(model, model_kwargs):

                def request(row: Row, assistant: int) -> DraftRequest:
                    drafter = call.drafter(assistant)
                    return draft_request(model, row, call.config, takes_trees=False, num_rows=num_rows, drafter=drafter)

                links, requests = staff.begin(rows, request)
                BatchDecoder(model, rows, model_kwargs=model_kwargs, recorder=recorder).run(
                    links, requests, staff.conductor
                )
            else:
                no_speech = NoSpeech(logits_processor)
                for row in rows:
                    row_kwargs = _row_kwargs(model, model_kwargs, generation_config, row.index, num_rows)
                    decoder = _decode_row(model, row, call, staff, row_kwargs, inputs_tensor)
                    no_speech.keep(row.index)
                no_speech.restore()
    finally:
        # Also when something was raised: whoever reads the stream must not wait for ever.
        if streamer is not None:
            streamer.end()
    recorder.num_rows += num_rows
    output = _gather(rows, decoder if num_rows == 1 else None, generation_config)
    if model.config.is_encoder_decoder and generation_config.return_dict_in_generate:
        return _of_encoder_decoder(output, decoder if num_rows == 1 else None)
    return output


def _decode_row(
    model: PreTrainedModel,
    row: Row,
    call: SSDCall,
    staff: Staff,
    model_kwargs: dict[str, Any],
    inputs_tensor: torch.Tensor | None,
) -> RowDecoder:
    """Decodes a row by itself. Returns what did it, which may hold more for the output."""
    decoder = RowDecoder(model, row, model_kwargs=model_kwargs, recorder=call.recorder)
    # Not asked where no tree is wanted: it takes a forward or two.
    takes_trees = call.config.max_tree_tokens > 0 and call.config.mode != "ar" and decoder.takes_trees

    @functools.cache
    def request(row: Row, assistant: int) -> DraftRequest:
        drafter = call.drafter(assistant)
        encoder = encoder_inputs(model, drafter.assistant, inputs_tensor, model_kwargs, row.index, row.num_rows)
        return draft_request(model, row, call.config, takes_trees=takes_trees, encoder=encoder, drafter=drafter)

    (link,), (first_request,) = staff.begin([row], request)
    decoder.run(link, first_request, staff.conductor)
    return decoder


def decode_plainly(
    generate: Callable[..., Any], kwargs: dict[str, Any], recorder: Recorder, eos_token_id: int | list[int] | None
) -> Any:
    """Runs transformers' own `generate()` and takes down its times."""
    observer = _Observer(recorder, eos_token_id)
    criteria = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), observer])
    return generate(**{**kwargs, "stopping_criteria": criteria})


def with_stats(output: Any, stats: SSDStats) -> Any:
    """The output of `generate()` with `ssd_stats` on it, where it is a dict."""
    if type(output) is GenerateDecoderOnlyOutput:
        return SSDGenerateOutput(**output, ssd_stats=stats)
    if type(output) is GenerateEncoderDecoderOutput:
        return SSDGenerateEncoderDecoderOutput(**output, ssd_stats=stats)
    return output


class _Observer(StoppingCriteria):
    """Notes when tokens come, those of rows that have ended left out. Stops nothing."""

    def __init__(self, recorder: Recorder, eos_token_id: int | list[int] | None) -> None:
        self.recorder = recorder
        self._eos = torch.tensor([] if eos_token_id is None else eos_token_id, dtype=torch.long, device="cpu").flatten()
        self._is_running: torch.Tensor | None = None
        self._length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stops_nothing = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        # A call may decode several times, as Whisper's does for the parts of a long recording.
        is_next = self._is_running is not None and len(self._is_running) == len(stops_nothing)
        if self._is_running is None or not is_next or input_ids.shape[1] != self._length + 1:
            self._is_running = ~stops_nothing
        self._length = input_ids.shape[1]
        for _ in range(int(self._is_running.sum())):
            self.recorder.token()
        self._is_running = self._is_running & ~torch.isin(input_ids[:, -1], self._eos.to(input_ids.device))
        return stops_nothing


def draft_request(
    model: PreTrainedModel,
    row: Row,
    config: SSDConfig,
    *,
    takes_trees: bool,
    num_rows: int = 1,
    encoder: EncoderInputs | None = None,
    drafter: Drafter | None = None,
) -> DraftRequest:
    """What a speculator needs to draft for a row that has not begun.

    Args:
        model: The target.
        row: The row.
        config: Settings of the call.
        takes_trees: Whether the row's speculations may be trees.
        num_rows: Rows that are decoded together with it, itself included.
        encoder: What the assistant reads beside tokens.
        drafter: The assistant; by default one that reads the target's tokens, and nothing else of it.
    """
    drafter = drafter or Drafter(None)
    layers = feature_layers(model, drafter.assistant)
    do_sample = bool(row.config.do_sample)
    # The detection of silence changes no scores, and holds the target.
    own = [each for each in row.processors if not isinstance(each, WhisperNoSpeechDetection)]
    processors = [_for_one_row(processor, row.index, row.num_rows) for processor in own]
    if do_sample and config.assistant_temperature is not None:
        processors = with_temperature(processors, config.assistant_temperature)
    return DraftRequest(
        prompt_ids=tuple(row.input_ids[0].tolist()),
        num_padding=row.num_padding,
        max_new_tokens=row.config.max_length - row.input_ids.shape[1],
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        takes_trees=takes_trees,
        do_sample=do_sample,
        processors=tuple(processors),
        seed=row.seed,
        config=config,
        num_rows=num_rows,
        encoder=encoder,
        # An assistant that reads the target's states has them of placeholders too.
        placeholders=frozenset() if layers else placeholder_tokens(model.config),
        translation=drafter.translation,
        feature_layers=layers,
    )


def _for_one_row(processor: Any, index: int, num_rows: int) -> Any:
    """A processor that knows the batch as one that takes any number of prefixes of one row, as drafting has them."""
    if isinstance(processor, ENCODER_PROCESSORS):
        return OneEncoderRow(processor, index, num_rows)
    # The repetition penalty of recent versions: padding of each row.
    num_ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(num_ignored, torch.Tensor):
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = int(num_ignored[index])
    return processor


def _count_padding(mask: torch.Tensor | None, input_ids: torch.Tensor, row: int) -> int:
    """Number of leading padding tokens of a row."""
    if mask is None or mask.ndim != 2 or mask.shape[1] != input_ids.shape[1]:
        return 0
    return int((mask[row].cumsum(0) == 0).sum())


def _row_seeds(seed: int | tuple[int, ...] | None, num_rows: int, first_row: int = 0) -> list[int]:
    """Seeds of the rows. `first_row` counts those that the call has decoded before, as Whisper's does in parts."""
    if seed is None:
        # From the default generator, so that `torch.manual_seed` reproduces a call and the next call differs.
        return torch.randint(2**62, (num_rows,), device="cpu").tolist()
    if isinstance(seed, int):
        return [derive_seed(seed, first_row + row) for row in range(num_rows)]
    if len(seed) != num_rows:
        raise ValueError(
            f"`seed` must be one number, or one for each of the {num_rows} rows (`num_return_sequences` counted), but "
            f"got {len(seed)}."
        )
    return list(seed)


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
    positions = model_kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim == 3:  # of several dimensions, which come first
        sliced["position_ids"] = positions[:, row : row + 1]
    if model.config.is_encoder_decoder:
        sliced["encoder_outputs"] = row_of(model_kwargs["encoder_outputs"], row)
    sliced.pop(CACHE_KEY, None)
    config = copy.copy(config)
    config.num_return_sequences = 1
    model._prepare_cache_for_generation(config, sliced, GenerationMode.ASSISTED_GENERATION, 1, config.max_length - 1)
    return sliced


def _gather(rows: list[Row], single: RowDecoder | None, config: GenerationConfig) -> Any:
    """The rows as one output. Rows that ended early are filled up: ids with the padding token, scores with zeros.

    Args:
        rows: The rows.
        single: The decoder of the only row.
        config: As `generate()` prepared it.
    """
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
    return GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=_stack([row.scores for row in rows]),
        logits=_stack([row.logits for row in rows]),
        attentions=single.attentions if single else None,
        hidden_states=single.hidden_states if single else None,
        **{CACHE_KEY: single.model_kwargs.get(CACHE_KEY) if single else None},
    )


def _of_encoder_decoder(output: GenerateDecoderOnlyOutput, single: RowDecoder | None) -> GenerateEncoderDecoderOutput:
    """The same as an encoder-decoder model's output. What is only collected for single rows is in `single`."""
    fields = {name: value for name, value in output.items() if name not in ("attentions", "hidden_states")}
    if single is not None:
        encoder = single.model_kwargs["encoder_outputs"]
        fields["decoder_attentions"], fields["decoder_hidden_states"] = single.attentions, single.hidden_states
        fields["cross_attentions"] = single.cross_attentions
        if single.attentions is not None:
            fields["encoder_attentions"] = encoder.get("attentions")
        if single.hidden_states is not None:
            fields["encoder_hidden_states"] = encoder.get("hidden_states")
    return GenerateEncoderDecoderOutput(**fields)


def _stack(rows: list[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
    present = [row for row in rows if row is not None]
    if not present:
        return None
    num_steps = max(len(row) for row in present)
    padded = [row + (torch.zeros_like(row[0]),) * (num_steps - len(row)) for row in present]
    return tuple(torch.cat(step) for step in zip(*padded, strict=True))
