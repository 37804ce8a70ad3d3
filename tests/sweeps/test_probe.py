"""The start-up probe of shared storage: the same folder on every node, and locks between them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpgcl_core.errors import StorageError
from sweeps.service.storage import probe
from sweeps.service.storage.probe import NodeStorage, StorageProbe, check_shared, probe_function
from tests.sweeps.head import REPOSITORY
from tests.sweeps.hosts import Hosts, why_no_hosts

LOOK = probe_function()


def test_held_folder_is_the_same_one_and_its_lock_cannot_be_taken(tmp_path: Path) -> None:
    with probe._hold_lock(tmp_path) as (place, token):
        seen = LOOK(place, token, 1, 0.0)
    assert (seen["folder"], seen["lock"], seen["error_text"]) == (probe.SAME, probe.HELD, "")
    assert list(tmp_path.iterdir()) == []


def test_folder_with_another_token_is_another_one(tmp_path: Path) -> None:
    with probe._hold_lock(tmp_path) as (place, token):
        assert LOOK(place, token[::-1] + "0", 1, 0.0)["folder"] == probe.OTHER
        (Path(place) / "token").unlink()
        assert LOOK(place, token, 2, 0.0)["folder"] == probe.OTHER
    assert LOOK(str(tmp_path / "gone" / "place"), token, 1, 0.0)["folder"] == probe.MISSING


def test_token_that_is_shown_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with probe._hold_lock(tmp_path) as (place, token):
        (Path(place) / "token").unlink()
        monkeypatch.setattr("time.sleep", lambda _: (Path(place) / "token").write_text(token))
        assert LOOK(place, token, 2, 1.0)["folder"] == probe.SAME


def test_lock_that_nobody_holds_is_taken(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one")
    (tmp_path / "lock").touch()
    assert LOOK(str(tmp_path), "one", 1, 0.0)["lock"] == probe.TAKEN


def test_file_system_without_locks_is_told_with_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with probe._hold_lock(tmp_path) as (place, token):
        seen = LOOK(place, token, 1, 0.0)
    assert (seen["lock"], seen["error_text"]) == (probe.UNSUPPORTED, "Operation not supported")


def test_every_finding_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "living_nodes", lambda: [None] * 2)
    monkeypatch.setattr(probe, "probe_storage", lambda _: found)
    said: list[str] = []
    good = NodeStorage(node="one", folder=probe.SAME, lock=probe.HELD)
    apart = NodeStorage(node="two", folder=probe.OTHER)
    unlocked = NodeStorage(node="three", folder=probe.SAME, lock=probe.TAKEN)
    found = StorageProbe(folder=tmp_path, nodes=(good, apart), silent=("four",))
    assert found.unshared_text()
    assert not found.unlocked_text()
    with pytest.raises(StorageError, match=r"not on two \(another folder at that path\): mount one"):
        check_shared(tmp_path, said.append)
    found = StorageProbe(folder=tmp_path, nodes=(good, unlocked), silent=("four",))
    assert found.unlocked_text()
    check_shared(tmp_path, said.append)
    locks, silent = said
    assert "do not hold between nodes (three): do not start sweeps from two nodes at once" in locks
    assert silent.endswith(": four")


QUICK = ("--tiny", "--noise-multiplier=1", "--no-non-private", "--no-references", "--num-steps=2")


@pytest.mark.ray
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_folder_that_one_node_has_for_itself_is_refused_and_a_shared_one_used() -> None:
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True) as name:
        top = Path(name)
        (top / "apart").mkdir()
        with Hosts(top, nodes=(1, 1), env={"PYTHONPATH": str(REPOSITORY)}, apart=top / "apart") as hosts:

            def sweep(storage: str) -> tuple[int, str]:
                log = top / f"{storage}.log"
                script = str(REPOSITORY / "sweeps/group_size.py")
                given = (*QUICK, "--name=one", f"--storage={top / storage}")
                driver: subprocess.Popen[bytes] = hosts.start(0, log, sys.executable, script, *given)
                return driver.wait(400), log.read_text()

            code, said = sweep("apart")
            last = said.splitlines()[-1]
            assert code == 2, said
            address = re.escape(hosts.address(2))
            assert re.match(
                rf"error: the storage folder {top}/apart must be the same folder on all nodes; ", last
            )
            assert re.search(rf"not on {address} \(\w+\) \(another folder at that path\): mount one", last)
            assert not (top / "apart/sweeps").exists(), "nothing was begun"
            assert not list((top / "apart").glob(".dpgcl-probe-*"))
            code, said = sweep("shared")
            assert code == 0, said
