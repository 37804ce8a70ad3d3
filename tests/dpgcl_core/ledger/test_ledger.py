"""The ledger's rules of charging, over every store."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from dpgcl_core.accounting.composition import epsilon_pld
from dpgcl_core.accounting.filters import RdpFilter, StepClass, composed_event
from dpgcl_core.errors import BudgetExceeded, ConfigError, DpgclError, LedgerError
from dpgcl_core.ledger.account import PlannedTraining, Reservation
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger

STEPS = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
OTHER = StepClass(sampling_prob=0.02, noise_multiplier=2.0)
RDP_CAP = Cap.for_steps(4.0, 1e-5, [STEPS])
QUOTA_CAP = Cap(
    epsilon=4.0, delta=1e-5, quotas=((STEPS, 100), (OTHER, 50)), sealed_epsilon=1.0, sealed_delta=1e-6
)
NUM_ADMITTED = math.floor(
    RdpFilter(4.0, 1e-5, RDP_CAP.order).rdp_budget / RDP_CAP.rdp_filter().cost(STEPS, 1)
)


@pytest.fixture
def ledger(ledger_url: str) -> Ledger:
    created = Ledger.create(ledger_url)
    created.register("scans", RDP_CAP, num_records_public=10_000)
    created.register("quotas", QUOTA_CAP, num_records_public=10_000)
    return created


def reserve(ledger: Ledger, num_steps: int, label: str = "trial", dataset: str = "scans") -> Reservation:
    """One training of the usual steps."""
    return ledger.reserve(dataset, [PlannedTraining(label=label, step_class=STEPS, num_steps=num_steps)])[0]


def charged(ledger: Ledger, dataset: str = "scans") -> int:
    """Steps of the usual class that are charged, as a process sees it that has just opened the ledger."""
    spent = Ledger.open(ledger.url).read_charges(dataset, with_pld=False)
    return spent.num_steps.get(STEPS, 0)


@pytest.mark.parametrize("name", ["l%20x.db", "l x.db", "50% of it?.db", "a#1.db"])
def test_ledger_lies_in_the_file_of_its_name_whatever_that_is(name: str, tmp_path: Path) -> None:
    created = Ledger.create(str(tmp_path / name))
    created.register("scans", RDP_CAP, num_records_public=10_000)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    for url in (str(tmp_path / name), created.url):
        assert Ledger.open(url).read_charges("scans", with_pld=False).num_settled == 0


def test_reservation_charges_all_planned_steps(ledger: Ledger) -> None:
    reserve(ledger, 70)
    assert charged(ledger) == 70


def test_reservation_is_admitted_up_to_the_filters_budget_and_no_further(ledger: Ledger) -> None:
    reserve(ledger, NUM_ADMITTED)
    with pytest.raises(BudgetExceeded, match="does not cover 1 more steps"):
        reserve(ledger, 1, "one more")


def test_refusal_tells_the_whole_request_in_shares_of_the_cap(ledger: Ledger) -> None:
    reserve(ledger, NUM_ADMITTED // 2)
    one = PlannedTraining(label="0", step_class=STEPS, num_steps=NUM_ADMITTED // 2)
    with pytest.raises(BudgetExceeded) as refusal:
        ledger.reserve(
            "scans", [one, dataclasses.replace(one, label="1"), dataclasses.replace(one, label="2")]
        )
    used, needed, left = map(float, re.findall(r"([\d.]+)%", str(refusal.value)))
    assert (used + left, needed) == pytest.approx((100, 3 * used), abs=0.3)
    assert 49 < used <= 50


def test_refused_reservation_adds_no_row(ledger: Ledger) -> None:
    before = ledger.head()
    with pytest.raises(BudgetExceeded):
        reserve(ledger, NUM_ADMITTED + 1)
    assert ledger.head() == before


def test_pld_total_below_the_cap_does_not_admit(ledger: Ledger) -> None:
    num_steps = NUM_ADMITTED + 1
    assert epsilon_pld(composed_event({STEPS: num_steps}), RDP_CAP.delta) < RDP_CAP.epsilon
    with pytest.raises(BudgetExceeded):
        reserve(ledger, num_steps)


def test_plan_of_several_trainings_is_admitted_together_or_not_at_all(ledger: Ledger) -> None:
    plan = [PlannedTraining(label=n, step_class=STEPS, num_steps=NUM_ADMITTED // 2) for n in "abc"]
    with pytest.raises(BudgetExceeded):
        ledger.reserve("scans", plan)
    assert charged(ledger) == 0
    ledger.reserve("scans", plan[:2])


def test_dry_run_of_a_reservation_charges_nothing(ledger: Ledger) -> None:
    plan = [PlannedTraining(label="trial", step_class=STEPS, num_steps=NUM_ADMITTED)]
    ledger.would_admit("scans", plan)
    assert charged(ledger) == 0
    reserve(ledger, 1, "first")
    with pytest.raises(BudgetExceeded):
        ledger.would_admit("scans", plan)


def test_settling_returns_unexecuted_steps_to_the_sum(ledger: Ledger) -> None:
    ledger.settle(reserve(ledger, NUM_ADMITTED), 30)
    assert charged(ledger) == 30
    reserve(ledger, NUM_ADMITTED - 30, "next")
    with pytest.raises(BudgetExceeded):
        reserve(ledger, 1, "one more")


def test_settling_returns_steps_to_the_same_quota_only(ledger: Ledger) -> None:
    ledger.settle(reserve(ledger, 100, dataset="quotas"), 0)
    with pytest.raises(BudgetExceeded, match="0 of 50 are charged"):
        ledger.reserve("quotas", [PlannedTraining(label="b", step_class=OTHER, num_steps=51)])


def test_quota_is_kept_over_several_reservations(ledger: Ledger) -> None:
    reserve(ledger, 60, "a", "quotas")
    with pytest.raises(BudgetExceeded, match="60 of 100 are charged"):
        reserve(ledger, 41, "b", "quotas")
    reserve(ledger, 40, "b", "quotas")


def test_step_class_without_quota_is_refused(ledger: Ledger) -> None:
    unknown = PlannedTraining(label="c", step_class=StepClass(0.01, 1.5), num_steps=1)
    with pytest.raises(BudgetExceeded, match="has no quota"):
        ledger.reserve("quotas", [unknown])


def test_settling_twice_alike_adds_one_row(ledger: Ledger) -> None:
    reservation = reserve(ledger, 50)
    ledger.settle(reservation, 20)
    head = ledger.head()
    ledger.settle(reservation, 20)
    assert ledger.head() == head


def test_settled_steps_are_never_taken_back(ledger: Ledger) -> None:
    reservation = reserve(ledger, 50)
    ledger.settle(reservation, 20)
    with pytest.raises(LedgerError, match="would reduce its charge"):
        ledger.settle(reservation, 19)


def test_steps_beyond_the_reservation_are_charged_and_said(ledger: Ledger) -> None:
    reservation = reserve(ledger, 50)
    with pytest.raises(LedgerError, match="drew 60 steps but had reserved 50"):
        ledger.settle(reservation, 60)
    assert charged(ledger) == 60
    assert any("drew 60 steps" in note for note in ledger.verify().notes)


@pytest.mark.parametrize("dataset", ["scans", "quotas"])
def test_overrun_above_the_cap_leaves_no_statement(ledger: Ledger, dataset: str) -> None:
    reservation = reserve(ledger, 50, dataset=dataset)
    assert ledger.statement(dataset).epsilon == 4.0
    with pytest.raises(LedgerError, match="all are charged"):
        ledger.settle(reservation, NUM_ADMITTED + 1)
    with pytest.raises(LedgerError, match="no guarantee to state"):
        ledger.statement(dataset)


def test_raised_cap_that_covers_an_overrun_is_stated(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="all are charged"):
        ledger.settle(reserve(ledger, 50), NUM_ADMITTED + 1)
    ledger.change_cap("scans", 4.5, allow_raise=True)
    assert ledger.statement("scans").epsilon == 4.5


def test_extension_by_nothing_only_confirms(ledger: Ledger) -> None:
    reservation = reserve(ledger, 50)
    head = ledger.head()
    assert ledger.extend(reservation, 0) == reservation
    assert ledger.head() == head


def test_extension_charges_repeated_steps(ledger: Ledger) -> None:
    extended = ledger.extend(reserve(ledger, 50), 10)
    assert extended.num_steps == charged(ledger) == 60


def test_extension_above_the_cap_is_refused(ledger: Ledger) -> None:
    reservation = reserve(ledger, NUM_ADMITTED)
    with pytest.raises(BudgetExceeded):
        ledger.extend(reservation, 1)


def test_settled_reservation_cannot_be_extended(ledger: Ledger) -> None:
    reservation = reserve(ledger, 50)
    ledger.settle(reservation, 50)
    with pytest.raises(LedgerError, match="is settled"):
        ledger.extend(reservation, 1)


def test_confirm_refuses_a_settled_reservation(ledger: Ledger) -> None:
    reservation = reserve(ledger, 50)
    ledger.settle(reservation, 50)
    with pytest.raises(LedgerError, match="is settled"):
        ledger.confirm(reservation)


def test_label_can_be_charged_once(ledger: Ledger) -> None:
    reserve(ledger, 10)
    with pytest.raises(LedgerError, match="is already charged to data set 'scans'"):
        reserve(ledger, 10)


def test_resumed_sweep_finds_its_reservation_by_label(ledger: Ledger) -> None:
    reservation = reserve(ledger, 10)
    assert ledger.reservation("scans", "trial") == reservation
    assert ledger.reservation("scans", "another") is None


def test_reservation_of_another_ledger_is_refused(
    ledger: Ledger, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Ledger.create(str(tmp_path_factory.mktemp("other") / "ledger.db"))
    other.register("scans", RDP_CAP, num_records_public=10_000)
    with pytest.raises(LedgerError, match="another ledger"):
        ledger.settle(reserve(other, 10), 0)


def test_sealed_sweep_enters_by_its_curve_at_the_filters_order(ledger: Ledger) -> None:
    orders: list[float] = []

    def curve(order: float) -> float:
        orders.append(order)
        return 0.25

    before = ledger.head().num_entries
    ledger.reserve_sealed("scans", label="sealed", epsilon=2.0, delta=1e-6, rdp_curve=curve)
    assert orders == [RDP_CAP.order]
    assert ledger.read_charges("scans", with_pld=False).rdp == pytest.approx(0.25)
    assert ledger.head().num_entries == before + 1


def test_sealed_curve_and_steps_share_one_budget(ledger: Ledger) -> None:
    budget = RDP_CAP.rdp_filter().rdp_budget
    ledger.reserve_sealed(
        "scans", label="sealed", epsilon=2.0, delta=1e-6, rdp_curve=lambda _: budget * 0.999
    )
    with pytest.raises(BudgetExceeded):
        reserve(ledger, NUM_ADMITTED // 10)


def test_charges_of_several_kinds_add_up_to_no_less_than_their_exact_sum(ledger: Ledger) -> None:
    """Rounded to nearest, about half of these sums would lie below it."""
    exact = Fraction(0)
    for number in range(1, 9):
        label, rdp = f"sealed {number}", 0.1 / (2 * number + 1)
        ledger.reserve_sealed("scans", label=label, epsilon=1.0, delta=1e-7, rdp_curve=lambda _, rdp=rdp: rdp)
        exact += Fraction(rdp)
        assert Fraction(ledger.read_charges("scans", with_pld=False).rdp or 0.0) >= exact


def test_sealed_bound_is_charged_to_what_the_cap_sets_aside(ledger: Ledger) -> None:
    ledger.reserve_sealed("quotas", label="first", epsilon=0.75, delta=5e-7)
    with pytest.raises(BudgetExceeded, match="set"):
        ledger.reserve_sealed("quotas", label="second", epsilon=0.5, delta=1e-7)
    ledger.reserve_sealed("quotas", label="second", epsilon=0.25, delta=5e-7)


def test_sealed_bound_without_anything_set_aside_is_refused(ledger: Ledger) -> None:
    with pytest.raises(BudgetExceeded, match="Pass its RDP curve"):
        ledger.reserve_sealed("scans", label="sealed", epsilon=0.1, delta=1e-9)


def test_sealed_curve_cannot_enter_quotas(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="Leave the curve out"):
        ledger.reserve_sealed("quotas", label="sealed", epsilon=0.1, delta=1e-9, rdp_curve=lambda _: 0.01)


def test_sealed_sweep_is_charged_anew_under_another_label_only(ledger: Ledger) -> None:
    ledger.reserve_sealed("quotas", label="sealed", epsilon=0.1, delta=1e-9)
    with pytest.raises(LedgerError, match="already"):
        ledger.reserve_sealed("quotas", label="sealed", epsilon=0.1, delta=1e-9)


def test_sealed_delta_above_one_over_the_records_is_refused(ledger: Ledger) -> None:
    before = ledger.head()
    with pytest.raises(ConfigError, match="at most 1/num_records_public"):
        ledger.reserve_sealed("scans", label="sealed", epsilon=1.0, delta=2e-4, rdp_curve=lambda _: 0.01)
    assert ledger.head() == before


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_sealed_sweep_with_a_nonsense_curve_is_refused(ledger: Ledger, value: float) -> None:
    with pytest.raises(DpgclError):
        ledger.reserve_sealed("scans", label="sealed", epsilon=1.0, delta=1e-6, rdp_curve=lambda _: value)


@pytest.mark.parametrize("num_steps", [0, -5, 1.5, True])
def test_nonsense_number_of_steps_is_refused(ledger: Ledger, num_steps: int) -> None:
    with pytest.raises(ConfigError, match="num_steps"):
        reserve(ledger, num_steps)


def test_unknown_data_set_is_refused_with_the_nearest_name(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="did you mean 'scans'"):
        reserve(ledger, 10, dataset="scan")


def test_training_of_another_unit_cannot_be_charged(ledger: Ledger) -> None:
    plan = [PlannedTraining(label="trial", step_class=STEPS, num_steps=1)]
    with pytest.raises(LedgerError, match="registered with unit 'record'"):
        ledger.reserve("scans", plan, unit="person")


def test_training_of_another_relation_cannot_be_charged(ledger: Ledger) -> None:
    plan = [PlannedTraining(label="trial", step_class=STEPS, num_steps=1)]
    with pytest.raises(LedgerError, match="registered with neighboring_relation 'add or remove"):
        ledger.reserve("scans", plan, neighboring_relation="zero out one record")


def test_delta_above_one_over_the_records_is_refused_for_a_trial(ledger: Ledger) -> None:
    plan = [PlannedTraining(label="trial", step_class=STEPS, num_steps=1, delta=2e-4)]
    with pytest.raises(ConfigError, match="at most 1/num_records_public"):
        ledger.reserve("scans", plan)


def test_delta_above_one_over_the_records_is_refused_for_a_cap(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="at most 1/num_records_public"):
        ledger.register("large", RDP_CAP, num_records_public=200_000)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cap(epsilon=0.0, delta=1e-6),
        lambda: Cap(epsilon=-1.0, delta=1e-6),
        lambda: Cap(epsilon=math.inf, delta=1e-6),
        lambda: Cap(epsilon=math.nan, delta=1e-6),
        lambda: Cap(epsilon=1.0, delta=0.0),
        lambda: Cap(epsilon=1.0, delta=1.0),
        lambda: Cap(epsilon=1.0, delta=math.nan),
        lambda: Cap(epsilon=1.0, delta=1e-6, order=1.0),
        lambda: Cap(epsilon=1.0, delta=1e-6, sealed_epsilon=1.0),
        lambda: Cap(epsilon=1.0, delta=1e-6, sealed_delta=-1e-7),
        lambda: Cap(epsilon=1.0, delta=1e-6, order=8.0, quotas=((STEPS, 1),)),
        lambda: Cap(epsilon=1.0, delta=1e-6, quotas=((STEPS, 1), (STEPS, 2))),
    ],
)
def test_nonsense_cap_is_refused(make: Callable[[], Cap]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_quotas_above_the_cap_are_refused_at_registration(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="above the cap"):
        ledger.register(
            "large", Cap(epsilon=1.0, delta=1e-6, quotas=((STEPS, 5000),)), num_records_public=100_000
        )


def test_unproven_neighbouring_relation_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="unknown neighboring_relation"):
        ledger.register("b", RDP_CAP, num_records_public=10_000, neighboring_relation="replace one record")


def test_same_registration_again_changes_nothing(ledger: Ledger) -> None:
    before = ledger.head()
    ledger.register("scans", RDP_CAP, num_records_public=10_000)
    assert ledger.head() == before


@pytest.mark.parametrize("change", [{"unit": "person"}, {"num_records_public": 20_000}, {"cap": QUOTA_CAP}])
def test_second_registration_that_differs_is_refused(ledger: Ledger, change: dict[str, object]) -> None:
    values = {"cap": RDP_CAP, "num_records_public": 10_000} | change
    with pytest.raises(LedgerError, match="a repeated registration must have the same values"):
        ledger.register("scans", **values)  # type: ignore[arg-type]


def test_order_is_fixed_with_the_cap(ledger: Ledger) -> None:
    ledger.change_cap("scans", 8.0, allow_raise=True)
    assert ledger.read_charges("scans", with_pld=False).cap.order == RDP_CAP.order


def test_cap_is_raised_only_explicitly(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="set allow_raise"):
        ledger.change_cap("scans", 8.0)


def test_statement_carries_the_highest_cap_ever_in_force(ledger: Ledger) -> None:
    ledger.change_cap("scans", 8.0, allow_raise=True)
    ledger.change_cap("scans", 2.0)
    statement = ledger.statement("scans")
    assert (statement.epsilon, statement.num_raised) == (8.0, 1)


def test_lowered_cap_refuses_more(ledger: Ledger) -> None:
    ledger.change_cap("scans", 2.0)
    with pytest.raises(BudgetExceeded):
        reserve(ledger, NUM_ADMITTED)


def test_quotas_cannot_be_changed(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="has step quotas; such a cap cannot change"):
        ledger.change_cap("quotas", 3.0)


def test_statement_carries_the_head(ledger: Ledger) -> None:
    reserve(ledger, 10)
    assert ledger.statement("scans").head == ledger.head()
    assert ledger.head().num_entries == len(ledger.entries()) == 4


def test_classes_of_steps_add_up_at_one_order(ledger: Ledger) -> None:
    reserve(ledger, 100)
    ledger.reserve("scans", [PlannedTraining(label="other", step_class=OTHER, num_steps=30)])
    expected = RDP_CAP.rdp_filter().total_cost({STEPS: 100, OTHER: 30})
    assert ledger.read_charges("scans", with_pld=False).rdp == pytest.approx(expected, rel=1e-12)


def test_random_use_agrees_with_a_plain_model(ledger: Ledger) -> None:
    chance, quota = random.Random(0), 100
    held: dict[str, Reservation] = {}
    model: dict[str, int] = {}
    for turn in range(100):
        num_steps, free = chance.randrange(1, 30), quota - sum(model.values())
        label = chance.choice([*held, f"trial-{turn}"])
        try:
            if label not in held:
                held[label] = reserve(ledger, num_steps, label, "quotas")
                model[label] = num_steps
            elif chance.random() < 0.5:
                held[label] = ledger.extend(held[label], num_steps)
                model[label] += num_steps
            else:
                model[label] = chance.randrange(model[label] + 1)
                ledger.settle(held.pop(label), model[label])
        except BudgetExceeded:
            assert num_steps > free
        assert (
            ledger.read_charges("quotas", with_pld=False).num_steps.get(STEPS, 0)
            == sum(model.values())
            <= quota
        )
    assert charged(ledger, "quotas") == sum(model.values())
    ledger.verify()


def test_pld_total_of_open_and_settled_charges_stands_beside(ledger: Ledger) -> None:
    ledger.settle(reserve(ledger, 500, "a"), 300)
    reserve(ledger, 400, "b")
    spent = ledger.read_charges("scans")
    assert spent.epsilon_pld == pytest.approx(epsilon_pld(composed_event({STEPS: 700}), 1e-5))
    assert spent.epsilon_pld < spent.epsilon_filter < RDP_CAP.epsilon


def test_pld_total_adds_a_sealed_sweeps_stated_bound(ledger: Ledger) -> None:
    reserve(ledger, 50, dataset="quotas")
    ledger.reserve_sealed("quotas", label="sealed", epsilon=0.5, delta=1e-6)
    expected = 0.5 + epsilon_pld(composed_event({STEPS: 50}), 1e-5 - 1e-6)
    assert ledger.read_charges("quotas").epsilon_pld == pytest.approx(expected)


def test_second_ledger_in_the_same_place_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="a ledger already exists"):
        Ledger.create(ledger.url)
    assert charged(ledger) == 0
