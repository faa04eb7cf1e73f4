"""`hf-ssd distill`, stage by stage: texts, the target's view of them, training, evaluation, card.

Each stage leaves its work in the folder. A run that begins there again finds it, and does what is missing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..drafting.draft_vocab import FREQUENT_TOKENS_FILE
from ..embedded import target_folder
from .card import write_card
from .evaluation import NUM_PROMPTS, TEMPERATURES, measure_rounds
from .folder import WorkFolder, write_json
from .head_kind import HeadKind
from .kinds import Kind, Student
from .measuring import Agreement, measure
from .model_kind import ModelKind
from .results import DistillResult
from .settings import DistillSettings
from .sources import HeldOut, Sources, read_held_out, read_sources
from .teacher import Collator, add_outputs
from .texts import (
    MAX_HELD_OUT,
    document_texts,
    documents_mark,
    frequent_tokens,
    num_positions,
    plain_texts,
    split_held_out,
    written_texts,
)
from .training import (
    DistillTrainer,
    TimeBudget,
    last_checkpoint,
    make_trainer,
    seconds_in,
)
from .writing import Writer, by_like_length, write_texts

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)

Progress = Callable[[str, int, int], None]

KINDS: dict[str, type[Kind]] = {"model": ModelKind, "eagle3": HeadKind}
WRITING, READING, TRAINING = "writing", "reading", "training"
WRITING_SHARE = 0.4  # of the time: on a CPU a token takes as long to write as to be learnt several times
MIN_TRAINING_SHARE = 0.25  # whatever the other stages took
MAX_DISK_SHARE = 0.5  # of what is free, for the target's states
NUM_WATCHED = 24  # held-out texts that are measured during training
DOCUMENT_PROMPT_TOKENS = 32  # how much of a document a prompt of the evaluation is


def distill(settings: DistillSettings, progress: Progress | None = None) -> DistillResult:
    """Makes an assistant, or goes on making it.

    Args:
        settings: What from, how long, where to.
        progress: Called with what is being done, how much of it is done and how much there is (0: not known yet).

    Returns:
        [`DistillResult`]: Its figures, which the model card in the folder shows too.

    Raises:
        OSError: If a model or file is not found.
        ValueError: If the folder belongs to another distillation or is in use, or there is too little text.
        UnsupportedError: If the target's logits do not come from a linear projection, or an EAGLE-3 head cannot read
            its layers.
    """
    sources = read_sources(settings.data)
    held_out = None if settings.held_out is None else read_held_out(settings.held_out, MAX_HELD_OUT)
    folder = WorkFolder(settings.out)
    with folder.held():
        folder.bind(settings, None if held_out is None else held_out.mark)
        return Distillation(settings, sources, folder, progress or (lambda what, done, total: None), held_out).run()


class Distillation:
    """One run of all stages.

    Args:
        settings: What is wanted.
        sources: What there is to learn from.
        folder: Where the stages leave their work.
        report: Told how far it is.
        held_out: Prompts to measure on; `None` keeps some of the texts from training for that.
    """

    def __init__(
        self,
        settings: DistillSettings,
        sources: Sources,
        folder: WorkFolder,
        report: Progress,
        held_out: HeldOut | None = None,
    ) -> None:
        self.settings, self.sources, self.folder, self.report = settings, sources, folder, report
        self.held_out = held_out
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        report("reading the target", 0, 0)
        self.target_name = settings.target or str(target_folder())
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.target_name, trust_remote_code=False
        )
        self.target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.target_name, dtype=self.dtype, device_map=settings.device_map, trust_remote_code=False
        )
        self.target.eval().requires_grad_(False)
        if settings.device_map is None:
            self.target.to(training_device())
        self.kind = KINDS[settings.kind](settings, self.target)

    def run(self) -> DistillResult:
        """All stages, as far as they are not done."""
        train, held_out = self._texts()
        self.report("preparing the student", 0, 0)
        student = self.kind.make(train, self.folder.work)
        trainer = self._train(student, train, held_out)
        self.report("saving", 0, 0)
        student.save(self.tokenizer, self.folder.out, self.dtype)
        write_json(self.folder.out / FREQUENT_TOKENS_FILE, frequent_tokens(train, self.target.config.vocab_size))
        facts = self._facts(student, train, trainer)
        del trainer, student
        result = DistillResult(**facts, **self._evaluate(train, held_out))
        (self.folder.out / "README.md").write_text(write_card(result), encoding="utf-8")
        write_json(self.folder.out / "distillation.json", result.to_dict())
        return result

    # Texts.

    def _texts(self) -> tuple[Dataset, Dataset]:
        """Those to train on, and those to measure on."""
        if self.held_out is None:
            return split_held_out(self._read(self._write()))
        from datasets import concatenate_datasets

        (held_out,) = self._read([self._write_held_out(self.held_out)])
        return concatenate_datasets(self._read(self._write())), held_out

    def _write_held_out(self, held_out: HeldOut) -> tuple[str, Dataset]:
        """The target's answers to the prompts that are measured on."""
        path = self.folder.held_out
        batches = write_texts(
            Writer(self.target, self.tokenizer, self.settings, temperatures=(0.0,), ended_share=1.0),
            path,
            writes_own=False,
            prompts=held_out.asked,
            batch_size=self.settings.writing_batch_size,
            may_go_on=lambda num_tokens: True,
        )
        start = time.monotonic()
        for num_tokens in batches:
            self.folder.add_seconds(WRITING, time.monotonic() - start)
            start = time.monotonic()
            self.report(f"answers to the prompts that are held out, {num_tokens} tokens so far", 0, 0)
        if not path.stat().st_size:
            raise ValueError(
                f"`held_out` must give prompts that leave room for an answer, but {self.settings.held_out!r} has none "
                f"for max_length={self.settings.max_length}. Give more of that."
            )
        return "held-out", written_texts(path, self.folder.cache / "held-out")

    def _write(self) -> list[tuple[str, Dataset]]:
        """The texts by what their shards are called, those that are still to be written included."""
        settings, folder = self.settings, self.folder
        if self.sources.needs_writing:
            budget = WRITING_SHARE * settings.minutes * 60
            prompts = [prompt for prompt in self.sources.prompts if prompt not in (self.held_out or ())]
            batches = write_texts(
                Writer(self.target, self.tokenizer, settings),
                folder.texts,
                writes_own=self.sources.writes_own,
                prompts=by_like_length(prompts, settings.writing_batch_size),
                batch_size=settings.writing_batch_size,
                may_go_on=lambda num_tokens: (
                    folder.seconds(WRITING) < budget and (settings.tokens is None or num_tokens < settings.tokens)
                ),
            )
            start = time.monotonic()
            for num_tokens in batches:
                folder.add_seconds(WRITING, time.monotonic() - start)
                start = time.monotonic()
                self.report(f"writing, {num_tokens} tokens so far", int(folder.seconds(WRITING)), max(1, int(budget)))
        parts = []
        if folder.texts.is_file() and folder.texts.stat().st_size:
            parts.append(("written", written_texts(folder.texts, folder.cache)))
        if self.sources.documents:
            documents = document_texts(self.sources.documents, self.tokenizer, settings.max_length, folder.cache)
            mark = documents_mark([str(documents._fingerprint)], settings.max_length)
            parts.append((f"documents-{mark}", documents))
        return parts

    def _read(self, parts: list[tuple[str, Dataset]]) -> list[Dataset]:
        """The texts, with the target's view of them if it is kept."""
        if not parts:
            raise ValueError(f"`data` must give texts, but {list(self.settings.data)} gave none.")
        num_tokens = sum(len(ids) for _, texts in parts for ids, _ in plain_texts(texts))
        size = self.kind.teacher.num_bytes(num_tokens, sum(num_positions(texts) for _, texts in parts))
        keeps = self.settings.teacher_cache == "on" or (
            self.settings.teacher_cache == "auto"
            and size < MAX_DISK_SHARE * (shutil.disk_usage(self.folder.cache).free + size_of(self.folder.cache))
        )
        if keeps:
            start = time.monotonic()

            def read(done: int, total: int) -> None:
                nonlocal start
                self.folder.add_seconds(READING, time.monotonic() - start)
                start = time.monotonic()
                self.report("the target reads the texts", done, total)

            parts = [
                (name, add_outputs(texts, self.kind.teacher, self.folder.cache, name, read)) for name, texts in parts
            ]
        return [
            texts.add_column("length", [len(ids) for ids, _ in plain_texts(texts)]).with_format("numpy")
            for _, texts in parts
        ]

    # Training.

    def _train(self, student: Student, train: Dataset, held_out: Dataset) -> DistillTrainer:
        settings, folder = self.settings, self.folder
        spent = folder.seconds(WRITING) + folder.seconds(READING)
        budget_s = max(settings.minutes * 60 - spent, MIN_TRAINING_SHARE * settings.minutes * 60)
        budget = TimeBudget(budget_s, settings.save_minutes * 60)
        watched = held_out.select(spread(len(held_out), NUM_WATCHED))
        trainer = make_trainer(student, train, watched, settings, folder, budget, self.report)
        trainer.train_from(last_checkpoint(folder.checkpoints))
        return trainer

    def _facts(self, student: Student, train: Dataset, trainer: DistillTrainer) -> dict[str, Any]:
        """What the card tells of how the assistant was made."""
        num_tokens, steps = num_positions(train), trainer.state.global_step
        seconds = {name: self.folder.seconds(name) for name in (WRITING, READING)}
        seconds[TRAINING] = seconds_in(trainer.state.stateful_callbacks)
        return {
            "out": str(self.folder.out),
            "kind": self.settings.kind,
            "target": self.target_name,
            "dtype": self.settings.dtype,
            **student.facts(),
            "init_from": self.settings.init_from,
            "data": tuple(self.settings.data),
            "held_out": self.settings.held_out,
            "num_texts": len(train),
            "num_tokens": num_tokens,
            "num_seen": round(num_tokens * steps * self.settings.batch_size / len(train)),
            "num_steps": steps,
            "minutes": {name: value / 60 for name, value in seconds.items() if value},
        }

    # Evaluation.

    def _evaluate(self, train: Dataset, held_out: Dataset) -> dict[str, Any]:
        self.report("evaluating", 0, 0)
        before, *_ = self._agreement(self.kind.make(train, self.folder.work), held_out, coupled=False)
        agreement, *deeper = self._agreement(self.kind.load(self.folder.out), held_out, coupled=True)
        prompts = [
            row["input_ids"][: row["num_prompt_tokens"] if row["num_prompt_tokens"] > 1 else DOCUMENT_PROMPT_TOKENS]
            for row in held_out.select(spread(len(held_out), NUM_PROMPTS))
        ]
        rounds = measure_rounds(
            self.target,
            self.kind.load(self.folder.out).model,  # on the CPU, and as it was saved: measuring leaves hooks behind
            prompts,
            (0.0, *TEMPERATURES),
            pad_token_id=self.tokenizer.pad_token_id or 0,
            seed=self.settings.seed,
        )
        return {"before": before, "agreement": agreement, "deeper": tuple(deeper), "rounds": rounds}

    def _agreement(self, student: Student, held_out: Dataset, *, coupled: bool) -> tuple[Agreement, ...]:
        device = training_device()
        model = student.model.eval().to(device)
        collate = Collator(self.target.config.hidden_size)
        batches = (
            {name: value.to(device) for name, value in collate([held_out[i]]).items()} for i in range(len(held_out))
        )
        return measure(batches, lambda batch: student.logits(model, batch), temperatures=TEMPERATURES, coupled=coupled)


def training_device() -> torch.device:
    """Where accelerate lets models train."""
    from accelerate import PartialState

    device: torch.device = PartialState().device
    return device


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def spread(length: int, count: int) -> range:
    """About `count` indices below `length`, evenly spread.

    ```python
    >>> list(spread(10, 3)), list(spread(2, 3))
    ([0, 4, 8], [0, 1])

    ```
    """
    return range(0, length, max(1, -(-length // count)))
