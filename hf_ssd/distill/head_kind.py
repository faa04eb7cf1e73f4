"""An assistant that is an EAGLE-3 head: one layer that reads the target's states (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..decoders import decoder_config
from ..drafting.draft_vocab import resolve_size
from ..eagle3 import Eagle3Head, check_head, decoder_layers, default_layer_ids, feature_layers, load_head
from ..vocabulary import UnsupportedError
from .head_start import calibrate, draft_tokens, make_head, regress
from .kinds import Kind, Student
from .losses import forward_kl
from .measuring import CHUNK, Batch, LogitPairs
from .settings import DEFAULT_DEPTH
from .teacher import Collator
from .texts import frequent_tokens
from .unrolling import has_room, unrolled_logits

if TYPE_CHECKING:
    from datasets import Dataset

DEPTH_DECAY = 0.8  # how much less each further token counts, as for EAGLE-3


class HeadKind(Kind):
    """A head over the states of a low, a middle and a high layer."""

    def layer_ids(self) -> Sequence[int]:
        """Those that published heads read, or those that the head to go on from reads.

        Raises:
            UnsupportedError: If the target has no layers that can be found, or that head is another target's.
        """
        if self.settings.init_from is not None:
            return feature_layers(self.target, self._given(self.settings.init_from))
        decoder_layers(self.target)
        return default_layer_ids(decoder_config(self.target).num_hidden_layers)

    def make(self, texts: Dataset, work: Path) -> Student:
        """A head that begins as a linear regression, or the one to go on from."""
        settings, start = self.settings, work / "start"
        if settings.init_from is None and not (start / "config.json").is_file():
            vocab_size = self.teacher.projection.vocab_size
            size = min(settings.draft_vocab_size or resolve_size("auto", vocab_size) or vocab_size, vocab_size)
            tokens = draft_tokens(frequent_tokens(texts, vocab_size), size, vocab_size)
            head = make_head(self.target, tokens, self.layer_ids(), depth=self._depth, seed=settings.seed)
            regress(head.to(self.target.device), self.teacher, self._batches(texts))
            calibrate(self._student(head), next(self._batches(texts)))
            head.save_pretrained(start)
        if settings.init_from is not None:
            return self._student(self._given(settings.init_from))
        head = load_head(str(start), self.target, dtype=torch.float32)
        head.lm_head.requires_grad_(False)  # the target's, as the embedding is
        return self._student(head)

    def load(self, folder: Path) -> Student:
        """The head of a folder."""
        return self._student(load_head(str(folder), self.target, dtype=self.dtype))

    def _given(self, folder: str) -> Eagle3Head:
        """A head to go on from, in float32. Where its embedding or projection is the target's, it stays that."""
        head = load_head(folder, self.target, dtype=torch.float32)
        try:
            check_head(self.target, head)
        except UnsupportedError as error:
            raise UnsupportedError(f"`init_from` must hold a head for the target, but does not: {error}") from None
        own, theirs = head.config.layer.vocab_size, decoder_config(self.target).vocab_size
        if own != theirs:
            raise UnsupportedError(
                f"`init_from` must hold a head for the target's {theirs} tokens, but {folder!r} knows {own}."
            )
        embedding, projection = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        if _is_same(head.embed_tokens.weight, embedding.weight):
            head.share_embedding(self.target)
        rows = projection.weight[head.draft_tokens.to(projection.weight.device)]
        head.lm_head.requires_grad_(not _is_same(head.lm_head.weight, rows))
        return head

    def _batches(self, texts: Dataset) -> Iterator[Batch]:
        """All texts in random order."""
        collate, size = Collator(self.teacher.config.hidden_size), self.settings.batch_size
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.settings.seed)).tolist()
        for start in range(0, len(order), size):
            batch = collate([texts[i] for i in order[start : start + size]])
            yield {name: value.to(self.target.device) for name, value in batch.items()}

    def _student(self, head: Eagle3Head) -> Student:
        return HeadStudent(head, self.teacher, self._depth)

    @property
    def _depth(self) -> int:
        return self.settings.depth or DEFAULT_DEPTH


def _is_same(own: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether weights are the target's, as far as its precision tells."""
    return own.shape == theirs.shape and torch.equal(own.to(theirs), theirs)


class HeadStudent(Student):
    """Learns what comes next when its features are one token old, two, and so on.

    Args:
        model: An [`Eagle3Head`].
        teacher: What it learns from.
        depth: How many tokens it drafts in training.
    """

    model: Eagle3Head

    def __init__(self, model: Eagle3Head, teacher: Any, depth: int) -> None:
        super().__init__(model, teacher)
        self._depth = depth

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Forward divergence over the draft vocabulary, a mean over depths of which the first counts most.

        It leaves out positions at which the target's likeliest token is outside: of these there is nothing to learn.
        """
        outputs, tokens = self.teacher.outputs(batch), self.model.draft_tokens
        with torch.no_grad():
            teacher_logits = self.teacher.projection(outputs.hidden, tokens.to(outputs.hidden.device))
        is_drafted = self.model.t2d.to(outputs.top_tokens.device)[outputs.top_tokens[:, 0]]
        losses, weights = [], []
        for depth, logits in enumerate(self._unrolled(model, batch, outputs.features), start=1):
            room = has_room(batch["positions"], depth).to(is_drafted.device)
            kept = is_drafted[room].to(logits.device)
            weights.append(DEPTH_DECAY ** (depth - 1))
            losses.append(weights[-1] * forward_kl(teacher_logits[room].to(logits.device)[kept], logits.float()[kept]))
        return torch.stack(losses).sum() / sum(weights)

    def logits(self, model: nn.Module, batch: Batch) -> Sequence[Iterable[LogitPairs]]:
        """Those at each depth; tokens that are not drafted have `-inf`."""
        outputs = self.teacher.outputs(batch)

        def pairs(depth: int, logits: torch.Tensor) -> Iterator[LogitPairs]:
            hidden = outputs.hidden[has_room(batch["positions"], depth).to(outputs.hidden.device)]
            for student, teacher in zip(logits.split(CHUNK), hidden.split(CHUNK), strict=True):
                yield self.model.full_logits(student.float()), self.teacher.projection(teacher).to(student.device)

        unrolled = self._unrolled(model, batch, outputs.features)
        return [pairs(depth, logits) for depth, logits in enumerate(unrolled, start=1)]

    def facts(self) -> dict[str, Any]:
        """Those of any student, and the size of the draft vocabulary."""
        return {**super().facts(), "draft_vocab_size": self.model.config.draft_vocab_size}

    def _unrolled(self, model: nn.Module, batch: Batch, features: torch.Tensor | None) -> list[torch.Tensor]:
        assert features is not None
        weight = self.model.fc.weight
        return unrolled_logits(
            model,
            self.model.config.layer,
            batch["input_ids"],
            features.to(weight.device, weight.dtype),
            batch["positions"],
            self._depth,
        )
