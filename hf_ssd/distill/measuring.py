"""How well an assistant knows its target, on texts that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..noise import GumbelNoise
from .projection import Projection

Batch = Mapping[str, torch.Tensor]

# A student's and its teacher's logits at the same positions, over the target's vocabulary.
LogitPairs = tuple[torch.Tensor, torch.Tensor]

CHUNK = 128  # positions whose distributions are in memory at once
SEED = 0  # of the noise: which one does not matter, as long as two measurements share it


@dataclass(frozen=True)
class Agreement:
    """Figures over all positions that were measured.

    Args:
        num_tokens: How many these are.
        kl: Mean forward divergence, in nats, over the tokens that the student may say.
        agreement: Share of the positions at which both find the same token likeliest: acceptance when greedy.
        token_rule: By temperature, the chance that the token rule accepts a draft token.
        coupled_rule: The same of the coupled rule.
    """

    num_tokens: int
    kl: float
    agreement: float
    token_rule: Mapping[float, float]
    coupled_rule: Mapping[float, float]


class Meter:
    """Compares two distributions at one position after another.

    Args:
        temperatures: Above 0; greedy is always measured.
        coupled: Whether to try the coupled rule too, which draws noise for every token.
    """

    def __init__(self, temperatures: Sequence[float] = (1.0,), *, coupled: bool = False) -> None:
        self._temperatures, self._coupled = temperatures, coupled
        self._sums: dict[str, float] = {}
        self._noise, self._num_tokens = GumbelNoise(SEED), 0

    def add(self, student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> None:
        """Counts positions in, whose logits are of shape `(num_positions, vocab_size)`."""
        teacher_logits = teacher_logits.to(student_logits.device)
        found = _compare(student_logits, teacher_logits, self._temperatures)
        if self._coupled:
            at = range(self._num_tokens, self._num_tokens + len(student_logits))
            for temperature in self._temperatures:
                picked = [
                    self._noise.add_to(logits / temperature, at).argmax(dim=1)
                    for logits in (student_logits, teacher_logits)
                ]
                found[f"coupled {temperature}"] = (picked[0] == picked[1]).sum()
        self._num_tokens += len(student_logits)
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    @property
    def num_tokens(self) -> int:
        """How many positions were counted in."""
        return self._num_tokens

    def result(self) -> Agreement:
        """Means over all positions so far.

        Raises:
            ValueError: If there were none.
        """
        if not self._num_tokens:
            raise ValueError("`batches` must hold at least one position to be learnt, but hold none.")
        means = {name: value / self._num_tokens for name, value in self._sums.items()}
        coupled = self._temperatures if self._coupled else ()
        return Agreement(
            num_tokens=self._num_tokens,
            kl=means["kl"],
            agreement=means["agreement"],
            token_rule={temperature: means[f"token {temperature}"] for temperature in self._temperatures},
            coupled_rule={temperature: means[f"coupled {temperature}"] for temperature in coupled},
        )


@torch.no_grad()
def measure(
    batches: Iterable[Batch],
    logits: Callable[[Batch], Sequence[Iterable[LogitPairs]]],
    *,
    temperatures: Sequence[float] = (1.0,),
    coupled: bool = False,
) -> tuple[Agreement, ...]:
    """Compares a student with its teacher at every position to be learnt.

    Args:
        batches: Texts as [`pad_texts`] makes them.
        logits: Both logits at the positions of a batch, for the next token and for those drafted after it.
        temperatures: Above 0; greedy is always measured.
        coupled: Whether to try the coupled rule too, for the next token.

    Returns:
        An [`Agreement`] for each depth of drafts that some text has room for.

    Raises:
        ValueError: If there is no such position.
    """
    meters: list[Meter] = []
    for batch in batches:
        for depth, pairs in enumerate(logits(batch)):
            if depth == len(meters):
                meters.append(Meter(temperatures, coupled=coupled and not depth))
            for student_logits, teacher_logits in pairs:
                meters[depth].add(student_logits, teacher_logits)
    measured = [meter for meter in meters if meter.num_tokens] or [Meter()]  # which says what is missing
    return tuple(meter.result() for meter in measured)


def paired(
    student_projection: Projection, student: torch.Tensor, teacher_projection: Projection, teacher: torch.Tensor
) -> Iterator[LogitPairs]:
    """Logits from the states of both, some positions at a time."""
    for own, their in zip(student.split(CHUNK), teacher.split(CHUNK), strict=True):
        yield student_projection(own), teacher_projection(their)


def _compare(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperatures: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Sums over the positions of a chunk."""
    unknown = student_logits.isinf()
    student_log_probs = student_logits.log_softmax(dim=1)
    teacher_log_probs = teacher_logits.masked_fill(unknown, float("-inf")).log_softmax(dim=1)
    differences = (teacher_log_probs - student_log_probs).masked_fill(unknown, 0.0)
    found = {
        "kl": (teacher_log_probs.exp() * differences).sum(),
        "agreement": (student_logits.argmax(dim=1) == teacher_logits.argmax(dim=1)).sum(),
    }
    for temperature in temperatures:
        student_probs, teacher_probs = (
            (logits / temperature).softmax(dim=1) for logits in (student_logits, teacher_logits)
        )
        # A draft token x ~ q is kept with probability min(1, p(x) / q(x)): over all x that is the overlap of p and q.
        found[f"token {temperature}"] = torch.minimum(student_probs, teacher_probs).sum()
    return found
