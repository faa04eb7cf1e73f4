from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_ssd.evaluation.settings import EvaluationSettings
from hf_ssd.evaluation.tasks import TASKS, Item, read_items
from hf_ssd.evaluation.tasks.humaneval import program_of
from hf_ssd.evaluation.tasks.maths import final_number
from hf_ssd.evaluation.tasks.rouge import rouge_l

CODE = 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """ Sum of the numbers. """\n'
TEST = "def check(candidate):\n    assert candidate([1, 2, 3]) == 6\n"


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("It costs $1,234.50 in all.", "1234.5"),
        ("first 5, then -12.", "-12"),
        ("#### 18 eggs at 2", "18"),
        ("#### $70,000.00", "70000"),
        ("the sum is 0.00", "0"),
        ("100", "100"),
        ("5 apples. ####", "5"),
        ("no number", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_gsm8k_is_exact_match_on_the_number(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "maths.jsonl", {"question": "How much?", "answer": "2 * 35,000\n#### 70,000"})
    (item,) = read_items(TASKS["gsm8k"], str(path))
    assert item.prompt.startswith("How much?")
    assert TASKS["gsm8k"].score("So it is #### $70,000.", item).value == 1
    assert TASKS["gsm8k"].score("So it is 7000.", item).value == 0
    assert TASKS["gsm8k"].score("I do not know.", item).note == "None for 70000"


@pytest.fixture
def function() -> Item:
    return Item("humaneval", "0", "", {"code": CODE, "test": TEST, "entry_point": "total"})


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (f"Here it is:\n```python\n{CODE}    return sum(numbers)\n```\nDone.", 1),
        ("```\n    return sum(numbers)\n```", 1),  # goes on from the docstring
        ("    return sum(numbers)", 1),
        ("```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)", 1),  # cut off; import is kept
        ("```python\ndef total(numbers):\n    return 5\n```", 0),
        ("I cannot do that.", 0),
        ("```python\nimport sys; sys.exit(0)\n```", 0),
    ],
)
def test_humaneval_runs_the_tests_in_the_sandbox(function: Item, answer: str, value: float) -> None:
    assert TASKS["humaneval"].score(answer, function).value == value


def test_what_went_wrong_is_noted(function: Item) -> None:
    assert program_of("```python\nx = 1\n```", function).endswith('""" Sum of the numbers. """\n\nx = 1\n\n')
    assert "AssertionError" in TASKS["humaneval"].score("    return 0", function).note


def test_rouge_is_the_longest_common_subsequence() -> None:
    # 3 of 4 words in order, in texts of 4 and 6 words: precision 3/4, recall 3/6.
    assert rouge_l("one two four five", "one two three four six seven") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l("the same", "The same.") == 1


def test_summaries_and_copies_are_read_from_several_forms(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "mixed.jsonl",
        {"question_id": 7, "category": "summarization", "turns": ["Summarize: long"], "reference": ["short"]},
        {"question_id": 8, "category": "writing", "turns": ["Write."]},
        {"article": "An article.", "highlights": "Its points."},
    )
    items = read_items(TASKS["summarisation"], str(path))
    assert [(item.name, item.prompt, item.reference["text"]) for item in items] == [
        ("7", "Summarize: long", "short"),
        ("2", "Summarize: An article.", "Its points."),
    ]
    copies = read_items(TASKS["copying"], str(path), limit=2)
    assert [item.reference["text"] for item in copies] == ["Summarize: long", "Write."]
    assert TASKS["copying"].score("Write.", copies[1]).value == 1


def test_what_is_no_item_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "bad.jsonl", {"question": "How many?"})
    with pytest.raises(ValueError, match=r"a text in `answer` in every row, but line 1 of .* has None"):
        read_items(TASKS["gsm8k"], str(path))
    with pytest.raises(ValueError, match=r"must hold items of 'summarisation', but .*bad.jsonl has none"):
        read_items(TASKS["summarisation"], str(path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suites": ("chess",)}, r"`suite` must be one of \['gsm8k', .*but got 'chess'"),
        ({"suites": ("gsm8k=missing.jsonl",)}, r"JSONL file or hub:NAME, but 'missing.jsonl' is no file"),
        ({"arms": ("ssd",)}, r"`arms` must hold 'ar', .*but got \['ssd'\]"),
        ({"limits": (0,)}, "`limits` must be at least 1, but got 0"),
        ({"limits": (1, 2, 3)}, r"one for each of the 2 suites, but got \[1, 2, 3\]"),
        ({"seeds": 2}, "`seeds` must be 1 when decoding greedily, .*but got 2"),
        ({"variants": {"x": {"speed": 3}}}, r"`variant` must set fields of SSDConfig .*'x' sets \['speed'\]"),
    ],
)
def test_settings_are_checked_before_a_model_is_read(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**settings)
