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
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..eagle3 import capture_features
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
        features: The states of some layers, of all tokens and not only at the positions, of shape
            `(batch_size, sequence_length, feature_size)`, or of one text without the first dimension. `None` if no
            layer was asked for.
    """

    hidden: torch.Tensor
    top_tokens: torch.Tensor
    features: torch.Tensor | None = None


class Teacher:
    """The target, as far as a student needs it.

    Args:
        target: A decoder-only transformers model in evaluation mode.
        projection: Its output projection.
        layer_ids: Of which layers a student reads the states too, as [`capture_features`] counts them.
    """

    def __init__(self, target: PreTrainedModel, projection: Projection, layer_ids: Sequence[int] = ()) -> None:
        self._target = target
        self._layer_ids = layer_ids
        self.projection = projection
        self.config = target.config.get_text_config(decoder=True)

    @property
    def feature_size(self) -> int:
        """Length of a token's features; 0 where none are read."""
        return len(self._layer_ids) * int(self.config.hidden_size)

    def num_bytes(self, num_tokens: int, num_positions: int) -> int:
        """What texts take on disk, with `num_positions` of their `num_tokens` tokens to be learnt."""
        return 2 * (num_positions * int(self.config.hidden_size) + num_tokens * self.feature_size)

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
        batch = {name: value.to(device) for name, value in batch.items()}
        features = None
        if self._layer_ids:
            with capture_features(self._target, self._layer_ids) as captured:
                hidden = hidden_at(self._target, batch)
                features = captured().to(input_ids.device)
        else:
            hidden = hidden_at(self._target, batch)
        num_top = min(NUM_TOP, self.projection.vocab_size)
        top_tokens = torch.cat([self.projection(part).topk(num_top).indices for part in hidden.split(512)])
        return TeacherOutputs(hidden.to(input_ids.device), top_tokens.to(input_ids.device), features)

    def outputs(self, batch: Mapping[str, torch.Tensor]) -> TeacherOutputs:
        """What the target says about a batch: what it brings along, or else by running the target."""
        if "teacher_hidden" in batch:
            return TeacherOutputs(batch["teacher_hidden"], batch["top_tokens"], batch.get("features"))
        return self(batch["input_ids"], batch["attention_mask"], batch["positions"])

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
            for row, (i, part) in enumerate(zip(picked, parts, strict=True)):
                features = None if found.features is None else found.features[row, : len(texts[i][0])].cpu()
                outputs[i] = TeacherOutputs(*part, features)
        return [outputs[i] for i in range(len(texts))]


def hidden_at(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A model's states at the positions of a batch, of shape `(num_positions, hidden_size)`."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return last_hidden(model, inputs)[batch["positions"].to(model.device)]


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


class Collator:
    """Makes a batch of texts.

    Args:
        hidden_size: Of the target.
    """

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad_texts([(row["input_ids"], int(row["num_prompt_tokens"])) for row in rows])
        if "teacher_hidden" in rows[0]:
            hidden = torch.cat([torch.tensor(row["teacher_hidden"]) for row in rows])
            top_tokens = torch.cat([torch.tensor(row["top_tokens"]) for row in rows])
            batch["teacher_hidden"] = hidden.view(-1, self._hidden_size)
            batch["top_tokens"] = top_tokens.view(len(batch["teacher_hidden"]), -1).long()
        if "features" in rows[0]:
            features = [torch.tensor(row["features"]).view(len(row["input_ids"]), -1) for row in rows]
            batch["features"] = pad_sequence(features, batch_first=True)
        return batch


def add_outputs(
    texts: Dataset, teacher: Teacher, cache: Path, name: str, report: Callable[[int, int], None]
) -> Dataset:
    """The texts with `teacher_hidden` and `top_tokens`, flat lists per text, kept on disk shard by shard.

    Where the teacher reads states of other layers, these are there as `features`.

    Args:
        texts: In an order that stays when more are added.
        teacher: Reads them.
        cache: Folder of the shards. Those that are there are not made again.
        name: What the shards are called by.
        report: Told how many texts are done, of how many.
    """
    from datasets import Features, List, Value, concatenate_datasets

    columns = {"teacher_hidden": List(Value("float16")), "top_tokens": List(Value("int32"))}
    if teacher.feature_size:
        columns["features"] = List(Value("float16"))
    features = Features({**texts.features, **columns})

    def read(batch: dict[str, Any]) -> dict[str, list[Any]]:
        outputs = teacher.outputs_of(list(zip(batch["input_ids"], batch["num_prompt_tokens"], strict=True)))
        found = {
            "teacher_hidden": [_in_16_bits(each.hidden) for each in outputs],
            "top_tokens": [each.top_tokens.numpy().astype(np.int32).ravel() for each in outputs],
        }
        states = [_in_16_bits(each.features) for each in outputs if each.features is not None]
        return {**found, "features": states} if states else found

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


def _in_16_bits(states: torch.Tensor) -> np.ndarray:
    # A layer's largest states may be beyond what 16 bits hold.
    largest = torch.finfo(torch.float16).max
    return states.float().clamp(-largest, largest).numpy().astype(np.float16).ravel()
