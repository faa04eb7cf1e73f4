from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chi_square import p_value
from tiny_models import make_target, padded_batch, prompt, tiny_tokenizer
from tiny_pair import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from hf_ssd.distill import writing
from hf_ssd.distill.chat import OPENINGS, ChatFormat
from hf_ssd.distill.row_sampling import MostRowsEnded, RowSampler
from hf_ssd.distill.settings import SELF, DistillSettings
from hf_ssd.distill.sources import read_sources
from hf_ssd.distill.writing import Text, Writer, digest, num_written, repair, up_to_end, write_texts


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_USER_TOKENS", 16)


@pytest.fixture(scope="module")
def writer(target_folder: Path, tmp_path_factory) -> Writer:
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    settings = DistillSettings(
        out=tmp_path_factory.mktemp("out"), max_length=384, max_new_tokens=24, writing_batch_size=4
    )
    return Writer(target, AutoTokenizer.from_pretrained(target_folder), settings)


class TestRowSampler:
    def test_rows_with_a_temperature_are_drawn_from_their_softmax(self) -> None:
        logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 2
        num_rows, temperature = 4000, 0.7
        sampler = RowSampler([temperature] * num_rows, torch.Generator().manual_seed(1))
        drawn = sampler(torch.zeros(num_rows, 1, dtype=torch.long), logits.expand(num_rows, -1)).argmax(dim=1)
        assert p_value(drawn.bincount(minlength=12), (logits[0] / temperature).softmax(0)) > 1e-3

    def test_greedy_rows_are_left_alone_and_a_batch_holds_both(self) -> None:
        target = make_target()
        inputs = padded_batch([prompt(6), prompt(4), prompt(6, seed=1)])
        greedy = target.generate(**inputs, max_new_tokens=12, do_sample=False)
        processors = LogitsProcessorList([RowSampler([0.0, 3.0, 0.0], torch.Generator().manual_seed(0))])
        mixed = target.generate(**inputs, max_new_tokens=12, do_sample=False, logits_processor=processors)
        assert torch.equal(mixed[[0, 2]], greedy[[0, 2]])
        assert not torch.equal(mixed[1], greedy[1])


def test_a_batch_ends_when_most_of_its_rows_have() -> None:
    most = MostRowsEnded([1, 2], num_prompt_tokens=2, share=0.5)
    ids = torch.tensor([[1, 2, 5, 6], [9, 9, 2, 0], [9, 9, 5, 5], [9, 9, 5, 1]])
    assert most(ids, None).tolist() == [True] * 4
    assert most(ids[:, :3], None).tolist() == [False] * 4


