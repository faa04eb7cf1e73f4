from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chi_square import p_value
from tiny_models import make_target, padded_batch, prompt, tiny_tokenizer
from tiny_pair import byte_tokenizer
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from hf_ssd.distill import writing
from hf_ssd.distill.chat import OPENINGS, ChatFormat
from hf_ssd.distill.row_sampling import MostRowsEnded, RowSampler
from hf_ssd.distill.settings import SELF, DistillSettings
from hf_ssd.distill.sources import digest, read_held_out, read_sources
from hf_ssd.distill.writing import Text, Writer, by_like_length, num_written, up_to_end, without_gaps, write_texts


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
        assert ChatFormat(tokenizer).user_text("Who", tokenizer(turn)["input_ids"]) == "Who was it?"

    def test_a_decoder_that_strips_the_first_space(self) -> None:
        """As SentencePiece's models have it."""
        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(
            [tokenizer.backend_tokenizer.decoder, decoders.Strip(" ", 1, 0)]
        )
        turn = tokenizer(" was it?")["input_ids"]
        assert tokenizer.decode(turn) == "was it?"
        assert ChatFormat(tokenizer).user_text("Who", turn) == "Who was it?"

    def test_words_are_tokens_that_begin_with_a_space(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["Ġsail", "Ġ2024", "sail", "Ġit", "▁ships", "ĠmÃ©t"])
        assert ChatFormat(tokenizer).words() == ["sail", "ships"]
        monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"▁oar": 7, "Ġmast": 90_000})  # with holes
        assert ChatFormat(tokenizer).words() == ["mast"]

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

    @pytest.mark.parametrize("size", [1, 3, 4])
    def test_small_batches_have_every_opening_and_temperature(
        self, writer: Writer, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr(writer, "_settings", replace(writer._settings, writing_batch_size=size))
        drawn: list[float] = []
        monkeypatch.setattr(
            writer, "_generate", lambda prompts, temperatures, *_, **__: drawn.extend(temperatures) or [[5]] * size
        )
        count = 4 * len(writer._known_openings)
        openings = [opening for batch in range(0, count, size) for opening in writer._openings(batch)][:count]
        assert openings.count("") == len(writer._known_openings)
        assert all(openings.count(opening) == 3 for opening in writer._known_openings)
        for batch in range(0, 48, size):
            writer.answer(["who?"] * size, batch)
        assert drawn == [(0.0, 0.7, 0.0, 1.0)[i // 4 % 4] for i in range(48)]

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
            {
                "source": SELF,
                "num_prompt_tokens": 1,
                "input_ids": [1, *tokenizer(text)["input_ids"], tokenizer.eos_token_id],
            }
            for text in (*said, "", "x" * 400)
        ]
        texts = writer.write_own(0, written)
        wholes = [tokenizer.decode(text["input_ids"]) for text in texts]
        assert len(wholes) == 2  # nothing can be asked about the others
        assert wholes[0].startswith("<user>Summarize: a dog")
        assert wholes[1].startswith("<user>two cats\n\nWho")
        assert all("<assistant>" in whole for whole in wholes)
        assert len(writer.write_own(0, written[2:])) == 4  # about what it likes

    @pytest.mark.parametrize("ended_share", [0.5, 1.0])
    def test_rows_are_cut_when_so_many_have_ended(
        self, writer: Writer, monkeypatch: pytest.MonkeyPatch, ended_share: float
    ) -> None:
        texts = ["what does a dog do?", "who?"]
        monkeypatch.setattr(writer, "_ended_share", 1.0)
        whole = [len(text["input_ids"]) - text["num_prompt_tokens"] for text in writer.answer(texts, 0)]
        first = writer.answer(texts[1:], 0)[0]
        end = first["input_ids"][first["num_prompt_tokens"] + 1]
        monkeypatch.setattr(writer, "_ends", [end])
        monkeypatch.setattr(writer, "_ended_share", ended_share)
        cut = [len(text["input_ids"]) - text["num_prompt_tokens"] for text in writer.answer(texts, 0)]
        assert whole == [24, 24]
        assert cut[1] <= 2
        assert (cut[0] == cut[1]) == (ended_share == 0.5)

    def test_the_first_answers_are_greedy(self, writer: Writer, target_folder: Path) -> None:
        text = writer.answer(["what does a dog do?"], 0)[0]
        asked = torch.tensor([text["input_ids"][: text["num_prompt_tokens"]]])
        target = AutoModelForCausalLM.from_pretrained(target_folder)
        assert text["input_ids"] == target.generate(asked, max_new_tokens=24, do_sample=False)[0].tolist()

    def test_a_prompt_that_leaves_no_room_is_left_out(self, writer: Writer) -> None:
        assert len(writer.answer(["x" * 500, "what does a dog do?"], 0)) == 1


def test_prompts_of_like_length_are_answered_together() -> None:
    prompts = [str(i) + "x" * (i * 37 % 101) for i in range(500)]
    ordered = by_like_length(prompts, 4)
    assert sorted(ordered) == sorted(prompts)
    lengths = [len(prompt) for prompt in ordered]
    spans = [max(lengths[i : i + 4]) - min(lengths[i : i + 4]) for i in range(0, 448, 4)]
    assert max(spans) < 10
    # When time ends in the middle of them, short and long ones were answered.
    assert min(lengths[:32]) < 20
    assert max(lengths[:32]) > 80
    # And the ones of a window stay there, so that a longer file goes on as the shorter one did.
    assert by_like_length([*prompts[:448], *prompts[:9]], 4)[:448] == ordered[:448]


def test_a_text_ends_with_its_first_end() -> None:
    assert up_to_end([5, 1, 6, 1], [1, 2]) == [5, 1]
    assert up_to_end([5, 6], [1, 2]) == [5, 6]


TEXT: Text = {"source": "self", "num_prompt_tokens": 2, "input_ids": [5, 6, 7]}


def test_the_output_projection_gets_states_without_gaps() -> None:
    target = make_target()
    batch = padded_batch([prompt(7), prompt(4, seed=1)])
    given: list[bool] = []
    with without_gaps(target):
        hook = target.lm_head.register_forward_pre_hook(lambda module, args: given.append(args[0].is_contiguous()))
        target(**batch, logits_to_keep=1)
        hook.remove()
    assert given == [True]
    assert not target.lm_head._forward_pre_hooks


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
        assert self.write(writer, path, 0) == []
        assert path.read_bytes() == whole
        texts = [json.loads(line) for line in whole.splitlines()]
        assert self.write(writer, path, 1)[-1] > num_written(texts) > 0
        assert path.read_bytes().startswith(whole)

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

    def test_answers_between_them_do_not_count(
        self, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        about: list[int] = []
        own = [{**TEXT, "source": SELF}] * 2
        monkeypatch.setattr(writer, "write_own", lambda batch, texts=(): about.append(len(texts)) or own)
        monkeypatch.setattr(writer, "answer", lambda texts, batch: [{**TEXT, "source": digest(text)} for text in texts])
        path, prompts = tmp_path / "texts.jsonl", [str(i) for i in range(40)]
        for batches in (3, 7, 6):
            self.write(writer, path, batches, prompts=prompts)
        assert about == [0, 0, 0, 2, 0, 0, 0]

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

    def test_prompts_to_measure_on_are_of_all_categories(self, tmp_path: Path) -> None:
        kinds = [f"kind {i % 8}" for i in range(200)]
        rows = [{"prompt": f"What is {i}? ", "category": kind} for i, kind in enumerate(kinds)]
        (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        held_out = read_held_out(str(tmp_path / "asked.jsonl"), 64)
        asked = [kinds[int(text.split()[2][:-1])] for text in held_out.asked]
        assert len(asked) == 64
        assert len(set(asked[::8])) == 8
        assert len(held_out.all) == 200
        assert "What is 7?" in held_out
        assert "What is 777?" not in held_out
