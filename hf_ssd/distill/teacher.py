"""What the target says about texts: the states that its output projection is given.

A state of `hidden_size` numbers stands for a whole distribution. Kept on disk, it saves the target's forward in every
later pass: on a CPU that is most of what training costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from .projection import Projection, last_hidden

if TYPE_CHECKING:
    from datasets import Dataset

NUM_TOP = 8  # tokens per position that the target finds likeliest, which every loss looks at
SHARD_TEXTS = 128  # what a killed run has to do again at most
MAX_BATCH_TOKENS = 4096  # padding included


class TeacherOutputs(NamedTuple):
    """The target's view of positions.

    Args:
        hidden: States that the output projection is given, of shape `(num_positions, hidden_size)`.
        top_tokens: The likeliest token ids, of shape `(num_positions, NUM_TOP)`.
    """

    hidden: torch.Tensor
    top_tokens: torch.Tensor


class Teacher:
    """The target, as far as a student needs it.

    Args:
        target: A decoder-only transformers model in evaluation mode.
        projection: Its output projection.
    """

    def __init__(self, target: PreTrainedModel, projection: Projection) -> None:
        self._target = target
        self.projection = projection

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, positions: torch.Tensor
    ) -> TeacherOutputs:
        """Runs the target.

        Args:
            input_ids: Of shape `(batch_size, sequence_length)`.
            attention_mask: Of the same shape.
            positions: Which positions are asked about: bool, of the same shape.

        Returns:
            [`TeacherOutputs`]: Of these positions in order, on the device of `input_ids`.
        """
        device = self._target.device
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "positions": positions}
        hidden = hidden_at(self._target, {name: value.to(device) for name, value in batch.items()})
        num_top = min(NUM_TOP, self.projection.vocab_size)
        top_tokens = torch.cat([self.projection(part).topk(num_top).indices for part in hidden.split(512)])
        return TeacherOutputs(hidden.to(input_ids.device), top_tokens.to(input_ids.device))

    def outputs_of(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[TeacherOutputs]:
        """What the target says about whole texts, each given as token ids and number of prompt tokens, on the CPU."""
        # Texts of like length together, so that little is padding.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
        outputs: dict[int, TeacherOutputs] = {}
        while order:
            count = max(1, MAX_BATCH_TOKENS // len(texts[order[0]][0]))
            picked, order = order[:count], order[count:]
            batch = pad_texts([texts[i] for i in picked])
            found = self(**batch)
            counts = batch["positions"].sum(dim=1).tolist()
            parts = zip(found.hidden.cpu().split(counts), found.top_tokens.cpu().split(counts), strict=True)
            outputs |= {i: TeacherOutputs(*part) for i, part in zip(picked, parts, strict=True)}
        return [outputs[i] for i in range(len(texts))]


def hidden_at(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A model's states at the positions of a batch, of shape `(num_positions, hidden_size)`."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return last_hidden(model, inputs)[batch["positions"].to(model.device)]


def outputs_of_batch(batch: Mapping[str, torch.Tensor], teacher: Teacher | None) -> TeacherOutputs:
    """What the target says about a batch: what it brings along, or by asking `teacher`."""
    if "teacher_hidden" in batch:
        return TeacherOutputs(batch["teacher_hidden"], batch["top_tokens"])
    assert teacher is not None
    return teacher(batch["input_ids"], batch["attention_mask"], batch["positions"])


def pad_texts(texts: Sequence[tuple[Sequence[int], int]]) -> dict[str, torch.Tensor]:
    """Texts as one batch, padded on the right.

    Returns:
        `input_ids`, `attention_mask` and `positions` of shape `(batch_size, sequence_length)`; the last says after
        which tokens the next one is to be learnt.
    """
    longest = max(len(ids) for ids, _ in texts)
    input_ids = torch.zeros(len(texts), longest, dtype=torch.long)
    attention_mask, positions = torch.zeros_like(input_ids), torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (ids, num_prompt_tokens) in enumerate(texts):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
        positions[row, num_prompt_tokens - 1 : len(ids) - 1] = True
    return {"input_ids": input_ids, "attention_mask": attention_mask, "positions": positions}


def add_outputs(
    texts: Dataset, teacher: Teacher, cache: Path, name: str, report: Callable[[int, int], None]
) -> Dataset:
    """The texts with `teacher_hidden` and `top_tokens`, flat lists per text, kept on disk shard by shard.

    Args:
        texts: In an order that stays when more are added.
        teacher: Reads them.
        cache: Folder of the shards. Those that are there are not made again.
        name: What the shards are called by.
        report: Told how many texts are done, of how many.
    """
    from datasets import Features, List, Value, concatenate_datasets

    features = Features(
        {**texts.features, "teacher_hidden": List(Value("float16")), "top_tokens": List(Value("int32"))}
    )

    def read(batch: dict[str, Any]) -> dict[str, list[Any]]:
        outputs = teacher.outputs_of(list(zip(batch["input_ids"], batch["num_prompt_tokens"], strict=True)))
        return {
            "teacher_hidden": [each.hidden.float().numpy().astype(np.float16).ravel() for each in outputs],
            "top_tokens": [each.top_tokens.numpy().astype(np.int32).ravel() for each in outputs],
        }

    shards = []
    for start in range(0, len(texts), SHARD_TEXTS):
        end = min(start + SHARD_TEXTS, len(texts))
        report(start, len(texts))
        mark = f"{name}-{start}-{end}"
        shards.append(
            texts.select(range(start, end)).map(
                read,
                batched=True,
                batch_size=SHARD_TEXTS,
                writer_batch_size=32,
                features=features,
                cache_file_name=str(cache / f"teacher-{mark}.arrow"),
                new_fingerprint=mark,
            )
        )
        # A shard that was not full when it was made holds the same texts, and fewer.
        for stale in cache.glob(f"teacher-{name}-{start}-*.arrow"):
            if stale.name != f"teacher-{mark}.arrow":
                stale.unlink()
    report(len(texts), len(texts))
    return concatenate_datasets(shards)
