"""Models as accelerate hands them out, and programs that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator, cpu_offload, dispatch_model
from callers.enabled import GREEDY, assert_speculated, enabled_target
from tiny_models import make_noisy, make_target, prompt

from hf_ssd import enable_ssd

TESTS = Path(__file__).parents[1]

# Each process has a part of the prompts, as in evaluation; rounds differ between them, and nothing waits for the other.
SCRIPT = """
import os, sys
sys.path[:0] = PATHS
from accelerate import Accelerator
from accelerate.utils import gather_object
from streamers import take_time
from tiny_models import make_noisy, make_target, prompt
from hf_ssd import enable_ssd
from hf_ssd.runtime import pool

accelerator = Accelerator()
model = accelerator.prepare(make_target())
target = accelerator.unwrap_model(model)
assistant = make_noisy()
enable_ssd(target, assistant)
greedy = {"max_new_tokens": 24, "do_sample": False}
with accelerator.split_between_processes([0, 1, 2, 3]) as seeds:
    found = [target.generate(prompt(seed=seed), stopping_criteria=take_time(), **greedy).tolist() for seed in seeds]
stats = target.ssd_stats
assert stats.degraded is None and stats.acceptance > 0, stats
found = gather_object(found)
workers = gather_object([pool._WORKERS[assistant].pid])
if accelerator.is_main_process:
    assert accelerator.num_processes == len(set(workers)) == 2, workers
    assert found == [make_target().generate(prompt(seed=seed), **greedy).tolist() for seed in range(4)]
    print("both have what one has alone")
"""


def test_a_prepared_model() -> None:
    accelerator = Accelerator(cpu=True)
    model = enabled_target()
    prepared = accelerator.prepare(model)
    assert prepared.generate(prompt(), **GREEDY).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(accelerator.unwrap_model(prepared))


def test_enabled_after_it_was_prepared() -> None:
    prepared = Accelerator(cpu=True).prepare(make_target())
    enable_ssd(prepared, make_noisy(), {"backend": "inline"})
    assert prepared.generate(prompt(), **GREEDY).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(prepared)


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_are_fetched_by_hooks(when: str) -> None:
    """What `device_map="auto"` makes of a model that does not fit."""
    model = make_target()
    if when == "after":
        enable_ssd(model, make_noisy(), {"backend": "inline"})
    cpu_offload(model, execution_device="cpu")
    if when == "before":
        enable_ssd(model, make_noisy(), {"backend": "inline"})
    assert model.generate(prompt(), **GREEDY).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(model)


def test_a_dispatched_model() -> None:
    model = dispatch_model(enabled_target(), {"": "cpu"}, force_hooks=True)
    assert model.generate(prompt(), **GREEDY).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(model)


@pytest.mark.slow
def test_two_processes_of_one_program(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("PATHS", repr([str(TESTS.parent), str(TESTS)])))
    # `accelerate launch --cpu` wants MPI for more than one; for an Accelerator this is the same.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [sys.executable, *launch, str(script)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "both have what one has alone" in result.stdout
