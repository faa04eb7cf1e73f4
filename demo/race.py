"""One prompt, answered by each arm in turn: what is run, and what is known of it at any moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers.utils import logging

from hf_ssd import SSDConfig, SSDStats

from .models import Models, padding, warm_up
from .tokens import StopWhenAsked, Tape, TextPieces, Token, read_tape

logger = logging.get_logger(__name__)

ARMS: Mapping[str, Literal["ar", "sd", "ssd"]] = {"AR": "ar", "SD": "sd", "SSD": "ssd"}
SAME_CORES, ALL_CORES = "target's cores", "all cores"

Message = Mapping[str, str]


@dataclass(frozen=True)
class RaceSettings:
    """What the controls say.

    Args:
        arms: Names from `ARMS`, in the order in which they run.
        ssd_config: Settings of SD and SSD, and the seed and rule of all.
        sampling: Arguments of `generate()`, its processors' among them; without a temperature it decodes greedily.
        max_new_tokens: Most tokens of an answer.
        dtype: Name of the type of the weights.
        ar_threads: `SAME_CORES` gives AR the CPU threads of the target, `ALL_CORES` those of the assistant too.
    """

    arms: tuple[str, ...] = tuple(ARMS)
    ssd_config: SSDConfig = field(default_factory=SSDConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 96
    dtype: str = "bfloat16"
    ar_threads: str = SAME_CORES

    @property
    def do_sample(self) -> bool:
        return "temperature" in self.sampling

    @property
    def promises_identity(self) -> bool:
        """Whether all arms must give the same text, but for rounding."""
        return not self.do_sample or self.ssd_config.rule == "coupled"


@dataclass
class Run:
    """One arm of a race.

    Args:
        name: One of `ARMS`.
        tape: Its tokens so far; `None` before it begins.
        text: What they add to the text.
        stats: Its figures, once it is over.
        probabilities: Of its tokens, once it is over.
        scores: What each token was chosen from, of shape `(num_tokens, vocab_size)`; dropped when the race is over.
    """

    name: str
    tape: Tape | None = None
    text: TextPieces | None = None
    stats: SSDStats | None = None
    probabilities: tuple[float, ...] = ()
    scores: torch.Tensor | None = None

    @property
    def is_over(self) -> bool:
        return self.stats is not None

    @property
    def num_tokens(self) -> int:
        return 0 if self.tape is None else len(self.tape.ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return () if self.tape is None else tuple(self.tape.ids)


@dataclass(frozen=True)
class Difference:
    """Where an arm's text leaves that of the first arm.

    Args:
        arm: Name of the arm.
        reference: Name of the first arm.
        position: How many tokens are the same before.
        probability: What the target gave the first arm's token there.
        other_probability: What it gave the arm's token in the same place.
    """

    arm: str
    reference: str
    position: int
    probability: float
    other_probability: float


class Race:
    """Runs the arms one after the other. All use the same target, so their devices always overlap.

    Args:
        models: Whose target runs.
        settings: What the controls say.
        messages: The conversation, the new prompt last.
        stop: Ends the race when it is set.
    """

    def __init__(self, models: Models, settings: RaceSettings, messages: Sequence[Message], stop: threading.Event):
        self.models = models
        self.settings = settings
        self.messages = list(messages)
        self.stop = stop
        self.runs = [Run(name) for name in settings.arms]
        self.differences: tuple[Difference, ...] = ()
        self.status = "Waiting for the models ..."
        self.error: str | None = None
        self.is_over = False
        self.tokenizer: Any = None

    @property
    def is_stopped(self) -> bool:
        return self.stop.is_set()

    def run(self) -> None:
        """Everything, in the thread that computes. What is raised is kept in `error`, for the page."""
        try:
            self._run()
        except (ValueError, TypeError) as error:  # what the person asked for; the message says what to do
            self.error = str(error)
        except Exception as error:
            logger.warning("A race ended early.", exc_info=True)
            self.error = f"{type(error).__name__}: {error}"
        finally:
            for run in self.runs:
                run.scores = None
            self.is_over = True

    def _run(self) -> None:
        target, _, self.tokenizer = pair = self.models.pair(self.settings.dtype)
        inputs = encode(self.tokenizer, self.messages, self.models.options.max_prompt_tokens).to(target.device)
        self.status = "Warming up ..."
        # Also what says how many threads the target gets beside an assistant.
        threads = warm_up(pair, replace(self.settings.ssd_config, mode="ssd", trace=False)).target_threads
        for run in self.runs:
            if self.is_stopped:
                break
            self.status = f"{run.name} is generating ..."
            with cpu_threads(threads if run.name == "AR" and self.settings.ar_threads == SAME_CORES else None):
                self._generate(target, run, inputs)
        self.status = "Comparing the texts ..."
        self.differences = tuple(self._differences())
        self.status = "Stopped." if self.is_stopped else "Done."

    def _generate(self, target: Any, run: Run, inputs: Any) -> None:
        settings = self.settings
        # The clock starts as late as it can, before anything that `generate()` does.
        run.tape = tape = Tape()
        output = target.generate(
            **inputs,
            **settings.sampling,
            do_sample=settings.do_sample,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=padding(self.tokenizer),
            streamer=tape,
            stopping_criteria=[StopWhenAsked(self.stop)],
            return_dict_in_generate=True,
            output_scores=True,
            ssd_config=replace(settings.ssd_config, mode=ARMS[run.name], trace=True),
        )
        ids = torch.tensor(tape.ids, device=target.device)
        run.scores = torch.cat(output.scores) if output.scores else torch.zeros(0, 1)
        run.probabilities = (
            tuple(run.scores.float().softmax(-1).gather(1, ids[:, None])[:, 0].tolist()) if ids.numel() else ()
        )
        run.stats = target.ssd_stats

    def _differences(self) -> Iterator[Difference]:
        """Where texts differ, as far as both go."""
        over = [run for run in self.runs if run.is_over]
        for run in over[1:]:
            position = first_difference(over[0].ids, run.ids, is_cut=self.is_stopped)
            if position is not None:
                yield self._difference(over[0], run, position)

    def _difference(self, reference: Run, run: Run, position: int) -> Difference:
        probabilities = [0.0, 0.0]
        if reference.scores is not None and position < min(reference.num_tokens, run.num_tokens):
            chances = reference.scores[position].float().softmax(-1)
            probabilities = [float(chances[each.ids[position]]) for each in (reference, run)]
        return Difference(run.name, reference.name, position, *probabilities)

    def tokens(self, run: Run) -> list[Token]:
        """The tokens of an arm so far."""
        if run.tape is None:
            return []
        if run.text is None:
            run.text = TextPieces(self.tokenizer)
        return read_tape(
            run.tape,
            run.text,
            has_rounds=run.name != "AR",
            is_over=run.is_over,
            probabilities=run.probabilities,
        )

    def answer(self) -> str:
        """The text for the conversation: that of the last arm that has one."""
        for run in reversed(self.runs):
            if run.ids:
                return str(self.tokenizer.decode(run.ids, skip_special_tokens=True))
        return ""


def first_difference(left: Sequence[int], right: Sequence[int], *, is_cut: bool = False) -> int | None:
    """How many tokens are the same before two texts differ; `None` where they do not.

    Args:
        left: Ids of one text.
        right: Ids of the other.
        is_cut: Whether either may have been cut short, so that lengths say nothing.
    """
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return None if is_cut or len(left) == len(right) else min(len(left), len(right))


def encode(tokenizer: Any, messages: Sequence[Message], max_tokens: int) -> Any:
    """The conversation as `generate()` takes it, in the chat template where there is one.

    Raises:
        ValueError: If the prompt is empty or too long.
    """
    text = messages[-1]["content"]
    if not text.strip():
        raise ValueError("The prompt must hold some text, but is empty. Type one, or take an example.")
    check_characters(messages, max_tokens)
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer("\n\n".join(message["content"] for message in messages), return_tensors="pt")
    num_tokens = inputs["input_ids"].shape[1]
    if num_tokens > max_tokens:
        raise ValueError(
            f"The prompt must have at most {max_tokens:,} tokens, the conversation before it included, but has "
            f"{num_tokens:,}. Shorten it, or start a new conversation."
        )
    inputs.pop("token_type_ids", None)
    return inputs


def check_characters(messages: Sequence[Message], max_tokens: int) -> None:
    """Refuses what is too long whatever its tokens are, before it is tokenized.

    Raises:
        ValueError: If it is.
    """
    most = 16 * max_tokens  # more characters than a token holds on average in any text
    num_characters = sum(len(message["content"]) for message in messages)
    if num_characters > most:
        raise ValueError(
            f"The prompt must have at most {max_tokens:,} tokens, which {most:,} characters are certainly more than, "
            f"but has {num_characters:,} characters with the conversation before it. Shorten it, or start a new "
            "conversation."
        )


@contextmanager
def cpu_threads(num_threads: int | None) -> Iterator[None]:
    """Torch's CPU threads for what runs inside; `None` leaves them."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
