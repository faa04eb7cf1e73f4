"""How well an assistant knows its target, on texts that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..noise import GumbelNoise
from .projection import Projection
from .teacher import TeacherOutputs

Batch = Mapping[str, torch.Tensor]

CHUNK = 128  # positions whose distributions are in memory at once
SEED = 0  # of the noise: which one does not matter, as long as two measurements share it


@dataclass(frozen=True)
class Agreement:
    """Figures over all positions that were measured.

    Args:
        num_tokens: How many these are.
        kl: Mean forward divergence, in nats.
        agreement: Share of the positions at which both find the same token likeliest: acceptance when greedy.
        token_rule: By temperature, the chance that the token rule accepts a draft token.
        coupled_rule: The same of the coupled rule.
    """

    num_tokens: int
    kl: float
    agreement: float
    token_rule: Mapping[float, float]
    coupled_rule: Mapping[float, float]


@torch.no_grad()
def measure(
    batches: Iterable[Batch],
    student_hidden: Callable[[Batch], torch.Tensor],
    teacher_outputs: Callable[[Batch], TeacherOutputs],
    student_projection: Projection,
    teacher_projection: Projection,
    *,
    temperatures: Sequence[float] = (1.0,),
    coupled: bool = False,
) -> Agreement:
    """Compares the two distributions at every position to be learnt.

    Args:
        batches: Texts as [`pad_texts`] makes them.
        student_hidden: The student's states at the positions of a batch.
        teacher_outputs: The target's.
        student_projection: From the student's states to logits.
        teacher_projection: From the target's.
        temperatures: Above 0; greedy is always measured.
        coupled: Whether to try the coupled rule too, which draws noise for every token.
    """
    sums: dict[str, float] = {}
    noise, num_tokens = GumbelNoise(SEED), 0
    for batch in batches:
        pairs = zip(student_hidden(batch).split(CHUNK), teacher_outputs(batch).hidden.split(CHUNK), strict=True)
        for student, teacher in pairs:
            student_logits, teacher_logits = student_projection(student), teacher_projection(teacher)
            found = _compare(student_logits, teacher_logits.to(student_logits.device), temperatures)
            if coupled:
                at = range(num_tokens, num_tokens + len(student))
                for temperature in temperatures:
                    picked = [
                        noise.add_to(logits / temperature, at).argmax(dim=1)
                        for logits in (student_logits, teacher_logits.to(student_logits.device))
                    ]
                    found[f"coupled {temperature}"] = (picked[0] == picked[1]).sum()
            num_tokens += len(student)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    if not num_tokens:
        raise ValueError("`batches` must hold at least one position to be learnt, but hold none.")
    means = {name: value / num_tokens for name, value in sums.items()}
    return Agreement(
        num_tokens=num_tokens,
        kl=means["kl"],
        agreement=means["agreement"],
        token_rule={temperature: means[f"token {temperature}"] for temperature in temperatures},
        coupled_rule={temperature: means[f"coupled {temperature}"] for temperature in temperatures} if coupled else {},
    )


def _compare(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperatures: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Sums over the positions of a chunk."""
    student_log_probs, teacher_log_probs = student_logits.log_softmax(dim=1), teacher_logits.log_softmax(dim=1)
    found = {
        "kl": (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(),
        "agreement": (student_logits.argmax(dim=1) == teacher_logits.argmax(dim=1)).sum(),
    }
    for temperature in temperatures:
        student_probs, teacher_probs = (
            (logits / temperature).softmax(dim=1) for logits in (student_logits, teacher_logits)
        )
        # A draft token x ~ q is kept with probability min(1, p(x) / q(x)): over all x that is the overlap of p and q.
        found[f"token {temperature}"] = torch.minimum(student_probs, teacher_probs).sum()
    return found
