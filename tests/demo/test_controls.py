from __future__ import annotations

import pytest

from demo.controls import race_settings
from demo.options import DemoOptions
from demo.race import SAME_CORES
from hf_ssd import SSDConfig

DEFAULTS = {
    "arms": ["AR", "SD", "SSD"],
    "dtype": "bfloat16",
    "max_new_tokens": 64,
    "temperature": 0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1,
    "seed": 0,
    "verification": "auto",
    "num_assistant_tokens": "auto",
    "draft_tree_size": "auto",
    "cache_budget": "auto",
    "fan_out": "per_instance",
    "saguaro_coefficient": 1.0,
    "backup": "auto",
    "draft_vocab_size": "auto",
    "target_threads": "auto",
    "assistant_threads": "auto",
    "ar_threads": SAME_CORES,
}


def test_untouched_controls_are_the_defaults_of_the_library():
    settings = race_settings(DEFAULTS)
    assert settings.ssd_config == SSDConfig(seed=0)
    assert not settings.do_sample
    assert settings.promises_identity


def test_typed_values_reach_the_config():
    settings = race_settings(
        DEFAULTS
        | {
            "num_assistant_tokens": "3",
            "draft_tree_size": "none",
            "cache_budget": " 12 ",
            "fan_out": "4, 2, 1",
            "saguaro_coefficient": 0.5,
            "backup": "ngram",
            "draft_vocab_size": "none",
            "target_threads": "2",
            "assistant_threads": 1,
            "seed": 7,
            "verification": "block",
            "temperature": 0.7,
            "top_k": 20,
            "arms": ["SSD", "AR"],
        }
    )
    assert settings.ssd_config == SSDConfig(
        num_assistant_tokens=3,
        draft_tree_size=None,
        cache_budget=12,
        fan_out=(4, 2, 1),
        saguaro_coefficient=0.5,
        backup="ngram",
        draft_vocab_size=None,
        target_threads=2,
        assistant_threads=1,
        seed=7,
        verification="block",
    )
    assert settings.sampling == {"temperature": 0.7, "top_k": 20, "top_p": 1.0}
    assert settings.arms == ("AR", "SSD")
    assert not settings.promises_identity


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_assistant_tokens", "many", r"`num_assistant_tokens` must be a whole number or one of \['auto'\].*'many'"),
        ("num_assistant_tokens", "0", r"`num_assistant_tokens` must be at least 1.*0"),
        ("cache_budget", "-3", r"`cache_budget` must be at least 1.*-3"),
        ("fan_out", "widest", r"`fan_out` must be one of.*'widest'"),
        ("fan_out", "0,0", r"`fan_out` must hold a number above 0"),
        ("saguaro_coefficient", 1.5, r"`saguaro_coefficient` must lie above 0 and be at most 1.*1\.5"),
        ("saguaro_coefficient", None, r"`saguaro_coefficient` must be a number"),
        ("seed", -1, r"`seed` must be at least 0.*-1"),
        ("temperature", -0.5, r"`temperature` must be 0 or more.*-0\.5"),
        ("temperature", None, r"`temperature` must be a number"),
        ("top_p", 1.5, r"`top_p` must lie above 0.*1\.5"),
        ("top_k", -1, r"`top_k` must be 0 or more.*-1"),
        ("repetition_penalty", 0, r"`repetition_penalty` must be above 0.*0"),
        ("target_threads", "0", r"`target_threads` must be at least 1.*0"),
        ("arms", [], r"`modes` must hold at least one"),
    ],
)
def test_values_that_are_not_allowed_say_so(name, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        race_settings(DEFAULTS | {name: value})


def test_a_penalty_alone_does_not_sample():
    settings = race_settings(DEFAULTS | {"repetition_penalty": 1.2})
    assert settings.sampling == {"repetition_penalty": 1.2}
    assert not settings.do_sample


def test_every_control_explains_itself_and_begins_with_the_default():
    from gradio import Blocks

    from demo.controls import Controls

    with Blocks():
        controls = Controls(DemoOptions())
    names = set(controls._components)
    assert names == set(DEFAULTS)
    assert all(each.info for each in controls.components)
    settings = controls.settings([each.value for each in controls.components])
    assert settings.ssd_config == SSDConfig(seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": "a"}, r"`target` and `assistant` must be given together.*'a'"),
        ({"dtype": "int8"}, r"`dtype` must be one of.*'int8'"),
        ({"max_prompt_tokens": 0}, r"`max_prompt_tokens` must be at least 1.*0"),
        ({"target_threads": 0}, r"`target_threads` must be at least 1.*0"),
    ],
)
def test_bad_options_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DemoOptions(**values)
