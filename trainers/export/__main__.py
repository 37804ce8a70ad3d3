"""`python -m trainers.export`: see `trainers.export.trial`."""

from __future__ import annotations

from dpgcl_core.errors import exit_on_bad_input
from trainers.export.trial import main

if __name__ == "__main__":
    exit_on_bad_input(main)
