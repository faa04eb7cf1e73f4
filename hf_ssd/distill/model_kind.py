"""An assistant that is a small model of the target's class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..drafting.draft_vocab import MIN_AUTO_VOCAB_SIZE
from .kinds import Kind, Student
from .losses import TokenSample, forward_kl
from .measuring import Batch, LogitPairs, paired
from .projection import Projection
from .student import load_student, make_student
from .teacher import Teacher
from .texts import frequent_tokens

if TYPE_CHECKING:
    from datasets import Dataset

NUM_FREQUENT, NUM_RANDOM = 4096, 2048  # of the token sample


class ModelKind(Kind):
    """The target's first layers, or a narrower cut of them."""

    def make(self, texts: Dataset, work: Path) -> Student:
        """The target's own layers, or the assistant to go on from."""
        settings = self.settings
        if settings.init_from is not None:
            model = load_student(settings.init_from, self.target, settings.layers)
        else:
            model = make_student(self.target, layers=settings.layers, width=settings.width)
        return ModelStudent(model, self.teacher, self.dtype, self._sample(texts))

    def load(self, folder: Path) -> Student:
        """The assistant of a folder."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()
        return ModelStudent(model, self.teacher, self.dtype, None)

    def _sample(self, texts: Dataset) -> TokenSample | None:
        settings, vocab_size = self.settings, self.teacher.projection.vocab_size
        is_large = settings.vocabulary == "auto" and vocab_size >= MIN_AUTO_VOCAB_SIZE
        if settings.vocabulary != "sampled" and not is_large:
            return None
        frequent = torch.tensor(frequent_tokens(texts, NUM_FREQUENT))
        return TokenSample(vocab_size, frequent, NUM_RANDOM, settings.seed)


class ModelStudent(Student):
    """Learns the target's distribution at each position.

    Args:
        model: A decoder-only transformers model.
        teacher: What it learns from.
        dtype: Of the product that gives its logits.
        sample: Draws the tokens that distributions are compared on in training; `None` compares them on all.
    """

    def __init__(
        self, model: PreTrainedModel, teacher: Teacher, dtype: torch.dtype, sample: TokenSample | None
    ) -> None:
        super().__init__(model, teacher)
        self._projection = Projection(model, dtype)
        self._sample = sample

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Forward divergence."""
        outputs = self.teacher.outputs(batch)
        hidden = trained_hidden(model, batch)
        tokens = log_weights = None
        if self._sample is not None:
            tokens, log_weights = self._sample.draw(batch["input_ids"], outputs.top_tokens)
        student_logits = self._projection(hidden, tokens)
        with torch.no_grad():
            teacher_logits = self.teacher.projection(outputs.hidden, tokens).to(student_logits.device)
        return forward_kl(teacher_logits, student_logits, log_weights)

    def logits(self, model: nn.Module, batch: Batch) -> Sequence[Iterable[LogitPairs]]:
        """Those for the next token; after drafted ones it guesses as well."""
        hidden, outputs = trained_hidden(model, batch), self.teacher.outputs(batch)
        return [paired(self._projection, hidden, self.teacher.projection, outputs.hidden)]


def trained_hidden(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The states of a model in training at the positions of a batch, of shape `(num_positions, hidden_size)`.

    The model is called as accelerate has prepared it, which is as a whole; but for one position's logits only.
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    outputs = model(**inputs, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    hidden: torch.Tensor = outputs.hidden_states[-1][batch["positions"]]
    return hidden
