"""A tiny random Whisper, what it hears, and a processor for `pipeline`."""

from __future__ import annotations

import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

NUM_MELS, NUM_FRAMES = 8, 100  # of one part of a recording, which is a second
PAD, EOS, START, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, PREVIOUS = 0, 2, 3, 4, 5, 6, 7, 8
NO_TIMESTAMPS = 69  # the tokens after it are times
VOCAB_SIZE = 104
NOISE = 0.05

_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "num_mel_bins": NUM_MELS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": NUM_FRAMES // 2,
    "max_target_positions": 64,
    "init_std": 0.35,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "decoder_start_token_id": START,
}


def make_whisper(*, noise: float = 0.0, attention: str = "sdpa", **settings: object) -> WhisperForConditionalGeneration:
    """The same each time; with `noise` an assistant for it that is partly right."""
    config = WhisperConfig(**{**_CONFIG, **settings})
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif noise:
                    parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.generation_config = GenerationConfig(
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        lang_to_id={"<|en|>": ENGLISH, "<|de|>": GERMAN},
        task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        prev_sot_token_id=PREVIOUS,
        no_timestamps_token_id=NO_TIMESTAMPS,
        is_multilingual=True,
        suppress_tokens=[10, 11],
        begin_suppress_tokens=[12, EOS],
        max_initial_timestamp_index=10,
        return_timestamps=False,
        max_length=24,
        alignment_heads=[[0, 0], [1, 2]],
        median_filter_width=3,
    )
    return model


def make_decoder(*, noise: float = NOISE, attention: str = "sdpa", **settings: object) -> WhisperForCausalLM:
    """The decoder of that assistant, without its encoder, as distil-whisper is used."""
    whole = make_whisper(noise=noise, attention=attention, **settings)
    decoder = WhisperForCausalLM(type(whole.config)(**whole.config.to_dict())).eval()
    decoder.set_attn_implementation(attention)
    weights = {name: value for name, value in whole.state_dict().items() if ".encoder." not in name}
    decoder.load_state_dict(weights)
    return decoder


def features(num_frames: int = NUM_FRAMES, *, num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Of shape `(num_rows, NUM_MELS, num_frames)`."""
    return torch.randn(num_rows, NUM_MELS, num_frames, generator=torch.Generator().manual_seed(seed))


def make_processor() -> tuple[WhisperFeatureExtractor, WhisperTokenizer]:
    """For parts of one second at 16 kHz."""
    special = {
        "<|endoftext|>": EOS,
        "<|startoftranscript|>": START,
        "<|en|>": ENGLISH,
        "<|de|>": GERMAN,
        "<|transcribe|>": TRANSCRIBE,
        "<|translate|>": TRANSLATE,
        "<|startofprev|>": PREVIOUS,
        "<|notimestamps|>": NO_TIMESTAMPS,
    }
    times = {f"<|{0.02 * index:.2f}|>": NO_TIMESTAMPS + 1 + index for index in range(VOCAB_SIZE - NO_TIMESTAMPS - 1)}
    taken = {*special.values(), *times.values()}
    words = {f"\u0120w{index}": index for index in range(VOCAB_SIZE) if index not in taken}  # each with its space
    tokenizer = WhisperTokenizer({**special, **times, **words}, [], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    extractor = WhisperFeatureExtractor(feature_size=NUM_MELS, sampling_rate=16_000, chunk_length=1)
    return extractor, tokenizer
