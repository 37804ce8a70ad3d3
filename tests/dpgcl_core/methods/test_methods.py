"""The registry: its table and labels, the sensitivities written out, and the numbers that it refuses."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dpgcl_core.accounting import composition, fixed_size_accounting
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, GROUPS, RECORDS, ZERO_OUT_ONE
from dpgcl_core.mechanism.registry import METHODS, method_named
from dpgcl_core.methods.__main__ import main
from dpgcl_core.methods.baselines.capped_batch import default_cap
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from tests.dpgcl_core.method_oracles import TAU, TRAINING, mechanism_of
from trainers.config.settings import TrainingOptions
from trainers.config.tree import replace_options
from trainers.training.resolve import training_config

REPLACE_ONE = "replace one record"
DPCL = [name for name in METHODS if name.startswith("dpcl_")]
SAMPLES_BOTH = ("dp_gcl", "dp_clip", "siglip_groups", "byol_groups")
ONE_RECORD = ("dp_mae", "dp_cap", "dp_classifier")
"""They clip each record by itself, however it is sampled."""


def test_table_lists_every_method_with_its_label_and_sensitivity(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpgcl_core.methods.__main__.table_width", lambda: 250)
    main()
    printed = capsys.readouterr().out.splitlines()
    ways = [m.with_sampling(sampling) for m in METHODS.values() for sampling in m.samplings]
    assert len(ways) == len(METHODS) + len(SAMPLES_BOTH) + len(ONE_RECORD)
    for line, method in zip(printed[1:], ways, strict=True):
        assert line.split()[:2] == [method.name, method.label]
        assert f"  {method.sensitivity_formula}  " in line
        assert line.rstrip().endswith(method.sampling)


def test_labels_say_what_is_proven() -> None:
    labels = {
        label: {m.name for m in METHODS.values() if m.label == label} for label in ("as-published", "none")
    }
    assert labels == {"as-published": {"dpcl_simclr", "dpcl_barlow"}, "none": {"non_private", "base"}}


def test_registry_names_are_the_methods_own() -> None:
    assert all(method_named(name).name == name for name in METHODS)


@pytest.mark.parametrize("name", TRAINING)
def test_label_of_a_run_is_the_methods_with_noise_and_none_without(name: str) -> None:
    mechanism = mechanism_of(name)
    assert mechanism.guarantee_label == METHODS[name].label
    if name not in ("dpcl_simclr", "dpcl_barlow"):
        assert mechanism.calibrated(math.inf).guarantee_label == "none"


@pytest.mark.parametrize("name", TRAINING)
def test_relation_is_replacing_a_record_for_batches_of_a_fixed_size_alone(name: str) -> None:
    expected = REPLACE_ONE if name in DPCL else ADD_OR_REMOVE_ONE
    assert mechanism_of(name).neighboring_relation == expected


@pytest.mark.parametrize("name", TRAINING)
def test_number_of_records_from_the_data_makes_adding_one_zeroing_one_out(name: str) -> None:
    expected = REPLACE_ONE if name in DPCL else ZERO_OUT_ONE
    assert _changed(name, num_records_from_data=True).neighboring_relation == expected


@pytest.mark.parametrize("name", list(METHODS))
def test_groups_are_sampled_only_where_a_term_sees_one_group(name: str) -> None:
    method = METHODS[name]
    if name in (*SAMPLES_BOTH, *ONE_RECORD):
        assert set(method.samplings) == {GROUPS, RECORDS}
        return
    assert method.samplings == (RECORDS,)
    with pytest.raises(ConfigError, match=f'{name} samples records.*got sampling = "groups"'):
        method.with_sampling(GROUPS)


@pytest.mark.parametrize("name", SAMPLES_BOTH)
def test_what_is_said_of_a_method_follows_what_it_samples(name: str) -> None:
    groups, records = (METHODS[name].with_sampling(each) for each in (GROUPS, RECORDS))
    assert groups.sensitivity_formula == "C"
    assert records.sensitivity_formula.startswith("2C")
    assert (groups.sampling, records.sampling) == ("Poisson, of groups", "Poisson")
    assert groups.proof == "dpgcl_core/sampling/slots.py"
    assert records.proof == "dpgcl_core/sampling/groups.py"
    assert "contributes zero" in groups.grouping
    assert "contributes zero" not in records.grouping


@pytest.mark.parametrize("name", ONE_RECORD)
def test_method_of_single_records_says_so_whatever_it_samples(name: str) -> None:
    for sampling in (GROUPS, RECORDS):
        method = METHODS[name].with_sampling(sampling)
        assert method.sensitivity_formula == "C"
        assert method.grouping == "each record is a group of its own"
        mechanism = _changed(name, sampling=sampling, l2_clip_norm=_C)
        assert mechanism.sensitivity == _C
        assert mechanism.noise().std == pytest.approx(1.5 * _C, rel=1e-12)


def test_unknown_sampling_lists_the_two() -> None:
    with pytest.raises(ConfigError, match=r"unknown sampling 'group'.*groups"):
        METHODS["dp_gcl"].with_sampling("group")


_CAP, _C = 40, 0.7
_A = math.exp(2 / TAU)
_LOGIT = 2 * _C / TAU * (1 + (_CAP - 1) * _A / (_A + _CAP - 1))
_SENSITIVITIES = {
    "dp_gcl": 2 * _C,
    "dp_clip": 2 * _C,
    "siglip_groups": 2 * _C,
    "byol_groups": _C,  # groups of one record
    "dp_mae": _C,
    "dp_cap": _C,
    "dp_classifier": _C,
    "dp_sgd": 2 * _CAP * _C,
    "group_clip": 2 * (_CAP // 2) * _C,
    "logit_dp": _LOGIT,
    "logit_dp_spread_out": _LOGIT + 6 * _C,
    "dpcl_simclr": 4 * _C,
    "dpcl_barlow": 4 * _C,
    "dpcl_simclr_rigorous": 4 * 4 * _C,  # batches of four
    "dpcl_barlow_rigorous": 4 * 4 * _C,
}


@pytest.mark.parametrize("name", [name for name in TRAINING if METHODS[name].label != "none"])
def test_sensitivity_is_the_stated_formula(name: str) -> None:
    mechanism = mechanism_of(name, sampling=RECORDS, l2_clip_norm=_C)
    assert mechanism.sensitivity == pytest.approx(_SENSITIVITIES[name], rel=1e-12)


@pytest.mark.parametrize("name", SAMPLES_BOTH)
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_sensitivity_and_noise_of_sampled_groups_are_those_of_one_group(name: str, group_size: int) -> None:
    mechanism = _changed(name, sampling=GROUPS, group_size=group_size, l2_clip_norm=_C)
    assert mechanism.sensitivity == _C
    assert mechanism.noise().std == pytest.approx(1.5 * _C, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in TRAINING if METHODS[name].label != "none"])
def test_noise_is_the_multiplier_times_the_sensitivity(name: str) -> None:
    mechanism = mechanism_of(name, sampling=RECORDS, l2_clip_norm=_C)
    assert mechanism.noise().std == pytest.approx(1.5 * _SENSITIVITIES[name], rel=1e-12)


def test_unknown_method_lists_the_known_and_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown method 'dp_sdg'; did you mean 'dp_sgd'") as raised:
        method_named("dp_sdg")
    assert all(name in str(raised.value) for name in METHODS)


def test_unknown_method_of_a_setting_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown method 'simclr'") as raised:
        training_config(replace_options(TrainingOptions(), method="simclr"), num_records=1000, public_seed=0)
    assert all(name in str(raised.value) for name in METHODS)


def _changed(name: str, **changes: object) -> Mechanism:
    """The method's mechanism, with numbers that its case does not leave to the caller."""
    return dataclasses.replace(mechanism_of(name), **changes)  # type: ignore[arg-type]


