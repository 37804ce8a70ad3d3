"""`python -m benchmarks.audit`: see `benchmarks.audit.canary`."""

from __future__ import annotations

from benchmarks.audit.canary import main
from dpgcl_core.errors import exit_on_bad_input

if __name__ == "__main__":
    exit_on_bad_input(main)
