"""The group-size sweep as a user starts it, but all that Ray writes is kept, in $DPGCL_TEST_SCRATCH.

python -m tests.sweeps.kept --tiny
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpgcl_core.errors import exit_on_bad_input
from sweeps import group_size
from sweeps.service.cluster import ray_session


@contextmanager
def _kept() -> Iterator[Path]:
    yield Path(os.environ["DPGCL_TEST_SCRATCH"])


if __name__ == "__main__":
    ray_session._scratch_folder = _kept
    exit_on_bad_input(group_size.main)
