from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tiny_pair import byte_tokenizer

from hf_ssd.bench.encoding import encode
from hf_ssd.bench.prompts import Prompt
from hf_ssd.bench.source_texts import MODULES, read_source_texts
from hf_ssd.bench.suites import long_prompts, read_jsonl, read_suite, sample_evenly


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_every_form_of_row_gives_its_text_and_category(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mixed.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now in prose."]},
        {"question": "How many?", "answer": "#### 3"},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert f()"},
        "",
        {"prompt": "Hello"},
        {"text": "Some text", "category": "prose"},
    )
    assert read_jsonl(path) == (
        Prompt("writing", "Write a poem."),
        Prompt("mixed", "How many?"),
        Prompt("mixed", "def f():\n"),
        Prompt("mixed", "Hello"),
        Prompt("prose", "Some text"),
    )
    assert read_suite(str(path)) == read_jsonl(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "a"}', "{nonsense"], r"`suite` must hold one JSON object per line, but line 2 of .*\.jsonl"),
        ([{"prompt": "a"}, "", {"title": "b"}], r"one of \['turns', .*line 3 of .* has \['title'\]"),
        (['["a"]'], r"one of \['turns', .*line 1 of .* has list"),
        ([{"prompt": " "}], r"a text in `prompt`, but line 1 of .* has ' '"),
        ([{"turns": []}], r"a text in `turns`, but line 1 of .* has \[\]"),
        ([""], r"at least one prompt, but .*\.jsonl is empty"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, rows: list[object], message: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(ValueError, match=message):
        read_suite(str(path))


def test_an_unknown_suite_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"`suite` must be one of \['chat', .*'long'\].*'nothing'"):
        read_suite("nothing")


def test_a_built_in_kind_is_a_suite() -> None:
    assert {prompt.kind for prompt in read_suite("code")} == {"code"}


def test_a_folder_is_read_as_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "questions"
    folder.mkdir()
    write_lines(folder / "train.jsonl", {"question": "One?"})
    write_lines(folder / "test.jsonl", {"question": "Two?"}, {"question": "Three?"})
    assert read_suite(f"hub:{folder}") == (Prompt("questions", "Two?"), Prompt("questions", "Three?"))
    assert read_suite(f"hub:{folder}@train") == (Prompt("questions", "One?"),)
    with pytest.raises(ValueError, match=r"`suite` must name a split among \['test', 'train'\].*'dev'"):
        read_suite(f"hub:{folder}@dev")


def test_a_sample_spreads_over_the_categories() -> None:
    prompts = [Prompt(kind, f"{kind}{i}") for kind, count in (("a", 10), ("b", 1), ("c", 4)) for i in range(count)]
    sample = sample_evenly(prompts, 6)
    assert Counter(prompt.kind for prompt in sample) == {"a": 3, "b": 1, "c": 2}
    assert [prompt.text for prompt in sample] == ["a0", "b0", "c0", "a3", "c2", "a6"]
    assert sorted(p.text for p in sample_evenly(prompts, 15)) == sorted(p.text for p in prompts)


@pytest.mark.parametrize("count", [0, 16])
def test_a_sample_of_an_impossible_size_is_refused(count: int) -> None:
    prompts = [Prompt("a", str(i)) for i in range(15)]
    with pytest.raises(ValueError, match=rf"`sample` must be between 1 and 15.*{count}"):
        sample_evenly(prompts, count)


@pytest.mark.parametrize("template", [True, False])
def test_long_prompts_have_exactly_the_tokens_asked_for(template: bool) -> None:
    tokenizer = byte_tokenizer() if template else byte_tokenizer(chat_template=None)
    prompts = long_prompts((256, 1000))
    assert len(prompts) == 2 * len(MODULES)
    assert [prompt.kind for prompt in prompts[:2]] == ["256 tokens", "1000 tokens"]
    for prompt in prompts[:4]:
        inputs = encode(tokenizer, prompt)
        assert inputs["input_ids"].shape == (1, prompt.num_tokens)
        assert inputs["attention_mask"].shape == (1, prompt.num_tokens)
    text = tokenizer.decode(encode(tokenizer, prompts[1])["input_ids"][0])
    start, end = ("<user>", "<assistant>") if template else ("", "")
    assert text.startswith(start + read_source_texts()[0][:100])
    assert text.endswith(prompts[1].question + end)


def test_lengths_out_of_reach_are_refused() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match=r"`prompt_tokens` must be above \d+, which .*but got 20"):
        encode(tokenizer, Prompt("x", "some text", "A question?", 20))
    with pytest.raises(ValueError, match=r"`prompt_tokens` must be at most \d+, .*but got 500"):
        encode(tokenizer, Prompt("x", "some text", "A question?", 500))
