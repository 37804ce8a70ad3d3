"""The dashboard's server: the list of sweeps, the report of each sweep, and the ledgers."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dashboards.dashboard_error import DashboardError
from dashboards.render.document import policy_of
from dashboards.serve.guard import Guard, is_loopback, new_token
from dashboards.serve.index import INDEX_SCRIPTS, SweepIndex, ledgers_page

_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-popups; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy that isolates a report from this server's pages; its file has a stricter one."""


def application(index: SweepIndex, ledgers: Sequence[str], token: str | None = None) -> ASGIApp:
    """Return the dashboard as an ASGI application behind its access control.

    Args:
      index: index of the storage folder.
      ledgers: addresses of the ledgers to show.
      token: the required token; None for a server that only this machine can reach.
    """

    def sweeps(request: Request) -> Response:
        return _page(index.page(), INDEX_SCRIPTS)

    def budgets(request: Request) -> Response:
        return _page(ledgers_page(ledgers))

    def report(request: Request) -> Response:
        path = index.report(request.path_params["name"])
        if path is None:
            return PlainTextResponse("There is no report of this name.\n", status_code=404)
        headers = {"Content-Security-Policy": _REPORT_POLICY}
        return FileResponse(path, media_type="text/html; charset=utf-8", headers=headers)

    routes = {"/": sweeps, "/ledgers": budgets, "/reports/{name}": report}
    app = Starlette(routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()])
    return Guard(app, token)


def _page(document: str, scripts: Sequence[str] = ()) -> Response:
    headers = {"Content-Security-Policy": policy_of(scripts) + "; frame-ancestors 'none'"}
    return HTMLResponse(document, headers=headers)


def serve(index: SweepIndex, ledgers: Sequence[str], host: str, port: int) -> None:
    """Serve the pages until the process is stopped.

    Raises:
      DashboardError: the server cannot listen on the address.
    """
    import uvicorn

    token = None if is_loopback(host) else new_token()
    app = application(index, ledgers, token)
    config = uvicorn.Config(app, access_log=False, log_config=None, server_header=False, proxy_headers=False)
    with _bind(host, port) as listener:
        print(_link_text(host, listener.getsockname()[1], token), flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def _link_text(host: str, port: int, token: str | None) -> str:
    """Return the dashboard's link for the terminal, with a warning if others can reach the server."""
    displayed_host = f"[{host}]" if ":" in host else host
    if token is None:
        return f"dashboard: http://{displayed_host}:{port}/ (Ctrl-C ends it)"
    name = socket.gethostname() if host in ("0.0.0.0", "::") else displayed_host
    return (
        f"dashboard, for anyone with this link (printed only once): http://{name}:{port}/?token={token}\n"
        "note: HTTP is not encrypted: anyone who can read the network traffic can read the pages and the "
        "token. An SSH tunnel to a dashboard on 127.0.0.1 is safer"
    )


def _bind(host: str, port: int) -> socket.socket:
    is_ipv6 = ":" in host
    family, dual = socket.AF_INET6 if is_ipv6 else socket.AF_INET, is_ipv6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DashboardError(
            f"the dashboard cannot listen on {host}:{port} ({reason}); pass another --port"
        ) from error
