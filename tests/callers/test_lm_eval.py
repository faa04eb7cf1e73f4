"""The Language Model Evaluation Harness on an enabled model, with a task of its own: `make test-lm-eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from callers.enabled import assert_speculated
from tiny_models import make_noisy, make_target
from tiny_pair import byte_tokenizer
from transformers import PreTrainedModel

from hf_ssd import enable_ssd

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

QUESTIONS = ("What is two plus three?", "Name a colour.", "Which day comes after Monday?", "Say hello.")

TASK = """
task: tiny_questions
dataset_path: json
dataset_kwargs: {data_files: {test: "FILE"}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: SAMPLE, max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps({"question": text, "answer": "x"}) for text in QUESTIONS))
    (tmp_path / "tiny_questions.yaml").write_text(TASK.replace("FILE", str(data)).replace("SAMPLE", "false"))
    return tmp_path


def answers_of(model: PreTrainedModel, task_folder: Path, batch_size: int) -> tuple[list[Any], float]:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    harness = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=batch_size, device="cpu")
    results = lm_eval.simple_evaluate(
        model=harness,
        tasks=["tiny_questions"],
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    answers = [sample["resps"] for sample in results["samples"]["tiny_questions"]]
    return answers, results["results"]["tiny_questions"]["exact_match,none"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_it_finds_what_it_finds_without(task_folder: Path, batch_size: int) -> None:
    target, model = (make_target(vocab_size=258) for _ in range(2))
    enable_ssd(model, make_noisy(vocab_size=258), {"backend": "inline"})
    answers, score = answers_of(model, task_folder, batch_size)
    assert_speculated(model)
    assert (answers, score) == answers_of(target, task_folder, batch_size)
    assert len(answers) == len(QUESTIONS)
    assert all(answer for ((answer,),) in answers)
