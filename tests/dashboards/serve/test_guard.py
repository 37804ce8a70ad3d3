"""Who may read the dashboard, and what its answers carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dashboards import __main__ as command
from dashboards.dashboard_error import DashboardError
from dashboards.serve import dashboard_server
from dashboards.serve.dashboard_server import application
from dashboards.serve.index import SweepIndex
from tests.dashboards.serve.storage import Storage, sealed

TOKEN = "secret-token"
OUTSIDE = "http://192.0.2.7:8421"


@pytest.fixture
def index(tmp_path: Path) -> SweepIndex:
    return SweepIndex(tmp_path)


def client_of(index: SweepIndex, token: str | None, base_url: str) -> TestClient:
    return TestClient(application(index, (), token), base_url=base_url, follow_redirects=False)


@pytest.fixture
def local(index: SweepIndex) -> TestClient:
    return client_of(index, None, "http://127.0.0.1:8421")


@pytest.fixture
def outside(index: SweepIndex) -> TestClient:
    return client_of(index, TOKEN, OUTSIDE)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:8421", 200), ("localhost", 200), ("[::1]:8421", 200)),
        *(("evil.example:8421", 421), ("127.0.0.1.evil.example", 421), ("192.0.2.7", 421), ("", 421)),
    ],
)
def test_server_of_this_machine_answers_to_its_own_names_alone(
    local: TestClient, host: str, status: int
) -> None:
    assert local.get("/", headers={"Host": host}).status_code == status


def test_page_of_another_name_that_points_here_has_no_cookie(outside: TestClient) -> None:
    outside.get("/", params={"token": TOKEN})
    assert outside.get("/").status_code == 200
    assert outside.get("http://evil.example:8421/").status_code == 401


@pytest.mark.parametrize("path", ["/", "/ledgers", "/reports/x", "/nowhere?name=x"])
@pytest.mark.parametrize("token", ["", "wrong", "secret-toke", "secret-token2", "\u20ac"])
def test_nothing_is_told_without_the_token(outside: TestClient, path: str, token: str) -> None:
    found = outside.get(path, headers={"Cookie": f"dpgcl-dashboard={token}"} if token.isascii() else {})
    assert (found.status_code, "Sweeps" in found.text) == (401, False)
    asked = outside.get(f"{path}{'&' if '?' in path else '?'}token={token}")
    assert asked.status_code == 401
    assert not outside.cookies


def test_token_becomes_a_cookie_and_leaves_the_address(outside: TestClient) -> None:
    found = outside.get("/reports/a b", params={"name": "a&b", "token": TOKEN})
    assert (found.status_code, found.headers["location"]) == (303, "/reports/a%20b?name=a%26b")
    told = found.headers["set-cookie"]
    assert TOKEN not in told
    assert "HttpOnly" in told
    assert "SameSite=lax" in told
    page = outside.get("/")
    assert page.status_code == 200
    assert TOKEN not in page.text


def test_token_is_not_taken_for_the_cookie(outside: TestClient) -> None:
    assert outside.get("/", headers={"Cookie": f"dpgcl-dashboard={TOKEN}"}).status_code == 401


def test_token_redirects_to_this_server_alone(outside: TestClient) -> None:
    found = outside.get("//evil.example/x", params={"token": TOKEN})
    assert found.headers["location"].startswith("/evil.example") or found.headers["location"].startswith("/x")
    assert not found.headers["location"].startswith("//")


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


@pytest.mark.parametrize(("host", "needs"), [("127.0.0.1", False), ("0.0.0.0", True), ("192.0.2.7", True)])
def test_token_is_made_and_shown_where_others_reach_the_dashboard(
    host: str,
    needs: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given: list[Any] = []

    class Socket:
        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return host, 8421

    monkeypatch.setattr(dashboard_server, "_bind", lambda *_: Socket())
    monkeypatch.setattr(dashboard_server, "application", lambda *each: given.extend(each))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    dashboard_server.serve(SweepIndex(tmp_path), (), host, 8421)
    told, token = capsys.readouterr().out, given[2]
    assert (token is not None) is needs
    if needs:
        assert told.count(token) == 1
        assert len(token) >= 43


def test_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with dashboard_server._bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match=r"^.*cannot listen on 127.0.0.1.*$"):
            command.main(["serve", "--storage", str(tmp_path), "--port", str(port)])
