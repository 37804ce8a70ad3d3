"""The privacy statement: its numbers, its words, and what it never says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.accounting.tuning.cost import TrialClass, not_accounted, open_cost, sealed_cost
from dpgcl_core.accounting.tuning.laws import (
    BinomialTrials,
    PoissonTrials,
    TrialCountLaw,
    TruncatedNegativeBinomial,
    TruncatedTrials,
)
from dpgcl_core.errors import ConfigError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import read_head
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise.chacha20 import SecureRandomness
from dpgcl_core.noise.randomness import SecretRandomness
from dpgcl_core.release.statement import OpenTrials, PrivacyStatement, rounded_up

MECHANISM = Mechanism(
    num_records_public=1000,
    sampling_prob=0.05,
    group_size=4,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    num_steps=20,
    target_delta=1e-4,
)
TRIAL = TrialClass(sampling_prob=0.05, noise_multiplier=1.0, num_steps=20)
OPEN = open_cost([replace(TRIAL, count=3)], delta=1e-4)
SEALED = sealed_cost([TRIAL], law=TruncatedNegativeBinomial.from_mean(5, eta=1), delta=1e-4)
TRIALS = OpenTrials(planned=3, without_guarantee=0, num_started=3, steps_planned=60, steps_repeated=0)
STATEMENT = PrivacyStatement(
    sweep="one",
    dataset="scans",
    data_are_private=True,
    guarantee_label="proven",
    num_records_public=1000,
    num_records_source="declared",
    cost=OPEN,
    budget=OPEN,
    mechanisms=[MECHANISM],
    randomness=SecureRandomness.description,
    scores="none were computed",
    trials=TRIALS,
)
SEALED_STATEMENT = replace(STATEMENT, mode="sealed", cost=SEALED, budget=SEALED, trials=None)


def test_statement_carries_the_numbers_of_the_tuning_cost() -> None:
    values = json.loads(STATEMENT.to_json())
    assert values["cost"]["tuned_epsilon"] == OPEN.tuned_epsilon
    assert values["cost"]["training_epsilon"] == OPEN.training_epsilon
    assert values["cost"]["theorem"] == OPEN.theorem


def test_statement_has_training_and_tuning_on_separate_lines() -> None:
    lines = dict(STATEMENT.lines())
    one, whole = lines["ε of one training"], lines["ε of the whole sweep, tuning included"]
    assert 0 <= float(one) - OPEN.training_epsilon <= 1e-4
    assert 0 <= float(whole) - OPEN.tuned_epsilon <= 1e-4
    assert float(one) < float(whole)


def test_statement_rounds_epsilon_up() -> None:
    shown = replace(STATEMENT, cost=replace(OPEN, tuned_epsilon=3.00001)).headline()
    assert "ε = 3.0001" in shown


def test_statement_rounds_delta_up() -> None:
    rounded = replace(STATEMENT, cost=replace(OPEN, delta=1.51515e-6))
    assert "δ = 1.516e-06" in rounded.headline()
    assert dict(rounded.lines())["δ"] == "1.516e-06"


def test_statement_keeps_exact_values_in_json() -> None:
    exact = replace(STATEMENT, cost=replace(OPEN, tuned_epsilon=3.00001, delta=1.51515e-6))
    values = json.loads(exact.to_json())
    assert (values["cost"]["tuned_epsilon"], values["cost"]["delta"]) == (3.00001, 1.51515e-6)


@pytest.mark.parametrize("num_digits", [3, 4, 6])
def test_rounded_number_is_never_below_the_exact_one(num_digits: int) -> None:
    generator = random.Random(0)
    for _ in range(2000):
        value = 10 ** generator.uniform(-12, 3)
        shown = float(rounded_up(value, num_digits))
        assert value <= shown <= value * (1 + 1.01 * 10 ** (1 - num_digits))
        assert rounded_up(shown, num_digits) == rounded_up(value, num_digits)


def test_epsilon_a_hair_above_its_decimals_is_rounded_up() -> None:
    shown = replace(STATEMENT, cost=replace(OPEN, tuned_epsilon=3.0000000000000004)).headline()
    assert "ε = 3.0001" in shown


@pytest.mark.parametrize("label", ["none", "as-published"])
def test_statement_without_guarantee_never_says_private(label: str) -> None:
    trials = replace(TRIALS, without_guarantee=1)
    loose = replace(STATEMENT, guarantee_label=label, data_are_private=False, trials=trials)
    for text in (loose.to_json(), loose.to_markdown(), loose.headline()):
        assert "private" not in text.lower()
    assert not loose.promises


@pytest.mark.parametrize(("label", "reason"), [("none", "label `none`"), ("as-published", "as-published")])
def test_private_sweep_with_a_training_without_guarantee_has_none(label: str, reason: str) -> None:
    """Whatever the others are: somebody may rely on what this sweep releases."""
    loose = replace(STATEMENT, guarantee_label=label, trials=replace(TRIALS, without_guarantee=1))
    assert loose.headline().startswith("NO GUARANTEE for this sweep as a whole: 1 of 3 trainings")
    assert reason in loose.headline()


def test_statement_of_a_search_states_on_what_its_total_with_earlier_sweeps_depends() -> None:
    headline = replace(STATEMENT, earlier=("first", "second"), ledger=None).headline()
    assert "together with sweep first and second, whose results it starts from" in headline
    assert "if those results did not decide its number of trials, q, σ and T" in headline
    assert headline.endswith("otherwise no ε covers them together.")
    assert "whose results" not in STATEMENT.headline()


def test_statement_of_public_data_says_research() -> None:
    public = replace(STATEMENT, data_are_private=False)
    assert "research: public data" in public.to_markdown()
    assert json.loads(public.to_json())["data"] == "research: public data"
    assert public.headline() == (
        "Public data: nothing to protect. 3 trainings at ε = 1.5058, together 2.2925, at δ = 0.0001."
    )


def test_statement_of_public_data_counts_what_has_no_guarantee_apart_by_its_reason() -> None:
    trials = replace(TRIALS, planned=9, without_guarantee=6, references=3, as_published=2)
    public = replace(STATEMENT, data_are_private=False, guarantee_label="none", trials=trials)
    apart = "3 references without noise, 2 as published, not proven, 1 seeded, with no guarantee"
    assert public.headline().endswith(f"together 2.2925, at δ = 0.0001; {apart}.")
    assert f"| Guarantee label | none: 3 of 9 are proven; {apart} |" in public.to_markdown()
    alone = replace(public, cost=None, budget=None, trials=replace(trials, planned=6))
    assert alone.headline() == f"Public data: nothing to protect. {apart}."


def test_statement_of_public_data_says_what_is_not_accounted() -> None:
    cost = not_accounted("open", reason="two relations", delta=1e-4, training_epsilon=2.0)
    public = replace(STATEMENT, data_are_private=False, cost=cost, budget=cost)
    assert "3 trainings at ε up to 2.0000, together not accounted (two relations)" in public.headline()


def test_statement_of_an_unaccounted_cost_gives_the_reason_and_no_promise() -> None:
    cost = not_accounted("open", reason="trials shared a seed", delta=1e-4, training_epsilon=1.0)
    loose = replace(STATEMENT, cost=cost)
    assert "trials shared a seed" in loose.headline()
    assert "differentially private" not in loose.headline()
    assert not loose.promises


def test_sealed_statement_refuses_numbers_of_trials() -> None:
    with pytest.raises(ConfigError, match="must not reveal counts of trials"):
        replace(SEALED_STATEMENT, trials=TRIALS)


def test_sealed_statement_names_law_parameters_and_theorem() -> None:
    lines = dict(SEALED_STATEMENT.lines())
    assert lines["Law of the number of trials"] == "truncated negative binomial, η = 1, γ = 0.2, mean 5"
    assert lines["Theorem"] == SEALED.theorem


@pytest.mark.parametrize("max_trials", [None, 12])
@pytest.mark.parametrize(
    "law",
    [
        TruncatedNegativeBinomial(eta=1.0, gamma=0.2),
        PoissonTrials(mean_trials=5.0),
        BinomialTrials(max_trials=9, prob=0.5),
    ],
)
def test_every_law_is_told_in_words(law: TrialCountLaw, max_trials: int | None) -> None:
    given = law if max_trials is None else TruncatedTrials(law=law, max_trials=max_trials)
    text = dict(replace(SEALED_STATEMENT, cost=replace(SEALED, law=given.parameters())).lines())[
        "Law of the number of trials"
    ]
    assert "_" not in text
    assert ("cut off: at most 12, mean" in text) == (max_trials is not None)


def test_statement_names_sampling_grouping_sensitivity_and_software() -> None:
    lines = dict(STATEMENT.lines())
    assert "each group of slots joins each step independently (Poisson)" in lines["Sampling"]
    assert "a group with an empty slot contributes zero" in lines["Grouping"]
    assert "by at most C; proof in dpgcl_core/sampling/slots.py" in lines["Sensitivity"]
    assert "dp-accounting" in lines["Software"]
    assert "σ = 1, T = 20, S = 4, C = 1 (flat clipping), sensitivity = 1" in lines["Mechanism"]


def test_statement_of_sampled_records_says_2c() -> None:
    lines = dict(replace(STATEMENT, mechanisms=[replace(MECHANISM, sampling="records")]).lines())
    assert "each record joins each step independently (Poisson)" in lines["Sampling"]
    assert "groups of exactly S" in lines["Grouping"]
    assert (
        "by at most 2C (C for groups of one); proof in dpgcl_core/sampling/groups.py" in lines["Sensitivity"]
    )
    assert "sensitivity = 2" in lines["Mechanism"]


def test_statement_of_a_number_from_the_data_speaks_of_zeroing_out() -> None:
    lines = dict(replace(STATEMENT, mechanisms=[replace(MECHANISM, num_records_from_data=True)]).lines())
    assert lines["Sensitivity"].startswith("zeroing out one record changes the clipped sum by at most C")


def test_statement_names_where_the_secrets_come_from() -> None:
    assert "ChaCha20" in dict(STATEMENT.lines())["Randomness"]
    assert (
        "| Randomness | PCG64DXSM, seeded"
        in replace(STATEMENT, randomness=SecretRandomness.description).to_markdown()
    )
    assert json.loads(STATEMENT.to_json())["randomness"] == SecureRandomness.description


def test_statement_says_that_there_is_no_ledger() -> None:
    assert dict(STATEMENT.lines())["Ledger"] == "no ledger"


def test_statement_is_what_verify_reads_the_ledgers_head_from(tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-4), num_records_public=1000)
    training = PlannedTraining(label="a", step_class=StepClass(0.05, 1.0), num_steps=20)
    ledger.reserve("scans", [training])
    statement = replace(STATEMENT, ledger=ledger.statement("scans"))
    (tmp_path / "statement.json").write_text(statement.to_json())
    assert read_head(tmp_path / "statement.json") == ledger.head()
    assert f"{ledger.head().num_entries} rows, head {ledger.head().head_hash}" in statement.to_markdown()


@pytest.mark.parametrize(
    ("epsilons", "said"),
    [
        ([], "filter at order 4; ledger"),
        ([9.0], "; the cap was raised once, a decision outside the guarantee; ledger"),
        ([9.0, 8.5, 9.1], "; the cap was raised 2 times, a decision outside the guarantee; ledger"),
    ],
)
def test_statement_says_how_often_the_cap_was_raised(
    epsilons: list[float], said: str, tmp_path: Path
) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-4, order=4.0), num_records_public=1000)
    for epsilon in epsilons:
        ledger.change_cap("scans", epsilon, allow_raise=True)
    assert said in dict(replace(STATEMENT, ledger=ledger.statement("scans")).lines())["Ledger"]


def test_ledgers_line_rounds_the_cap_up(tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0000001, delta=1.00001e-4), num_records_public=1000)
    line = dict(replace(STATEMENT, ledger=ledger.statement("scans")).lines())["Ledger"]
    assert "(ε = 8.00001, δ = 0.0001001)" in line


@pytest.mark.usefixtures("coarse_losses")
def test_step_that_releases_its_noised_norm_is_named() -> None:
    joint = replace(TRIAL, joint_noise_multiplier=0.8, num_joint_steps=1)
    lines = dict(replace(STATEMENT, cost=open_cost([joint], delta=1e-4)).lines())
    assert "accounted at σ = 0.8" in lines["Noised SNR"]
    assert "Noised SNR" not in dict(STATEMENT.lines())


def test_statement_with_a_ledger_has_no_word_of_none(tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-4, order=4.0), num_records_public=1000)
    with_ledger = replace(STATEMENT, ledger=ledger.statement("scans"), ledger_note="no ledger")
    assert json.loads(with_ledger.to_json())["ledger_note"] is None


def test_unknown_label_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown guarantee label 'prooven'"):
        replace(STATEMENT, guarantee_label="prooven")
