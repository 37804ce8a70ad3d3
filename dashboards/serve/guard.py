"""Who may read the dashboard: this machine's own browser.

*Host.* The server listens at 127.0.0.1 alone. A page of somebody else may let its name point here and read
what is shown (DNS rebinding), so a request that names another host than this machine is refused, before
anything else.

*Nothing is written.* There is no method but GET and HEAD.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS = "127.0.0.1"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_POLICY = "default-src 'none'; frame-ancestors 'none'"


def guarded(app: ASGIApp) -> ASGIApp:
    """Return the application for this machine's names alone; no page may embed its answers."""
    own = TrustedHostMiddleware(app, allowed_hosts=[ADDRESS, "localhost"], www_redirect=False)

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                headers.update(_HEADERS)
                headers.setdefault("Content-Security-Policy", _NO_POLICY)
                message = {**message, "headers": headers.raw}
            await send(message)

        await own(scope, receive, sent)

    return answered