class TestChatFormat:
    def test_a_conversation_is_put_together_as_the_template_does_it(self) -> None:
        tokenizer = byte_tokenizer()
        chat = ChatFormat(tokenizer)
        assert tokenizer.decode(chat.user_start("Who ")) == "<user>Who "
        assert tokenizer.decode(chat.user_ends()) == "<"
        assert tokenizer.decode(chat.prompt("Who is it?")) == "<user>Who is it?<assistant>"

    @pytest.mark.parametrize("turn", [" was it?<eos>rest", " was it?<assistant>You", " was it? "])
    def test_a_user_turn_ends_where_it_is_over(self, turn: str) -> None:
        tokenizer = byte_tokenizer()
        assert ChatFormat(tokenizer).user_text(tokenizer(turn)["input_ids"]) == " was it?"  # as after "Who"

    def test_words_are_tokens_that_begin_with_a_space(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["Ġsail", "Ġ2024", "sail", "Ġit", "▁ships", "ĠmÃ©t"])
        assert ChatFormat(tokenizer).words() == ["sail", "ships"]

    def test_without_a_template_there_are_no_turns(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        chat = ChatFormat(tokenizer)
        assert not chat.has_turns
        assert (chat.user_start(), chat.user_ends(), chat.prompt("w5 w6")) == ([1], [], [5, 6])


class TestWriter:
    def test_the_target_asks_and_answers_itself(self, writer: Writer, target_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target_folder)
        texts = writer.write_own(0)
        assert len(texts) == 4
        for text in texts:
            whole = tokenizer.decode(text["input_ids"])
            assert text["source"] == "self"
            assert whole.startswith("<user>")
            assert tokenizer.decode(text["input_ids"][: text["num_prompt_tokens"]]).endswith("<assistant>")
        # Of four texts, one begins as it likes. Tokens that are bytes are no words.
        assert tokenizer.decode(texts[1]["input_ids"]).startswith(f"<user>{OPENINGS[1]}")

    def test_openings_have_words_of_the_vocabulary(self, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer, "_words", ["sail", "ship"])
        monkeypatch.setattr(writer, "_known_openings", ["Who was {word}", "Discuss"])
        openings = writer._openings(0)
        assert openings[0] == ""
        assert openings[2] == "Discuss"
        assert {openings[1], openings[3]} <= {"Who was sail", "Who was ship"}

    def test_an_opening_goes_on_as_the_target_does(
        self, writer: Writer, target_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target_folder)
        monkeypatch.setattr(
            writer, "_generate", lambda prompts, *_, **__: [tokenizer(" it. ")["input_ids"]] * len(prompts)
        )
        wholes = [tokenizer.decode(text["input_ids"]) for text in writer.write_own(0)]
        assert wholes[0].startswith("<user>it.<assistant>")
        assert wholes[1].startswith(f"<user>{OPENINGS[1]} it.<assistant>")

    def test_a_batch_is_the_same_each_time_and_no_two_are_alike(self, writer: Writer) -> None:
        texts = writer.write_own(8)
        assert texts == writer.write_own(8)
        assert texts != writer.write_own(16)

    def test_conversations_about_texts(self, writer: Writer, target_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target_folder)
        said = ["a dog", "two cats"]
        written: list[Text] = [
            {"source": SELF, "num_prompt_tokens": 1, "input_ids": [1, *tokenizer(text)["input_ids"]]} for text in said
        ]
        texts = writer.write_own(0, written)
        wholes = [tokenizer.decode(text["input_ids"]) for text in texts]
        assert wholes[0].startswith("<user>Summarize: a dog")
        assert wholes[1].startswith("<user>two cats\n\nWho")
        assert all("<assistant>" in whole for whole in wholes)

    def test_a_text_that_leaves_no_room_is_not_asked_about(self, writer: Writer) -> None:
        long: Text = {"source": SELF, "num_prompt_tokens": 1, "input_ids": [7] * 400}
        assert writer._openings_on([long], 0) == [""] * 4

    def test_the_first_answers_are_greedy(self, writer: Writer, target_folder: Path) -> None:
        text = writer.answer(["what does a dog do?"], 0)[0]
        asked = torch.tensor([text["input_ids"][: text["num_prompt_tokens"]]])
        target = AutoModelForCausalLM.from_pretrained(target_folder)
        assert text["input_ids"] == target.generate(asked, max_new_tokens=24, do_sample=False)[0].tolist()

    def test_a_prompt_that_leaves_no_room_is_left_out(self, writer: Writer) -> None:
        assert len(writer.answer(["x" * 500, "what does a dog do?"], 0)) == 1


def test_a_text_ends_with_its_first_end() -> None:
    assert up_to_end([5, 1, 6, 1], [1, 2]) == [5, 1]
    assert up_to_end([5, 6], [1, 2]) == [5, 6]


TEXT: Text = {"source": "self", "num_prompt_tokens": 2, "input_ids": [5, 6, 7]}


class TestFile:
    def write(self, writer: Writer, path: Path, batches: int, **kwargs) -> list[int]:
        going = iter([True] * batches + [False] * 9)
        values = {"writes_own": True, "prompts": (), "batch_size": 2, **kwargs}
        return list(write_texts(writer, path, may_go_on=lambda num_tokens: next(going), **values))

    def test_it_grows_over_runs(self, writer: Writer, tmp_path: Path) -> None:
        path = tmp_path / "texts.jsonl"
        first = self.write(writer, path, 1)
        lines = path.read_text().splitlines()
        second = self.write(writer, path, 1)
        assert path.read_text().splitlines()[: len(lines)] == lines
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert second[-1] == sum(len(row["input_ids"]) - row["num_prompt_tokens"] for row in rows) > first[-1]

    def test_what_a_killed_run_left_of_a_line_is_dropped(self, writer: Writer, tmp_path: Path) -> None:
        path = tmp_path / "texts.jsonl"
        self.write(writer, path, 1)
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"source": "self", "num_pro')
        texts = repair(path)
        assert path.read_bytes() == whole
        assert len(texts) == whole.count(b"\n")
        assert num_written(texts) > 0

    def test_some_conversations_are_about_what_was_written_last(
        self, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        about: list[int] = []
        monkeypatch.setattr(
            writer, "write_own", lambda batch, texts=(): about.append(len(texts)) or [{**TEXT, "source": "self"}] * 2
        )
        path = tmp_path / "texts.jsonl"
        self.write(writer, path, 6)
        self.write(writer, path, 3)
        assert about == [0, 0, 0, 2, 0, 0, 0, 2, 0]

    def test_each_prompt_is_answered_once(self, writer: Writer, tmp_path: Path) -> None:
        path, prompts = tmp_path / "texts.jsonl", ("tell me.", "what?", "who?")
        self.write(writer, path, 1, prompts=prompts, writes_own=False)
        self.write(writer, path, 9, prompts=prompts, writes_own=False)
        sources = [json.loads(line)["source"] for line in path.read_text().splitlines()]
        assert sources == [digest(text) for text in prompts]

    def test_prompts_and_own_conversations_take_turns(self, writer: Writer, tmp_path: Path) -> None:
        path = tmp_path / "texts.jsonl"
        self.write(writer, path, 3, prompts=("tell me.", "what?", "who?"))
        sources = [json.loads(line)["source"] == "self" for line in path.read_text().splitlines()]
        assert sources[:2] == [False, False]
        assert sources[2:-1] == [True] * (len(sources) - 3)
        assert not sources[-1]


class TestSources:
    def test_prompts_documents_and_own_text(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.jsonl").write_text(
            '{"prompt": "What?"}\n{"turns": ["Who?", "Why?"]}\n{"prompt": "What?"}\n'
        )
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "a.md").write_text("Text.")
        sources = read_sources(["self", str(tmp_path / "prompts.jsonl"), str(tmp_path / "docs")])
        assert sources.writes_own
        assert sources.prompts == ("What?", "Who?")
        assert sources.documents == (tmp_path / "docs" / "a.md",)

    def test_what_is_not_there_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"`data` must be 'self', files, folders or hub:NAME, but got 'nowhere'"):
            read_sources(["nowhere"])
