"""`python -m sweeps.settle`: close the reservations of an unfinished sweep in a budget ledger."""
