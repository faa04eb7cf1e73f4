"""Chat templates with tools: what the template makes of a conversation is what is read, on both sides."""

from __future__ import annotations

from typing import Any

from callers.enabled import GREEDY, assert_speculated
from tiny_models import make_noisy, make_target
from tiny_pair import byte_tokenizer

from hf_ssd import enable_ssd

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}:{{ tool.function.parameters.properties | length }}]"
    "{% endfor %}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}{% endfor %}<assistant>"
)


def get_weather(city: str, days: int = 1) -> str:
    """Says what the weather will be.

    Args:
        city: Where.
        days: For how long.
    """
    return f"{city}: sun for {days} days"


def test_a_conversation_with_tool_calls() -> None:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    target, model = (make_target(vocab_size=len(tokenizer)) for _ in range(2))
    enable_ssd(model, make_noisy(vocab_size=len(tokenizer)), {"backend": "inline"})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Oslo?"}]
    for turn in range(2):
        inputs = tokenizer.apply_chat_template(
            messages, tools=[get_weather], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert "[get_weather:2]<user>" in tokenizer.decode(inputs["input_ids"][0])
        ids = model.generate(**inputs, **GREEDY)
        assert ids.tolist() == target.generate(**inputs, **GREEDY).tolist()
        assert_speculated(model)
        call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
        messages += [
            {"role": "assistant", "content": f"turn {turn}", "tool_calls": [call]},
            {"role": "tool", "content": get_weather("Oslo")},
        ]
