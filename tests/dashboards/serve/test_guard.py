"""Who may read the dashboard, and what its answers carry."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from dashboards import __main__ as command
from dashboards.errors import DashboardError
from dashboards.serve import server
from dashboards.serve.index import SweepIndex
from dashboards.serve.server import application
from tests.dashboards.serve.storage import Storage, sealed


@pytest.fixture
def index(tmp_path: Path) -> SweepIndex:
    return SweepIndex(tmp_path)


@pytest.fixture
def local(index: SweepIndex) -> TestClient:
    return TestClient(application(index, ()), base_url="http://127.0.0.1:8421", follow_redirects=False)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:8421", 200), ("localhost", 200), ("localhost:8421", 200)),
        *(("evil.example:8421", 400), ("127.0.0.1.evil.example", 400), ("192.0.2.7", 400), ("", 400)),
    ],
)
def test_server_of_this_machine_answers_to_its_own_names_alone(
    local: TestClient, host: str, status: int
) -> None:
    assert local.get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/ledgers", "/reports/x"])
def test_server_is_only_read(local: TestClient, method: str, path: str) -> None:
    assert local.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/", "/ledgers", "/reports/none", "/nowhere"])
def test_every_answer_has_its_headers(local: TestClient, path: str) -> None:
    headers = local.get(path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in policy
    assert "script-src 'unsafe" not in policy
    assert "unsafe-eval" not in policy


def test_report_is_sent_as_it_lies_and_apart_from_the_pages(tmp_path: Path, local: TestClient) -> None:
    folder = tmp_path / "sweeps" / "one"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text('{"params": {"num_trials": 3}}')
    (folder / "report.html").write_text("<h1>report</h1>")
    report = local.get("/reports/one")
    assert report.text == "<h1>report</h1>"
    assert report.headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
    for name in ("..%2Fsweeps%2Fone", "none", "", "one/../../x", "one%00"):
        assert local.get(f"/reports/{name}").status_code == 404


def test_report_of_a_sealed_sweep_is_not_sent(tmp_path: Path, local: TestClient) -> None:
    sealed(Storage(tmp_path), "secret-one")
    assert local.get("/reports/secret-one").status_code == 404


def test_server_listens_to_this_machine_alone() -> None:
    with server._bind(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with server._bind(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match=r"^.*cannot listen at 127.0.0.1.*$"):
            command.main(["serve", "--storage", str(tmp_path), "--port", str(port)])
