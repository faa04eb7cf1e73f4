from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from race import SSDRace
from typer.testing import CliRunner

from hf_ssd.bench.advice import Devices, advise
from hf_ssd.bench.conditions import (
    NOMINAL_BUDGET,
    Backup,
    Changes,
    Conditions,
    assumed_conditions,
    conditions_of,
    pooled_acceptance,
)
from hf_ssd.bench.forecast import ForecastSettings, check, forecast
from hf_ssd.bench.prediction import predict_ar, predict_sd, predict_ssd
from hf_ssd.bench.presets import PRESETS
from hf_ssd.bench.profile import Profile
from hf_ssd.bench.recorded import MAX_FILE_BYTES, read_runs
from hf_ssd.cli import app
from hf_ssd.config import SSDConfig

runner = CliRunner()

GIVEN = ["--target-ms", "30", "--assistant-ms", "4", "--acceptance", "0.8", "--hit-rate", "0.9"]


def conditions(**changes: float) -> Conditions:
    return assumed_conditions(Changes(**{"target_ms": 30.0, "assistant_ms": 4.0, "acceptance": 0.8, **changes}))


def profile(mode: str, **changes: Any) -> Profile:
    """What a pair like `conditions(hit_rate=0.9)` leaves behind, whatever else it reached."""
    figures = {
        "mode": mode,
        "num_calls": 4,
        "num_rounds": 100,
        "num_tokens": 304,
        "decode_tokens_per_s": 70.0,
        "prefill_ms": 100.0,
        "verify_base_ms": 29.85,
        "verify_token_ms": 0.15,
        "verify_single_ms": None,
        "overhead_ms": 0.5,
        "acceptance": (0.8, 0.64, 0.512),
        "num_drafted": (100, 100, 100),
        "width": 1.0,
        "hit_rate": None,
        "tokens_at_hit": None,
        "tokens_at_miss": 3.0,
        "depth_at_hit": None,
        "depths_at_miss": (),
        "wait_at_hit_ms": None,
        "wait_at_miss_ms": 12.0,
        "step_ms": None,
        "steps_at_hit": None,
        "steps_at_miss": None,
        "token_ms": 4.0,
    }
    if mode == "ssd":
        figures |= {"hit_rate": 0.9, "step_ms": 5.0}
    return Profile(**{**figures, **changes})


def comparison(**measured: float) -> dict[str, Any]:
    """What `hf-ssd compare --json` prints, as far as it is read."""
    arms: dict[str, Any] = {name: {"decode_tokens_per_s": speed, "profile": None} for name, speed in measured.items()}
    for name in ("sd", "ssd"):
        if name in arms:
            arms[name] |= {"profile": profile(name).to_dict(), "settings": SSDConfig(mode=name).to_dict()}
    return {"pair": {"target": "large", "assistant": "small"}, "dtype": "bfloat16", "arms": arms}


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


