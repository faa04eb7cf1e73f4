"""Folders that hold EAGLE-3 heads, wherever an assistant is named; and what is said where a head does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from lookup_model import LookupForCausalLM
from safetensors.torch import load_file, save_file
from tiny_head import make_head
from tiny_models import make_target, prompt, tiny_llama, tiny_tokenizer
from tiny_pair import byte_tokenizer
from tiny_tokenizers import byte_level
from transformers import BartConfig, BartForConditionalGeneration
from typer.testing import CliRunner

from hf_ssd import SSDConfig, disable_ssd, enable_ssd, load_pair
from hf_ssd.bench.bench_settings import BenchSettings
from hf_ssd.bench.benchmark import Benchmark
from hf_ssd.bench.compare import compare
from hf_ssd.bench.settings import CompareSettings
from hf_ssd.checks import check_pair
from hf_ssd.cli import app
from hf_ssd.doctor import DoctorSettings, examine
from hf_ssd.eagle3 import Eagle3Head, load_head
from hf_ssd.row import Link
from hf_ssd.runtime.pool import close_worker
from hf_ssd.types import Speculation
from hf_ssd.vocabulary import UnsupportedError

INLINE = SSDConfig(backend="inline")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A target, and its head in both forms in use; neither holds the embedding."""
    folder = tmp_path_factory.mktemp("eagle3")
    tokenizer = byte_tokenizer()
    target = make_target(vocab_size=len(tokenizer), num_hidden_layers=4)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    head = make_head(target, draft_vocab_size=200)
    head.save_pretrained(folder / "speculators")
    weights = load_file(folder / "speculators" / "model.safetensors")
    other = folder / "safeailab"
    other.mkdir()
    save_file(
        {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200}
    (other / "config.json").write_text(json.dumps({**head.config.layer.to_dict(), **own}))
    return {name: str(folder / name) for name in ("target", "speculators", "safeailab")}


@pytest.mark.parametrize("form", ["speculators", "safeailab"])
def test_load_pair(folders, form: str) -> None:
    pair = load_pair(folders["target"], folders[form], dtype=torch.float32, ssd_config=INLINE)
    assert isinstance(pair.assistant, Eagle3Head)
    assert pair.assistant_tokenizer is None
    ids = prompt(12, vocab_size=250)
    found = pair.target.generate(ids, max_new_tokens=20, do_sample=False)
    assert pair.target.ssd_stats.degraded is None
    assert sum(each.num_draft_tokens for each in pair.target.ssd_stats.rounds) > 0
    disable_ssd(pair.target)
    assert found.equal(pair.target.generate(ids, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("embedding", ["disk", "cpu"])
def test_load_pair_with_an_offloaded_target(folders, embedding: str, tmp_path) -> None:
    places = {"model.embed_tokens": embedding, "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    options = {"dtype": torch.float32, "ssd_config": INLINE, "assistant_device": "cpu"}
    map_ = {"device_map": {**places, "model.rotary_emb": "cpu"}, "offload_folder": str(tmp_path)}
    pair = load_pair(folders["target"], folders["speculators"], **options, **map_)
    assert pair.target.get_input_embeddings().weight.is_meta == (embedding == "disk")
    whole = load_pair(folders["target"], folders["speculators"], **options)
    assert torch.equal(pair.assistant.embed_tokens.weight, whole.target.get_input_embeddings().weight)
    ids = prompt(12, vocab_size=250)
    expected = whole.target.generate(ids, max_new_tokens=20, do_sample=False)
    assert pair.target.generate(ids, max_new_tokens=20, do_sample=False).equal(expected)
    assert pair.target.ssd_stats.degraded is None
    assert pair.target.ssd_stats.acceptance == whole.target.ssd_stats.acceptance


def test_an_embedding_without_weights_is_refused(folders) -> None:
    with pytest.raises(UnsupportedError, match="embedding in memory, but that of LlamaForCausalLM is on 'meta'"):
        load_head(folders["speculators"], make_target(vocab_size=258).to("meta"))


@pytest.mark.parametrize(
    ("form", "probe"), [pytest.param("speculators", True, marks=pytest.mark.slow), ("safeailab", False)]
)
def test_the_doctor(folders, form: str, probe: bool) -> None:
    models = {"model": folders["target"], "assistant": folders[form], "dtype": "float32"}
    diagnosis = examine(DoctorSettings(**models, probe=probe, probe_tokens=4))
    assert not diagnosis.is_refused, diagnosis.verdict
    texts = {each.subject: each.text for each in diagnosis.findings}
    assert texts["assistant"].startswith("Eagle3Head")
    assert "reads the target's tokens and states" in texts["tokenizer"]
    assert (diagnosis.probe is not None) == probe
    if probe:
        assert texts["draft vocabulary"] == "continuations come from 200 of the 258 tokens"


@pytest.mark.slow
def test_compare(folders) -> None:
    """Without transformers' assisted generation, which cannot draft with a head."""
    options = ["--target", folders["target"], "--assistant", folders["speculators"], "--dtype", "float32"]
    options += ["--max-new-tokens", "12", "--prompt", "Hello", "--json"]
    result = CliRunner().invoke(app, ["compare", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    arms = json.loads(result.stdout)["arms"]
    assert set(arms) == {"ar", "ar_all_cores", "sd", "ssd"}
    assert all(arm["identical_to_ar"] == [1, 1] for arm in arms.values())


@pytest.mark.slow
def test_what_transformers_cannot_do_is_said_where_it_is_asked_for(folders) -> None:
    pair = {"target": folders["target"], "assistant": folders["speculators"], "dtype": "float32"}
    with pytest.raises(ValueError, match=r"must not hold \['hf_assisted'\] for an EAGLE-3 head"):
        compare(CompareSettings(**pair, texts=("Hello",), arms=("ar", "hf_assisted")))
    with pytest.raises(ValueError, match="`replay` must be False for an EAGLE-3 head"):
        Benchmark(BenchSettings(**pair)).run()


class TestRefusals:
    def test_a_target_of_another_size(self) -> None:
        with pytest.raises(UnsupportedError, match="hidden size 48, but it reads states of size 32"):
            enable_ssd(tiny_llama(hidden_size=48), make_head(make_target()), INLINE)

    def test_another_vocabulary(self) -> None:
        with pytest.raises(UnsupportedError, match="share the target's vocabulary"):
            check_pair(make_target(vocab_size=2000), make_head(make_target()))

    def test_drafts_that_the_target_does_not_know(self) -> None:
        with pytest.raises(UnsupportedError, match="has 60, but it drafts token 63"):
            check_pair(make_target(vocab_size=60), make_head(make_target(), draft_vocab_size=64))

    def test_an_encoder_decoder_target(self) -> None:
        config = BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1)
        config.encoder_attention_heads = config.decoder_attention_heads = 4
        with pytest.raises(UnsupportedError, match="Eagle3Head drafts for BartForConditionalGeneration"):
            check_pair(BartForConditionalGeneration(config), make_head(make_target()))

    def test_another_tokenizer(self) -> None:
        head = make_head(make_target(vocab_size=320))
        with pytest.raises(UnsupportedError, match="must read the target's tokens"):
            check_pair(make_target(vocab_size=420), head, byte_level(420), byte_level(320))
        assert check_pair(make_target(), make_head(make_target()), tiny_tokenizer(), tiny_tokenizer()) is None

    def test_layers_that_cannot_be_found(self) -> None:
        table = LookupForCausalLM.of(torch.zeros(32, 32))
        with pytest.raises(UnsupportedError, match="must keep its decoder layers in one list"):
            check_pair(table, make_head(make_target(vocab_size=32), draft_vocab_size=16))

    def test_layers_that_are_not_there(self) -> None:
        head = make_head(make_target())
        head.config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]
        with pytest.raises(UnsupportedError, match="between 1 and 2"):
            check_pair(make_target(), head)


def test_a_process_holds_a_head_as_any_assistant(folders, monkeypatch) -> None:
    """Its weights changed in place are seen there."""
    config = SSDConfig(ngram_drafts=False, num_assistant_tokens=2, backup="jit")
    pair = load_pair(folders["target"], folders["speculators"], dtype=torch.float32, ssd_config=config)
    drafts: list[Speculation] = []
    receive = Link.receive

    def noted(link: Link) -> Speculation:
        drafts.append(receive(link))
        return drafts[-1]

    monkeypatch.setattr(Link, "receive", noted)
    texts, first_drafts = [], []
    for factor in (1.0, 1.0, -1.0):
        with torch.no_grad():
            pair.assistant.lm_head.weight.mul_(factor)
        drafts.clear()
        texts.append(pair.target.generate(prompt(12, vocab_size=250), max_new_tokens=8, do_sample=False))
        assert pair.target.ssd_stats.degraded is None
        first_drafts.append(drafts[0].tokens[0])  # after the prompt: nothing depends on times yet
    close_worker(pair.assistant)
    assert texts[0].equal(texts[1])
    assert texts[0].equal(texts[2])
    assert first_drafts[0] == first_drafts[1] != first_drafts[2]
