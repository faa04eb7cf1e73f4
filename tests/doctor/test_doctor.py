"""`hf-ssd doctor`: what it says of tiny pairs in folders, and how soon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
from tiny_models import make_noisy, make_target, tiny_llama
from tiny_pair import byte_tokenizer, save_tiny_pair
from tiny_tokenizers import byte_level, words
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration, MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from hf_ssd import doctor as package
from hf_ssd import embedded
from hf_ssd.cli import app
from hf_ssd.doctor import Diagnosis, DoctorSettings, Status, examine, verdict
from hf_ssd.doctor.checkpoints import examine_checkpoint
from hf_ssd.doctor.findings import Findings
from hf_ssd.doctor.probe import Probe
from hf_ssd.doctor.surroundings import SUPPORTED
from hf_ssd.runtime import placement

VOCAB_SIZE = 258


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    return tuple(map(str, save_tiny_pair(tmp_path_factory.mktemp("pair"))))


@pytest.fixture
def no_weights(monkeypatch):
    def fails(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded before everything had been checked")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)


def diagnose(model: str, assistant: str | None = None, **settings: Any) -> Diagnosis:
    return examine(DoctorSettings(model=model, assistant=assistant, dtype="float32", **settings))


def text_of(diagnosis: Diagnosis, subject: str) -> str:
    (finding,) = [each for each in diagnosis.findings if each.subject == subject]
    return f"{finding.status.value}: {finding.text}"


def saved(folder: Path, model: Any, tokenizer: Any = None) -> str:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


class TestBeforeWeightsAreLoaded:
    """What is wrong with a pair is told from its configurations."""

    pytestmark = pytest.mark.usefixtures("no_weights")

    def test_a_missing_folder(self, folders, tmp_path) -> None:
        missing = str(tmp_path / "nothing")
        diagnosis = diagnose(missing, folders[1])
        assert diagnosis.is_refused
        assert re.match(f"refused: target. .*no folder '{missing}'", diagnosis.verdict)

    def test_a_recurrent_target(self, folders, tmp_path) -> None:
        config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
        diagnosis = diagnose(saved(tmp_path, MambaForCausalLM(config)), folders[1])
        assert diagnosis.verdict.startswith(
            "refused: target. The target must be able to take tokens back, but MambaForCausalLM keeps a recurrent state"
        )

    def test_a_recurrent_assistant(self, folders, tmp_path) -> None:
        config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
        diagnosis = diagnose(folders[0], saved(tmp_path, MambaForCausalLM(config)))
        assert "The assistant must be able to take tokens back, but MambaForCausalLM" in diagnosis.verdict

    def test_an_assistant_that_cannot_read_what_the_encoder_does(self, folders, tmp_path) -> None:
        config = BartConfig(vocab_size=VOCAB_SIZE, d_model=16, encoder_layers=1, decoder_layers=1)
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            setattr(config, name, 2)
        diagnosis = diagnose(saved(tmp_path, BartForConditionalGeneration(config)), folders[1])
        assert diagnosis.verdict.startswith("refused: encoder.")
        assert "LlamaForCausalLM drafts for BartForConditionalGeneration" in diagnosis.verdict

    def test_another_vocabulary(self, folders, tmp_path) -> None:
        diagnosis = diagnose(folders[0], saved(tmp_path, make_noisy(vocab_size=5000)))
        assert diagnosis.verdict.startswith("refused: vocabulary.")
        assert "knows 5000 tokens and the target 258" in diagnosis.verdict

    def test_hardly_any_token_in_common(self, folders, tmp_path) -> None:
        other = words([f"unheard of {index}" for index in range(VOCAB_SIZE)])
        diagnosis = diagnose(folders[0], saved(tmp_path, make_noisy(vocab_size=VOCAB_SIZE), other))
        assert diagnosis.verdict.startswith("refused: vocabulary.")
        assert "only 0 of 256 tokens are the same" in diagnosis.verdict

    def test_another_tokenizer_is_translated(self, folders, tmp_path) -> None:
        tokenizer = byte_level(500)  # has all bytes too, by other ids
        other = saved(tmp_path, make_noisy(vocab_size=len(tokenizer)), tokenizer)
        diagnosis = diagnose(folders[0], other, probe=False)
        assert not diagnosis.is_refused
        assert "tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer)" in diagnosis.verdict
        assert re.match(r"note: another one: \d+ tokens are the same", text_of(diagnosis, "tokenizer"))

    def test_too_little_memory(self, folders, monkeypatch) -> None:
        monkeypatch.setattr("hf_ssd.doctor.checkpoints.free_memory", lambda: {placement.CPU: 1000})
        diagnosis = diagnose(*folders)
        assert re.match(
            r"refused: memory. The target needs 0.\d MB of memory, but free on cpu is 0.0 MB", diagnosis.verdict
        )

    def test_settings_of_the_checkpoint_that_rule_it_out(self, folders, tmp_path) -> None:
        model = make_target(vocab_size=VOCAB_SIZE)
        model.generation_config.num_beams = 4
        diagnosis = diagnose(saved(tmp_path, model, byte_tokenizer()), folders[1])
        assert diagnosis.verdict.startswith("refused: its own settings. ")
        assert "these arguments ask for beam search" in diagnosis.verdict

    def test_what_is_fine_and_what_is_less_than_it_could_be(self, folders, tmp_path) -> None:
        short = saved(tmp_path, make_noisy(vocab_size=VOCAB_SIZE, max_position_embeddings=64))
        diagnosis = diagnose(folders[0], short, probe=False)
        assert not diagnosis.is_refused
        assert text_of(diagnosis, "context").startswith(
            "note: 1024 tokens, the assistant's 64: beyond, the target goes"
        )
        assert text_of(diagnosis, "tokenizer") == "note: the assistant has none to compare; sizes must do"
        assert text_of(diagnosis, "vocabulary") == "fine: 258 tokens"
        assert text_of(diagnosis, "cache") == "fine: 2 DynamicLayer"
        assert text_of(diagnosis, "calls with SSD").startswith("fine: greedy decoding, sampling")
        for name in ("a quantised cache", "beam search", "prompt lookup", "classifier-free guidance"):
            assert name in text_of(diagnosis, "without")
        assert "fits" in text_of(diagnosis, "memory")
        assert "enable_ssd" in diagnosis.verdict

    @pytest.mark.parametrize("tied", [True, False])
    def test_weights_count_once(self, tmp_path, tied: bool) -> None:
        model = make_target(vocab_size=VOCAB_SIZE, tie_word_embeddings=tied)
        findings = Findings()
        checkpoint = examine_checkpoint("target", saved(tmp_path, model), "float32", findings)
        assert findings.refused is None
        assert checkpoint.num_parameters == model.num_parameters()
        assert checkpoint.num_bytes >= 4 * model.num_parameters()

    def test_a_target_alone(self, folders) -> None:
        diagnosis = diagnose(folders[0], probe=False)
        assert not diagnosis.is_refused
        assert "It needs --assistant: a model with its tokenizer (258 tokens)" in diagnosis.verdict


def test_a_pair_is_measured(folders) -> None:
    steps: list[str] = []
    settings = DoctorSettings(model=folders[0], assistant=folders[1], dtype="float32", probe_tokens=16)
    diagnosis = examine(settings, lambda what, done, total: steps.append(what))
    probe = diagnosis.probe
    assert probe is not None
    assert probe.num_identical == probe.num_prompts == 4
    assert probe.acceptance > 0
    assert 1 < probe.tokens_per_round <= 17
    assert probe.speed_up == pytest.approx(probe.ssd_tokens_per_s / probe.ar_tokens_per_s)
    assert probe.degraded is None
    assert text_of(diagnosis, "token trees") == "fine: verified by the target"
    assert text_of(diagnosis, "drafting ahead").startswith("fine")
    assert text_of(diagnosis, "batches").startswith("fine")
    assert text_of(diagnosis, "draft vocabulary") == "fine: all tokens"  # 258 are few
    assert verdict.measured(probe) == diagnosis.verdict
    assert any("ssd, prompt 4 of 4" in step for step in steps)


@pytest.mark.slow
def test_a_pair_of_two_tokenizers_is_measured(folders, tmp_path) -> None:
    tokenizer = byte_level(500)
    other = saved(tmp_path, make_noisy(vocab_size=len(tokenizer)), tokenizer)
    probe = diagnose(folders[0], other, probe_tokens=6).probe
    assert probe is not None
    assert probe.num_identical == probe.num_prompts
    assert probe.degraded is None


def test_a_target_alone_is_timed(folders) -> None:
    diagnosis = diagnose(folders[0], probe_tokens=8)
    assert re.search(r"whose forward takes at most about \d+\.\d ms here", diagnosis.verdict)
    assert text_of(diagnosis, "token trees") == "fine: verified by the target"


def test_the_embedded_targets_folder_brings_the_embedded_assistant(folders, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_SSD_HOME", str(tmp_path))
    own = embedded._target_path()
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(folders[0])
    monkeypatch.setattr(embedded, "assistant_folder", lambda: Path(folders[1]))
    diagnosis = diagnose(str(own), probe=False)
    assert diagnosis.assistant == "smollm2-135m-assistant (embedded)"
    assert text_of(diagnosis, "assistant").startswith("fine: LlamaForCausalLM")
    other = saved(tmp_path / "other", tiny_llama(3, vocab_size=VOCAB_SIZE))
    assert diagnose(other, probe=False).assistant is None


def test_a_version_that_was_not_tested_is_a_note(folders, monkeypatch) -> None:
    monkeypatch.setitem(SUPPORTED, "torch", ">=99")
    diagnosis = diagnose(*folders, probe=False)
    assert re.match(r"note: .*, which was not tested: supported is >=99", text_of(diagnosis, "torch"))
    assert not diagnosis.is_refused


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(package.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ranges = {"python": project["requires-python"]}
    for requirement in project["dependencies"]:
        name, *rest = re.split(r"(?=[<>=])", requirement, maxsplit=1)
        ranges[name] = "".join(rest)
    assert {name: ranges[name] for name in SUPPORTED} == SUPPORTED


def probe_with(**figures: Any) -> Probe:
    values: dict[str, Any] = {
        "num_prompts": 4,
        "max_new_tokens": 32,
        "ar_tokens_per_s": 10.0,
        "sd_tokens_per_s": 8.0,
        "ssd_tokens_per_s": 8.0,
        "perfect_speed_up": None,
        "tokens_per_round": 2.5,
        "acceptance": 0.6,
        "hit_rate": 0.8,
        "verify_ms": 100.0,
        "wait_ms": 10.0,
        "draft_step_ms": 20.0,
        "num_identical": 4,
        "assistant_device": "cpu",
        "degraded": None,
        **figures,
    }
    return Probe(**values, speed_up=values["ssd_tokens_per_s"] / values["ar_tokens_per_s"])


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"ssd_tokens_per_s": 15.0}, r"^Use enable_ssd\(model, assistant_model=assistant\): 1.50 times"),
        ({"ssd_tokens_per_s": 11.0, "sd_tokens_per_s": 13.0}, r'"mode": "sd".*1.30 times .*SSD 1.10'),
        ({"ssd_tokens_per_s": 14.0, "sd_tokens_per_s": 14.2}, r"assistant_model=assistant\): 1.40 times"),
        ({"tokens_per_round": 1.2}, r"^Not worth it here, 0.80 times.*agrees too seldom: 1.20 tokens"),
        ({"wait_ms": 60.0}, r"assistant is too slow: a step takes 20.0 ms beside 100.0 ms.*waits for 60.0 ms"),
        ({}, r"The target is fast by itself"),
        ({"degraded": "Traceback\nBoom"}, r"^The assistant failed, and generation went on without it: Boom$"),
    ],
    ids=["SSD", "SD", "equal", "disagrees", "slow", "small", "failed"],
)
def test_the_verdict_goes_by_what_was_measured(figures: dict[str, Any], says: str) -> None:
    assert re.search(says, verdict.measured(probe_with(**figures)))


class TestCommand:
    runner = CliRunner()

    def test_json(self, folders) -> None:
        result = self.runner.invoke(
            app,
            ["doctor", "--model", folders[0], "--assistant", folders[1], "--dtype", "float32", "--no-probe", "--json"],
        )
        assert result.exit_code == 0
        values = json.loads(result.stdout)
        assert values["verdict"].startswith("Nothing speaks against it")
        assert {each["status"] for each in values["findings"]} <= {status.value for status in Status}

    def test_a_refusal_is_status_1_and_a_table(self, folders, tmp_path) -> None:
        result = self.runner.invoke(app, ["doctor", "--model", str(tmp_path / "none"), "--assistant", folders[1]])
        assert result.exit_code == 1
        assert "transformers" in result.stdout
        assert "refused: target." in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--assistant", "x"], "`assistant` needs `model` too, but only 'x'"),
            (["--probe-tokens", "1"], "`probe_tokens` must be at least 2 .*1"),
            (["--dtype", "int8"], "`dtype` must be one of .*'int8'"),
        ],
    )
    def test_a_bad_option(self, arguments: list[str], message: str) -> None:
        result = self.runner.invoke(app, ["doctor", *arguments])
        assert result.exit_code == 2
        assert re.search(message, result.stderr)
