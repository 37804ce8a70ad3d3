"""The doctor: what it finds on nodes that are as they should be, and on others, and what it says to do."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps.doctor import __main__ as command
from sweeps.doctor import checks
from sweeps.doctor.checks import check_storage, findings_of
from sweeps.doctor.facts import NodeFacts, this_machine
from sweeps.doctor.findings import Finding, as_text, is_ready
from sweeps.service.storage.probe import HELD, OTHER, SAME, TAKEN, NodeStorage, StorageProbe
from tests.programs import run_program
from tests.sweeps.support import write_npz

VERSIONS = {"Python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "mlflow": "3.17.2", "this code": "abc"}
DRIVER = NodeFacts(name="this machine", versions=VERSIONS)
FIRST = dataclasses.replace(DRIVER, name="one", num_cpus=4)
SECOND = dataclasses.replace(FIRST, name="two")


def changed(**changes: Any) -> list[NodeFacts]:
    return [FIRST, dataclasses.replace(SECOND, **changes)]


def statuses(findings: list[Finding]) -> set[str]:
    return {finding.status for finding in findings}


def test_nodes_that_are_alike_have_nothing_to_fix() -> None:
    nodes = [FIRST, SECOND]
    found = [checks.check_versions(nodes, DRIVER), checks.check_nodes(nodes, ())]
    assert statuses(found) == {"ok"}
    assert "2 nodes answered, with 8 cores and 0 GPUs" in as_text(found)
    assert as_text(found).splitlines()[-1] == "ready"


WRONG: dict[str, tuple[Callable[[], list[Finding]], tuple[str, ...]]] = {
    "another Ray": (
        lambda: [checks.check_versions(changed(versions=VERSIONS | {"ray": "2.50.0"}), DRIVER)],
        ("ray is 2.60.0 here, but 2.50.0 on two", "constraints.txt"),
    ),
    "no torch": (
        lambda: [checks.check_versions(changed(versions=VERSIONS | {"torch": ""}), DRIVER)],
        ("missing on two", "constraints.txt"),
    ),
    "another copy of the code": (
        lambda: [checks.check_versions(changed(versions=VERSIONS | {"this code": "def"}), DRIVER)],
        ("this code is abc here, but def on two", "--working-dir ."),
    ),
    "node that is silent": (
        lambda: [checks.check_nodes([FIRST], ["two"])],
        ("no answer from two", "ray status"),
    ),
    "GPU that torch does not see": (
        lambda: [checks.check_gpus(changed(num_gpus=2.0, num_gpus_seen=1))],
        ("1 of 2 on two", "nvidia-smi"),
    ),
    "data out of sight": (
        lambda: [checks.check_data("/there/is/none.npz")],
        ("cannot read the data", "as the driver's machine sees it"),
    ),
    "data at an address": (
        lambda: [checks.check_data("s3://team/scans")],
        ("AWS_ENDPOINT_URL must begin with http", "localhost:9"),
    ),
    "no MLflow": (
        lambda: [checks.check_tracking("http://127.0.0.1:9")],
        ("http://127.0.0.1:9", "docs/cluster.md"),
    ),
    "no ledger": (
        lambda: [checks.check_ledger("/there/is/none.db")],
        ("there is no such file", "docs/ledger.md"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9")
    look, said = WRONG[name]
    found = look()
    assert not is_ready(found)
    for part in said:
        assert part in as_text(found)


def test_storage_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    (found,) = check_storage(tmp_path, 1)
    assert found.status == "wrong"
    assert "cannot be locked (Operation not supported)" in found.text
    assert "flock" in found.fix


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert statuses(check_storage(tmp_path / "results", 1)) == {"ok"}
    assert statuses(check_storage(tmp_path / "file" / "results", 1)) == {"wrong"}
    assert not (tmp_path / "results").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("folder", "lock", "status", "said"),
    [
        (OTHER, "", "wrong", "not on two (another folder at that path)\n"),
        (SAME, TAKEN, "note", "do not hold between nodes (two)\n"),
        (SAME, HELD, "ok", "is the same folder on 2 nodes"),
    ],
)
def test_storage_is_looked_at_on_every_node(folder: str, lock: str, status: str, said: str) -> None:
    one = NodeStorage(node="one", folder=SAME, lock=HELD)
    two = NodeStorage(node="two", folder=folder, lock=lock)
    found = findings_of(StorageProbe(folder=Path("/shared"), nodes=(one, two)))
    assert found[0].status == status
    assert said in as_text(found)
    assert (found[0].fix != "") == (status != "ok")


def test_nothing_of_the_data_is_told_but_that_they_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in ((37, "few.npz"), (41, "many.npz")):
        write_npz(tmp_path / name, number)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    told = []
    for name in ("few.npz", "many.npz"):
        write_npz(tmp_path / "scans.npz", 5)
        os.replace(tmp_path / name, tmp_path / "scans.npz")
        code = command.doctor(dataset=f"npz:{tmp_path / 'scans.npz'}", storage=tmp_path, json=True)
        found = json.loads(capsys.readouterr().out)["findings"]
        told.append(found)
    assert code == 1, "the cluster does not answer"
    assert told[0] == told[1]
    assert {each["check"]: each["status"] for each in told[0]}["data"] == "ok"


def test_password_of_a_ledger_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    finding = checks.check_ledger("postgresql://me:hunter2@127.0.0.1:9/ledger")
    assert finding.status == "wrong"
    assert "hunter2" not in as_text([finding])


def test_own_machine_knows_its_code_and_programs() -> None:
    machine = this_machine()
    assert all(machine.versions.values())
    assert len(machine.versions["this code"]) == 12


# On real nodes


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    given = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=given)
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    yield cluster
    cluster.shutdown()


@pytest.mark.ci
@pytest.mark.ray
def test_cluster_of_two_nodes_is_ready(two_nodes: Any, tmp_path: Path) -> None:
    data = write_npz(tmp_path / "scans.npz", 5)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DPGCL_")} | {
        "HOME": str(tmp_path)
    }
    words = ("-m", "sweeps.doctor", "--json", "--ray-address", two_nodes.address, "--dataset", data)
    done = run_program(words, cwd=tmp_path, environment=environment)
    told = json.loads(done.stdout)
    found = {each["check"]: each for each in told["findings"]}
    assert (done.returncode, told["ready"]) == (0, True), done.stdout + done.stderr
    assert found["ray"]["text"] == "2 nodes answered, with 2 cores and 0 GPUs"
    assert found["data"]["status"] == found["versions"]["status"] == "ok", found
    assert "2 nodes" in found["versions"]["text"]
    assert "is the same folder on 2 nodes" in found["storage"]["text"]
