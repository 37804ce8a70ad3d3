"""Plans of a training before any budget is spent: feasible (B, σ, T, S) and expected SNR.

    from dpgcl_core.planning import PlanRequest, feasible

    answer = feasible(PlanRequest(num_records_public=60_000, target_epsilon=1.0, num_weights=8_280))
    print(answer.recommended)

All results depend only on public numbers. `sweeps/plan.py` is the command line. Every sweep's plan uses
`too_small` to warn that n and ε are too small.
"""

from dpgcl_core.planning.feasible import Answer, Plan, PlanRequest, enough_records, feasible, verified
from dpgcl_core.planning.snr import ExpectedSnr, expected_snr, too_small
from dpgcl_core.planning.tradeoff_curves import epochs_by_batch, epsilon_by_records

Wanted = PlanRequest  # the former name, for one version

__all__ = ["Answer", "ExpectedSnr", "Plan", "PlanRequest", "Wanted", "enough_records", "epochs_by_batch"]
__all__ += ["epsilon_by_records", "expected_snr", "feasible", "too_small", "verified"]
