"""Processes of one gloo group, for tests of trainings on several workers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dpgcl_core.noise import chunked_draw

# Imported once; every worker is a fork. The first optimizer of a process would import torch's compiler.
mp.set_forkserver_preload([__name__, "torch._dynamo"])
FORK_SERVER = mp.get_context("forkserver")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(function: Callable[..., None], count: int, folder: Path, *arguments: object) -> None:
    """Runs `function(rank, folder, *arguments)` in every process of a group, with this process's `PART`."""
    given = (count, free_port(), chunked_draw.PART, function, str(folder), *arguments)
    mp.start_processes(_enter, args=given, nprocs=count, start_method="forkserver")


def _enter(
    rank: int,
    count: int,
    port: int,
    part: int,
    function: Callable[..., None],
    folder: str,
    *arguments: object,
) -> None:
    chunked_draw.PART = part
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    function(rank, Path(folder), *arguments)
    dist.destroy_process_group()