NEEDS_CAP = [name for name in TRAINING if METHODS[name].needs_cap]


@pytest.mark.parametrize("name", NEEDS_CAP)
def test_cap_is_asked_for_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_cap, for example {default_cap(4)}"):
        _changed(name, batch_cap=None)


@pytest.mark.parametrize("name", NEEDS_CAP)
def test_cap_below_the_expected_batch_is_refused_with_a_better_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"got 3 with 4 records expected.*reach a cap of {default_cap(4)}"):
        _changed(name, batch_cap=3)


@pytest.mark.parametrize("name", NEEDS_CAP)
def test_setting_with_a_cap_below_the_expected_batch_is_refused(name: str) -> None:
    setting = replace_options(
        TrainingOptions(), method=name, expected_batch_size=64, batch_cap=10, noise_multiplier=1.0
    )
    with pytest.raises(ConfigError, match="got 10 with 64 records expected"):
        training_config(setting, num_records=1000, public_seed=0)


@pytest.mark.parametrize("name", [name for name in TRAINING if name not in NEEDS_CAP])
def test_cap_that_the_method_does_not_need_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} needs none\. Leave it out"):
        _changed(name, batch_cap=40)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dp_clip", {"group_size": 2}, 'got group_size = 2. Set group_size = "batch"'),
        ("dp_mae", {"group_size": 2}, "clips each record separately, so group_size must be 1; got 2"),
        ("dp_cap", {"group_size": 2}, "clips each record separately, so group_size must be 1; got 2"),
        ("dp_classifier", {"group_size": 2}, "group_size must be 1; got 2"),
        ("group_clip", {"group_size": "batch"}, 'got "batch". Use dp_clip'),
        ("logit_dp", {"temperature": None}, "depends on the temperature. Set temperature"),
        ("logit_dp", {"batch_cap": 10}, "is reached so often"),
        ("logit_dp_spread_out", {"batch_cap": 10}, "is reached so often"),
        ("dpcl_simclr", {"sampling_prob": 0.001}, "must be at least 2; got 1. Raise sampling_prob"),
        ("dpcl_barlow_rigorous", {"sampling_prob": 0.001}, "Raise sampling_prob"),
        ("non_private", {"noise_multiplier": 1.0, "l2_clip_norm": 1.0}, "got .* = 1. Set epsilon = inf"),
    ],
)
def test_method_refuses_numbers_it_cannot_use(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _changed(name, **changes)


def test_logit_dp_refuses_a_loss_at_another_temperature_than_its_sensitivity() -> None:
    with pytest.raises(ConfigError, match=r"same temperature for loss and sensitivity; got 0\.5 and 0\.3"):
        mechanism_of("logit_dp").rule(LossSettings(temperature=0.5))


def test_logit_dp_sensitivity_without_the_temperature_would_be_too_small() -> None:
    """What 1/τ left out gives, against the sum of one pair that moves by 2B/τ."""
    stated = mechanism_of("logit_dp").sensitivity
    assert stated * TAU < LogitClipper(logit_clip_norm=1.0, temperature=TAU).sensitivity(_CAP)


@pytest.mark.parametrize("name", ["dp_gcl", "logit_dp", "dpcl_simclr"])
def test_budget_out_of_reach_names_the_smallest_epsilon_that_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "_MAX_NOISE", 3.0)
    mechanism = mechanism_of(name)
    with pytest.raises(ConfigError, match="cannot be met by any noise_multiplier up to 3") as raised:
        mechanism.calibrated(1e-2)
    smallest = dataclasses.replace(mechanism, noise_multiplier=2.0).epsilon()
    assert f"the smallest epsilon reachable is {smallest:.3g}, at noise_multiplier = 2." in str(raised.value)


