"""The web server: the page at `/` and the endpoint beside it, for this machine alone unless told otherwise."""

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Collection
from importlib.resources import files
from typing import NamedTuple, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from pivotpatch.app.batching import Batcher
from pivotpatch.app.endpoint import STATUS, Bodies, answer_error, answer_json, make_routes
from pivotpatch.errors import InputError
from pivotpatch.runtime.predictor import Predictor

_PAGE = ("index.html", "page.css", "page.js", "icon.svg", "coffee.jpg", "cat.jpg", "astronaut.jpg")
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "jpg": "image/jpeg"}
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:(?P<name>[\w.-]+)|\[(?P<number>[\da-fA-F:.]+)\])(?::\d+)?", re.ASCII)
_HEADERS = {
    # The browser itself keeps the page from asking anybody else and from running what a label or a file name holds.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Access(NamedTuple):
    """Who may ask."""

    # What requests to the endpoint must carry (`Authorization: Bearer TOKEN`); None asks for none.
    token: str | None = None
    # Whether the server may be called by a number of any machine (`http://192.0.2.7:7860`). A name that is not
    # its own is refused either way: a web site could have it lead here, and ask in a visitor's stead.
    numbers: bool = False
    names: Collection[str] = ()  # what else it may be called


def open_socket(host: str = "127.0.0.1", port: int = 7860) -> socket.socket:
    """Listen at an address, port 0 for any that is free; whoever calls waits until `serve` answers."""
    if not 0 <= port < 1 << 16:  # the system would take the rest of a division
        raise InputError("port", f"{port} is none", "give 0 to 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        reason = str(getattr(error, "strerror", error)).partition(" (")[0]  # the rest repeats the address
        raise InputError(f"{host}:{port}", f"cannot be listened at ({reason})", "choose another host or port") from None


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class Connection(H11Protocol):
    """uvicorn's connection with time-outs and a limit, neither of which uvicorn has for requests that never come.

    Attributes:
        most: connections at once. One more takes the place of the one that has kept us waiting longest, for a request,
            the rest of it, or for its answer to be read; where all wait for us it is refused.
        header_seconds: from the opening of a connection, or from its last answer, until a request's header is there.
        request_seconds: from there until the answer has been sent.
    """

    most = 256
    header_seconds = 10.0
    request_seconds = 300.0

    _at_work: RequestResponseCycle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0  # when the wait for this request, or for the next one, began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._drop_longest_waiting():
            transport.write(_FULL)
            transport.close()
            return
        self._set_deadline(self.header_seconds)

    def data_received(self, data: bytes) -> None:
        """Take what the other side sent."""
        super().data_received(data)
        self._see_progress()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._see_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _see_progress(self) -> None:
        """A new request has its time, and so has the wait for one; more bytes of the same give no more."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        at_work = None if cycle is None or cycle.response_complete else cycle
        if at_work is not self._at_work:
            self._at_work = at_work
            self._set_deadline(self.header_seconds if at_work is None else self.request_seconds)

    def _set_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _drop_longest_waiting(self) -> bool:
        """Make room, unless each request is here as a whole, with no answer that waits to be read: they wait for us."""
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        waiting = [o for o in others if o._at_work is None or o._at_work.more_body or o.flow.write_paused]
        if not waiting:
            return False
        longest = min(waiting, key=lambda other: other._since)
        self.connections.discard(longest)  # at once: the transport tells of its end only later
        longest.transport.abort()
        return True


def serve(predictor: Predictor, listening: socket.socket, *, name: str = "", access: Access | None = None) -> None:
    """Serve the page and the endpoint at a socket, as `build_app` makes them, until the process is told to end."""
    batcher = Batcher(predictor.engine)
    try:
        make_server(build_app(batcher, name=name, access=access)).run([listening])
    finally:
        batcher.close()


def make_server(app: ASGIApp, *, connection: type[Connection] = Connection) -> uvicorn.Server:
    """What runs an application from `build_app`; `connection` sets the limits of connections."""
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_level="critical",  # `answer_error` says what failed; those who waited when it ends are no news
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # connections that are kept open are not waited for
    )
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # a caller's mistakes are the caller's to hear
    return uvicorn.Server(config)


def build_app(
    batcher: Batcher, *, name: str = "", access: Access | None = None, bodies: Bodies | None = None
) -> ASGIApp:
    """The page and the endpoint of a model called `name` as an ASGI application, for this machine by default."""
    pages = (make_page_route("pivotpatch.app", file) for file in _PAGE)
    return guard([*pages, *make_routes(batcher, name=name, bodies=bodies or Bodies())], access or Access())


def make_page_route(package: str, name: str) -> BaseRoute:
    """The address of one file of a package's page."""
    content, kind = files(package).joinpath("page", name).read_bytes(), _KINDS[name.rpartition(".")[2]]

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind)

    return Route("/" if name == "index.html" else f"/{name}", answer)


def guard(routes: list[BaseRoute], access: Access) -> ASGIApp:
    """Refuse whoever may not ask, before anything of a body is read; tell browsers what the page may do."""
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys([HTTPException, *STATUS, Exception], answer_error))
    app.router.redirect_slashes = False

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (_refuse(scope, access) or app)(scope, receive, send_guarded)

    return answer


def _refuse(scope: Scope, access: Access) -> Response | None:
    """The answer to a request that is not heard, after which its connection ends."""
    headers = Headers(scope=scope)
    host, sites = headers.get("host", ""), headers.getlist("origin")
    if not _is_own(host, access):
        status = 400
        wrong = f"request: {host[:80]!r} is no name of this server's; use 127.0.0.1 or localhost, or --allow-host"
    elif scope["method"] not in ("GET", "HEAD") and {site.lower() for site in sites} - {
        f"{scheme}://{host}".lower() for scheme in ("http", "https")
    }:
        status, wrong = 403, "request: it comes from another web site; use the page or send no Origin"
    elif scope["path"].startswith("/api/") and not _has_token(headers.get("authorization", ""), access.token):
        status, wrong = 401, "request: its token is missing or wrong; send Authorization: Bearer TOKEN"
    else:
        return None
    close = {"Connection": "close", **({"WWW-Authenticate": "Bearer"} if status == 401 else {})}
    return answer_json({"error": wrong}, status, headers=close)


def _is_own(host: str, access: Access) -> bool:
    """Whether a `Host` header, with or without a port, names this server."""
    found = _HOST.fullmatch(host)
    name = (found["name"] or found["number"]).lower() if found else ""
    if name in {*_LOOPBACK, *(own.lower() for own in access.names)}:
        return True
    try:
        return access.numbers and bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _has_token(authorization: str, token: str | None) -> bool:
    scheme, _, given = authorization.partition(" ")
    if token is None:
        return True
    return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), token.encode())