class TestConditions:
    def test_acceptance_is_pooled_and_leans_on_the_first_position_where_little_was_drafted(self) -> None:
        first = profile("ssd", acceptance=(0.6,), num_drafted=(60,))
        second = profile("sd", acceptance=(0.9, 0.5), num_drafted=(30, 20))
        typical = (36 + 27) / 90
        until_second = (10 + 4 * typical * typical) / (20 + 4)
        expected = (typical, until_second / typical, typical)
        assert pooled_acceptance([first, second], 3) == pytest.approx(expected)

    def test_acceptance_never_rises_from_one_position_to_the_next(self) -> None:
        """Only where much was likely did speculations get to the second position; its acceptance is no better."""
        selected = profile("sd", acceptance=(0.5, 0.9), num_drafted=(100, 100))
        assert pooled_acceptance([selected], 2) == pytest.approx((0.5, 1.0))
        assert pooled_acceptance([profile("sd", acceptance=(0.0,), num_drafted=(9,))], 2) == (0.0, 0.0)

    def test_times_are_those_of_the_first_arm(self) -> None:
        sd, ssd = profile("sd", verify_base_ms=20.0, token_ms=3.0), profile("ssd")
        config = SSDConfig()
        assert conditions_of(config, [ssd, sd]).verify_base_ms == ssd.verify_base_ms
        assert conditions_of(config, [sd, ssd]).verify_base_ms == 20.0
        assert conditions_of(config, [sd, ssd]).token_ms == 3.0

    def test_what_an_arm_never_did_is_taken_from_what_is_nearest(self) -> None:
        never_missed = profile("ssd", token_ms=None)
        never_hit = profile("ssd", step_ms=None, hit_rate=0.0)
        assert conditions_of(SSDConfig(), [never_missed, profile("sd", token_ms=3.0)]).token_ms == 3.0
        assert conditions_of(SSDConfig(), [never_missed]).token_ms == never_missed.step_ms
        assert conditions_of(SSDConfig(), [never_hit]).step_ms == never_hit.token_ms
        assert conditions_of(SSDConfig(), [never_hit]).hit_rate(8) == pytest.approx(0.0)

    def test_the_hit_rate_of_the_run_is_that_at_its_budget(self) -> None:
        assert conditions_of(SSDConfig(), [profile("ssd")]).hit_rate(NOMINAL_BUDGET) == pytest.approx(0.9)
        assert conditions_of(SSDConfig(cache_budget=12), [profile("ssd")]).hit_rate(12) == pytest.approx(0.9)
        assert conditions_of(SSDConfig(power_law_exponent=0.4), [profile("sd")]).exponent == 0.4

    def test_what_came_of_drafting_is_kept(self) -> None:
        """A tree holds several tokens per position, and not every step makes the branch that hits longer."""
        ssd = profile("ssd", width=3.0, depth_at_hit=2.0, steps_at_hit=2.5, hit_rate=0.5)
        sd = profile("sd", depths_at_miss=(0, 10, 0, 30), steps_at_miss=2.5)
        typical = Backup((0.0, 0.25, 0.0, 0.75), 2.5)
        assert typical.depth == 2.5
        found = conditions_of(SSDConfig(), [ssd, sd])
        assert (found.width, found.depth_per_step, found.backup) == (3.0, 0.8, typical)
        assert conditions_of(SSDConfig(), [sd, ssd]).backup == typical  # SSD does not know its own
        # After other times or acceptance, drafting would go on for longer or shorter.
        assert found.changed(Changes(target_ms=60.0)).backup is None
        assert found.changed(Changes(hit_rate=0.5)).backup == typical

    def test_what_was_seen_too_seldom_is_not_typical(self) -> None:
        ssd = profile("ssd", depths_at_miss=(0, 0, 0, 5), steps_at_miss=3.5, token_ms=9.0)
        sd = profile("sd", depths_at_miss=(0, 0, 0, 50), steps_at_miss=3.0, token_ms=4.0)
        assert conditions_of(SSDConfig(), [ssd]).backup is None
        assert conditions_of(SSDConfig(), [ssd]).token_ms == 9.0
        assert conditions_of(SSDConfig(), [ssd, sd]).token_ms == 4.0

    def test_settings_of_the_run_are_kept(self) -> None:
        config = SSDConfig(num_assistant_tokens=5, cache_budget=12, power_law_exponent=0.4)
        found = conditions_of(config, [profile("ssd")])
        assert (len(found.acceptance), found.draft_length) == (5, 5)
        assert (found.budget, found.fan_out_exponent) == (12, 0.4)
        assert found.branch_ms == pytest.approx((5.0 - 4.0) / 11)

    def test_a_run_without_draft_tokens_is_refused(self) -> None:
        with pytest.raises(ValueError, match="none of the 1 profiles has any"):
            conditions_of(SSDConfig(), [profile("sd", acceptance=(), num_drafted=())])


class TestPaper:
    """70B target on four devices, 1B assistant on a fifth (arXiv 2603.03251)."""

    PAPER = PRESETS["paper"]

    def test_the_shape_of_its_result(self) -> None:
        ar = predict_ar(self.PAPER.conditions).tokens_per_s
        assert 2.5 <= predict_sd(self.PAPER.conditions).tokens_per_s / ar <= 3.3
        assert 4.5 <= predict_ssd(self.PAPER.conditions).tokens_per_s / ar <= 5.5

    @pytest.mark.parametrize(("batch_size", "published"), [(2, 409), (4, 681), (8, 1166), (16, 1900)])
    def test_larger_batches_come_out_as_published(self, batch_size: int, published: float) -> None:
        """Only the time of 21 branches and what a branch adds were taken from these runs, not their speeds."""
        predicted = predict_ssd(self.PAPER.conditions, batch_size).tokens_per_s
        assert predicted == pytest.approx(published, rel=0.25)

    def test_per_device_the_gain_is_smaller(self) -> None:
        ssd, sd = predict_ssd(self.PAPER.conditions), predict_sd(self.PAPER.conditions)
        share = self.PAPER.devices.share
        assert share(ssd) / share(sd) == pytest.approx(ssd.tokens_per_s / sd.tokens_per_s * 4 / 5)


