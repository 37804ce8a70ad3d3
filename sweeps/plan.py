#!/usr/bin/env python
"""What is feasible? Lists (B, σ, T, S) within budgets of privacy and compute; spends nothing.

    python sweeps/plan.py --num-records-public 60000 --epsilon 1 --dataset fashion-mnist --core-hours 1
    ray job submit --working-dir . -- python sweeps/plan.py --num-records-public 60000

Prints a table, or one JSON object with `--json`; `--output` draws ε against N and epochs against B.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.planner_options import PlannerOptions
from sweeps.service.options.sweep_command_line import parse_options


def main() -> int:
    """Print the feasible settings."""
    options = parse_options(PlannerOptions, description=__doc__, announces=False)
    from sweeps.service.running.planner import run_plan  # imported late: it loads torch

    return run_plan(options)


if __name__ == "__main__":
    exit_on_bad_input(main)
