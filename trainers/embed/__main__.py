"""`python -m trainers.embed`: see `trainers.embed.command`."""

from __future__ import annotations

from dpgcl_core.errors import exit_on_bad_input
from trainers.embed.command import main

if __name__ == "__main__":
    exit_on_bad_input(main)