class TestAdvice:
    def advise(self, given: Conditions, **changes: Any) -> Any:
        return advise(given, **{"batch_size": 1, "budgets": (4, 8, 16), "devices": Devices(), **changes})

    def test_ssd_where_drafting_can_be_hidden(self) -> None:
        advice = self.advise(conditions(hit_rate=0.9))
        assert advice.settings["mode"] == "ssd"
        assert "times SD" in advice.reasons[0]

    def test_sd_where_hardly_anything_hits_and_drafting_costs_little(self) -> None:
        advice = self.advise(conditions(assistant_ms=0.3, hit_rate=0.05))
        assert advice.settings["mode"] == "sd"
        assert "drafting ahead adds nothing" in advice.reasons[0]

    def test_ar_where_the_assistant_is_slow_and_mostly_wrong(self) -> None:
        advice = self.advise(conditions(assistant_ms=25.0, acceptance=0.1, hit_rate=0.2), vocab_size=50_000)
        assert advice.settings == {"mode": "ar"}
        assert "Drafting costs more than it gives" in advice.reasons[0]

    def test_the_smallest_budget_that_is_about_as_fast_as_any(self) -> None:
        given = conditions(hit_rate=0.9, assistant_token_ms=0.0)
        speeds = {budget: predict_ssd(given, budget=budget).tokens_per_s for budget in (4, 8, 16)}
        budget = self.advise(given).prediction.budget
        assert speeds[budget] * 1.03 >= max(speeds.values())
        assert all(speeds[b] * 1.03 < max(speeds.values()) for b in speeds if b < budget)

    def test_longer_speculations_where_auto_stops_too_soon(self) -> None:
        fast = conditions(target_ms=100.0, assistant_ms=4.0, acceptance=0.97, hit_rate=0.97)
        advice = self.advise(fast)
        assert advice.settings["mode"] == "ssd"
        assert advice.settings["num_assistant_tokens"] in (24, 32)
        assert self.advise(conditions(hit_rate=0.9)).settings["num_assistant_tokens"] == "auto"

    @pytest.mark.parametrize(("vocab_size", "expected"), [(None, "auto"), (8_000, None), (152_000, 38_000)])
    def test_a_draft_vocabulary_where_the_projection_is_large(self, vocab_size: int | None, expected: Any) -> None:
        advice = self.advise(conditions(hit_rate=0.9), vocab_size=vocab_size)
        assert advice.settings["draft_vocab_size"] == expected
        SSDConfig(**advice.settings)  # it can be used as it stands

    def test_it_says_when_another_mode_gives_more_per_device(self) -> None:
        advice = self.advise(conditions(hit_rate=0.9), devices=Devices(1, 3))
        assert advice.settings["mode"] == "ssd"
        assert "Counted per device SD gives most" in advice.reasons[-1]

    def test_numbers_of_devices_are_checked(self) -> None:
        with pytest.raises(ValueError, match="`assistant_devices` must be at least 1, but got 0"):
            Devices(4, 0)


