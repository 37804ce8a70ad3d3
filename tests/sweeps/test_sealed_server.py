"""Sealed sweeps on a real MLflow server: its HTTP interface tells neither number nor length of the trials.

Every answer is read twice, when the first trial starts and just before the moment of publication: nothing may
have changed. Afterwards every time that the server noted by itself must be from before the trials or from the
moment on; and two sweeps of different numbers and lengths must read the same but for names, ids and seeds.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.accounting.tuning.laws import TrialCountLaw
from sweeps.group_size import points
from tests.sweeps.support import options, run_sweep
from tests.sweeps.test_sealed import SEALED, Ray, ray  # noqa: F401 (a fixture)
from tests.trainers.tracking.test_tracking import end, free_port, start_server

pytestmark = [pytest.mark.ci, pytest.mark.server]

API = "/api/2.0/mlflow"
REAL_TIMES = re.compile(r"\b1[5-9]\d{11}\b")  # in milliseconds, from 2017 on


@pytest.fixture
def address(tmp_path: Path, empty_database: Path) -> Iterator[str]:
    storage = tmp_path / "server"
    storage.mkdir()
    shutil.copy(empty_database, storage)
    server = start_server(storage, port := free_port())
    yield f"http://127.0.0.1:{port}"
    end(server)


@dataclass
class Reader:
    """Somebody who may read the server.

    Attributes:
      address: of the server.
      modified: times of files that it answered, in seconds since the epoch.
    """

    address: str
    modified: list[float] = field(default_factory=list)

    def ask(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{self.address}{path}", data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            if told := answer.headers.get("last-modified"):
                self.modified.append(parsedate_to_datetime(told).timestamp())
            return answer.read()

    def everything(self) -> dict[str, Any]:
        """All that it can be asked for: experiments, runs, histories of metrics, lists of artifacts."""
        found: dict[str, Any] = {}
        found["experiments"] = json.loads(
            self.ask(f"{API}/experiments/search", max_results=100, view_type="ALL")
        )["experiments"]
        ids = [experiment["experiment_id"] for experiment in found["experiments"]]
        asked = {"experiment_ids": ids, "run_view_type": "ALL", "max_results": 100}
        found["runs"] = json.loads(self.ask(f"{API}/runs/search", **asked)).get("runs", [])
        for run in found["runs"]:
            run_id = run["info"]["run_id"]
            for metric in run["data"].get("metrics", []):
                path = f"{API}/metrics/get-history?run_id={run_id}&metric_key={metric['key']}"
                found[path] = json.loads(self.ask(path))
            listed = json.loads(self.ask(f"{API}/artifacts/list?run_id={run_id}")).get("files", [])
            found[f"artifacts of {run_id}"] = listed
            for file in listed:
                self.ask(f"/get-artifact?run_id={run_id}&path={file['path']}")
        return found


def test_server_tells_neither_the_number_nor_the_length_of_trials(
    ray: Ray,  # noqa: F811
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, runs = Reader(address), []
    for name, number, seconds in (("sealed-a1b2", 1, 1.0), ("sealed-c3d4", 5, 20.0)):
        seen: list[Any] = []
        times: list[float] = []

        def look(
            *_: Any, seen: list[Any] = seen, times: list[float] = times, reader: Reader = reader
        ) -> None:
            seen.append(reader.everything())
            times.append(time.time())

        monkeypatch.setattr(TrialCountLaw, "draw", lambda _, number=number: number)
        ray.seconds, ray.on_start, ray.clock.on_wait = seconds, look, look
        chosen = options(
            *SEALED[:-1],
            name,
            "--publish-after",
            "600",
            "--storage",
            str(tmp_path),
            "--tracking-uri",
            address,
        )
        assert run_sweep("group-size", chosen, points(chosen), lambda *_: [], clock=ray.clock) == 0
        assert len(seen) == number + 1
        assert all(each == seen[0] for each in seen)
        reader.modified.clear()
        now = reader.everything()
        noted = [int(found) / 1000 for found in REAL_TIMES.findall(json.dumps(now))] + reader.modified
        assert noted, "the experiment was created"
        assert [at for at in noted if times[0] < at < times[-1] - 1] == []
        (run,) = (run for run in now["runs"] if run["info"]["run_name"] == name)
        runs.append(_comparable(run, name))
    assert runs[0] == runs[1]


def _comparable(run: dict[str, Any], name: str) -> str:
    text = json.dumps(run, sort_keys=True).replace(run["info"]["run_id"], "id").replace(name, "name")
    text = re.sub(r'sweep_id", "value": "[0-9a-f]{12}"', "sweep_id", text)
    return re.sub(r"public_seed\W+value\W+\d+", "public_seed", text)
