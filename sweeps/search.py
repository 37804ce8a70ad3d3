#!/usr/bin/env python
"""Which settings are best? An adaptive search, private as a whole: its cost is fixed before it starts.

    python sweeps/search.py --dataset fashion-mnist --num-trials 30
    python sweeps/search.py --epsilon-range 1 10 --objectives knn_accuracy epsilon
    python sweeps/search.py --epsilon 3 --num-trials 10 --earlier NAME    # starts from results of that sweep
    ray job submit --working-dir . -- python sweeps/search.py --dataset fashion-mnist

Reports the best settings, and draws utility against ε with its Pareto front, both at the ε of one training
and at the ε of the whole search. Optuna's own figures can draw history and importance from the stored study.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning.space import SearchOptions
from sweeps.service.script_runner import run_question


def main() -> int:
    """Run the search."""
    options = parse_options(SearchOptions, description=__doc__)
    from sweeps.service.running.search_policy import SearchPolicy  # imported late: loads pandas and Ray

    return run_question("search", options, (), SearchPolicy())


if __name__ == "__main__":
    exit_on_bad_input(main)
