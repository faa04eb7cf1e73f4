from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3.plain_head import (
    DRAFT_VOCAB_SIZE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYER,
    TARGET_HIDDEN,
    VOCAB_SIZE,
    draft_tokens,
    plain_head,
    random_weights,
)
from safetensors.torch import load_file, save_file
from tiny_models import prompt, tiny_llama
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from hf_ssd.compat import CACHE_KEY
from hf_ssd.eagle3 import Eagle3Config, Eagle3Head, capture_features, decoder_layers, load_head, read_config
from hf_ssd.vocabulary import UnsupportedError

TOKENS = [5, 9, 2, 31, 17, 8]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "target_hidden_size": TARGET_HIDDEN, "norm_before_residual": True, "transformer_layer_config": LAYER,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
}  # fmt: skip
SAFEAILAB = {
    **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "target_hidden_size": TARGET_HIDDEN, "torch_dtype": "float32",
}  # fmt: skip


def features(seed: int = 1) -> torch.Tensor:
    return torch.randn(len(TOKENS), 3 * TARGET_HIDDEN, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], *, pickled: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def head(tmp_path: Path) -> Eagle3Head:
    return load_head(write(tmp_path / "head", SPECULATORS, random_weights()))


@torch.no_grad()
def run(head: Eagle3Head, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = head(torch.tensor([TOKENS]), head.fuse(features())[None], **kwargs)
    return output.hidden_states[0], output.logits[0]


def check(head: Eagle3Head, weights: dict[str, torch.Tensor], **options: Any) -> None:
    for found, expected in zip(run(head), plain_head(weights, TOKENS, features(), **options), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


class TestForward:
    def test_it_is_what_plain_torch_computes(self, head: Eagle3Head) -> None:
        check(head, random_weights(), norm_before_residual=True)

    @pytest.mark.parametrize("option", ["norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"])
    def test_each_variant_of_the_norms(self, option: str, tmp_path: Path) -> None:
        weights = random_weights()
        generator = torch.Generator().manual_seed(3)
        sizes = {"norm_before_fc": {"input_norm": 3 * TARGET_HIDDEN}}.get(option, {})
        sizes |= {f"fc_norm.{i}": TARGET_HIDDEN for i in range(3 if option == "fc_norm" else 0)}
        weights |= {f"{name}.weight": torch.rand(size, generator=generator) for name, size in sizes.items()}
        config = {**SPECULATORS, "norm_before_residual": False, option: True}
        check(load_head(write(tmp_path, config, weights)), weights, **{option: True})

    @torch.no_grad()
    def test_a_cache_and_a_mask_give_what_one_forward_gives(self, head: Eagle3Head) -> None:
        expected, _ = run(head)
        cache, fused, ids = head.new_cache(), head.fuse(features())[None], torch.tensor([TOKENS])
        first = head(ids[:, :4], fused[:, :4], **{CACHE_KEY: cache}).hidden_states
        # The last two tokens as two branches after the third: each sees the first three and itself.
        mask = torch.full((1, 1, 2, 6), float("-inf"))
        mask[..., :3] = 0
        mask[..., 0, 4] = mask[..., 1, 5] = 0
        positions = torch.tensor([[3, 3]])
        branches = head(ids[:, [3, 5]], fused[:, [3, 5]], positions, mask, **{CACHE_KEY: cache})
        alone = head(ids[:, [0, 1, 2, 5]], fused[:, [0, 1, 2, 5]]).hidden_states
        torch.testing.assert_close(first[0], expected[:4])
        torch.testing.assert_close(branches.hidden_states[0], torch.stack([expected[3], alone[0, 3]]))
        assert cache.get_seq_length() == 6

    @torch.no_grad()
    def test_its_own_states_stand_in_for_features(self, head: Eagle3Head) -> None:
        weights, fused = random_weights(), head.fuse(features())[None]
        states = head(torch.tensor([TOKENS]), fused).hidden_states
        chained = torch.cat([fused, states[:, -1:]], dim=1)
        found = head(torch.tensor([[*TOKENS, 4]]), chained, return_logits=False)
        assert found.logits is None
        # In plain torch, where the fusion is the identity.
        weights["fc.weight"] = torch.eye(HIDDEN)
        expected, logits = plain_head(weights, [*TOKENS, 4], chained[0], norm_before_residual=True)
        torch.testing.assert_close(found.hidden_states[0], expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(head.project(found.hidden_states)[0], logits, atol=2e-5, rtol=1e-4)

    @torch.no_grad()
    def test_it_fuses_features_itself_and_projects_what_is_asked_for(self, head: Eagle3Head) -> None:
        states, logits = run(head)
        at = torch.tensor([[True, False, False, True, True, False]])
        found = head(torch.tensor([TOKENS]), features=features()[None], logits_at=at)
        torch.testing.assert_close(found.hidden_states[0], states)
        torch.testing.assert_close(found.logits, logits[at[0]])
        with pytest.raises(ValueError, match="Either `hidden_states` or `features` must be given"):
            head(torch.tensor([TOKENS]))

    def test_full_logits_have_the_targets_ids(self, head: Eagle3Head) -> None:
        _, logits = run(head)
        full = head.full_logits(logits)
        assert full.shape == (len(TOKENS), VOCAB_SIZE)
        assert torch.equal(full[:, draft_tokens()], logits)
        assert torch.equal(full.isfinite()[0], torch.isin(torch.arange(VOCAB_SIZE), draft_tokens()))


class TestCheckpoints:
    @pytest.mark.parametrize("pickled", [False, True])
    @pytest.mark.parametrize("prefix", ["midlayer.", "model.midlayer."])
    def test_safeailabs_form(self, prefix: str, pickled: bool, tmp_path: Path) -> None:
        folder = write(tmp_path, SAFEAILAB, random_weights(prefix), pickled=pickled)
        head = load_head(folder)
        check(head, random_weights(), norm_before_residual=False)
        assert torch.equal(head.draft_tokens, draft_tokens())
        assert head.config.layer_ids(32) == [2, 16, 29]

    def test_a_saved_head_is_in_the_speculators_form(self, tmp_path: Path) -> None:
        head = load_head(write(tmp_path / "read", SAFEAILAB, random_weights("midlayer.")))
        head.config.eagle_aux_hidden_state_layer_ids = [1, 5, 7]
        head.save_pretrained(tmp_path / "saved")
        weights = load_file(tmp_path / "saved" / "model.safetensors")
        assert weights.keys() == random_weights().keys()
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config["speculators_model_type"] == "eagle3"
        assert config["architectures"] == ["Eagle3Speculator"]
        assert config["norm_before_residual"] is False
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 5, 7]
        assert config["transformer_layer_config"]["model_type"] == "llama"
        assert config["transformer_layer_config"]["head_dim"] == LAYER["head_dim"]
        assert "model_type" not in config
        again = load_head(str(tmp_path / "saved"))
        check(again, random_weights())
        assert again.config.layer_ids(9) == [1, 5, 7]

    def test_the_embedding_may_be_the_targets(self, tmp_path: Path) -> None:
        target = tiny_llama(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, num_attention_heads=4)
        folder = write(tmp_path / "read", SPECULATORS, random_weights(embedding=False))
        head = load_head(folder, target)
        table = target.get_input_embeddings().weight
        check(head, {**random_weights(), "embed_tokens.weight": table.detach()}, norm_before_residual=True)
        assert head.embed_tokens.weight.data_ptr() == table.data_ptr()
        head.save_pretrained(tmp_path / "saved")
        assert "embed_tokens.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
        with pytest.raises(UnsupportedError, match="`target` must be given"):
            load_head(folder)
        with pytest.raises(UnsupportedError, match=r"shape \(40, 24\) for this head, but got \(64, 32\)"):
            load_head(folder, tiny_llama())

    def test_without_a_list_all_tokens_are_drafted(self, tmp_path: Path) -> None:
        weights = random_weights("midlayer.")
        weights["lm_head.weight"] = torch.randn(VOCAB_SIZE, HIDDEN)
        del weights["d2t"], weights["t2d"]
        config = {name: value for name, value in SAFEAILAB.items() if name != "draft_vocab_size"}
        head = load_head(write(tmp_path, config, weights))
        assert torch.equal(head.draft_tokens, torch.arange(VOCAB_SIZE))
        assert head.t2d.all()

    def test_precision_is_the_checkpoints_or_what_was_asked_for(self, tmp_path: Path) -> None:
        weights = {
            name: weight.bfloat16() if weight.is_floating_point() else weight
            for name, weight in random_weights().items()
        }
        folder = write(tmp_path, {**SPECULATORS, "dtype": "bfloat16"}, weights)
        assert load_head(folder).dtype == torch.bfloat16
        assert load_head(folder).d2t.dtype == torch.long
        assert load_head(folder, dtype=torch.float32).dtype == torch.float32

    @pytest.mark.parametrize(
        ("config", "lost", "message"),
        [
            ({"transformer_layer_config": {**LAYER, "num_hidden_layers": 2}}, None, "one layer, but got .*=2"),
            (
                {"transformer_layer_config": {**LAYER, "model_type": "gpt2"}},
                None,
                "of type 'llama' or 'qwen3', but .*'gpt2'",
            ),
            ({"draft_vocab_size": 41}, None, "between 1 and 40, .* but got 41"),
            ({}, "d2t", "which 16 of 40 tokens are drafted, but .* lacks `d2t`"),
            ({}, "layers.0.hidden_norm.weight", "lacks layers.0.hidden_norm.weight"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, config: dict, lost: str | None, message: str, tmp_path: Path) -> None:
        weights = random_weights()
        weights.pop(lost, None)
        with pytest.raises(UnsupportedError, match=message):
            load_head(write(tmp_path, {**SPECULATORS, **config}, weights))

    @pytest.mark.parametrize(
        ("config", "weights", "message"),
        [
            (SAFEAILAB, {"fc.weight_scale": (1,)}, "but .* has fc.weight_scale too"),
            (SAFEAILAB, {"midlayer.self_attn.q_proj.bias": (HEADS * HEAD_DIM,)}, "layers.0.self_attn.q_proj.bias too"),
            ({**SAFEAILAB, "quantization_config": {"quant_method": "fp8"}}, {}, "has a `quantization_config`"),
            (
                {**SPECULATORS, "transformer_layer_config": {**LAYER, "quantization_config": {"quant_method": "fp8"}}},
                {},
                "has a `quantization_config`",
            ),
            (SAFEAILAB, {"fc.weight": (HIDDEN, TARGET_HIDDEN)}, r"fc.weight of shape \(24, 20\), where \(24, 60\) is"),
        ],
    )
    def test_weights_of_other_heads_are_refused(
        self, config: dict, weights: dict[str, tuple[int, ...]], message: str, tmp_path: Path
    ) -> None:
        prefix = "layers.0." if "transformer_layer_config" in config else "midlayer."
        others = {name: torch.zeros(shape) for name, shape in weights.items()}
        with pytest.raises(UnsupportedError, match=message):
            load_head(write(tmp_path, config, {**random_weights(prefix), **others}))

    def test_what_is_not_the_heads_is_left(self, tmp_path: Path) -> None:
        others = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(3), "verifier_norm.weight": torch.ones(HIDDEN)}
        check(load_head(write(tmp_path, SAFEAILAB, {**random_weights("midlayer."), **others})), random_weights())

    @pytest.mark.parametrize(
        ("config", "states"),
        [
            ({}, [2, 31, 59]),
            ({"eagle_config": {LAYER_IDS: [1, 30, 58]}}, [2, 31, 59]),  # layers, as SpecForge and ModelOpt count
            ({"eagle_config": {LAYER_IDS: [2, 31, 59]}}, [2, 31, 59]),
            ({"eagle_config": {LAYER_IDS: [44, 53, 62]}}, [44, 53, 62]),  # up to the last layer's
            ({LAYER_IDS: [1, 30, 58]}, [1, 30, 58]),  # states, as vLLM reads it
            ({LAYER_IDS: [1, 30, 58], "eagle_config": {LAYER_IDS: [1, 30, 58]}}, [2, 31, 59]),
            ({"eagle_config": {LAYER_IDS: []}}, [2, 31, 59]),
        ],
    )
    def test_which_layers_the_flat_form_means(self, config: dict, states: list[int], tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**SAFEAILAB, **config}))
        assert read_config(str(tmp_path)).layer_ids(62) == states

    def test_other_models_are_no_heads(self, tmp_path: Path) -> None:
        tiny_llama().save_pretrained(tmp_path)
        assert read_config(str(tmp_path)) is None
        with pytest.raises(UnsupportedError, match="holds another model"):
            load_head(str(tmp_path))

    def test_qwen3_layers(self, tmp_path: Path) -> None:
        layer = {**LAYER, "model_type": "qwen3"}
        names = {f"layers.0.self_attn.{name}_norm.weight": torch.ones(LAYER["head_dim"]) for name in "qk"}
        config = {**SPECULATORS, "transformer_layer_config": layer}
        head = load_head(write(tmp_path, config, {**random_weights(), **names}))
        assert head.layers[0].self_attn.q_norm.weight.shape == (LAYER["head_dim"],)
        assert run(head)[1].shape == (len(TOKENS), DRAFT_VOCAB_SIZE)

    def test_a_target_of_other_layers_is_refused(self) -> None:
        config = Eagle3Config(
            transformer_layer_config=LAYER, draft_vocab_size=8, eagle_aux_hidden_state_layer_ids=[2, 9, 12]
        )
        with pytest.raises(UnsupportedError, match=r"between 1 and 10, .* but got \[2, 9, 12\]"):
            config.layer_ids(10)


class TestFeatures:
    @pytest.mark.parametrize("ids", [[1, 2, 4], [4, 1, 1]])
    def test_they_are_transformers_own_hidden_states(self, ids: list[int], tmp_path: Path) -> None:
        tiny_llama(num_hidden_layers=5).save_pretrained(tmp_path)
        target = AutoModelForCausalLM.from_pretrained(tmp_path)
        with torch.no_grad(), capture_features(target, ids) as captured:
            target(prompt(7))
            found = captured()
        states = target(prompt(7), output_hidden_states=True).hidden_states
        torch.testing.assert_close(found, torch.cat([states[i] for i in ids], dim=-1))

    def test_nothing_stays_behind(self) -> None:
        target = tiny_llama()
        with pytest.raises(KeyError), capture_features(target, [1, 2, 1]):
            raise KeyError
        assert not any(layer._forward_hooks for layer in decoder_layers(target))

    def test_a_chain_with_features_of_a_target(self) -> None:
        target = tiny_llama(num_hidden_layers=3)
        config = Eagle3Config(
            transformer_layer_config={**target.config.to_dict(), "num_hidden_layers": 1}, draft_vocab_size=64
        )
        head = Eagle3Head(config).eval()
        head.share_embedding(target)
        with torch.no_grad(), capture_features(target, config.layer_ids(3)) as captured:
            target(prompt(7))
            logits = head(prompt(7)[:, 1:], head.fuse(captured()[:, :-1]), **{CACHE_KEY: DynamicCache()}).logits
        assert logits.shape == (1, 6, 64)
        assert logits.isfinite().all()
