"""`pipeline("text-generation")` on an enabled model, or with the assistant among its arguments."""

from __future__ import annotations

from typing import Any

import pytest
from callers.enabled import GREEDY, assert_speculated, enabled_target
from plain import INLINE
from tiny_models import make_noisy, make_target, tiny_tokenizer
from transformers import PreTrainedModel, TextStreamer, pipeline

from hf_ssd import custom_generate_path

CHAT = [{"role": "user", "content": "w5 w9"}]
TEXTS = ["w5 w9 w20", "w7", "w30 w31 w32 w33"]


def run(model: PreTrainedModel, inputs: Any, **kwargs: Any) -> Any:
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    return generator(inputs, **{**GREEDY, **kwargs})


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        (CHAT, {}),
        ([CHAT, [{"role": "system", "content": "w8"}, *CHAT]], {}),
        ([CHAT, [{"role": "user", "content": "w5 w9 w11 w12"}]], {"batch_size": 2}),
        (TEXTS, {}),
        (TEXTS, {"batch_size": 3}),
        (TEXTS[0], {"return_full_text": False}),
        (CHAT, {"return_full_text": False}),
        (TEXTS[0], {"return_tensors": True}),
        (CHAT, {"continue_final_message": True}),
    ],
    ids=[
        "chat",
        "chats",
        "batch of chats",
        "texts",
        "batch of texts",
        "new text",
        "new message",
        "token ids",
        "prefilled answer",
    ],
)
def test_it_returns_what_it_returned(inputs: Any, settings: dict[str, Any]) -> None:
    model = enabled_target()
    assert run(model, inputs, **settings) == run(make_target(), inputs, **settings)
    assert_speculated(model)


def test_several_sequences_of_a_sampled_batch() -> None:
    model = enabled_target()
    sampled = {"do_sample": True, "num_return_sequences": 2, "batch_size": 3, "temperature": 0.5}
    ssd = {"ssd_config": {"backend": "inline", "seed": 5}}
    found = run(model, TEXTS, **sampled, **ssd)
    assert_speculated(model)
    assert [len(each) for each in found] == [2, 2, 2]
    assert found == run(model, TEXTS, **sampled, ssd_config={"mode": "ar", "seed": 5})


def test_an_assistant_given_to_the_pipeline_itself() -> None:
    """transformers' own way to assist a pipeline; settings for SSD come with each call."""
    model = enabled_target()
    generator = pipeline(
        "text-generation", model=model, tokenizer=tiny_tokenizer(), assistant_model=make_noisy(), **GREEDY
    )
    assert generator(CHAT, ssd_config=INLINE) == run(make_target(), CHAT)
    assert_speculated(model)


def test_by_folder_on_a_model_of_any_class() -> None:
    model = make_target()
    way = {"custom_generate": custom_generate_path(), "trust_remote_code": True, "assistant_model": make_noisy()}
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    assert generator(TEXTS[0], **GREEDY, **way, ssd_config=INLINE) == run(make_target(), TEXTS[0])
    assert_speculated(model)


def test_a_streamer_given_to_a_pipeline(capsys) -> None:
    printed = []
    for model in (make_target(), enabled_target()):
        run(model, CHAT, streamer=TextStreamer(tiny_tokenizer(), skip_prompt=True))
        printed.append(capsys.readouterr().out)
    assert_speculated(model)
    assert printed[0].strip()
    assert printed[1] == printed[0]
