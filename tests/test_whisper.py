"""Speech: Whisper's own `generate()`, with an assistant that has an encoder or takes the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_noisy
from tiny_whisper import (
    GERMAN,
    NUM_FRAMES,
    PREVIOUS,
    VOCAB_SIZE,
    features,
    make_decoder,
    make_processor,
    make_whisper,
)
from transformers import PreTrainedModel, pipeline

from hf_ssd import SSDConfig, SSDStats, custom_generate_path, disable_ssd, enable_ssd, make_custom_generate
from hf_ssd.checks import UnsupportedError
from hf_ssd.generation import generate_with_ssd
from hf_ssd.target_trees import Masks, masks_of

INLINE = SSDConfig(backend="inline", num_assistant_tokens=4)
SEEDED = SSDConfig(backend="inline", num_assistant_tokens=4, seed=11)
GREEDY = {"do_sample": False, "language": "en"}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_whisper()


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def assistant(request) -> PreTrainedModel:
    """One with an encoder of its own, and one that takes the target's states."""
    return make_whisper(noise=0.05) if request.param == "encoder" else make_decoder()


@pytest.fixture(scope="module")
def decoder() -> PreTrainedModel:
    return make_decoder()


def compare(target: PreTrainedModel, assistant: PreTrainedModel, config: SSDConfig = INLINE, **kwargs: Any) -> SSDStats:
    """Generates plainly and with SSD, and compares; with a seed, with mode "ar"."""
    if config.seed is None:
        expected = target.generate(**kwargs)
    else:
        expected = generate_with_ssd(target, ssd_config=SSDConfig(mode="ar", seed=config.seed), **kwargs)
    found = generate_with_ssd(target, assistant_model=assistant, ssd_config=config, **kwargs)
    assert_same(expected, found)
    stats: SSDStats = target.ssd_stats
    assert stats.degraded is None
    assert stats.acceptance > 0.2
    return stats


