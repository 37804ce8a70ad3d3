"""`sweeps/plan.py`: what it prints and refuses, what it measures, and that sweeps warn as it does."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpgcl_core.accounting.tuning.cost import TrialClass, open_cost
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.planning.snr import expected_snr
from sweeps.group_size import GroupSizeOptions
from sweeps.privacy_budget import PrivacyBudgetOptions
from sweeps.service.options.planner_options import PlannerOptions
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning import resources
from sweeps.service.planning.resources import request_of
from sweeps.service.running.planner import run_plan
from tests.sweeps.support import ROOT, run_script
from tests.sweeps.support import plan as sweep_plan
from trainers.data.dataset_registry import DATA_SOURCES
from trainers.data.loading import load_dataset
from trainers.models.encoder import build_encoder

GRID = ("--batch-sizes", "256", "1024", "--num-steps-grid", "50", "200", "--group-sizes", "4", "16")
STATED = ("--num-records-public", "60000", "--records-per-second", "1000", "--num-weights", "8280")
QUICK = (*STATED, *GRID, "--epsilon", "8")
Said = pytest.CaptureFixture[str]


def options(*arguments: str) -> PlannerOptions:
    return parse_options(PlannerOptions, description="", arguments=arguments)


def answer(capsys: Said, *arguments: str) -> dict[str, Any]:
    """What the planner prints as JSON."""
    assert run_plan(options(*arguments, "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The JSON object of a quick plan."""
    code, out, err = run_script("plan", *QUICK, "--json", "--num-trials", "4")
    assert (code, err) == (0, "")
    read: dict[str, Any] = json.loads(out)
    return read


@pytest.mark.ci
def test_table_marks_the_recommended_plan(capsys: Said, found: dict[str, Any]) -> None:
    assert run_plan(options(*QUICK)) == 0
    shown = capsys.readouterr().out
    marked, strategy = [line for line in shown.splitlines() if line.startswith("*")]
    assert strategy.startswith(f"* --tuning {found['strategies'][0]['strategy']} ")
    chosen = found["recommended"]
    assert marked.split()[1:4] == [
        f"{chosen['expected_batch_size']:g}",
        str(chosen["num_steps"]),
        str(chosen["group_size"]),
    ]
    assert "8 feasible plans" in shown
    for mode in ("open", "sealed", "sealed-threshold"):
        assert f"\n  {mode} " in shown


def test_recommended_noise_is_that_of_a_training(found: dict[str, Any]) -> None:
    chosen = found["recommended"]
    told = Mechanism(
        num_records_public=60_000,
        l2_clip_norm=1.0,
        target_delta=found["target_delta"],
        **{name: chosen[name] for name in ("sampling_prob", "group_size", "noise_multiplier", "num_steps")},
    )
    assert 8 * 0.995 <= told.epsilon() <= 8
    assert chosen["noise_multiplier_is_verified"]
    assert chosen["snr_over_training"] == pytest.approx(expected_snr(told, 8280).over_training)


def test_tuning_costs_what_the_calculator_says(found: dict[str, Any]) -> None:
    chosen = found["recommended"]
    names = ("sampling_prob", "noise_multiplier", "num_steps")
    trials = [TrialClass(**{name: chosen[name] for name in names}, count=4)]
    expected = open_cost(trials, delta=found["target_delta"]).tuned_epsilon
    tuned = {mode: cost["tuned_epsilon"] for mode, cost in found["tuning"].items()}
    assert tuned["open"] == pytest.approx(expected)
    assert 8 < tuned["sealed-threshold"] < tuned["sealed"] < tuned["open"]
    assert found["tuning"]["sealed"]["law"]["mean"] == pytest.approx(4)


def test_one_training_has_no_secret_number(capsys: Said) -> None:
    assert list(answer(capsys, *QUICK, "--num-trials", "1")["tuning"]) == ["open"]


