"""`python -m dpgcl_core.audit`: see `dpgcl_core.audit.canary`."""

from __future__ import annotations

from dpgcl_core.audit.canary import main
from dpgcl_core.errors import exit_on_bad_input

if __name__ == "__main__":
    exit_on_bad_input(main)