def assert_same(expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.allclose(found.float(), expected.float(), atol=1e-4)
    elif isinstance(expected, dict):
        for name in expected:
            if name not in ("cache", "past_key_values"):
                assert_same(expected[name], found[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for each, other in zip(expected, found, strict=True):
            assert_same(each, other)
    else:
        assert found == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["ssd", "sd"])
@pytest.mark.parametrize("make", [make_whisper, make_decoder])
def test_a_short_recording(make, mode: str, attention: str) -> None:
    whisper = make_whisper(attention=attention)
    assistant = make(noise=0.05, attention=attention)
    config = SSDConfig(backend="inline", num_assistant_tokens=4, mode=mode)
    stats = compare(whisper, assistant, config, input_features=features(), **GREEDY)
    assert any(each.num_draft_tokens > each.depth for each in stats.rounds), "no tree was verified"
    assert stats.num_hits > 1 if mode == "ssd" else stats.num_hits == 0


@pytest.mark.parametrize("make", [make_whisper, make_decoder])
def test_it_drafts_for_itself_without_a_rejection(target, make) -> None:
    """A wrong mask, position or encoder's state on the assistant's side costs acceptance and nothing else."""
    stats = compare(target, make(noise=0.0), input_features=features(), **GREEDY)
    assert stats.acceptance > 0.97
    assert stats.num_hits > 1


def test_the_target_takes_trees(target) -> None:
    assert masks_of(target) is not Masks.OWN


LONG: dict[str, dict[str, Any]] = {
    "timestamps": {},
    "language detected": {"language": None},
    "a prompt": {"prompt_ids": torch.tensor([PREVIOUS, 20, 21])},
    "conditioned": {"condition_on_prev_tokens": True},
    "silence": {"no_speech_threshold": 0.6, "logprob_threshold": -1.0, "temperature": 0.0},
    "segments": {"return_segments": True},
    "dict": {"return_dict_in_generate": True, "output_scores": True, "return_segments": True},
}


@pytest.mark.parametrize("settings", LONG.values(), ids=LONG)
def test_a_long_recording_in_parts(target, assistant, settings: dict[str, Any]) -> None:
    recording = features(NUM_FRAMES + 40)
    kwargs = {**GREEDY, "return_timestamps": True, **settings}
    stats = compare(target, assistant, input_features=recording, **kwargs)
    assert stats.num_hits > 0


def test_figures_of_all_parts_add_up(target, decoder) -> None:
    stats = compare(target, decoder, input_features=features(NUM_FRAMES + 40), return_timestamps=True, **GREEDY)
    num_parts = stats.num_tokens - sum(each.num_emitted for each in stats.rounds)  # each prefill emits one
    assert num_parts > 1
    whole = stats.num_tokens
    kwargs = {"input_features": features(NUM_FRAMES + 40), "return_timestamps": True, **GREEDY}
    generate_with_ssd(target, ssd_config={"mode": "ar"}, **kwargs)
    assert target.ssd_stats.num_tokens == whole


def test_temperatures_to_fall_back_on(target, decoder) -> None:
    """Each part is decoded greedily first, then by sampling, whose noise is not that of the part before."""
    kwargs = {
        "input_features": features(NUM_FRAMES + 40),
        "return_timestamps": True,
        "language": "en",
        "temperature": (0.0, 0.8),
        "logprob_threshold": -0.5,
    }
    compare(target, decoder, SEEDED, **kwargs)


def test_sampling_with_a_seed(target, decoder) -> None:
    compare(target, decoder, SEEDED, input_features=features(), language="de", temperature=0.7, do_sample=True)


def test_several_recordings(target, decoder) -> None:
    """One after the other; what detects silence keeps its finding for each."""
    kwargs = {
        "input_features": features(NUM_FRAMES + 40, num_rows=2),
        "attention_mask": torch.ones(2, NUM_FRAMES + 40, dtype=torch.long),
        "return_timestamps": True,
        "no_speech_threshold": 0.5,
        "logprob_threshold": -3.0,
        "temperature": 0.0,
        "condition_on_prev_tokens": True,
    }
    kwargs["attention_mask"][1, NUM_FRAMES + 10 :] = 0
    compare(target, decoder, **kwargs, **GREEDY)


def test_several_texts_of_one_recording(target, decoder) -> None:
    kwargs = {"input_features": features(), "num_return_sequences": 2, "do_sample": True, "temperature": 1.0}
    compare(target, decoder, SEEDED, **kwargs)


def test_silence_found_from_the_scores_of_each_row() -> None:
    """An English-only model begins with one token, so that the detection reads the scores it is shown."""
    target = make_whisper()
    del target.generation_config.lang_to_id, target.generation_config.task_to_id
    target.generation_config.is_multilingual = False
    kwargs = {"input_features": features(num_rows=2), "return_timestamps": True, "do_sample": False}
    kwargs |= {"attention_mask": torch.ones(2, NUM_FRAMES, dtype=torch.long)}
    kwargs |= {"no_speech_threshold": 0.01, "logprob_threshold": 0.0, "temperature": 0.0}
    compare(target, make_decoder(), **kwargs)


@pytest.mark.parametrize("settings", [{}, {"output_hidden_states": True, "output_logits": True}])
def test_outputs_as_a_dict(target, decoder, settings: dict[str, Any]) -> None:
    kwargs = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, **settings}
    compare(target, decoder, input_features=features(), **kwargs)


def test_a_dict_has_the_figures(target, decoder) -> None:
    output = generate_with_ssd(
        target,
        assistant_model=decoder,
        ssd_config=INLINE,
        input_features=features(),
        return_dict_in_generate=True,
        force_unique_generate_call=True,
        **GREEDY,
    )
    assert output.ssd_stats is target.ssd_stats


def test_times_of_words() -> None:
    """They are read off the cross-attention of each token."""
    target = make_whisper(attention="eager")
    stats = compare(
        target,
        make_decoder(),
        input_features=features(),
        attention_mask=torch.ones(1, NUM_FRAMES, dtype=torch.long),
        return_timestamps=True,
        return_token_timestamps=True,
        **GREEDY,
    )
    assert stats.num_hits > 0


def test_the_assistants_encoder_runs_once_per_part(target) -> None:
    assistant = make_whisper(noise=0.05)
    runs: list[None] = []
    assistant.get_encoder().register_forward_hook(lambda *_: runs.append(None))
    stats = compare(target, assistant, input_features=features(NUM_FRAMES + 40), return_timestamps=True, **GREEDY)
    assert len(runs) == stats.num_tokens - sum(each.num_emitted for each in stats.rounds)


def test_an_encoder_that_both_have_runs_for_the_target_only(target) -> None:
    assistant = make_whisper(noise=0.05)
    assistant.model.encoder = target.model.encoder
    runs: list[None] = []
    hook = target.get_encoder().register_forward_hook(lambda *_: runs.append(None))
    compare(target, assistant, input_features=features(), **GREEDY)
    hook.remove()
    stats = target.ssd_stats
    assert len(runs) == 2 * (stats.num_tokens - sum(each.num_emitted for each in stats.rounds))  # SSD, and plainly


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (make_decoder, "process"),
        (make_whisper, "stream"),
        pytest.param(make_whisper, "process", marks=pytest.mark.slow),
        pytest.param(make_decoder, "stream", marks=pytest.mark.slow),
    ],
)
def test_through_enable_ssd(make, backend: str) -> None:
    """Features by position, as in Whisper's examples."""
    target = make_whisper()
    recording = features(NUM_FRAMES + 40)
    plain = target.generate(recording, return_timestamps=True, **GREEDY)
    # Its own drafts are right, whichever of them are ready in time; those that are copied from the text may not be.
    enable_ssd(target, assistant_model=make(noise=0.0), ssd_config={"backend": backend})
    for _ in range(2):
        found = target.generate(recording, return_timestamps=True, **GREEDY)
        assert found.equal(plain)
        stats = target.ssd_stats
        assert stats.degraded is None
        assert stats.acceptance > 0.5
        assert stats.num_hits + stats.num_misses > 0
    assert disable_ssd(target).generate(recording, return_timestamps=True, **GREEDY).equal(plain)


