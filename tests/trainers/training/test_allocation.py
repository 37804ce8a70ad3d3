"""Memory that a training frees: its process reuses it, so a step does not wait for the operating system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.trainers.conftest import make_config, make_data
from trainers.training import loop, step
from trainers.training.allocation import keep_freed_memory

TWICE = """
import resource

import numpy as np

from trainers.training.allocation import keep_freed_memory

def faults_of_arrays() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.empty(2**24, dtype=np.uint8) for _ in range(8)]  # together more than glibc keeps by itself
    for array in arrays:
        array.fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory(), faults_of_arrays(), faults_of_arrays())
"""


def test_freed_memory_is_reused_without_a_page_fault() -> None:
    kept, first, second = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, check=True
    ).stdout.split()
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert 10 * int(second) < int(first)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0:glibc.malloc.trim_threshold=65536"),
    ],
)
def test_what_the_user_tells_the_c_library_is_kept(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmarks measure peaks so: with nothing kept, a peak is what is needed."""
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


def test_a_tunable_of_something_else_leaves_memory_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_freed_memory()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert keep_freed_memory() == kept


def test_trainings_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(step, "keep_freed_memory", lambda: called.append(True) or keep_freed_memory())
    loop.train(make_config(), make_data())
    assert called == [True]
