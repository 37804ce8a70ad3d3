"""Files that trainings read by themselves: refused where a node does not see them as the driver does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpgcl_core.errors import DataError
from sweeps.service.cluster import file_visibility
from sweeps.service.cluster.file_visibility import check_files_visible, file_check_function, files_of_workers
from sweeps.service.planning.plan import SweepPlan
from tests.sweeps.head import REPOSITORY
from tests.sweeps.hosts import Hosts, why_no_hosts
from tests.trainers.data.readers import load_webdataset
from tests.trainers.data.test_webdataset import write_three
from trainers.config.training import WarmStart
from trainers.data.dataset import image_shape_of
from trainers.training.warm_start import starting_encoder

QUICK = ("--tiny", "--noise-multiplier=1", "--no-non-private", "--no-references", "--num-steps=2")


def plan_with(data: object = None, *starts: WarmStart) -> Any:
    trials = [SimpleNamespace(config=SimpleNamespace(warm_start=start)) for start in (*starts, None)]
    return SimpleNamespace(data=data, trials=trials)


def test_shards_are_needed_with_their_times(tmp_path: Path) -> None:
    records = load_webdataset(write_three(tmp_path / "shards"))
    for data in (records, (1, (records,)), (records, records)):
        found = files_of_workers(plan_with(data))
        assert [Path(path).name for path, _, _ in found] == ["s-00.tar", "s-01.tar"]
        assert all(modified_ns == Path(path).stat().st_mtime_ns for path, _, modified_ns in found)


def test_weights_of_a_warm_start_are_needed_once(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"1234")
    start: Any = SimpleNamespace(path=str(tmp_path / "weights.pt"))
    made: Any = SimpleNamespace(path="synthetic:100")
    (found,) = files_of_workers(plan_with(None, start, start, made))
    assert found == (str(tmp_path / "weights.pt"), 4, None)


def test_records_that_are_sent_need_no_files(make_plan: Callable[..., SweepPlan]) -> None:
    assert files_of_workers(make_plan(*QUICK)) == []


def test_node_counts_files_that_are_missing_or_others(tmp_path: Path) -> None:
    file = tmp_path / "s-00.tar"
    file.write_bytes(b"1234")
    path, time_ns, look = str(file), file.stat().st_mtime_ns, file_check_function()
    assert look([(path, 4, time_ns), (path, 4, None)]) == 0
    assert look([(path, 5, None), (path, 4, time_ns + 1), (f"{path}x", 4, None)]) == 3
    os.utime(file, ns=(1, 1))
    assert look([(path, 4, time_ns)]) == 1


def test_refusal_names_nodes_and_the_folder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(files: object) -> Iterator[tuple[str, int]]:
        yield from (("10.0.0.1", 0), ("10.0.0.2", 2))

    monkeypatch.setattr(file_visibility, "_count_missing", asked)
    files = [(f"/data/shards/s-{number}.tar", 1, None) for number in range(3)]
    with pytest.raises(
        DataError, match=r"weights in /data/shards, at the same path; .* on 10\.0\.0\.2 \(2 of 3\)\. Mount"
    ) as said:
        check_files_visible(files)
    assert "s-0" not in str(said.value)


def test_nothing_is_asked_where_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_visibility, "_count_missing", lambda files: pytest.fail("asked"))
    check_files_visible([])


@pytest.mark.ray
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_weights_that_one_node_does_not_see_are_refused_before_the_charge(
    make_plan: Callable[..., SweepPlan],
) -> None:
    plan = make_plan(*QUICK)
    encoder = starting_encoder(plan.trials[0].config, image_shape_of(plan.data.train))
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True) as name:
        top = Path(name)
        (top / "apart").mkdir()
        torch.save(encoder.state_dict(), top / "apart/weights.pt")
        (top / "all.pt").write_bytes((top / "apart/weights.pt").read_bytes())
        with Hosts(top, nodes=(1, 1), env={"PYTHONPATH": str(REPOSITORY)}, apart=top / "apart") as hosts:

            def sweep(weights: str) -> tuple[int, str]:
                log = top / f"{Path(weights).stem}.log"
                script = str(REPOSITORY / "sweeps/group_size.py")
                given = (*QUICK, "--name=one", f"--storage={top / 'shared'}", f"--warm-start={top / weights}")
                driver: subprocess.Popen[bytes] = hosts.start(0, log, sys.executable, script, *given)
                return driver.wait(400), log.read_text()

            code, said = sweep("apart/weights.pt")
            assert code == 2, said
            address = re.escape(hosts.address(2))
            assert re.search(rf"\nerror: all nodes must .* different on {address} \(1 of 1\)\. Mount", said)
            assert not (top / "shared/sweeps/one/plan.json").exists(), "nothing was begun"
            code, said = sweep("all.pt")
            assert code == 0, said