@pytest.mark.parametrize("timestamps", [None, True, "word"])
def test_pipeline(timestamps: Any) -> None:
    extractor, tokenizer = make_processor()
    target = make_whisper(attention="eager")
    sound = np.sin(np.arange(20_000) * 0.05).astype(np.float32) * np.linspace(0, 1, 20_000, dtype=np.float32)
    recognizer = pipeline(
        "automatic-speech-recognition", model=target, feature_extractor=extractor, tokenizer=tokenizer, device="cpu"
    )
    kwargs = {"return_timestamps": timestamps, "generate_kwargs": {**GREEDY, "num_beams": 1}}
    if timestamps is None:
        sound = sound[:16_000]
    plain = recognizer(sound.copy(), **kwargs)
    assert plain["text"].strip()
    enable_ssd(target, assistant_model=make_decoder(), ssd_config=INLINE)
    assert recognizer(sound.copy(), **kwargs) == plain
    assert target.ssd_stats.num_hits > 0


def test_the_example_in_the_documentation(capsys) -> None:
    page = (Path(__file__).parents[1] / "docs" / "speech_and_images.md").read_text(encoding="utf-8")
    code = next(block.split("```")[0] for block in page.split("```python\n") if "torch.randn" in block)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(compile(code, "speech_and_images.md", "exec"), {"__name__": "example"})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "True"
    assert float(second.split()[0]) > 1.5


def test_through_custom_generate(target, decoder) -> None:
    kwargs = {"input_features": features(NUM_FRAMES + 40), "return_timestamps": True, **GREEDY}
    plain = target.generate(**kwargs)
    found = target.generate(**kwargs, custom_generate=make_custom_generate(decoder, INLINE))
    assert found.equal(plain)
    assert target.ssd_stats.num_hits > 0


def test_a_folder_in_custom_generate_is_refused(target, decoder) -> None:
    with pytest.raises(UnsupportedError, match="`custom_generate` must not be a folder for WhisperForConditional"):
        target.generate(
            features(),
            custom_generate=custom_generate_path(),
            trust_remote_code=True,
            assistant_model=decoder,
            ssd_config=INLINE.to_dict(),
            **GREEDY,
        )


def test_mode_auto(target, decoder) -> None:
    plain = target.generate(features(), **GREEDY)
    for _ in range(4):
        config = SSDConfig(backend="inline", mode="auto")
        found = generate_with_ssd(
            target, assistant_model=decoder, ssd_config=config, input_features=features(), **GREEDY
        )
        assert found.equal(plain)


def test_the_languages_token_is_in_the_prompt(target, decoder) -> None:
    output = generate_with_ssd(
        target,
        assistant_model=decoder,
        ssd_config=INLINE,
        input_features=features(),
        language="de",
        do_sample=False,
        return_segments=True,
    )
    assert output["segments"][0][0]["result"][1] == GERMAN


class TestRefusals:
    @pytest.mark.parametrize(
        ("assistant", "match"),
        [
            (lambda: make_whisper(num_mel_bins=16), "reads `input_features` of 16 mel bins"),
            (lambda: make_decoder(d_model=48), "states of size 32, .* WhisperForCausalLM takes 48"),
            (lambda: make_noisy(vocab_size=VOCAB_SIZE), "LlamaForCausalLM drafts for WhisperForConditionalGeneration"),
            (lambda: make_whisper(vocab_size=400), "share the target's vocabulary"),
        ],
    )
    def test_pairs(self, target, assistant, match: str) -> None:
        with pytest.raises(UnsupportedError, match=match):
            enable_ssd(target, assistant_model=assistant(), ssd_config=INLINE)

    @pytest.mark.parametrize(
        ("config", "kwargs", "match"),
        [
            (INLINE, {"num_beams": 2}, "ask for beam search"),
            (SSDConfig(backend="inline", seed=(1,)), {}, "`seed` must be one number for WhisperForConditional"),
            (INLINE, {"cache_implementation": "static"}, "`cache_implementation` must"),
        ],
    )
    def test_calls(self, target, config: SSDConfig, kwargs: dict[str, Any], match: str) -> None:
        with pytest.raises(UnsupportedError, match=match):
            generate_with_ssd(
                target, assistant_model=make_decoder(), ssd_config=config, input_features=features(), **kwargs
            )

    def test_states_without_what_was_read(self, target) -> None:
        states = target.get_encoder()(features())
        kwargs = {"encoder_outputs": states, **GREEDY}
        with pytest.raises(UnsupportedError, match="`encoder_outputs` must be None, as WhisperForConditional"):
            generate_with_ssd(target, assistant_model=make_whisper(noise=0.05), ssd_config=INLINE, **kwargs)
        compare(target, make_decoder(), **kwargs)

    def test_after_enable_beams_are_transformers_own(self) -> None:
        target = make_whisper()
        plain = target.generate(features(), num_beams=2, **GREEDY)
        enable_ssd(target, assistant_model=make_decoder(), ssd_config=INLINE)
        assert target.generate(features(), num_beams=2, **GREEDY).equal(plain)
