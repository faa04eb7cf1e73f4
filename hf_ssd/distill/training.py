"""Training: transformers' `Trainer` with the loss of distillation, a budget of time, and checkpoints by the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, PrinterCallback, TrainerControl, TrainerState

from .folder import WorkFolder
from .kinds import Student
from .measuring import Agreement, measure
from .settings import DistillSettings
from .teacher import Collator

if TYPE_CHECKING:
    from datasets import Dataset

WARM_UP_STEPS = 50
WARM_UP_SHARE = 0.05  # of the training, where that has fewer steps
COOL_DOWN_SHARE = 0.2
LEAST_RATE = 0.02  # of the learning rate, at the very end
LOG_STEPS = 20


class DistillTrainer(Trainer):
    """Trains a student on the target's distributions at the positions to be learnt.

    Args:
        student: What is trained, and how.
        budget: The time there is, by which the learning rate ends.
        **kwargs: As of `Trainer`.
    """

    control: TrainerControl
    lr_scheduler: LambdaLR | None

    def __init__(self, *, student: Student, budget: TimeBudget, **kwargs: Any) -> None:
        super().__init__(model=student.model, callbacks=[budget, *kwargs.pop("callbacks", ())], **kwargs)
        self.remove_callback(PrinterCallback)  # what it prints is in the log
        self._student, self._budget = student, budget

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch."""
        loss = self._student.loss(model, inputs)
        return (loss, None) if return_outputs else loss

    def train_from(self, checkpoint: Path | None) -> None:
        """Trains on from a checkpoint, or takes it as it is where it has had all its time or steps."""
        state = None if checkpoint is None else TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state is not None and seconds_in(state.stateful_callbacks) >= self._budget.budget_s:
            self._load_from_checkpoint(str(checkpoint))
            self.state = state
        else:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measures the student on the texts that were kept from training."""
        self.model.eval()
        found = measure(
            map(self._prepare_inputs, self.get_eval_dataloader(eval_dataset)),
            lambda batch: self._student.logits(self.model_wrapped, batch),
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in _to_metrics(found).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """A learning rate that warms up, stays, and cools down towards the end of the time or of the steps.

        It follows the clock, so that more time later simply warms it up again.
        """
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda step: rate(step, max(self._budget.share, step / num_training_steps)),
            )
        return self.lr_scheduler


def rate(step: int, share: float) -> float:
    """The learning rate's factor.

    Args:
        step: Steps done.
        share: How much of the training is over, at most 1.

    ```python
    >>> [round(rate(step, share), 2) for step, share in ((0, 0.0), (24, 0.0), (99, 0.5), (999, 0.9), (999, 1.0))]
    [0.02, 0.5, 1.0, 0.5, 0.02]

    ```
    """
    warm = max((step + 1) / WARM_UP_STEPS, share / WARM_UP_SHARE)
    return max(LEAST_RATE, min(1.0, warm, (1.0 - share) / COOL_DOWN_SHARE))


class TimeBudget(TrainerCallback, ExportableState):
    """Counts the time of training over all runs, saves by it, and ends training when it is used up.

    Args:
        budget_s: Seconds of training in all.
        save_s: Seconds between checkpoints.
    """

    def __init__(self, budget_s: float, save_s: float) -> None:
        self.budget_s, self.save_s = budget_s, save_s
        self.seconds = 0.0
        self._last = self._last_save = 0.0

    @property
    def share(self) -> float:
        """How much of it is used up, at most 1."""
        return min(1.0, self.seconds / self.budget_s)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        args = {"budget_s": self.budget_s, "save_s": self.save_s}
        return {"args": args, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Goes on counting where the checkpoint stopped."""
        self.seconds = seconds_in(state.stateful_callbacks)
        self._last = self._last_save = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves, measures and stops when it is time."""
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now
        is_over = self.seconds >= self.budget_s or state.global_step >= state.max_steps
        if is_over:
            control.should_training_stop = True
        if is_over or now - self._last_save >= self.save_s:
            control.should_log = control.should_evaluate = control.should_save = True
            self._last_save = now


class Reporter(TrainerCallback):
    """Tells how training goes, and keeps it in the log."""

    def __init__(self, folder: WorkFolder, budget: TimeBudget, report: Callable[[str, int, int], None]) -> None:
        self._folder, self._budget, self._report = folder, budget, report
        self._loss = self._agreement = ""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Notes figures."""
        self._folder.note({"step": state.global_step, "seconds": round(self._budget.seconds, 1), **(logs or {})})
        if "loss" in logs:
            self._loss = f", loss {logs['loss']:.2f}"
        if "eval_agreement" in logs:
            self._agreement = f", agreement {logs['eval_agreement']:.3f}"

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Moves the progress on."""
        budget = self._budget
        self._report(f"training{self._loss}{self._agreement}", int(budget.seconds), max(1, int(budget.budget_s)))


def make_trainer(
    student: Student,
    train: Dataset,
    held_out: Dataset,
    settings: DistillSettings,
    folder: WorkFolder,
    budget: TimeBudget,
    report: Callable[[str, int, int], None],
) -> DistillTrainer:
    """A trainer with this project's settings."""
    has_accelerator = torch.accelerator.is_available()
    args = TrainingArguments(
        output_dir=str(folder.checkpoints),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        adam_beta2=0.98,
        bf16=settings.dtype == "bfloat16",
        fp16=settings.dtype == "float16" and has_accelerator,
        seed=settings.seed,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        remove_unused_columns=False,
        save_strategy="no",  # by the clock
        save_total_limit=2,
        logging_steps=LOG_STEPS,
        eval_on_start=last_checkpoint(folder.checkpoints) is None,
        report_to="none",
        dataloader_pin_memory=has_accelerator,
        use_cpu=not has_accelerator,
        disable_tqdm=True,
    )
    return DistillTrainer(
        student=student,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=Collator(student.teacher.config.hidden_size),
        budget=budget,
        callbacks=[Reporter(folder, budget, report)],
    )


def last_checkpoint(checkpoints: Path) -> Path | None:
    """The newest checkpoint that was written to its end; a killed run may leave one that was not."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2]))
    return next((path for path in found if _is_complete(path)), None)


def _is_complete(checkpoint: Path) -> bool:
    try:
        # What the trainer writes last.
        return bool(json.loads((checkpoint / TRAINER_STATE_NAME).read_text()))
    except (OSError, ValueError):
        return False


def seconds_in(stateful_callbacks: Mapping[str, Any]) -> float:
    """The time of training that a trainer's state tells of."""
    kept = stateful_callbacks.get(TimeBudget.__name__, {})
    return float(kept.get("attributes", {}).get("seconds", 0.0))


def _to_metrics(found: Sequence[Agreement]) -> dict[str, float]:
    first, *deeper = found
    metrics = {"kl": first.kl, "agreement": first.agreement, "acceptance": first.token_rule[1.0]}
    return metrics | {f"agreement_{depth}": each.agreement for depth, each in enumerate(deeper, start=2)}
