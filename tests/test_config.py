from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

from hf_ssd import SSDConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "fast", r"`mode` must be one of .*'ssd'.*, but got 'fast'"),
        ("backend", "thread", r"`backend` must be one of .*'process'.*, but got 'thread'"),
        ("num_assistant_tokens", 0, r"`num_assistant_tokens` must be at least 1, but got 0\. Or use \"auto\""),
        (
            "draft_tree_size",
            0,
            r"`draft_tree_size` must be at least 1, but got 0\. Or use \"auto\", or None for chains",
        ),
        ("cache_budget", 0, r"`cache_budget` must be at least 1, but got 0\. Or use \"auto\", or mode=\"sd\""),
        ("assistant_quantization", "int4", r"`assistant_quantization` must be one of .*'int8'.*, but got 'int4'"),
        ("fan_out", "square", r"`fan_out` must be one of .*'geometric'.*, but got 'square'"),
        ("fan_out", [2, -1], r"`fan_out` must be at least 0, but got -1"),
        ("fan_out", [0, 0], r"`fan_out` must hold a number above 0, but got \(0, 0\)\. .*mode=\"sd\""),
        ("expected_acceptance", 0.0, r"`expected_acceptance` must lie between 0 and 1.*but got 0\.0"),
        ("expected_acceptance", 1, r"`expected_acceptance` must lie between 0 and 1.*but got 1"),
        ("power_law_exponent", 0.0, r"`power_law_exponent` must be a positive number, but got 0\.0"),
        ("power_law_exponent", float("nan"), r"`power_law_exponent` must be a positive number, but got nan"),
        ("draft_vocab_size", 0, r"`draft_vocab_size` must be at least 1, but got 0\. Or use \"auto\", or None"),
        ("target_threads", 0, r"`target_threads` must be at least 1, but got 0\. Use None"),
        ("assistant_threads", -2, r"`assistant_threads` must be at least 1, but got -2\. Use None"),
        ("assistant_device", "gpu", r"`assistant_device` must be \"auto\" or a device.*but got 'gpu'"),
        ("assistant_device", None, r"`assistant_device` must be \"auto\" or a device.*but got None"),
        ("target_threads", 10**9, r"`target_threads` must be at most 4096, but got 1000000000\. Use None"),
        ("timeout_s", 0, r"`timeout_s` must be a positive number of seconds, at most 86400 .*but got 0"),
        ("timeout_s", float("inf"), r"`timeout_s` must be a positive number .*but got inf"),
        ("timeout_s", 1e300, r"`timeout_s` must be a positive number of seconds, at most 86400 .*but got 1e\+300"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_its_remedy(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SSDConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_assistant_tokens", "5", r"`num_assistant_tokens` must be a whole number, but got '5'\. Or use \"auto\""),
        ("num_assistant_tokens", 2.5, r"`num_assistant_tokens` must be a whole number, but got 2\.5"),
        ("num_assistant_tokens", None, r"`num_assistant_tokens` must be a whole number, but got None"),
        ("draft_tree_size", "all", r"`draft_tree_size` must be a whole number, but got 'all'"),
        ("draft_tree_size", False, r"`draft_tree_size` must be a whole number, but got False"),
        ("ngram_drafts", None, r"`ngram_drafts` must be True or False, but got None"),
        ("cache_budget", None, r"`cache_budget` must be a whole number, but got None\. Or use \"auto\""),
        ("cache_budget", True, r"`cache_budget` must be a whole number, but got True"),
        ("fan_out", 3, r"`fan_out` must be one of .* or a list of numbers, but got 3"),
        ("fan_out", [], r"`fan_out` must be one of .* or a list of numbers, but got \[\]"),
        ("fan_out", [1.5], r"`fan_out` must be a whole number, but got 1\.5"),
        ("expected_acceptance", "0.7", r"`expected_acceptance` must be a number, but got '0\.7'"),
        ("power_law_exponent", True, r"`power_law_exponent` must be a number, but got True"),
        ("draft_vocab_size", "all", r"`draft_vocab_size` must be a whole number, but got 'all'"),
        ("target_threads", 1.0, r"`target_threads` must be a whole number, but got 1\.0"),
        ("timeout_s", "60", r"`timeout_s` must be a number, but got '60'"),
        ("trace", "trace.json", r"`trace` must be True or False, but got 'trace\.json'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SSDConfig(**{field: value})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SSDConfig().mode = "ar"  # type: ignore[misc]


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['budget'\].*cache_budget"):
        SSDConfig.of({"budget": 3})


@pytest.mark.parametrize("values", [["mode"], "mode", None, 3])
def test_a_file_that_holds_no_settings_is_refused(values: object) -> None:
    with pytest.raises(TypeError, match="must be an SSDConfig or a dict, but got"):
        SSDConfig.from_dict(values)  # type: ignore[arg-type]


def test_anything_else_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match="must be an SSDConfig or a dict, but got str"):
        SSDConfig.of("ssd")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        SSDConfig(),
        SSDConfig(fan_out=[3, 2, 1], draft_vocab_size=None, timeout_s=5),
        SSDConfig(draft_tree_size=None, assistant_quantization=None, cache_budget=3, ngram_drafts=False),
    ],
)
def test_a_config_survives_json_and_pickle(config: SSDConfig) -> None:
    assert SSDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))


def test_to_dict_names_every_field() -> None:
    assert set(SSDConfig().to_dict()) == {field.name for field in dataclasses.fields(SSDConfig)}


def test_of_takes_a_config_a_dict_or_nothing() -> None:
    config = SSDConfig(mode="sd")
    assert SSDConfig.of(config) is config
    assert SSDConfig.of({"mode": "sd"}) == config
    assert SSDConfig.of(None) == SSDConfig()


@pytest.mark.parametrize(("device", "text"), [(torch.device("cpu"), "cpu"), (1, "cuda:1"), ("auto", "auto")])
def test_a_device_is_kept_as_text(device: object, text: str) -> None:
    assert SSDConfig(assistant_device=device).assistant_device == text  # type: ignore[arg-type]


def test_auto_allows_sixteen_draft_tokens_in_a_chain_and_twenty_four_in_a_tree() -> None:
    assert SSDConfig().max_draft_tokens == 16
    assert SSDConfig(num_assistant_tokens=3).max_draft_tokens == 3
    assert SSDConfig().max_tree_tokens == 24
    assert SSDConfig(draft_tree_size=3).max_tree_tokens == 3
    assert SSDConfig(draft_tree_size=None).max_tree_tokens == 0
