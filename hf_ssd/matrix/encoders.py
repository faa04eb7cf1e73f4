"""Tiny random encoder-decoder models of transformers' own architectures, for texts and for speech."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
    WhisperForCausalLM,
)

from .zoo import NOISE, SMALL, VOCAB_SIZE, finish, is_known, text_prompts

NUM_MELS, NUM_FRAMES = 8, 40

_SMALL: dict[str, Any] = {
    **{name: SMALL[name] for name in ("vocab_size", "init_std", "bos_token_id", "eos_token_id", "pad_token_id")},
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "initializer_factor": 3.0,
    "tie_word_embeddings": False,
}
_PROPHETNET: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "init_std": 0.35,
    "eos_token_id": None,
}
_WHISPER: dict[str, Any] = {
    **_SMALL,
    "num_mel_bins": NUM_MELS,
    "max_source_positions": NUM_FRAMES // 2,
    "max_target_positions": 64,
    "init_std": 0.6,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
_WHISPER.pop("max_position_embeddings")


@dataclass(frozen=True)
class EncoderFamily:
    """One encoder-decoder architecture of transformers, tiny.

    Args:
        model_type: As in `AutoConfig.for_model`.
        remark: What is special about it, for readers.
        settings: Config values.
        is_speech: Whether it reads speech features; otherwise tokens.
        takes_states: Whether the assistant is a decoder that takes the states of the target's encoder.
        is_refused: Whether SSD has to refuse it.
        noise: What `make_assistant` adds.
    """

    model_type: str
    remark: str = ""
    settings: dict[str, Any] = field(default_factory=lambda: _SMALL)
    is_speech: bool = False
    takes_states: bool = False
    is_refused: bool = False
    noise: float = NOISE
    kind: str = "encoder-decoder"
    max_rows: int = 3
    drafts_for_itself: bool = True

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has this family."""
        return is_known(self.model_type)

    def make(self, *, noise: float = 0.0, attn_implementation: str | None = None) -> PreTrainedModel:
        """A float32 model, the same each time. The global random state is left alone."""
        config = AutoConfig.for_model(self.model_type, **self.settings)
        auto = AutoModelForSpeechSeq2Seq if self.is_speech else AutoModelForSeq2SeqLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
            model = finish(model, noise)
        model.generation_config.decoder_start_token_id = 2
        return model

    def make_assistant(self, *, attn_implementation: str | None = None) -> PreTrainedModel:
        """A model that is near the family's: as its assistant it is partly right."""
        whole = self.make(noise=self.noise, attn_implementation=attn_implementation)
        if not self.takes_states:
            return whole
        config = AutoConfig.for_model(self.model_type, **self.settings)
        config._attn_implementation = whole.config._attn_implementation
        decoder = WhisperForCausalLM(config).eval()
        decoder.load_state_dict({key: value for key, value in whole.state_dict().items() if ".encoder." not in key})
        decoder.generation_config = whole.generation_config
        return decoder

    def prompts(self, num_rows: int) -> dict[str, torch.Tensor]:
        """What the encoder reads, the same each time."""
        if not self.is_speech:
            return text_prompts(num_rows)
        generator = torch.Generator().manual_seed(num_rows)
        return {"input_features": torch.randn(num_rows, NUM_MELS, NUM_FRAMES, generator=generator)}


ENCODER_FAMILIES = (
    EncoderFamily("whisper", "speech", _WHISPER, is_speech=True),
    EncoderFamily("whisper", "speech, the assistant takes the target's states", _WHISPER, True, True),
    EncoderFamily("bart", "learned positions"),
    EncoderFamily("bigbird_pegasus", "learned positions"),
    EncoderFamily("blenderbot", "learned positions, norms before the blocks"),
    EncoderFamily("blenderbot-small", "learned positions"),
    EncoderFamily("led", "windows in the encoder", {**_SMALL, "attention_window": 8}, noise=0.03),
    EncoderFamily("longt5", "relative positions, windows in the encoder", _T5),
    EncoderFamily("m2m_100", "sinusoidal positions", noise=0.02),
    EncoderFamily("marian", "sinusoidal positions"),
    EncoderFamily("mbart", "learned positions, norms before the blocks"),
    EncoderFamily("mt5", "relative positions, gated layers", _T5, noise=0.02),
    EncoderFamily("mvp", "learned positions"),
    EncoderFamily("nllb-moe", "experts", {**_SMALL, "num_experts": 4, "expert_capacity": 16}, noise=0.02),
    EncoderFamily("pegasus", "sinusoidal positions", noise=0.03),
    EncoderFamily("plbart", "learned positions"),
    EncoderFamily("prophetnet", "predicts several tokens at once", _PROPHETNET, is_refused=True),
    EncoderFamily("t5", "relative positions", _T5),
    EncoderFamily("umt5", "relative positions of each layer", _T5),
)
