"""The inline backend: the drafting engine in the caller's thread. Nothing overlaps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafting import DraftEngine, make_assistant
from ..drafting.int8 import copy_modules
from ..protocol import DraftRequest, SpeculatorError
from ..sampling import Processor
from ..types import Outcome, Speculation
from ..wrappers import input_device

logger = logging.get_logger(__name__)


class InlineSpeculator:
    """Drafts in the caller's thread. In mode `"ssd"` it prepares all branches to their full depth before it looks at
    the outcome: a speculation cache with unlimited time.

    Args:
        model: The assistant.
        quantization: As `assistant_quantization` in [`SSDConfig`]; `"auto"` leaves the assistant as it is.
    """

    threads: int | None = None

    def __init__(self, model: PreTrainedModel, quantization: str | None = None) -> None:
        self._quantization = quantization
        self.device = str(input_device(model))
        self._model = in_evaluation(model)
        self._engine: DraftEngine | None = None
        self._outcome: tuple[Outcome, float | None] | None = None

    def another(self) -> InlineSpeculator:
        return InlineSpeculator(self._model, self._quantization)

    def start(self, request: DraftRequest) -> None:
        self._guard(self._start, dataclasses.replace(request, processors=copy_processors(request.processors)))

    def _start(self, request: DraftRequest) -> None:
        if self._engine is None:
            with torch.inference_mode():
                quantization = None if self._quantization == "auto" else self._quantization
                self._engine = DraftEngine(make_assistant(self._model, quantization), overlaps=False)
        self._engine.start(request)

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> None:
        self._outcome = (outcome, verify_ms)

    def receive(self) -> Speculation:
        if self._outcome is None or self._engine is None:
            raise SpeculatorError("There is no outcome to answer.")
        outcome, self._outcome = self._outcome, None
        while self._guard(self._engine.deepen):
            pass
        return self._guard(self._engine.resolve, *outcome)

    def stop(self) -> None:
        self._outcome = None

    @staticmethod
    def _guard(function, *args):  # type: ignore[no-untyped-def]
        try:
            return function(*args)
        except Exception as error:  # whatever the assistant's own code raises must not end the run
            raise SpeculatorError(f"the assistant failed: {error!r}") from error


def in_evaluation(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, or where that is being trained another one over the same weights, which drops nothing out."""
    if not any(module.training for module in model.modules()):
        return model
    try:
        return copy_modules(model).eval()
    except Exception as error:  # whatever a model may hold that cannot be copied
        logger.info(f"The assistant's modules cannot be copied ({error!r}); it drafts in training mode.")
        return model


def copy_processors(processors: Sequence[Processor]) -> list[Processor]:
    """Copies of the processors for the assistant's side, so that those with a memory are not disturbed.

    One that cannot be copied is left out: the assistant drafts without it, verification applies it.
    """
    copies = []
    for processor in processors:
        try:
            copies.append(copy.deepcopy(processor))
        except Exception as error:
            logger.info(f"{type(processor).__name__} cannot be copied and is not applied when drafting: {error!r}")
    return copies
