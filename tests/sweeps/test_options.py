"""Options: typed, by name, checked, and refused in one line before anything starts."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgcl_core.errors import exit_on_bad_input
from sweeps.group_size import GroupSizeOptions, points
from sweeps.service.options.help import FIRST
from sweeps.service.options.start import Start
from sweeps.service.running import driver
from tests.sweeps.support import SCRIPT, environment, options, run_script, run_sweep
from trainers.config.presets import SETTINGS
from trainers.config.tree import leaves, replace_options
from trainers.data.pair_options import PairOptions
from trainers.models.clip.published_models import SHIPPED

Refusal = Callable[..., str]


def test_options_take_the_settings_of_the_data_set_by_default() -> None:
    chosen = options("--dataset", "digits")
    assert chosen.training() == SETTINGS["digits-cpu"]


def test_first_sweep_is_of_pairs_from_weights_that_come_with_the_package() -> None:
    chosen = options()
    assert chosen.data.modality == "image-text"
    assert chosen.training() == SETTINGS["short-pairs-cpu"]
    assert (chosen.network.name, chosen.network.pretrained) in SHIPPED
    assert chosen == options("--dataset", chosen.data.dataset)


def test_grid_of_digits_is_theirs() -> None:
    chosen = options("--dataset", "digits")
    assert (chosen.group_sizes, chosen.service.repeats) == ((2, 4, 8, 16, 32), 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_options_take_every_value_of_a_named_setting(name: str) -> None:
    chosen = options("--dataset", "fashion-mnist", "--setting", name)
    assert chosen.training() == SETTINGS[name]


def test_options_given_replace_those_of_a_named_setting() -> None:
    chosen = options("--dataset", "digits", "--setting", "paper", "--num-steps", "7")
    assert chosen.training() == replace_options(SETTINGS["paper"], num_steps=7)


def test_tiny_is_replaced_by_explicit_options() -> None:
    chosen = options("--tiny", "--num-steps", "13", "--group-sizes", "2", "batch")
    assert (chosen.mechanism.num_steps, chosen.group_sizes) == (13, (2, "batch"))
    assert chosen.mechanism.expected_batch_size == GroupSizeOptions().tiny().mechanism.expected_batch_size


def test_tiny_is_two_trainings() -> None:
    chosen = options("--tiny")
    assert len(points(chosen)) * chosen.service.repeats == 2


def test_full_is_the_paper_setting_replaced_by_explicit_options() -> None:
    chosen = options("--full", "--repeats", "3")
    full = GroupSizeOptions().full()
    assert (chosen.data, chosen.group_sizes, chosen.service.repeats) == (full.data, full.group_sizes, 3)
    assert chosen.training() == SETTINGS["paper"]


def test_full_keeps_a_data_set_that_is_given() -> None:
    assert options("--full", "--dataset", "cifar10").data.dataset == "cifar10"


def test_group_sizes_are_taken_once_each() -> None:
    labels = [point.label for point in points(options("--group-sizes", "4", "2", "4", "--no-non-private"))]
    assert labels == ["S4-Na0-private", "S2-Na0-private"]


@pytest.mark.ci
def test_group_size_batch_is_accepted(make_plan: Callable[..., object]) -> None:
    assert options("--group-sizes", "batch").group_sizes == ("batch",)
    make_plan("--tiny", "--group-sizes", "batch")


def test_a_tab_is_the_separator_however_it_is_typed() -> None:
    for typed in ("\t", "\\t"):
        assert options("--tiny", "--csv-separator", typed).data.pairs.changed_fields == ()


def test_options_of_pairs_are_read_for_any_of_the_data_sets() -> None:
    given = ("--csv-separator", ",", "--csv-caption-key", "words", "--skip-corrupt")
    chosen = options("--tiny", "--dataset", "shapes:50", "--evaluate-on", "csv:x", *given)
    assert chosen.data.pairs == PairOptions(separator=",", caption="words", skip_corrupt=True)


@pytest.mark.parametrize("name", ["shapes", "shapes:50", "shapes:50:3"])
def test_shapes_are_public_unless_declared_private(name: str) -> None:
    assert not options("--tiny", "--dataset", name).data.are_private
    assert options("--tiny", "--dataset", name, "--data-is", "private").data.are_private


@pytest.mark.parametrize("scheme", ["csv", "webdataset", "parquet"])
def test_own_pairs_are_private_unless_declared_public(scheme: str) -> None:
    assert options("--tiny", "--dataset", f"{scheme}:x").data.are_private
    assert not options("--tiny", "--dataset", f"{scheme}:x", "--data-is", "public").data.are_private


@pytest.mark.parametrize(
    ("given", "taken"),
    [((), None), (("--secure-noise",), True), (("--no-secure-noise",), False), (("--secure_noise",), True)],
)
def test_secure_noise_is_on_off_or_left_to_the_rule(given: tuple[str, ...], taken: bool | None) -> None:
    chosen = options("--tiny", *given)
    assert chosen.randomness.secure_noise is taken


def test_infinite_epsilon_is_one_point_per_group_size() -> None:
    labels = [point.label for point in points(options("--group-sizes", "4", "--epsilon", "inf"))]
    assert labels == ["S4-Na0-eps-inf"]


def test_option_names_are_none_of_ray_job_submit() -> None:
    from ray.dashboard.modules.job.cli import submit

    taken = {name for param in submit.params for name in (*param.opts, *param.secondary_opts)}
    assert {"--working-dir", "--no-wait"} <= taken
    named = {"--" + name.replace("_", "-") for name in (*leaves(GroupSizeOptions), *leaves(Start))}
    negated = {f"--no-{name[2:]}" for name in named}
    assert not (named | negated) & taken


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--group-sizs", "4"],
            "unknown option '--group-sizs'; did you mean '--group-sizes'? --help-all lists all options.",
        ),
        (["--dataset", "digit"], "unknown data set 'digit'; did you mean 'digits'? Valid: cifar10, csv:PATH"),
        (["--dataset", "shapes:0"], "shapes:NUM:SEED must have 1 to 60000 training pairs"),
        (
            ["--csv-separator", ","],
            "--csv-separator must be left out for digits. --csv-separator applies only to csv:PATH",
        ),
        (["--dataset", "npz:x", "--skip-corrupt"], "--skip-corrupt must be left out"),
        (["--dataset", "webdataset:x", "--csv-img-key", "x"], "--csv-img-key must be left out"),
        (["--dataset", "parquet:x", "--csv-separator", ","], "--csv-separator must be left out"),
        (["--dataset", "csv:x", "--csv-separator", "ab"], "csv separator must be one character"),
        (["--dataset", "csv:x", "--csv-img-key", "x", "--csv-caption-key", "x"], "names must be distinct"),
        (["--evaluate-on", "mnist"], "unknown data set 'mnist'"),
        (["--setting", "papr"], "unknown setting 'papr'; did you mean 'paper'? Valid: auto, cpu"),
        (["--network", "resnet19"], "unknown network 'resnet19'; did you mean 'resnet18'? Valid:"),
        (["--optimizer", "adan"], "unknown optimizer 'adan'; did you mean 'adam'? Valid: adam, adamw, sgd"),
        (["--data-is", "secret"], "Expected one of ('auto', 'public', 'private')"),
        (["--dataset"], "Missing value for argument '--dataset'"),
        (["--num-steps", "many"], "--num-steps must be a whole number"),
        (["stray"], "Unrecognized options: stray"),
        (["--group-size", "4"], "this sweep varies --group-size. Set --group-sizes instead"),
        (["--group-sizes"], "Set at least one value for every axis"),
        (["--tiny", "--full"], "set tiny or full, not both"),
        (["--epsilon", "1", "--noise-multiplier", "1"], "not both; got epsilon = 1.0 and --noise-multiplier"),
        (["--sampling-prob", "0.1", "--expected-batch-size=64"], "--sampling-prob or --expected-batch-size"),
        (["--sampling_prob=0.1", "--expected-batch-size", "64"], "--sampling-prob or --expected-batch-size"),
        (["--epsilon", "0"], "epsilon must be positive; got 0"),
        (["--epsilon", "-1"], "epsilon must be positive; got -1"),
        (["--epsilon", "nan"], "epsilon must be positive; got nan"),
        (["--noise-multiplier", "0"], "noise_multiplier must be positive; got 0"),
        (["--delta", "0"], "target_delta must be in (0, 1); got 0"),
        (["--delta", "1"], "target_delta must be in (0, 1); got 1"),
        (["--delta", "0.01"], "target_delta must be at most 1/num_records_public"),
        (["--group-sizes", "1"], "group_size must be at least 2"),
        (["--group-sizes", "0"], "group_size must be"),
        (["--sampling-prob", "0"], "sampling_prob must be in (0, 1]; got 0"),
        (["--sampling-prob", "1.5"], "sampling_prob must be in (0, 1]; got 1.5"),
        (["--expected-batch-size", "100000"], "so that sampling_prob is in (0, 1]; got 100000"),
        (["--num-steps", "0"], "num_steps must be at least 1; got 0"),
        (["--repeats", "0"], "repeats must be at least 1; got 0"),
        (["--learning-rate", "0"], "--learning-rate must be positive and finite; got 0"),
        (["--test-fraction", "1"], "--test-fraction must be in (0, 1); got 1"),
        (["--num-workers", "0"], "--num-workers must be at least 1; got 0"),
        (["--network", "no_such_module:net"], "must name an importable `package.module:factory`"),
        (["--network", "tests.sweeps.networks:batch_norm"], "BatchNorm2d, which uses statistics across"),
        (["--network", "tests.sweeps.networks:centred"], "mixes records"),
        (
            ["--network", "tests.sweeps.networks:centred_when_many", "--mixes-no-records"],
            "another group changed",
        ),
    ],
)
def test_bad_option_is_refused_in_planning(arguments: list[str], words: str, refusal: Refusal) -> None:
    tiny = [] if "--full" in arguments else ["--tiny"]
    assert words in refusal(*tiny, *arguments)


def test_group_size_above_a_quarter_of_the_batch_is_refused_with_the_dropped_share(refusal: Refusal) -> None:
    message = refusal("--tiny", "--sampling", "records", "--group-sizes", "4", "32")  # of 64
    share = re.search(r"got 32, whose incomplete groups would drop (\d+)% of the sampled records", message)
    assert share is not None
    assert 20 <= int(share[1]) <= 30  # E[X mod 32] is about 15.5 of 64


def test_group_size_of_a_quarter_of_the_batch_is_accepted(make_plan: Callable[..., object]) -> None:
    make_plan("--tiny", "--sampling", "records", "--group-sizes", "16")


def test_sampled_groups_may_be_larger(make_plan: Callable[..., object]) -> None:
    """No incomplete group is dropped of a sample: a group is there whole or not at all."""
    make_plan("--tiny", "--group-sizes", "32", "64")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--bogus",),
        ("--tiny", "--epsilon", "0"),
        ("--tiny", "--noise-multiplier", "1", "--network", "tests.sweeps.networks:batch_norm"),
        ("--tiny", "--dataset", "npz:missing.npz"),
        ("--tiny", "--data-is", "private", "--no-ledger", "--no-secure-noise"),
        ("--tiny", "--noise-multiplier", "1", "--num-workers", "4000"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    code, out, err = run_script("group_size", "--storage", str(storage), *arguments)
    assert code == 2
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert "Traceback" not in out
    assert not storage.exists()


@pytest.mark.ci
def test_bad_input_to_a_script_in_its_own_process_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Nothing that is imported on the way writes a line of its own."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--epsilon", "0", "--storage", str(tmp_path / "storage")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path / "home"),
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2
    assert re.fullmatch(r"error: [^\n]+\n", ended.stderr)
    assert not (tmp_path / "storage").exists()


def test_error_of_several_lines_is_told_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    from dpgcl_core.errors import DataError

    def main() -> int:
        raise DataError("the rule,\n  the value")

    with pytest.raises(SystemExit) as stop:
        exit_on_bad_input(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: the rule, the value\n"


def test_help_all_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(sys.stdout):
        options("--help-all")
    assert not stop.value.code
    shown = capsys.readouterr().out
    names = {*leaves(GroupSizeOptions), *leaves(Start)} - {"group_size"}
    named = {name.replace("_", "-") for name in names}
    assert [name for name in named if f"--{name} " not in shown and f"--no-{name}" not in shown] == []


def test_help_leaves_out_what_the_sweep_varies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), contextlib.redirect_stderr(sys.stdout):
        options("--help")
    shown = capsys.readouterr().out
    assert "--group-sizes " in shown
    assert "--group-size " not in shown


def test_help_shows_the_axes_and_what_most_people_need_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), contextlib.redirect_stderr(sys.stdout):
        options("--help")
    shown = set(re.findall(r"^\W*--([a-z][a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    axes = {"group-sizes", "non-private", "num-augmentations-grid", "epsilon-grid", "sampling-grid"}
    assert len(FIRST) == 10
    assert shown - {"help", "help-all"} == axes | {name.replace("_", "-") for name in FIRST}


def test_help_shows_the_defaults_of_the_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # options below each other
    with pytest.raises(SystemExit), contextlib.redirect_stderr(sys.stdout):
        options("--help-all", "--dataset", "fashion-mnist")
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--network STR .{0,300}default: tiny_cnn", shown)


def test_bad_input_starts_no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "ray_session", lambda *_: pytest.fail("Ray was started"))
    chosen = options("--tiny", "--storage", str(tmp_path), "--optimizer", "adan")
    with pytest.raises(ValueError, match="unknown optimizer"):
        run_sweep("group-size", chosen, points(chosen), lambda *_: [])
