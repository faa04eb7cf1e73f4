"""Training: transformers' `Trainer` with the loss of distillation, a budget of time, and checkpoints by the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, PrinterCallback, TrainerControl, TrainerState

from .folder import WorkFolder
from .losses import TokenSample, forward_kl
from .measuring import Agreement, measure
from .projection import Projection
from .settings import DistillSettings
from .teacher import Teacher, outputs_of_batch, pad_texts

if TYPE_CHECKING:
    from datasets import Dataset

WARM_UP_STEPS = 50
WARM_UP_SHARE = 0.05  # of the training, where that has fewer steps
COOL_DOWN_SHARE = 0.2
LEAST_RATE = 0.02  # of the learning rate, at the very end
LOG_STEPS = 20


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
        return batch


class DistillTrainer(Trainer):
    """Trains a student on the target's distributions at the positions to be learnt.

    Args:
        projection: From the student's states to logits.
        teacher_projection: From the target's.
        teacher: The target, for texts that do not bring its states along; may be left out where all do.
        sample: Draws the tokens that distributions are compared on; `None` compares them on all.
        budget: The time there is, by which the learning rate ends.
        **kwargs: As of `Trainer`.
    """

    control: TrainerControl
    lr_scheduler: LambdaLR | None

    def __init__(
        self,
        *,
        projection: Projection,
        teacher_projection: Projection,
        teacher: Teacher | None,
        sample: TokenSample | None,
        budget: TimeBudget,
        **kwargs: Any,
    ) -> None:
        super().__init__(callbacks=[budget, *kwargs.pop("callbacks", ())], **kwargs)
        self.remove_callback(PrinterCallback)  # what it prints is in the log
        self.projection = projection
        self.teacher_projection = teacher_projection
        self._teacher, self._sample, self._budget = teacher, sample, budget

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch."""
        outputs = outputs_of_batch(inputs, self._teacher)
        hidden = trained_hidden(model, inputs)
        tokens = log_weights = None
        if self._sample is not None:
            tokens, log_weights = self._sample.draw(inputs["input_ids"], outputs.top_tokens)
        student_logits = self.projection(hidden, tokens)
        with torch.no_grad():
            teacher_logits = self.teacher_projection(outputs.hidden, tokens).to(student_logits.device)
        loss = forward_kl(teacher_logits, student_logits, log_weights)
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
            lambda batch: trained_hidden(self.model_wrapped, batch),
            lambda batch: outputs_of_batch(batch, self._teacher),
            self.projection,
            self.teacher_projection,
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


def trained_hidden(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The states of a model in training at the positions of a batch, of shape `(num_positions, hidden_size)`.

    The model is called as accelerate has prepared it, which is as a whole; but for one position's logits only.
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    outputs = model(**inputs, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    hidden: torch.Tensor = outputs.hidden_states[-1][batch["positions"]]
    return hidden


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
    student: PreTrainedModel,
    train: Dataset,
    held_out: Dataset,
    settings: DistillSettings,
    folder: WorkFolder,
    budget: TimeBudget,
    report: Callable[[str, int, int], None],
    **parts: Any,
) -> DistillTrainer:
    """A trainer with this project's settings; `parts` are the others of [`DistillTrainer`]."""
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
        model=student,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=Collator(parts["teacher_hidden_size"]),
        budget=budget,
        callbacks=[Reporter(folder, budget, report)],
        **{name: part for name, part in parts.items() if name != "teacher_hidden_size"},
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


def _to_metrics(found: Agreement) -> dict[str, float]:
    return {"kl": found.kl, "agreement": found.agreement, "acceptance": found.token_rule[1.0]}
