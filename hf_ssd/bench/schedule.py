"""The order of a measurement: every arm warmed up, then all arms taking turns prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .arms import Arm, Call, Inputs, Runner

# What comes next, the steps done and the steps in all (0: not known yet).
Progress = Callable[[str, int, int], None]

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Step:
    """One call of the schedule. `repeat` is `None` for a warm-up."""

    arm: Arm
    prompt: int
    repeat: int | None = None


def schedule(arms: Sequence[Arm], num_prompts: int, repeats: int) -> tuple[Step, ...]:
    """All calls in order: a warm-up of every arm, then prompt by prompt every arm in turn.

    The turns start with another arm each time and run backwards every second time: no arm always follows the same one.
    """
    steps = [Step(arm, 0) for arm in arms]
    for repeat in range(repeats):
        for prompt in range(num_prompts):
            turn = repeat * num_prompts + prompt
            direction = -1 if turn % 2 else 1
            order = [arms[(turn + direction * i) % len(arms)] for i in range(len(arms))]
            steps += [Step(arm, prompt, repeat) for arm in order]
    return tuple(steps)


def run_schedule(
    runner: Runner,
    arms: Sequence[Arm],
    inputs: Sequence[Inputs],
    *,
    repeats: int,
    max_new_tokens: int,
    seed: int,
    report: Progress,
) -> dict[Arm, dict[tuple[int, int], Call]]:
    """Runs all calls of a schedule.

    Args:
        runner: Runs one call.
        arms: The arms, variants included.
        inputs: The tokenized prompts.
        repeats: How often everything is run.
        max_new_tokens: Most tokens per text.
        seed: Seed of the first text's draws.
        report: Told before each call.

    Returns:
        For each arm its calls by (repeat, prompt index).
    """
    calls: dict[Arm, dict[tuple[int, int], Call]] = {arm: {} for arm in arms}
    steps = schedule(arms, len(inputs), repeats)
    for done, step in enumerate(steps):
        if step.repeat is None:
            report(f"warming up {step.arm.label}", done, len(steps))
            runner.run(step.arm, inputs[step.prompt], min(WARM_UP_TOKENS, max_new_tokens), seed)
            continue
        report(f"{step.arm.label}, prompt {step.prompt + 1} of {len(inputs)}", done, len(steps))
        # The same seed for every arm, another one for every text.
        text_seed = seed + step.repeat * len(inputs) + step.prompt
        calls[step.arm][step.repeat, step.prompt] = runner.run(step.arm, inputs[step.prompt], max_new_tokens, text_seed)
    return calls
