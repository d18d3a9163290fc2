"""Who may ask the server: whoever has the token, by a name of this machine. It holds for every path."""

import hmac
import ipaddress
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),  # the address has the token in it
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """In front of the application. The page of another site has no token, and its name is refused."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self.app, self._token, self._hosts = app, token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refused = self._refused(scope) if scope["type"] == "http" else "there are no websockets here"
        app = PlainTextResponse(f"tenterhook: {refused}\n", 403) if refused else self.app

        async def send_with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]  # type: ignore[misc]
            await send(message)

        await app(scope, receive, send_with_headers)  # type: ignore[arg-type]

    def _refused(self, scope: Scope) -> str:
        """Why a request is refused, or nothing."""
        names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(names) != 1 or host_of(names[0]) not in self._hosts:
            what = "this server does not go by the name in the Host header"
            return f"{what}; open the address that `tenterhook view` printed, or start it with --host"
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self._token):
            return "the token is missing or wrong; open the address that `tenterhook view` printed"
        return ""


def host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0].removeprefix("[").lower()
    return header.partition(":")[0].lower()


def names_of(host: str) -> frozenset[str]:
    """Under which names a server on this address may be asked for."""
    local = {"127.0.0.1", "localhost", "::1"}
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        import socket

        name = socket.gethostname().lower()
        return frozenset({*local, name, socket.getfqdn().lower()})
    return frozenset({*local, host.lower()})
