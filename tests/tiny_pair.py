"""A tiny target and assistant as model folders with a tokenizer, for what loads models by name or folder."""

from __future__ import annotations

from pathlib import Path

from tiny_models import make_noisy, make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and two special tokens: 258 in all, nothing trained."""
    vocab = {"<pad>": 0, "<eos>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = chat_template
    return fast


def save_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Writes target and assistant, float32, below `folder`; the assistant is the target with noise."""
    tokenizer = byte_tokenizer()
    paths = folder / "target", folder / "assistant"
    for path, make in zip(paths, (make_target, make_noisy), strict=True):
        make(vocab_size=len(tokenizer)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths
