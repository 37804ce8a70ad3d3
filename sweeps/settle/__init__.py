"""`python -m sweeps.settle`: close what an unfinished sweep has reserved in a budget ledger."""
