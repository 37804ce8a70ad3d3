"""Access control of the dashboard: this machine's own browser, and elsewhere anyone who has the token.

*Host.* A foreign page may resolve its host name to this machine and read its content (DNS rebinding). If no
token is needed, a request that names a host other than this machine is refused before anything else. If a
token is needed, such a page does not have it: a browser sends a cookie only to the host name that set it.

*Token.* On an address that others can reach, every request needs a token of 256 random bits. It is printed
once, on the terminal, in a link. From the first use on, a cookie with another random value replaces it, and
no link contains this value. Both are compared in a time that does not depend on their values.

*Nothing is written.* Only the methods GET and HEAD are accepted.
"""

from __future__ import annotations

import ipaddress
import secrets
from urllib.parse import quote, urlencode

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_POLICY = "default-src 'none'; frame-ancestors 'none'"
_COOKIE = "dpgcl-dashboard"


def new_token() -> str:
    """Return 256 random bits in a form that is valid in a link."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


class Guard(BaseHTTPMiddleware):
    """Passes the requests that the module's rules allow, and adds headers to responses that forbid embedding.

    Args:
      app: the guarded application.
      token: the required token; None if only this machine can reach the server.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        super().__init__(app)
        self._token, self._session = token, new_token()

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Answer a request, or pass it to the application."""
        response = self._refusal(request) or await call_next(request)
        response.headers.update(_HEADERS)
        response.headers.setdefault("Content-Security-Policy", _NO_POLICY)
        return response

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is not passed on; None if it is passed on."""
        if self._token is None:
            if is_loopback(_without_port(request.headers.get("host", ""))):
                return None
            return PlainTextResponse("This server does not have that host name.\n", status_code=421)
        if _are_equal(request.cookies.get(_COOKIE, ""), self._session):
            return None
        if not _are_equal(request.query_params.get("token", ""), self._token):
            return PlainTextResponse(
                "The dashboard needs a token: open the link that its terminal shows.\n", status_code=401
            )
        response = RedirectResponse(_without_token(request), status_code=303)
        response.set_cookie(_COOKIE, self._session, httponly=True, samesite="lax", path="/")
        return response


def _are_equal(text: str, secret: str) -> bool:
    return secrets.compare_digest(text.encode(errors="replace"), secret.encode())


def _without_token(request: Request) -> str:
    others = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
    path = "/" + request.url.path.lstrip("/\\")  # a path on this server: //host would be another server
    return quote(path) + (f"?{urlencode(others)}" if others else "")
