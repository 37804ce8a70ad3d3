"""The charge of a sealed sweep: the ε of the best of K trials, charged once, before K is drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from dpgcl_core.accounting.filters import FILTER_ORDERS, StepClass, composed_event
from dpgcl_core.accounting.tuning.bounds import papernot_steinke_rdp
from dpgcl_core.accounting.tuning.modes import SEALED
from dpgcl_core.accounting.tuning.trial_release import cases_of
from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import LedgerStatement
from sweeps.service.options.data import data_path
from sweeps.service.options.release_options import ReleaseOptions, trial_law
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.sweep_cost import candidates_of
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.ledger_choice import bind_images, unit_of

_log = logging.getLogger(__name__)


def rdp_of_best(
    release: ReleaseOptions, trials: Sequence[Trial], max_trials: int | None = None
) -> Callable[[float], float]:
    """Return the RDP curve of the best of a secret number of trials, by Papernot and Steinke (2022).

    With noised scores it is the larger of two curves: for a record that trials train on, and for one that
    they score (`dpgcl_core.accounting.tuning.trial_release`).
    """
    candidates, weights = candidates_of(trials)
    law = trial_law(release, max_trials)

    def rdp_of_case(case: Sequence[Mapping[StepClass, int]], order: float) -> float:
        orders = np.array(sorted({*FILTER_ORDERS, order}))
        log_moments = [
            np.log(weight) + (orders - 1) * _rdp(steps, orders)
            for steps, weight in zip(case, weights, strict=True)
        ]
        trial_rdp = np.logaddexp.reduce(log_moments, axis=0) / (orders - 1)
        return float(papernot_steinke_rdp(orders, trial_rdp, law)[np.searchsorted(orders, order)])

    return lambda order: max(rdp_of_case(case, order) for case in cases_of(candidates))


def charged_curve(
    release: ReleaseOptions, trials: Sequence[Trial], cap: Cap, max_trials: int | None = None
) -> Callable[[float], float] | None:
    """Return the RDP curve that a sealed sweep is charged by; None if its tuned ε is charged instead."""
    has_curve = release.mode == SEALED and not cap.quotas
    return rdp_of_best(release, trials, max_trials) if has_curve else None


def _rdp(steps: Mapping[StepClass, int], orders: Any) -> Any:
    if not steps:  # a candidate without noised scores releases nothing about a record that is only scored
        return np.zeros(len(orders))
    accountant = RdpAccountant(orders.tolist(), NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(composed_event(steps))
    rdp = np.asarray(accountant.rdp, dtype=np.float64)
    return np.where(rdp > 0, rdp, np.inf)  # an overflow must not count as free


def reserve(ledger: Ledger, dataset_id: str, plan: SweepPlan, label: str) -> LedgerStatement:
    """Charge a sealed sweep once, before its number of trials is drawn; return the ledger's statement then.

    Its RDP curve is charged if the cap has an order and the mode has a theorem, else its tuned ε by basic
    composition. A later statement's head would be among rows with times, and reveal how long the sweep took.

    Raises:
      BudgetExceeded, LedgerError: as in `Ledger.reserve_sealed`; or the sweep's tuned ε is not known.
    """
    cost, source = plan.cost, plan.source
    if cost is None or cost.tuned_epsilon is None:
        reason = cost.reason if cost is not None else "no candidate has a guarantee"
        raise LedgerError(f"a sealed sweep whose cost is not accounted cannot be charged: {reason}")
    path = data_path(source.dataset) if source.are_private else None
    if path is not None:
        for note in ledger.bind(dataset_id, path):
            _log.warning("note: %s", note)
        bind_images(ledger, dataset_id, source)
    cap = ledger.read_charges(dataset_id, with_pld=False).cap
    ledger.reserve_sealed(
        dataset_id,
        label=label,
        epsilon=cost.tuned_epsilon,
        delta=cost.delta,
        rdp_curve=charged_curve(plan.release, plan.trials, cap, plan.max_trials),
        unit=unit_of(source),
        neighboring_relation=cost.neighboring_relation,
    )
    if path is not None:
        bind_images(ledger, dataset_id, source)
    return ledger.statement(dataset_id)