class TestRecorded:
    def test_a_comparison(self, tmp_path: Path) -> None:
        (run,) = read_runs(write(tmp_path / "run.json", comparison(ar=33.0, sd=60.0, ssd=80.0, hf_assisted=50.0)))
        assert run.title == "large with small, bfloat16"
        assert run.tokens_per_s == {"ar": 33.0, "sd": 60.0, "ssd": 80.0}
        assert run.config == SSDConfig()

    def test_a_benchmark_has_a_run_per_temperature_and_speeds_with_intervals(self, tmp_path: Path) -> None:
        values = comparison(ar=33.0, ssd=80.0)
        arms = values.pop("arms")
        arms["ssd"]["decode_tokens_per_s"] = {"value": 80.0, "low": 70.0, "high": 90.0}
        arms["ssd"]["settings"]["tried_tokens_per_s"] = {"B=8": 1.0}
        values["measurements"] = [{"temperature": t, "arms": arms} for t in (0.0, 0.8)]
        cold, warm = read_runs(write(tmp_path / "bench.json", values))
        assert (cold.title[-13:], warm.title[-15:]) == ("temperature 0", "temperature 0.8")
        assert warm.tokens_per_s == {"ar": 33.0, "ssd": 80.0}

    def test_checks_compare_each_arm_with_its_prediction(self, tmp_path: Path) -> None:
        (run,) = read_runs(write(tmp_path / "run.json", comparison(ar=33.0, sd=60.0, ssd=80.0)))
        checks = {each.mode: each for each in check(run)}
        assert list(checks) == ["ar", "sd", "ssd"]
        assert checks["sd"].prediction == predict_sd(run.conditions("sd"))
        assert checks["ssd"].deviation == pytest.approx(checks["ssd"].prediction.tokens_per_s / 80.0 - 1)
        assert checks["ar"].measured_tokens_per_round == 1.0
        assert checks["ssd"].measured_tokens_per_round == 3.0

    def test_a_forecast_takes_ar_as_it_was_measured(self, tmp_path: Path) -> None:
        """The line over several tokens need not hold for one; a check must not know the answer, a forecast should."""
        (run,) = read_runs(write(tmp_path / "run.json", comparison(ar=25.0, ssd=80.0)))
        assert predict_ar(run.as_measured()).tokens_per_s == pytest.approx(25.0)
        assert predict_ar(run.conditions()).tokens_per_s == pytest.approx(1e3 / 30.5)

    def test_speed_is_no_input(self, tmp_path: Path) -> None:
        """Otherwise it would be no prediction. So are tokens per round and waiting."""
        reached = {
            "decode_tokens_per_s": 1.0, "tokens_at_hit": 9.0, "tokens_at_miss": 9.0,
            "wait_at_hit_ms": 99.0, "wait_at_miss_ms": 99.0,
        }  # fmt: skip
        expected = conditions_of(SSDConfig(), [profile("ssd"), profile("sd")])
        found = conditions_of(SSDConfig(), [replace(profile(mode), **reached) for mode in ("ssd", "sd")])
        assert found == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tokens/s: 12", "`result` must be JSON"),
            ("[1, 2]", "`result` must hold the profile of an arm"),
            ('{"arms": {"ar": {"decode_tokens_per_s": 3.0}}}', "`result` must hold the profile of an arm"),
            ('{"arms": ["ssd"]}', "`result` must hold what `hf-ssd compare --json` or `hf-ssd bench` wrote"),
            ("[" * 100_000, "`result` must be JSON"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_runs(path)

    @pytest.mark.parametrize("value", [None, True, "x", -1e999, [], ["x"], {}, {"value": "x"}, [[1]]])
    def test_whatever_is_changed_in_a_file_is_refused_or_read(self, tmp_path: Path, value: object) -> None:
        """Each value of it in turn: nothing but a `ValueError` may come of that."""
        whole = comparison(ar=33.0, sd=60.0, ssd=80.0)
        for keys in list(paths_in(whole)):
            values = json.loads(json.dumps(whole))
            place = values
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = value
            with contextlib.suppress(ValueError):
                read_runs(write(tmp_path / "changed.json", values))

    def test_a_file_that_is_too_large_is_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "large.json"
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
        with pytest.raises(ValueError, match=r"`result` must have at most \d+ bytes"):
            read_runs(path)


def paths_in(values: object, keys: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The keys that lead to each value in plain values."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield (*keys, key)
        yield from paths_in(value, (*keys, key))


def test_a_run_that_was_played_is_predicted() -> None:
    """Everything between a race and its prediction: what was measured in it is all that is known of it."""
    truth = conditions(hit_rate=0.8)
    race = SSDRace(truth).run(5_000)
    measured = profile(
        "ssd",
        verify_base_ms=truth.verify_base_ms,
        verify_token_ms=truth.verify_token_ms,
        overhead_ms=0.0,
        hit_rate=0.8,
        step_ms=truth.step_ms,
    )
    predicted = predict_ssd(conditions_of(SSDConfig(), [measured]))
    assert predicted.tokens_per_s == pytest.approx(race.tokens_per_s, rel=0.05)


class TestCommand:
    def test_a_measured_run(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.json", comparison(ar=33.0, sd=60.0, ssd=80.0))
        result = runner.invoke(app, ["predict", str(path), "--vocab-size", "152000"])
        assert result.exit_code == 0
        for text in ("large with small", "deviation", "batch", "Perfect SSD", "SSDConfig(mode='ssd'", "152000 tokens"):
            assert text in result.output

    def test_other_hardware_for_a_measured_run(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.json", comparison(sd=60.0, ssd=80.0))
        slow, fast = (
            json.loads(runner.invoke(app, ["predict", str(path), "--json", "--target-ms", ms]).output)[0]
            for ms in ("60", "30")
        )
        assert slow["checks"] == fast["checks"]  # what was measured is checked as it was measured
        assert slow["forecast"]["rows"][0]["ar"]["round_ms"] == pytest.approx(61.0)
        assert fast["forecast"]["rows"][0]["ar"]["round_ms"] == pytest.approx(30.5)

    def test_given_times_as_json(self) -> None:
        arguments = ["--batch-sizes", "1,8", "--budgets", "4,8", "--assistant-devices", "2", "--json"]
        (scenario,) = json.loads(runner.invoke(app, ["predict", *GIVEN, *arguments]).output)
        found = scenario["forecast"]
        given = conditions(hit_rate=0.9)
        assert [row["batch_size"] for row in found["rows"]] == [1, 8]
        assert found["rows"][1]["ssd"][0]["tokens_per_s"] == pytest.approx(predict_ssd(given, 8, 4).tokens_per_s)
        per_device = found["tokens_per_s_per_device"][0]
        assert per_device["ssd"][1] == pytest.approx(found["rows"][0]["ssd"][1]["tokens_per_s"] / 3)
        assert per_device["sd"] == pytest.approx(found["rows"][0]["sd"]["tokens_per_s"])
        assert found["chain_bound"] == pytest.approx(5.0)
        assert found["entropy_bound"] is None

    def test_the_entropy_of_the_target_bounds_what_any_draft_gives(self) -> None:
        result = runner.invoke(app, ["predict", *GIVEN, "--entropy", "1.5", "--entropy-second-moment", "4"])
        assert re.search(r"more than about \d+\.\d\d per target forward", result.output)

    def test_the_preset_states_its_assumptions(self) -> None:
        output = runner.invoke(app, ["predict", "--preset", "paper"]).output
        assert output.count("Assumed:") == len(PRESETS["paper"].assumptions)
        assert "4 for AR and SD and 5 for SSD" in " ".join(output.split())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "needs the file of a measured run, a preset, or"),
            (["--target-ms", "30", "--assistant-ms", "4"], "but got 30.0, 4.0 and None"),
            (["--preset", "moon"], r"`preset` must be one of \['paper'\], but got 'moon'"),
            (["nowhere.json"], "nowhere.json"),
            (["nowhere.json", "--preset", "paper"], "`preset` replaces a result"),
            (
                [*GIVEN, "--batch-sizes", "1,x"],
                "`batch_sizes` must be whole numbers with commas between them, but got '1,x'",
            ),
            ([*GIVEN, "--budgets", "0"], r"`budgets` must be numbers of at least 1, with commas, but got \[0\]"),
            ([*GIVEN, "--target-devices", "0"], "`target_devices` must be at least 1, but got 0"),
            ([*GIVEN, "--entropy", "1"], "`entropy` and `entropy_second_moment` belong together, but got 1.0 and None"),
            ([*GIVEN, "--hit-rate", "1.5"], "`hit_rate` must be at least 0 and below 1, but got 1.5"),
        ],
    )
    def test_what_cannot_be_predicted_is_refused(self, arguments: list[str], message: str) -> None:
        result = runner.invoke(app, ["predict", *arguments])
        assert result.exit_code == 2
        assert re.search(message, result.output)


def test_a_forecast_covers_what_was_asked_for() -> None:
    found = forecast(conditions(hit_rate=0.9), ForecastSettings(batch_sizes=(2, 1), budgets=(3,)))
    assert [row.batch_size for row in found.rows] == [2, 1]
    assert found.advice.prediction.batch_size == 2
    assert [each.budget for each in found.rows[0].ssd] == [3]