@pytest.mark.ci
def test_curves_are_written(capsys: Said, tmp_path: Path) -> None:
    assert run_plan(options(*QUICK, "--output", str(tmp_path / "curves"))) == 0
    for ending in (".png", ".svg", ".pdf", ".csv"):
        path = tmp_path / "curves" / f"planning{ending}"
        assert f"written: {path}" in capsys.readouterr().out or path.stat().st_size > 100
    rows = list(csv.DictReader((tmp_path / "curves" / "planning.csv").open()))
    assert {row["figure"] for row in rows} == {"epsilon", "epochs"}
    assert len({row["noise_multiplier"] for row in rows if row["figure"] == "epochs"}) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*QUICK, "--core-hours", "0.0001"), "no plan is feasible. time: the smallest plan, B = 256"),
        ((*STATED, *GRID[:6], "--group-sizes", "5000"), "allows at most 1024"),
        (GRID, "so it needs their number. Set --num-records-public"),
        ((*QUICK, "--core-hours", "1", "--gpu-hours", "1"), "--core-hours or --gpu-hours, not both"),
        (("--num-records-public", "60000", "--gpu-hours", "1"), "Set --records-per-second"),
        ((*QUICK, "--core-hours", "-1"), "--core-hours must be positive and finite"),
        ((*QUICK, "--records-per-second", "nan"), "--records-per-second must be positive"),
        ((*QUICK, "--num-trials", "0"), "--num-trials must be at least 1"),
        ((*QUICK, "--batch-sizes", "0"), "--batch-sizes must all be at least 1; got [0]"),
        ((*QUICK, "--memory-gib", "inf"), "--memory-gib must be positive and finite"),
        ((*STATED, "--noise-multiplier", "1"), "the planner computes --noise-multiplier"),
        (
            (*STATED, "--tan-factor", "2"),
            "--tan-factor must be 1, because a plan describes the full training; got 2",
        ),
        ((*STATED, "--epsilon", "inf"), "finite epsilon"),
        ((*STATED, "--epsilon", "-1"), "epsilon must be positive"),
        ((*STATED, "--method", "logit_dp"), "clip one gradient per disjoint group"),
        (
            (*STATED, "--expected-batch-size", "9"),
            "this sweep varies --expected-batch-size. Set --batch-sizes instead",
        ),
        ((*STATED, "--delta", "0.1"), "target_delta must be at most"),
        ((*QUICK, "--measured-snr", "0.01", "1024", "16", "1"), "alignment_size"),
        (("--num-records-public", "90", "--dataset", "npz:own.npz"), "Set --image-shape"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run_script("plan", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_memory_that_no_worker_has_is_told(capsys: Said) -> None:
    told = ("--num-records-public", "60000", "--records-per-second", "1000", "--memory-gib", "0.00001")
    with pytest.raises(ConfigError, match="memory: a worker needs at least"):
        run_plan(options(*told, *GRID))


def test_throughput_weights_and_memory_are_those_of_the_network() -> None:
    chosen = options("--num-records-public", "1500", "--dataset", "digits", *GRID)
    told = request_of(chosen)
    encoder = build_encoder(_network(chosen), (1, 8, 8), 0)
    assert told.num_weights == num_trainable(encoder)
    assert told.records_per_second is not None
    assert told.records_per_second > 1
    assert set(told.memory_bytes) == {4, 16}
    assert min(told.memory_bytes.values()) > 4 * told.num_weights


def _network(chosen: PlannerOptions) -> Any:
    from trainers.config.training import NetworkConfig

    return NetworkConfig(name=chosen.network.name, embedding_dim=chosen.network.embedding_dim)


def test_image_shapes_are_those_of_the_data_sets() -> None:
    assert load_dataset("digits").image_shape == DATA_SOURCES["digits"].image_shape
    assert load_dataset("shapes:20").image_shape == DATA_SOURCES["shapes"].image_shape


SMALL = ("--tiny", "--dataset", "digits", "--group-sizes", "8", "--no-non-private")


def test_sweep_predicts_no_gain() -> None:
    """The planner's rule is of trainings from random weights; of public starts it was wrong."""
    assert not [note for note in sweep_plan(*SMALL, "--epsilon", "0.1").advice if "too small" in note]


def test_planner_warns_and_says_how_many_records_would_do(capsys: Said) -> None:
    told = ("--num-records-public", "1500", "--records-per-second", "1000", "--num-weights", "8280")
    grid = ("--batch-sizes", "64", "--num-steps-grid", "400", "--group-sizes", "4")
    warning = answer(capsys, *told, *grid, "--epsilon", "0.5")["warning"]
    assert warning.startswith("n and ε are too small to expect a gain")
    assert "ε = " in warning
    assert "At this B, T and S, n = " in warning
    assert answer(capsys, *QUICK)["warning"] is None


@pytest.mark.parametrize(
    "more",
    [
        ("--dataset", "digits"),
        (
            "--dataset",
            "shapes",
            "--network",
            "clip-tiny",
            "--sampling",
            "records",
            "--learning-rate",
            "0.123",
        ),
        ("--dataset", "npz:my photos.npz", "--image-shape", "3", "8", "8", "--unit-column", "patient"),
        ("--dataset", "digits", "--method", "dp_clip"),
    ],
)
def test_command_of_the_recommendation_trains_what_was_planned(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--num-records-public", "1400", "--epsilon", "3", "--records-per-second", "100", *more)
    planned = parse_options(PlannerOptions, description="", arguments=given)
    assert run_plan(planned) == 0
    said = capsys.readouterr().out
    assert planned.network.name in said.splitlines()[0] + said.splitlines()[1]
    (line,) = [each for each in said.splitlines() if each.startswith("the sweep: ")]
    python, script, *words = shlex.split(line.removeprefix("the sweep: "))
    assert python == "python"
    assert (ROOT / script).is_file()
    options_class = GroupSizeOptions if "group_size" in script else PrivacyBudgetOptions
    found = parse_options(options_class, description="", arguments=words)
    assert (found.network, found.data, found.optimizer, found.objective, found.evaluation) == (
        planned.network,
        planned.data,
        planned.optimizer,
        planned.objective,
        planned.evaluation,
    )
    recommended = json.loads(_json_of(given, capsys))["recommended"]
    mechanism = found.mechanism
    assert (mechanism.expected_batch_size, mechanism.num_steps) == (
        recommended["expected_batch_size"],
        recommended["num_steps"],
    )
    assert (mechanism.method, mechanism.sampling) == (planned.mechanism.method, planned.mechanism.sampling)
    assert getattr(found, "group_sizes", ("batch",)) == (recommended["group_size"],)
    assert getattr(found, "epsilons", (mechanism.epsilon,)) == (3.0,)


def test_time_of_a_step_is_that_of_its_records_and_a_fixed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's: a step of B records takes 5 + 2 B seconds."""
    now = [0.0]

    def train(config: Any, data: Any, *, progress: Any) -> None:
        progress(0)
        for step in range(1, 1 + config.mechanism.num_steps):
            now[0] += 5 + 2 * config.mechanism.expected_batch_size
            progress(step)

    monkeypatch.setattr(resources, "train", train)
    monkeypatch.setattr(resources, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = request_of(options("--num-records-public", "2000", "--dataset", "digits", "--epsilon", "3"))
    threads = options().performance.threads_per_worker
    assert found.records_per_second == pytest.approx(1 / (2 * threads))
    assert found.seconds_per_step == pytest.approx(5 * threads)


def _json_of(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    run_plan(parse_options(PlannerOptions, description="", arguments=(*given, "--json")))
    return capsys.readouterr().out
