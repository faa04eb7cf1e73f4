"""What is distilled. A kind knows what it reads of the target and how a student begins; a student, how it learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .measuring import Batch, LogitPairs
from .projection import Projection
from .settings import DistillSettings
from .student import count_own_parameters, save_student
from .teacher import Teacher

if TYPE_CHECKING:
    from datasets import Dataset


class Student(ABC):
    """A model in the making.

    Args:
        model: It, in float32 while it is trained.
        teacher: What it learns from.
    """

    def __init__(self, model: PreTrainedModel, teacher: Teacher) -> None:
        self.model = model
        self.teacher = teacher

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a batch, a scalar.

        Args:
            model: The student's model, perhaps in the wrapper that accelerate put it in.
            batch: Texts as the [`Collator`] makes them.
        """

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> Sequence[Iterable[LogitPairs]]:
        """Logits of student and teacher over the target's vocabulary, chunk by chunk of the positions to be learnt.

        The first of the sequence is for the next token, the second for a token that is drafted after one, and so on.
        """

    def save(self, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
        """Writes the assistant as a folder."""
        save_student(self.model, tokenizer, folder, dtype)

    def facts(self) -> dict[str, Any]:
        """What the card tells of it: fields of [`DistillResult`]."""
        config, target = self.model.config.get_text_config(decoder=True), self.teacher.config
        return {
            "model_type": config.model_type,
            "layers": (config.num_hidden_layers, target.num_hidden_layers),
            "width": (config.hidden_size, target.hidden_size),
            "own_parameters": count_own_parameters(self.model),
            "shares_embedding": not self.model.get_input_embeddings().weight.requires_grad,
            "shares_projection": not self.model.get_output_embeddings().weight.requires_grad,
        }


class Kind(ABC):
    """Makes and loads students of one kind.

    Args:
        settings: What is wanted.
        target: Frozen, in evaluation mode.
    """

    def __init__(self, settings: DistillSettings, target: PreTrainedModel) -> None:
        self.settings, self.target = settings, target
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.teacher = Teacher(target, Projection(target), self.layer_ids())

    def layer_ids(self) -> Sequence[int]:
        """Of which layers the student reads the target's states."""
        return ()

    @abstractmethod
    def make(self, texts: Dataset, work: Path) -> Student:
        """A student before its training.

        Args:
            texts: Those that it will be trained on.
            work: Folder for what is not to be made again.
        """

    @abstractmethod
    def load(self, folder: Path) -> Student:
        """The student that was saved, as a user would load it."""
