"""What an assistant gets of an encoder: the input for its own one, or what the target's made of it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    WhisperNoSpeechDetection,
)
from transformers.utils import ModelOutput

from .decoders import attends_to_encoder, encoder_size
from .protocol import EncoderInputs
from .vocabulary import UnsupportedError


def check_encoders(target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Raises [`UnsupportedError`] unless the assistant can be given what the target's encoder reads or makes of it."""
    names = f"{type(assistant).__name__} drafts for {type(target).__name__}"
    if not target.config.is_encoder_decoder:
        if attends_to_encoder(assistant):
            raise UnsupportedError(
                f"`assistant_model` must be decoder-only for a decoder-only target, but {names}. Choose an assistant "
                "of the target's kind."
            )
        return
    if not attends_to_encoder(assistant):
        raise UnsupportedError(
            f"`assistant_model` must read what the target's encoder does, but {names}. Choose an encoder-decoder "
            "assistant of the target's family, or a decoder that takes `encoder_outputs` such as WhisperForCausalLM."
        )
    if shares_encoder(target, assistant):
        sizes = encoder_size(target), encoder_size(assistant)
        if sizes[0] != sizes[1]:
            raise UnsupportedError(
                f"`assistant_model` must attend to states of size {sizes[0]}, which the target's encoder makes, but "
                f"{type(assistant).__name__} takes {sizes[1]}. Choose one distilled from this target."
            )
        return
    inputs = _encoder_input(target), _encoder_input(assistant)
    if inputs[0] != inputs[1]:
        raise UnsupportedError(
            f"`assistant_model` must read {inputs[0]} as the target's encoder does, but {type(assistant).__name__} "
            f"reads {inputs[1]}. Choose an assistant of the target's family."
        )


def shares_encoder(target: PreTrainedModel, assistant: PreTrainedModel) -> bool:
    """Whether the assistant takes the states that the target's encoder made: it has none, or the same one."""
    return not assistant.config.is_encoder_decoder or assistant.get_encoder() is target.get_encoder()


def encoder_inputs(
    target: PreTrainedModel,
    assistant: PreTrainedModel | None,
    inputs_tensor: torch.Tensor | None,
    model_kwargs: dict[str, Any],
    row: int,
    num_rows: int,
) -> EncoderInputs | None:
    """What the assistant reads for one row.

    Args:
        target: The target.
        assistant: The assistant; `None` reads nothing.
        inputs_tensor: What the target's encoder read, one for each prompt of the call.
        model_kwargs: Keyword arguments of the target's forward, for this row.
        row: Index of the row.
        num_rows: Rows of the call. There may be several for each prompt.
    """
    if assistant is None or not target.config.is_encoder_decoder:
        return None
    mask = model_kwargs.get("attention_mask")
    if shares_encoder(target, assistant):
        states = model_kwargs["encoder_outputs"][0]
        # Of speech features the mask counts frames, of which several make one state. All are attended to.
        has_mask = mask is not None and mask.shape == states.shape[:2]
        return EncoderInputs(states=states, mask=mask if has_mask else None)
    assert inputs_tensor is not None
    prompt = row // (num_rows // len(inputs_tensor))
    encoder = assistant.get_encoder()
    known = inspect.signature(encoder.forward).parameters
    inputs = {name: value for name, value in model_kwargs.items() if name in known and isinstance(value, torch.Tensor)}
    inputs[assistant.main_input_name] = inputs_tensor[prompt : prompt + 1]
    has_mask = mask is not None and assistant.main_input_name == "input_ids"
    return EncoderInputs(inputs=inputs, mask=mask if has_mask else None)


def row_of(output: ModelOutput, row: int) -> ModelOutput:
    """One row of what an encoder returned."""

    def pick(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[row : row + 1]
        return tuple(map(pick, value)) if isinstance(value, (tuple, list)) else value

    if isinstance(output, (tuple, list)):
        return pick(output)
    return type(output)(**{name: pick(value) for name, value in output.items()})


# They hold what the encoder read, for each row of the batch.
ENCODER_PROCESSORS = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)


class OneEncoderRow(LogitsProcessor):
    """One of `ENCODER_PROCESSORS` for any number of prefixes of one row.

    Args:
        processor: The processor.
        row: Index of the row.
        num_rows: Rows of the call. There may be several for each input of the encoder.
    """

    def __init__(self, processor: LogitsProcessor, row: int, num_rows: int) -> None:
        self._processor: Any = copy.copy(processor)
        for name in ("encoder_input_ids", "generated_ngrams"):
            inputs = getattr(processor, name, None)
            if inputs is not None:
                first = row // (num_rows // len(inputs))
                setattr(self._processor, name, inputs[first : first + 1])
        self._processor.batch_size = 1

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = [self._processor(input_ids[i : i + 1], scores[i : i + 1]) for i in range(len(scores))]
        return torch.cat(rows)  # type: ignore[return-value]


class NoSpeech:
    """Keeps what Whisper's detection of silence finds for each row, where rows are decoded one after the other.

    Args:
        processors: Logits processors of the call. The detection is one of them; it changes no scores.
    """

    def __init__(self, processors: list[Any]) -> None:
        self._detections = [each for each in processors if isinstance(each, WhisperNoSpeechDetection)]
        self._found: list[list[torch.Tensor]] = [[] for _ in self._detections]

    def keep(self, row: int) -> None:
        """Takes it down for a row that has been decoded."""
        for detection, found in zip(self._detections, self._found, strict=True):
            found.append(detection.no_speech_prob[row])

    def restore(self) -> None:
        """Hands it back for all rows."""
        for detection, found in zip(self._detections, self._found, strict=True):
            detection._no_speech_prob = torch.stack(found)


def _encoder_input(model: PreTrainedModel) -> str:
    """What an encoder reads, in words; two that read the same say the same."""
    encoder = model.get_encoder()
    name = f"`{model.main_input_name}`"
    num_mel_bins = getattr(getattr(encoder, "config", None), "num_mel_bins", None)
    return name if num_mel_bins is None else f"{name} of {num_mel_bins} mel bins"
