"""Real tokenizers of a few hundred tokens, most of them trained on a little text, that differ in kind and in size."""

from __future__ import annotations

import json
import string
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The cat sat on the mat, and the other cat sat there too.",
    "Speculation is cheap; verification of a speculation is what costs.",
    "An international organisation, internationalised over the years.",
    "für Größe und Übermut — naïve café 😀 😃 🚀",
    "def add(first, second):\n    return first + second\n",
    "123 456 7890 in 2024",
]


@cache
def byte_level(size: int, *, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2: every byte is a token, a space is part of the word after it.

    Each size has learnt from texts of its own, and has its special tokens in another order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", eos, "<turn>"] if size > 400 else ["<turn>", "<pad>", eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT if size > 400 else TEXT[2:], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, padding_side="left")


@cache
def byte_fallback(size: int = 400) -> PreTrainedTokenizerFast:
    """BPE as of Llama 2: "▁" for spaces, one before each text, tokens like <0xE2> for what is not ASCII, and a bos."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<pad>", "<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*names, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    # Merges do not reach over words, as sentencepiece trains them.
    plain = [line.encode("ascii", "ignore").decode() for line in TEXT]
    words = [word for line in plain for word in line.replace(" ", " ▁").split(" ")]
    tokenizer.normalizer, whole = None, tokenizer.normalizer
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.normalizer = whole
    tokenizer = _without_special_bytes(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _without_special_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The tokens for bytes are ordinary ones; only training needs them as special ones, to have them all."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if not each["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


@cache
def unigram() -> PreTrainedTokenizerFast:
    """As of T5: "▁" for spaces, no tokens for bytes, so what it does not know is <unk>."""
    letters = string.ascii_letters + string.digits + ".,;"
    pieces = ["▁", *letters, "the", "▁the", "▁c", "at", "▁cat", "▁sat", "ation", "▁Spec", "international", "▁is", "▁of"]
    vocabulary = [("<pad>", 0.0), ("<unk>", 0.0), ("</s>", 0.0), *((piece, -10.0 / len(piece)) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", padding_side="left"
    )


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    """As of BERT: "##" for what continues a word, and spaces nowhere."""
    pieces = ["[PAD]", "[UNK]", *string.ascii_letters, *(f"##{c}" for c in string.ascii_letters), "the", "cat", "##sat"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def words(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """Whole words with these ids, the first of them for all others too."""
    model = models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=vocabulary[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