def test_tiny_budget_is_searched_on_coarse_grids_and_met_on_a_fine_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fine grid at little noise takes minutes and gigabytes; a coarse one must not decide."""
    asked: list[tuple[float, float]] = []

    def epsilon_of_steps(*, noise_multiplier: float, grid: float, **others: float) -> float:
        asked.append((noise_multiplier, grid))
        return max(0.0, 1 / noise_multiplier - 3 * grid)  # as if coarseness hid some of the loss

    monkeypatch.setattr(composition, "epsilon_of_steps", epsilon_of_steps)
    found = composition.calibrate_noise_multiplier(
        sampling_prob=0.1, num_steps=10, target_epsilon=1e-3, target_delta=1e-6
    )
    fine = 1e-3 / 500
    assert found.noise_multiplier == pytest.approx(1 / (1e-3 + 3 * fine), rel=0.01)
    assert min(noise for noise, grid in asked if grid <= fine) > 50
    assert min(grid for _, grid in asked) == fine


def test_budget_of_a_fixed_size_batch_that_protects_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fixed_size_accounting, "_epsilon_replace_one", lambda what, delta: 1 / what.noise_multiplier
    )
    with pytest.raises(ConfigError, match="such a budget protects nothing"):
        mechanism_of("dpcl_simclr_rigorous").calibrated(1e6)


@pytest.mark.parametrize(
    ("name", "declared", "accepted", "refused"),
    [("logit_dp", 100, 105, 106), ("dpcl_simclr", 100, 100, 99), ("dpcl_simclr", 100, 100, 101)],
)
def test_data_set_of_another_size_than_accounted_is_refused(
    name: str, declared: int, accepted: int, refused: int
) -> None:
    mechanism = _changed(name, num_records_public=declared, sampling_prob=0.04)
    mechanism.rules.check_records(mechanism, accepted)
    assert str(declared if name != "logit_dp" else accepted) in mechanism.rules.condition(mechanism)
    with pytest.raises(ConfigError, match="is accounted for") as raised:
        mechanism.rules.check_records(mechanism, refused)
    assert str(refused) not in str(raised.value)  # the number of records is private


def test_data_set_that_the_slots_do_not_hold_is_refused_without_its_number() -> None:
    mechanism = mechanism_of("dp_gcl")  # 1,000 slots in blocks of two, of which a fifth may be lost
    assert mechanism.rules.condition(mechanism).startswith("data sets with 895 to 1000 records in the slots")
    for accepted in (895, 1000):
        mechanism.rules.check_records(mechanism, accepted)
    for refused, said in ((1001, "more records than num_records_public = 1000"), (894, "least 895 records")):
        with pytest.raises(ConfigError, match=said) as raised:
            mechanism.rules.check_records(mechanism, refused)
        assert str(refused) not in str(raised.value)


def test_more_records_than_declared_are_refused_where_records_are_sampled() -> None:
    """δ is at most 1/N, and of more records it would let one be published at random."""
    for name, changes in (("dp_gcl", {"sampling": "records"}), ("dp_sgd", {})):
        mechanism = _changed(name, **changes)
        n = mechanism.num_records_public
        assert mechanism.rules.condition(mechanism) == f"data sets of at most {n} records"
        for accepted in (1, n):
            mechanism.rules.check_records(mechanism, accepted)
        with pytest.raises(ConfigError, match="more records than num_records_public") as raised:
            mechanism.rules.check_records(mechanism, n + 1)
        assert str(n + 1) not in str(raised.value)


def test_number_of_records_from_the_data_leaves_no_condition() -> None:
    mechanism = _changed("dp_gcl", num_records_from_data=True)
    assert mechanism.rules.condition(mechanism) == ""
    with pytest.raises(ConfigError, match="more records"):
        mechanism.rules.check_records(mechanism, 1001)


def test_cap_of_groups_must_hold_a_group() -> None:
    with pytest.raises(ConfigError, match="batch_cap must be at least group_size = 16; got 10"):
        _changed("group_clip", group_size=16, batch_cap=10)


def test_cap_that_is_reached_too_often_is_refused_with_a_better_one() -> None:
    with pytest.raises(ConfigError, match=rf"would use up .* Set batch_cap to at least {default_cap(4)}"):
        _changed("logit_dp", batch_cap=5)
