"""What `hf-ssd distill` can be asked for. Importing this loads no model and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

KINDS = ("model", "eagle3")
DTYPES = ("bfloat16", "float32", "float16")
VOCABULARIES = ("auto", "sampled", "full")
TEACHER_CACHES = ("auto", "on", "off")
# Fields that only one kind has.
KIND_OF = {"layers": "model", "width": "model", "vocabulary": "model", "draft_vocab_size": "eagle3", "depth": "eagle3"}
SELF = "self"  # as data: text that the target writes itself
DEFAULT_DEPTH = 4

# What a folder was begun with and has to stay, as what lies in it depends on it.
FIXED = ("kind", "target", "layers", "width", "init_from", "draft_vocab_size", "dtype", "max_length", "seed")


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Settings of a distillation, checked in full when the object is made.

    Args:
        out: Folder of the assistant. A run that was interrupted goes on there.
        kind: `"model"`, a small model of the target's class, or `"eagle3"`, one layer that reads the target's states.
        target: Name or folder of the target; `None` takes the embedded one.
        layers: Decoder layers of the assistant, the target's first ones; `None` is a fifth of the target's. With
            `init_from` it is how many that assistant shall have: those it lacks are added without effect.
        width: Hidden size of the assistant; `None` is the target's, whose embedding and output projection it then
            shares.
        init_from: Folder of an assistant to go on from, instead of the target's layers.
        draft_vocab_size: How many tokens an EAGLE-3 head may draft, the target's most frequent ones; `None` is a
            quarter of a large vocabulary, and all of a small one.
        depth: How many tokens an EAGLE-3 head drafts in training, its own states fed back; `None` is 4.
        data: What to learn from: `"self"`, files, or `"hub:"` and a data set. Of JSONL files and data sets the prompts
            are taken, and the target answers them. Other files are read as text.
        held_out: What to measure on: a JSONL file, or `"hub:"` and a data set, with prompts that the target answers
            greedily, 64 of them at most, spread over their categories. None of its prompts is learnt from. `None` keeps
            some of the texts from training instead.
        minutes: Time for all stages but the closing evaluation, over all runs in this folder. More of it later lets
            training go on.
        tokens: Most tokens that the target writes; `None` lets time decide, of which it gets two fifths.
        epochs: Most passes over the texts.
        max_length: Most tokens of a text.
        max_new_tokens: Most tokens of an answer that the target writes.
        batch_size: Texts per step of training.
        writing_batch_size: Texts that the target writes at once.
        learning_rate: Of AdamW, after warming up and before cooling down.
        vocabulary: `"full"` compares the distributions over all tokens, `"sampled"` over those that matter and some
            others; `"auto"` samples from 32,768 tokens on.
        teacher_cache: Whether the target's hidden states are kept on disk, so that it reads each text once. `"auto"`
            keeps them if they take less than half of what is free there.
        save_minutes: Time between checkpoints.
        dtype: Precision of the target, of the arithmetic and of the saved weights.
        device_map: Where the target goes, as in `from_pretrained`; `None` is where training runs.
        seed: Seed of the draws.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
        ImportError: If the `datasets` package is not installed.
    """

    out: Path
    kind: Literal["model", "eagle3"] = "model"
    target: str | None = None
    layers: int | None = None
    width: int | None = None
    init_from: str | None = None
    draft_vocab_size: int | None = None
    depth: int | None = None
    data: Sequence[str] = (SELF,)
    held_out: str | None = None
    minutes: float = 60.0
    tokens: int | None = None
    epochs: int = 10
    max_length: int = 1024
    max_new_tokens: int = 256
    batch_size: int = 8
    writing_batch_size: int = 64
    learning_rate: float = 3e-4
    vocabulary: Literal["auto", "sampled", "full"] = "auto"
    teacher_cache: Literal["auto", "on", "off"] = "auto"
    save_minutes: float = 5.0
    dtype: str = "bfloat16"
    device_map: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"`out` must be a folder, but {str(self.out)!r} is a file.")
        choices = {"kind": KINDS, "dtype": DTYPES, "vocabulary": VOCABULARIES, "teacher_cache": TEACHER_CACHES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {list(allowed)}, but got {getattr(self, name)!r}.")
        sizes = ["layers", "width", "tokens", "epochs", "max_new_tokens", "batch_size", "writing_batch_size"]
        sizes += ["draft_vocab_size", "depth"]
        for name, smallest in {**dict.fromkeys(sizes, 1), "max_length": 8, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"`{name}` must be at least {smallest}, but got {value}.")
        for name in ("minutes", "save_minutes", "learning_rate"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` must be a positive number, but got {getattr(self, name)}.")
        if not self.data:
            raise ValueError(f"`data` must name something to learn from, but is empty. Give {SELF!r} or files.")
        if self.depth is not None and self.depth > self.max_length - 2:
            raise ValueError(
                f"`depth` must be at most {self.max_length - 2}, which texts of max_length={self.max_length} have room "
                f"for, but got {self.depth}."
            )
        for name, kind in KIND_OF.items():
            if getattr(self, name) not in (None, "auto") and self.kind != kind:
                raise ValueError(
                    f"`{name}` must be left out for kind={self.kind!r}, but got {getattr(self, name)!r}. It is for "
                    f"kind={kind!r}."
                )
        sizes = ["width", "draft_vocab_size"]
        given = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) is not None]
        if self.init_from is not None and given:
            raise ValueError(
                f"`init_from` decides the assistant's size, but got {' and '.join(given)} too. Leave that out."
            )
        if find_spec("datasets") is None:
            raise ImportError('Distillation needs the package `datasets`: pip install "hf-ssd[distill]".')

    def fixed(self) -> dict[str, Any]:
        """The values that the folder is bound to."""
        return {name: getattr(self, name) for name in FIXED}
