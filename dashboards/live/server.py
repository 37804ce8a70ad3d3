"""The live page's server: three addresses, each as a page and as parts that its script asks for."""

from __future__ import annotations

from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dashboards.live.guard import Guard, Hosts
from dashboards.live.pages import Pages, View, page_of, policy
from dashboards.live.state import Reader

_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-popups; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Of a report, which has a stricter one of its own: apart from this server's pages, and sending nothing."""


def application(reader: Reader, hosts: Hosts, token: str | None = None) -> ASGIApp:
    """Return the server as an application.

    Args:
      reader: what it shows.
      hosts: names that it may be asked for by.
      token: that is needed; None for none.
    """
    pages = Pages(reader)

    def index(request: Request) -> Response:
        return _page(pages.index(), "/state", home=True)

    def index_state(request: Request) -> Response:
        return _state(request, pages.index())

    def sweep(request: Request) -> Response:
        name = request.query_params.get("name", "")
        view = pages.sweep(name)
        return _missing() if view is None else _page(view, f"/sweep/state?name={quote(name, safe='')}")

    def sweep_state(request: Request) -> Response:
        view = pages.sweep(request.query_params.get("name", ""))
        return _missing() if view is None else _state(request, view)

    def report(request: Request) -> Response:
        path = reader.report(request.query_params.get("name", ""))
        if path is None:
            return _missing()
        headers = {"Content-Security-Policy": _REPORT_POLICY}
        return FileResponse(path, media_type="text/html; charset=utf-8", headers=headers)

    routes = {"/": index, "/state": index_state, "/sweep": sweep, "/sweep/state": sweep_state}
    routes["/sweep/report"] = report
    app = Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()])
    return Guard(app, hosts, token)


def _page(view: View, at: str, *, home: bool = False) -> Response:
    headers = {"Content-Security-Policy": policy(home=home)}
    return HTMLResponse(page_of(view, at, home=home), headers=headers)


def _state(request: Request, view: View) -> Response:
    tag = f'"{view.tag}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(view.as_json(), media_type="application/json", headers={"ETag": tag})


def _missing() -> Response:
    return PlainTextResponse("There is no such page here.\n", status_code=404)
