#!/usr/bin/env python
"""Which settings are best? An adaptive search, private as a whole: its cost is fixed before it starts.

    python sweeps/search.py --dataset fashion-mnist --num-trials 30
    python sweeps/search.py --epsilon-range 1 10 --objectives knn_accuracy epsilon
    ray job submit --working-dir . -- python sweeps/search.py --dataset fashion-mnist

Ends in the history of the search, the score against every setting and, where ε is searched, utility against
ε with its Pareto front; and in the best settings.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dashboards.figures import draw
from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options import parse_options
from sweeps.service.run import execute
from sweeps.service.search_space import SearchOptions, with_default_space
from sweeps.service.searching import SearchSweep

TINY = {"num_trials": 4, "group_sizes": (2, 4, 8), "learning_rate_range": (1e-3, 1e-2), "num_steps": 10}
TINY |= {"expected_batch_size": 64, "max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "num_trials": 50}


def main() -> int:
    """Runs the search."""
    options = parse_options(SearchOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    options = with_default_space(options, sys.argv[1:])
    return execute("search", options, (), partial(draw, "search"), kind=SearchSweep).code


if __name__ == "__main__":
    exit_on_bad_input(main)
