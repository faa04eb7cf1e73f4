"""The assistant that a model makes, as it drafts best."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.utils import logging

from ..eagle3 import Eagle3Head
from .assistant import AssistantModel
from .eagle3 import Eagle3Assistant
from .graphs import GraphedAssistant
from .int8 import MIN_SPEED_UP, TRIAL_TOKENS, best_time, copy_modules, may_pay

logger = logging.get_logger(__name__)


def make_assistant(model: PreTrainedModel, quantization: str | None) -> AssistantModel:
    """The assistant of a model, which itself is left as it is: weights in 8 bits are a copy.

    Args:
        model: A transformers model in evaluation mode, or an EAGLE-3 head.
        quantization: `"int8"`, `"auto"` for that where it pays, or `None`.

    Raises:
        ValueError: If 8 bits are asked for and this build of torch has no kernels for it.
    """
    assistant = _plain(model)
    if quantization != "int8" and not (quantization == "auto" and may_pay(model)):
        return assistant
    quantized = _plain(copy_modules(model))
    quantized.quantize()
    if quantization == "auto":
        step_s, quantized_step_s = _step_time(assistant), _step_time(quantized)
        logger.info(f"A draft step takes {step_s * 1e3:.1f} ms, in 8 bits {quantized_step_s * 1e3:.1f} ms.")
        if quantized_step_s * MIN_SPEED_UP > step_s:
            return assistant
    return quantized


def make_fast_assistant(model: PreTrainedModel, quantization: str | None) -> AssistantModel:
    """The assistant as it runs fastest on its device; the arguments are those of [`make_assistant`].

    An EAGLE-3 head has no graphs: its steps are one layer.
    """
    devices = {parameter.device for parameter in model.parameters()}
    is_on_cuda = len(devices) == 1 and model.device.type == "cuda"
    if is_on_cuda and quantization != "int8" and not isinstance(model, Eagle3Head):
        return GraphedAssistant(model)
    return make_assistant(model, quantization)


def _plain(model: PreTrainedModel) -> AssistantModel:
    return Eagle3Assistant(model) if isinstance(model, Eagle3Head) else AssistantModel(model)


def _step_time(assistant: AssistantModel) -> float:
    tokens = [token % assistant.vocab_size for token in range(TRIAL_TOKENS)]
    return best_time(lambda: assistant.forward(tokens, assistant.new_cache()))
