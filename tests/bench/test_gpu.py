"""The GPU benchmark, on the CPU and tiny shapes."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from streamers import take_time
from tiny_models import prompt

from hf_ssd import SSDConfig
from hf_ssd.bench import gpu
from hf_ssd.bench.gpu import ARMS, GpuBenchSettings
from hf_ssd.bench.synthetic import SHAPES, SyntheticForCausalLM
from hf_ssd.drafting import AssistantModel
from hf_ssd.generation import generate_with_ssd


class TestSynthetic:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_its_choices_are_clear(self, dtype) -> None:
        """So that no rounding changes a text."""
        model = SyntheticForCausalLM.of(SHAPES["tiny-target"], dtype=dtype)
        ids = model.generate(prompt(6), max_new_tokens=64, do_sample=False)
        with torch.inference_mode():
            best = model(ids).logits[0, 5:-1].float().topk(2)
        assert best.indices[:, 0].tolist() == ids[0, 6:].tolist()
        assert (best.values[:, 0] - best.values[:, 1]).min() > 5
        assert len(set(ids[0].tolist())) > 30, "it repeats itself"

    @pytest.mark.parametrize("agreement", [0.5, 0.8])
    def test_the_assistant_agrees_as_often_as_it_is_told_to(self, agreement) -> None:
        target = SyntheticForCausalLM.of(SHAPES["tiny-target"], dtype=torch.float32)
        assistant = SyntheticForCausalLM.of(SHAPES["tiny"], agreement=agreement, dtype=torch.float32, seed=1)
        ids = torch.randint(512, (1, 2000), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            right = target(ids).logits[0].argmax(-1)
            choices = assistant(ids).logits[0].topk(2).indices
        first, second = (choices == right[:, None]).T
        assert abs(first.float().mean() - agreement) < 0.04
        assert abs(second[~first].float().mean() - 0.75) < 0.06

    def test_it_is_an_assistant_like_any_other(self) -> None:
        assistant = AssistantModel(SyntheticForCausalLM.of(SHAPES["tiny"], agreement=0.8, dtype=torch.float32))
        assert assistant.head is not None
        assert assistant.takes_trees

    def test_random_state_and_default_dtype_are_left_alone(self) -> None:
        state = torch.get_rng_state()
        SyntheticForCausalLM.of(SHAPES["tiny"])
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() == torch.float32

    def test_by_a_thread_the_text_is_the_targets(self) -> None:
        target = SyntheticForCausalLM.of(SHAPES["tiny-target"])
        assistant = SyntheticForCausalLM.of(SHAPES["tiny"], agreement=0.8, seed=1)
        arguments = {"max_new_tokens": 48, "do_sample": False}
        expected = target.generate(prompt(6), **arguments).tolist()
        arguments |= {"assistant_model": assistant, "stopping_criteria": take_time()}
        ids = generate_with_ssd(target, inputs=prompt(6), ssd_config=SSDConfig(backend="stream"), **arguments)
        assert ids.tolist() == expected
        assert target.ssd_stats.num_hits


class TestSettings:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"target": "70b"}, "`target` must be one of .* but got '70b'"),
            ({"arms": ("AR", "magic")}, r"`arms` must be some of .* but got \['magic'\]"),
            ({"acceptances": (1.5,)}, r"`acceptances` .* between 0 and 1, but got \(1.5,\)"),
            ({"repeats": 0}, "`repeats` must be at least 1, but got 0"),
        ],
    )
    def test_what_is_refused(self, fields, message) -> None:
        with pytest.raises(ValueError, match=message):
            GpuBenchSettings(**fields)

    def test_options(self) -> None:
        settings, path = gpu._parse(["--acceptances", "0.5", "0.7", "--arms", "AR", "SSD (stream)", "--repeats", "2"])
        assert settings == GpuBenchSettings(acceptances=(0.5, 0.7), arms=("AR", "SSD (stream)"), repeats=2)
        assert path is None


@pytest.mark.slow
def test_all_arms_on_the_cpu(tmp_path) -> None:
    console = Console(file=io.StringIO(), width=140)
    path = tmp_path / "figures.json"
    assert gpu.main(["--tiny", "--json", str(path)], console) == 0
    report = json.loads(path.read_text())
    assert [each["arm"] for each in report["results"]] == list(ARMS)
    for each in report["results"]:
        assert each["is_identical"]
        assert each["tokens_per_s"] > 0
        assert (each["verify_ms"] is not None) == (ARMS[each["arm"]] is not None)
    text = console.file.getvalue()
    assert "draft tokens right in 80% of cases" in text
    assert "hit rate" in text


def test_the_time_limit_leaves_at_least_one_repeat() -> None:
    console = Console(file=io.StringIO(), width=140)
    arguments = ["--tiny", "--arms", "AR", "HF assisted", "--time-limit-s", "0"]
    assert gpu.main(arguments, console) == 0
    settings, _ = gpu._parse(arguments)
    assert settings.time_limit_s == 0
