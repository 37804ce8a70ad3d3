"""The privacy statement: its numbers, its words, and what it never says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.filters import StepClass
from dpgcl_core.ledger import Ledger
from dpgcl_core.ledger_account import PlannedTraining
from dpgcl_core.ledger_cap import Cap
from dpgcl_core.ledger_report import read_head
from dpgcl_core.mechanism import Mechanism
from dpgcl_core.randomness import SecretRandomness
from dpgcl_core.secure_randomness import SecureRandomness
from dpgcl_core.selection import TrialClass, not_accounted, open_cost, sealed_cost
from dpgcl_core.selection_laws import TruncatedNegativeBinomial
from dpgcl_core.statement import OpenTrials, PrivacyStatement

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
TRIALS = OpenTrials(planned=3, without_guarantee=0, started=3, steps_planned=60, steps_repeated=0)
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


@pytest.mark.parametrize("label", ["none", "as-published"])
def test_statement_without_guarantee_never_says_private(label: str) -> None:
    trials = replace(TRIALS, without_guarantee=1)
    loose = replace(STATEMENT, guarantee_label=label, data_are_private=False, trials=trials)
    for text in (loose.to_json(), loose.to_markdown(), loose.headline()):
        assert "private" not in text.lower()
    assert "NO GUARANTEE" in loose.headline()
    assert not loose.promises


def test_statement_of_public_data_says_research() -> None:
    public = replace(STATEMENT, data_are_private=False)
    assert "research: public data" in public.to_markdown()
    assert json.loads(public.to_json())["data"] == "research: public data"
    assert public.headline().startswith("Research on public data")


def test_statement_of_an_unaccounted_cost_gives_the_reason_and_no_promise() -> None:
    cost = not_accounted("open", reason="trials shared a seed", delta=1e-4, training_epsilon=1.0)
    loose = replace(STATEMENT, cost=cost)
    assert "trials shared a seed" in loose.headline()
    assert "differentially private" not in loose.headline()
    assert not loose.promises


def test_sealed_statement_refuses_numbers_of_trials() -> None:
    with pytest.raises(ConfigError, match="must not tell its trials"):
        replace(SEALED_STATEMENT, trials=TRIALS)


def test_sealed_statement_names_law_parameters_and_theorem() -> None:
    lines = dict(SEALED_STATEMENT.lines())
    assert lines["Law of the number of trials"] == "name = tnb, eta = 1, gamma = 0.2, mean = 5"
    assert lines["Theorem"] == SEALED.theorem


def test_statement_names_sampling_grouping_sensitivity_and_software() -> None:
    lines = dict(STATEMENT.lines())
    assert "Poisson" in lines["Sampling"]
    assert "groups of exactly S" in lines["Grouping"]
    assert "2C" in lines["Sensitivity"]
    assert "dp-accounting" in lines["Software"]
    assert "σ = 1, T = 20, S = 4, C = 1, sensitivity = 2" in lines["Mechanism"]


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


def test_unknown_label_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown guarantee label 'prooven'"):
        replace(STATEMENT, guarantee_label="prooven")
