"""Programs in processes of their own, which import nothing first: they are forked from one that has.

Most of what a command takes that refuses a wrong option, or prints a plan, is the import of PyTorch, MLflow
and Ray. What a process of its own is for stays: arguments, environment, folder, output and exit code. What
only a fresh interpreter shows, as that a program imports what it uses, is tested where whole sweeps are.

    python -m tests.programs    # the process that forks: a JSON object per line, and the exit code of each
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.distributions import made_quickly

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    "dashboards.figures",
    "dpgcl_core.calculator",
    "dpgcl_core.ledger.remaining",
    "mlflow.tracking",
    "ray.tune",
    "sweeps.group_size",
    "sweeps.service.running.search_policy",
    "sweeps.service.running.two_stage_policy",
    "trainers.embed.embed_images",
    "trainers.export.sweep_results",
    "trainers.ray_worker",
)


def run_program(
    words: Sequence[str], *, cwd: Path, environment: Mapping[str, str], timeout_seconds: int = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`: a script with its arguments, or `-m` and a module with its own.

    One that takes longer than `timeout_seconds` is killed: its exit code is that of SIGALRM, negative.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        request = {"words": list(words), "cwd": str(cwd), "environment": dict(environment)}
        places = {"out": str(out), "err": str(err), "timeout_seconds": timeout_seconds}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request | places) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        said = (path.read_text(encoding="utf-8") for path in (out, err))
        return subprocess.CompletedProcess(request["words"], code, *said)


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one."""
    command = [sys.executable, "-m", __name__]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # that it is loaded already
    gc.freeze()  # what is loaded is shared by all that are forked
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _run(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(
    *, words: list[str], cwd: str, environment: dict[str, str], out: str, err: str, timeout_seconds: int
) -> None:
    """Becomes the program, and never returns."""
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    signal.alarm(timeout_seconds)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    code = _exit_code(words, cwd)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _exit_code(words: list[str], cwd: str) -> int:
    try:
        if words[0] == "-m":
            sys.path[0], sys.argv = cwd, words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(Path(words[0]).parent), words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    with made_quickly():
        _serve()
