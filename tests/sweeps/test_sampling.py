"""What a sweep samples: groups unless told otherwise, one capacity N for all of it, and what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, GROUPS, RECORDS, ZERO_OUT_ONE
from sweeps.service.options.sweep_options import SweepOptions, errors_in_flags
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Point
from sweeps.service.privacy.ledger_choice import with_registered_number
from sweeps.service.privacy.sweep_statement import build_statement
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps import support
from tests.sweeps.support import plan_of, write_npz
from tests.sweeps.test_budget import open_budget
from trainers.config.settings import MechanismOptions

pytestmark = pytest.mark.ci

Plan = Callable[..., SweepPlan]
QUICK = ("--tiny", "--noise-multiplier", "1", "--no-non-private")


@pytest.fixture
def private(tmp_path: Path) -> tuple[str, ...]:
    """A private data set of 90 records."""
    return ("--dataset", write_npz(tmp_path / "own.npz", 90), "--no-ledger")


def test_groups_are_sampled_and_the_whole_batch_is_of_sampled_records(make_plan: Plan) -> None:
    for asked in ((), ("--sampling", "groups")):
        found = [t.config.mechanism for t in make_plan(*QUICK, *asked, "--group-sizes", "4", "batch").trials]
        assert [(m.sampling, m.sensitivity) for m in found] == [(GROUPS, 1.0), (RECORDS, 2.0)]


def test_published_scheme_is_an_option_at_the_same_epsilon_and_twice_the_noise(make_plan: Plan) -> None:
    groups, records = (make_plan(*QUICK, "--sampling", each).trials[0] for each in (GROUPS, RECORDS))
    assert records.config.epsilon() == groups.config.epsilon()
    assert records.config.mechanism.noise().std == 2 * groups.config.mechanism.noise().std
    assert (groups.params["sampling"], records.params["sampling"]) == ("Poisson, of groups", "Poisson")


def test_group_sizes_are_swept_at_several_epsilons_and_without_noise_once(make_plan: Plan) -> None:
    grids = ("--epsilon-grid", "1", "3", "--sampling-grid", "groups", "records")
    given = ("--tiny", "--group-sizes", "4", "batch", *grids)
    found = {trial.name.removesuffix("-r0"): trial.params for trial in make_plan(*given).trials}
    assert {label: (params["sampled"], params["target_epsilon"]) for label, params in found.items()} == {
        **{f"S4-Na1-eps{eps}-{way}": (way, eps) for eps in (1, 3) for way in (GROUPS, RECORDS)},
        **{f"Sbatch-Na1-eps{eps}-records": (RECORDS, eps) for eps in (1, 3)},
        "S4-Na1-eps-inf-groups": (GROUPS, math.inf),
        "Sbatch-Na1-eps-inf-records": (RECORDS, math.inf),
    }


def test_dp_clip_of_sampled_groups_has_one_block_of_the_batch_on_average() -> None:
    chosen = support.options(*QUICK, "--expected-batch-size", "64", "--num-records-public", "1445")
    point = Point(label="a", changes={"method": "dp_clip", "sampling": "groups"})
    mechanism = plan_of("one", chosen, [point]).trials[0].config.mechanism
    assert (mechanism.group_size, mechanism.sensitivity) == (64, 1.0)
    assert mechanism.divisor == pytest.approx(64 / 1445 * (1445 // 64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "dp_sgd", "sampling": "groups"}, "dp_sgd samples records"),
        ({"sampling": "pairs"}, "unknown sampling 'pairs'"),
        ({"group_size": 2000}, "group_size must be from 1 to num_records_public = 1445; got 2000"),
        ({"num_records_public": 1400}, "num_records_public must be the same in all trials"),
    ],
)
def test_sampling_that_cannot_be_is_refused(changes: dict[str, object], reason: str) -> None:
    chosen = support.options(*QUICK, "--num-records-public", "1445")
    with pytest.raises(ConfigError, match=reason):
        plan_of("one", chosen, [Point(label="a", changes=changes)])


def test_large_groups_are_for_sampled_groups_alone(make_plan: Plan) -> None:
    assert make_plan(*QUICK, "--group-sizes", "60").trials[0].config.mechanism.group_size == 60
    with pytest.raises(ConfigError, match="at most a quarter of the expected batch size"):
        make_plan(*QUICK, "--group-sizes", "60", "--sampling", "records")


@pytest.mark.parametrize(
    ("declared", "reason"),
    [("89", "more records than num_records_public = 89"), ("97", "too many of the 97 slots are empty")],
)
def test_number_of_records_outside_the_capacity_is_refused_without_being_told(
    make_plan: Plan, private: tuple[str, ...], declared: str, reason: str
) -> None:
    assert make_plan(*QUICK, *private, "--num-records-public", "93")
    with pytest.raises(ConfigError, match=reason) as raised:
        make_plan(*QUICK, *private, "--num-records-public", declared)
    assert "90" not in str(raised.value).replace(declared, "")


def test_plan_and_statement_say_what_the_number_of_records_promises(
    make_plan: Plan, private: tuple[str, ...]
) -> None:
    taken = make_plan(*QUICK, *private)
    declared = make_plan(*QUICK, *private, "--num-records-public", "90")
    for plan, relation, headline in (
        (taken, ZERO_OUT_ONE, "for zeroing out one record."),
        (declared, ADD_OR_REMOVE_ONE, "among data sets with 86 to 90 records in the slots trained on."),
    ):
        assert plan.cost is not None
        assert plan.cost.neighboring_relation == plan.trials[0].params["neighboring_relation"] == relation
        assert build_statement(plan, "sweep").headline().endswith(headline)
    assert any("zeroing out any one record" in note for note in taken.notes)
    assert any("1 empty slots of 90 would cost 4%" in note for note in declared.notes)


def test_shards_are_in_plan_statement_and_workers(make_plan: Plan, private: tuple[str, ...]) -> None:
    given = (*QUICK, *private, "--num-records-public", "93", "--group-sizes", "2", "4", "--shards", "2")
    plan = make_plan(*given)
    (note,) = [note for note in plan.notes if "93 slots" in note]
    assert "2 ranges" in note
    assert "K = 46 at S = 2, K = 22 at S = 4" in note  # ⌊46/2⌋ + ⌊47/2⌋ and ⌊46/4⌋ + ⌊47/4⌋
    assert note not in plan.usual_notes, "the terminal shows it"
    lines = dict(build_statement(plan, "sweep").lines())
    assert "in each of 2 ranges of the slots" in lines["Sampling"]
    assert {trial.config.performance.num_workers for trial in plan.trials} == {2}
    plain = make_plan(*(*given[:-2], "--num-workers", "2"))
    assert "ranges" not in dict(build_statement(plain, "sweep").lines())["Sampling"]
    assert plan.cost == plain.cost
    assert plan.fingerprint != plain.fingerprint
    assert plan.data.slots is not None
    assert plain.data.slots is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--shards", "2", "--num-workers", "3"), "--shards must be the number of workers"),
        (
            ("--shards", "2", "--sampling", "records"),
            "--shards must be 1 unless groups are sampled; got 2 and dp_gcl",
        ),
        (("--shards", "0"), "--shards must be at least 1; got 0"),
    ],
)
def test_shards_that_cannot_be_are_refused(
    make_plan: Plan, private: tuple[str, ...], more: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason), errors_in_flags(SweepOptions):
        make_plan(*QUICK, *private, *more)


def test_shards_are_the_same_in_all_trials() -> None:
    chosen = support.options(*QUICK, "--shards", "2")
    with pytest.raises(ConfigError, match="shards must be the same in all trials"):
        plan_of("one", chosen, [Point(label="a", changes={"shards": 3})])


def test_sweep_of_the_other_sampling_is_another_one(make_plan: Plan) -> None:
    prints = {make_plan(*QUICK, "--sampling", each).fingerprint for each in (GROUPS, RECORDS)}
    assert len(prints) == 2


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger with a data set of 100 records."""
    opened = Ledger.create(str(tmp_path / "ledger.db"))
    opened.register("scans", Cap(epsilon=10.0, delta=1e-3, order=4.0), num_records_public=100)
    return opened


def test_ledger_says_the_number_of_records(ledger: Ledger) -> None:
    options = MechanismOptions()
    assert with_registered_number(options, ledger, "scans").num_records_public == 100
    assert with_registered_number(options, None, None) == options
    with pytest.raises(ConfigError, match=r"registered with num_records_public = 100.*got 99"):
        with_registered_number(MechanismOptions(num_records_public=99), ledger, "scans")


def test_ledger_takes_no_training_that_protects_against_zeroing_out_alone(
    ledger: Ledger, make_plan: Plan, tmp_path: Path
) -> None:
    plan = make_plan(*QUICK, "--ledger", "unused", "--dataset-id", "scans")
    budget = open_budget(plan, ledger, SweepFolder(tmp_path / "one"))
    with pytest.raises(LedgerError, match="'zero out one record' cannot be charged"):
        budget.begin(plan.trials, None)
