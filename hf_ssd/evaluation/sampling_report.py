"""A check of sampling as a report in Markdown, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path

from ..bench.markdown import number, table
from .sampling_check import BIASED, SAMPLES_FILE, SamplingCheck

NOTES = """\
- **First token** and **opening** (three tokens) are the mean over prompts of the total variation between the two
  samplers' draws, which is far above 0 for finite samples of the same distribution too: **if equal** is what
  exchanging the labels gives on average (and its standard deviation, for the differences).
- **Likeliest** is how much more often than AR the sampler drew the target's likeliest token, per token, each side less
  what that token's probability says. **Score** is the difference in the share of texts with the right word.
- **p** is the chance of a value this large when the samplers' labels are exchanged within each prompt, **corrected**
  the same after correction for the number of tests (Holm). A sampler is told from AR if a corrected p-value is below
  the significance. **p, chi-square** is Pearson's, for comparison; it decides nothing.
- The tests, their number, the correction and the seed were fixed before anything was drawn.
"""


def write_check(result: SamplingCheck) -> str:
    """The report."""
    settings, machine = result.settings, result.environment
    rows = [
        [
            test.sampler,
            test.what,
            number(test.value, 4),
            number(test.if_equal, 4) + (f" ± {test.sd_if_equal:.4f}" if test.sd_if_equal is not None else ""),
            number(test.p_value, 4),
            number(test.corrected, 4),
            number(test.chi_square_p_value, 4),
        ]
        for test in result.tests
    ]
    scores = ", ".join(f"{name} {score:.3f}" for name, score in result.mean_scores.items())
    return "\n\n".join(
        [
            f"# Sampling: {result.pair['target']} with {result.pair['assistant']}, {result.dtype}",
            (
                f"{settings['num_prompts']} prompts, {settings['num_samples']} samples of {settings['max_new_tokens']} "
                f"tokens each, temperature {settings['temperature']:g}, seed {settings['seed']}; significance "
                f"{settings['significance']:g} over all {len(rows)} tests, {settings['num_permutations']} "
                f"permutations. torch {machine['torch']}, transformers {machine['transformers']}, "
                f"Python {machine['python']}, {machine['system']}."
            ),
            verdict(result),
            table(("", "test", "value", "if equal", "p", "corrected", "p, chi-square"), rows),
            f"Texts with the right word: {scores}.",
            "## How to read this",
            NOTES,
        ]
    )


def verdict(result: SamplingCheck) -> str:
    """What the check found, in words."""
    others = [name for name in result.told if name != BIASED]
    size = (
        f"the sampler that is biased on purpose (by {result.settings['bias']:g} in total variation per token, "
        f"{result.mean_bias:.4f} where the other tokens have less than that)"
    )
    caught = "is told" if BIASED in result.told else "is NOT told"
    rules = f"Told from AR: {', '.join(others)}" if others else "No rule is told from AR"
    return f"{rules}; {size} {caught} from it."


def write_check_files(result: SamplingCheck, folder: Path) -> tuple[str, ...]:
    """Writes `sampling.json` and `report.md` into a folder that exists.

    Raises:
        OSError: If one cannot be written.
    """
    (folder / "sampling.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(write_check(result), encoding="utf-8")
    return (SAMPLES_FILE, "sampling.json", "report.md")
