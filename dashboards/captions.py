"""Table → words of a figure: title, settings, facts and what the reader must know."""

from __future__ import annotations

import math

import pandas as pd

from trainers.tracking import NO_TUNING_COST, TUNING_COST_TAG

_DATASET_NAMES = {
    "fashion_mnist": "Fashion-MNIST",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "Digits",
}


def has_values(trials: pd.DataFrame, name: str) -> bool:
    """Whether a column exists and holds anything."""
    return name in trials and bool(trials[name].notna().any())


def _values(trials: pd.DataFrame, name: str, form: str = "g") -> str:
    """The distinct values of a column, for example "3, 10"; empty without such a column."""
    if not has_values(trials, name):
        return ""
    found = sorted(trials[name].dropna().unique())
    shown = list(dict.fromkeys(value if isinstance(value, str) else format(value, form) for value in found))
    return ", ".join(shown) if len(shown) <= 3 else f"{shown[0]} to {shown[-1]}"


def title(trials: pd.DataFrame) -> str:
    """Returns data set, ε, δ and the neighbouring relation, or that there is no guarantee."""
    finite = trials[trials["target_epsilon"] < math.inf]
    dataset = _values(trials, "dataset").replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    name = _DATASET_NAMES.get(dataset, dataset)
    head = f"{name}: DP-GCL" if name else "DP-GCL"
    if finite.empty:
        return f"{head}, ε = ∞ (non-private: no guarantee)"
    delta = _values(finite, "target_delta", ".2g") or "not recorded"
    relation = "add or remove one record"
    if has_values(finite, "neighboring_relation"):
        relation = _values(finite, "neighboring_relation")
    if _not_proven(finite):
        relation = "NO GUARANTEE: seeded, non-private trials"
    epsilon = _values(finite, "target_epsilon")
    epsilon = f"ε ∈ {{{epsilon}}}" if finite["target_epsilon"].nunique() > 1 else f"ε = {epsilon}"
    return f"{head}, {epsilon}, δ = {delta} ({relation})"


def _not_proven(finite: pd.DataFrame) -> bool:
    return "guarantee_label" in finite and bool((finite["guarantee_label"] != "proven").any())


def subtitle(trials: pd.DataFrame) -> str:
    """Returns σ, expected batch size, steps, temperature and network."""
    finite = trials[trials["target_epsilon"] < math.inf]
    parts = []
    if has_values(finite, "noise_multiplier"):
        noise = [
            (f"{_values(rows, 'noise_multiplier', '.3g')}", f"{epsilon:g}")
            for epsilon, rows in finite.groupby("target_epsilon")
        ]
        many = len(noise) > 1
        parts.append("σ = " + "; ".join(f"{s} at ε = {e}" if many else s for s, e in noise))
    if {"sampling_prob", "num_records_public"} <= set(trials):
        batch = trials.assign(batch=(trials["sampling_prob"] * trials["num_records_public"]).round(1))
        parts.append(f"B = {_values(batch, 'batch')} expected")
    for name, sign in (("num_steps", "T"), ("temperature", "τ"), ("network_name", "network")):
        if has_values(trials, name):
            parts.append(f"{sign} = {_values(trials, name)}")
    return ", ".join(parts)


def facts(trials: pd.DataFrame) -> list[list[str]]:
    """Returns a table, heading first: what was trained and spent for each ε and num_augmentations."""
    rows = [["target ε", "Nₐ", "group sizes S", "trials", "ε spent", "σ", "steps"]]
    for (epsilon, count), cell in trials.groupby(["target_epsilon", "num_augmentations"]):
        rows.append(
            [
                "∞" if math.isinf(epsilon) else f"{epsilon:g}",
                f"{count:g}",
                _group_sizes(cell),
                str(len(cell)),
                _values(cell, "epsilon", ".4g").replace("inf", "∞") or "–",
                _values(cell, "noise_multiplier", ".3g") or "–",
                _values(cell, "num_steps_done") or _values(cell, "num_steps") or "–",
            ]
        )
    return rows


def _group_sizes(trials: pd.DataFrame) -> str:
    orders = sorted(trials["group_size_order"].unique())
    sizes = [f"{order:g}" for order in orders if order < math.inf]
    shown = ", ".join(sizes) if len(sizes) <= 3 else f"{sizes[0]} to {sizes[-1]}"
    return ", ".join(filter(None, [shown, "batch" if math.inf in orders else ""]))


def notes(
    trials: pd.DataFrame,
    *,
    num_repeats: list[int],
    num_untrained: int,
    private: bool,
    has_scores: bool,
) -> list[str]:
    """Returns what the reader must know, one sentence each; the tuning cost comes last.

    Args:
      trials: those shown.
      num_repeats: the distinct numbers of repeats of the points, ascending.
      num_untrained: networks behind the line of the untrained network; 0 = no such line.
      private: whether the training data are private.
      has_scores: whether any score is shown.
    """
    found = []
    if num_repeats and num_repeats[-1] > 1:
        fewest, most = num_repeats[0], num_repeats[-1]
        span = f"{most}" if fewest == most else f"{fewest} to {most}"
        missing = "" if fewest == most else " (some trials are missing)"
        found.append(f"Points and error bars: mean ± standard error over {span} repeats{missing}.")
    elif num_repeats:
        found.append("One repeat: no error bars.")
    if num_untrained:
        band = f", band: ± standard error over {num_untrained} initialisations" if num_untrained > 1 else ""
        found.append(f"Grey line: untrained network{band}.")
    if trials["num_augmentations"].nunique() == 1:
        found.append(f"Extra augmented copies of every key: Nₐ = {trials['num_augmentations'].iloc[0]:g}.")
    if private:
        found.append(
            "The training data are private: trials with ε = ∞, un-noised scores on private records and the "
            "SNR are not shown."
        )
    if not has_scores:
        cause = "they would be computed from private records" if private else "none was recorded"
        found.append(f"No scores: {cause}.")
    found.append(_overspent(trials))
    found.append(_tuning_cost(trials))
    return [note for note in found if note]


def _tuning_cost(trials: pd.DataFrame) -> str:
    """What the choice among the trials costs, as the sweep's own runs say."""
    if not has_values(trials, TUNING_COST_TAG):
        return NO_TUNING_COST
    told = list(dict.fromkeys(str(line) for line in trials[TUNING_COST_TAG].dropna()))
    return told[0] if len(told) == 1 else NO_TUNING_COST


def _overspent(trials: pd.DataFrame) -> str:
    """A note when restarts repeated steps and the spent ε passed the target."""
    if not has_values(trials, "epsilon"):
        return ""
    finite = trials[trials["target_epsilon"] < math.inf]
    over = finite[finite["epsilon"] > 1.001 * finite["target_epsilon"]]
    if over.empty:
        return ""
    return (
        f"{len(over)} of {len(finite)} private trials spent more than their target ε, up to "
        f"{over['epsilon'].max():.3g}: steps repeated after restarts are charged."
    )
