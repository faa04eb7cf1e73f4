from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from tiny_models import make_target, tiny_llama, tiny_tokenizer

from hf_ssd.distill import teacher as teacher_module
from hf_ssd.distill.measuring import measure
from hf_ssd.distill.model_kind import ModelStudent
from hf_ssd.distill.projection import Projection
from hf_ssd.distill.student import make_student
from hf_ssd.distill.teacher import NUM_TOP, Collator, Teacher, add_outputs, pad_texts
from hf_ssd.distill.texts import document_texts, frequent_tokens, num_positions, split_held_out

FEATURES = Features({"input_ids": List(Value("int64")), "num_prompt_tokens": Value("int64")})


def texts_of(lengths: list[int]) -> Dataset:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in lengths]
    starts = [1 + i % (length - 1) for i, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": rows, "num_prompt_tokens": starts}, features=FEATURES)


class TestTeacher:
    def test_its_states_are_those_of_each_text_alone(self) -> None:
        target = make_target().requires_grad_(False)
        teacher = Teacher(target, Projection(target))
        texts = texts_of([7, 30, 12, 2])
        outputs = teacher.outputs_of(list(zip(texts["input_ids"], texts["num_prompt_tokens"], strict=True)))
        for row, found in zip(texts, outputs, strict=True):
            logits = target(torch.tensor([row["input_ids"]])).logits[0, row["num_prompt_tokens"] - 1 : -1]
            torch.testing.assert_close(teacher.projection(found.hidden), logits, rtol=1e-4, atol=1e-4)
            assert torch.equal(found.top_tokens, logits.topk(NUM_TOP).indices)

    def test_positions_are_those_before_what_is_learnt(self) -> None:
        batch = pad_texts([([4, 5, 6, 7], 2), ([8, 9], 1)])
        assert batch["positions"].tolist() == [[False, True, True, False], [True, False, False, False]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


class TestCache:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many texts the target was asked about, each time."""
        counts: list[int] = []
        original = Teacher.outputs_of

        def counting(self, texts):
            counts.append(len(texts))
            return original(self, texts)

        monkeypatch.setattr(Teacher, "outputs_of", counting)
        monkeypatch.setattr(teacher_module, "SHARD_TEXTS", 3)
        return counts

    def test_it_holds_what_the_target_would_say(self, asked, tmp_path: Path) -> None:
        target = make_target().requires_grad_(False)
        teacher, texts = Teacher(target, Projection(target)), texts_of([9, 14, 5, 8])
        kept = add_outputs(texts, teacher, tmp_path, "some", lambda done, total: None).with_format("numpy")
        batch = Collator(hidden_size=32)([kept[i] for i in range(4)])
        live = teacher(batch["input_ids"], batch["attention_mask"], batch["positions"])
        found = teacher.outputs(batch)
        torch.testing.assert_close(found.hidden, live.hidden, rtol=1e-3, atol=1e-3)  # kept in 16 bits
        assert torch.equal(found.top_tokens, live.top_tokens)

    def test_no_shard_is_made_twice(self, asked, tmp_path: Path) -> None:
        target = make_target().requires_grad_(False)
        teacher = Teacher(target, Projection(target))

        def add(lengths: list[int]) -> Dataset:
            texts = Dataset.from_dict(
                {"input_ids": [list(range(1, length)) for length in lengths], "num_prompt_tokens": [1] * len(lengths)},
                features=FEATURES,
            )
            return add_outputs(texts, teacher, tmp_path, "some", lambda done, total: None)

        first = add([9, 14, 5, 8])
        assert asked == [3, 1]
        second = add([9, 14, 5, 8])
        assert asked == [3, 1]
        assert first[3]["teacher_hidden"] == second[3]["teacher_hidden"]
        # More texts: the full shard stays, the other one is made anew and its old file goes.
        assert len(add([9, 14, 5, 8, 20])) == 5
        assert asked == [3, 1, 2]
        assert sorted(path.name for path in tmp_path.glob("*.arrow")) == [
            "teacher-some-0-3.arrow", "teacher-some-3-5.arrow",
        ]  # fmt: skip


class TestTexts:
    def test_documents_are_cut_and_learnt_from_the_second_token_on(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(2, 23)))
        texts = document_texts([tmp_path / "a.txt"], tiny_tokenizer(), 8, tmp_path)
        assert [len(ids) for ids in texts["input_ids"]] == [8, 8, 5]
        assert set(texts["num_prompt_tokens"]) == {1}
        assert num_positions(texts) == 7 + 7 + 4

    def test_held_out_texts_stay_held_out(self) -> None:
        lengths = [3 + i % 5 for i in range(100)]
        whole, documents = texts_of(lengths), texts_of([9, 8])
        _, held_out = split_held_out([whole.select(range(50)), documents])
        train, more_held_out = split_held_out([whole, documents])
        assert held_out["input_ids"] == [*(whole[i]["input_ids"] for i in (0, 40)), documents[0]["input_ids"]]
        assert more_held_out["input_ids"] == [
            *(whole[i]["input_ids"] for i in (0, 40, 80)), documents[0]["input_ids"],
        ]  # fmt: skip
        assert len(train) == 97 + 1
        assert not {tuple(ids) for ids in train["input_ids"]} & {tuple(ids) for ids in more_held_out["input_ids"]}
        with pytest.raises(ValueError, match=r"`data` must give at least 2 texts, but gave 1"):
            split_held_out([texts_of([5])])

    def test_frequent_tokens_are_counted_after_the_prompts(self) -> None:
        rows = {"input_ids": [[9, 9, 9, 5, 6], [9, 7, 6, 6]], "num_prompt_tokens": [3, 1]}
        assert frequent_tokens(Dataset.from_dict(rows, features=FEATURES), 2) == [6, 5]


class TestMeasuring:
    def test_the_target_agrees_with_itself(self) -> None:
        assert self.of(make_student(make_target(), layers=2), coupled=True).agreement == 1.0

    def test_figures_are_those_of_a_loop_over_positions(self) -> None:
        target, student = make_target(), tiny_llama(noise=0.1)
        found = self.of(student, temperatures=(0.5,))
        same, overlap, divergence, count = 0, 0.0, 0.0, 0
        for row in texts_of([12, 7]):
            ids, start = torch.tensor([row["input_ids"]]), row["num_prompt_tokens"]
            for position in range(start - 1, ids.shape[1] - 1):
                p, q = (model(ids[:, : position + 1]).logits[0, -1].detach().double() for model in (target, student))
                same += int(p.argmax() == q.argmax())
                divergence += float((p.softmax(0) * (p.log_softmax(0) - q.log_softmax(0))).sum())
                # What the token rule does, token by token.
                p, q = (p / 0.5).softmax(0).numpy(), (q / 0.5).softmax(0).numpy()
                overlap += float((q * np.minimum(1, p / q)).sum())
                count += 1
        assert found.num_tokens == count
        assert found.agreement == pytest.approx(same / count)
        assert found.token_rule[0.5] == pytest.approx(overlap / count, abs=1e-4)
        assert found.kl == pytest.approx(divergence / count, rel=1e-3)

    def of(self, student, **kwargs):
        target = make_target()
        teacher = Teacher(target, Projection(target))
        batch = pad_texts([(row["input_ids"], row["num_prompt_tokens"]) for row in texts_of([12, 7])])
        learner = ModelStudent(student.eval(), teacher, torch.float32, None)
        (found,) = measure([batch], lambda batch: learner.logits(student, batch), **kwargs)
        return found
