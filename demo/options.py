"""What the page is started with."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line can set. Every value is checked when the object is made.

    Args:
        target: Name or folder of the target; `None` is the embedded pair's.
        assistant: Name or folder of the assistant; `None` is the embedded pair's.
        dtype: Type of the weights that the page starts with. It can be changed there.
        device: Where the target goes; `"auto"` is the accelerator, or the CPU where there is none. The assistant goes
            where `SSDConfig.assistant_device` says.
        target_threads: What the page's control for the target's CPU threads starts with; `None` is "auto".
        assistant_threads: The same for the assistant.
        max_prompt_tokens: Most tokens of a prompt, the conversation before it included.
        max_new_tokens: Most tokens of an answer that the page offers.

    Raises:
        ValueError: If a value is not allowed.
    """

    target: str | None = None
    assistant: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    target_threads: int | None = None
    assistant_threads: int | None = None
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if (self.target is None) != (self.assistant is None):
            raise ValueError(
                f"`target` and `assistant` must be given together, but got {self.target!r} and {self.assistant!r}. "
                "Leave both out for the embedded pair."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {list(DTYPES)}, but got {self.dtype!r}.")
        for name in ("target_threads", "assistant_threads", "max_prompt_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {value}.")

    @property
    def title(self) -> str:
        """The pair, in words."""
        if self.target is None:
            return "the embedded pair: SmolLM2-135M-Instruct and its six-layer assistant"
        return f"{self.target} and {self.assistant}"
