"""The web server: the page at `/` and the endpoint beside it, for this machine alone unless told otherwise."""

import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Collection
from importlib.resources import files
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pivotpatch.app.batching import Batcher
from pivotpatch.app.connection import Connection
from pivotpatch.app.endpoint import Bodies, answer_errors, answer_json, make_routes
from pivotpatch.errors import InputError
from pivotpatch.inference.predictor import Predictor

PAGE = {
    "/": "index.html",
    **{f"/{name}": name for name in ("page.css", "page.js", "icon.svg", "coffee.jpg", "cat.jpg", "astronaut.jpg")},
}
"""Every file that the page consists of, by its address."""
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "jpg": "image/jpeg"}
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
    """Who may ask.

    Attributes:
        token: what requests to the endpoint must carry (`Authorization: Bearer TOKEN`); None asks for none.
        numbers: whether the server may be called by a number of any machine (`http://192.0.2.7:7860`). A name that
            is not its own is refused either way: a web site could have it lead here, and ask in a visitor's stead.
        names: what else it may be called.
    """

    token: str | None = None
    numbers: bool = False
    names: Collection[str] = ()


def open_socket(host: str = "127.0.0.1", port: int = 7860) -> socket.socket:
    """Listen at an address; whoever calls waits until `serve` answers.

    Args:
        host: a name or number of this machine.
        port: 0 for any that is free.
    """
    if not 0 <= port < 1 << 16:  # the system would take the rest of a division
        raise InputError("port", f"{port} is none", "give 0 to 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # the rest repeats the address
        raise InputError(f"{host}:{port}", f"cannot be listened at ({reason})", "choose another host or port") from None


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def serve(predictor: Predictor, listening: socket.socket, *, name: str = "", access: Access | None = None) -> None:
    """Serve the page and the endpoint until the process is told to end.

    Args:
        predictor: answers the images.
        listening: from `open_socket`; closed afterwards.
        name: of the model, for the page to show.
        access: who may ask; by default whoever runs on this machine.
    """
    batcher = Batcher(predictor)
    try:
        make_server(build_app(batcher, name=name, access=access)).run([listening])
    finally:
        batcher.close(drop=True)


class _Server(uvicorn.Server):
    """uvicorn's server, but whoever is told to end says nothing of those who still waited."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def make_server(app: ASGIApp, *, connection: type[Connection] = Connection) -> uvicorn.Server:
    """What runs an application.

    Args:
        app: from `build_app`.
        connection: sets the limits of connections.
    """
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_level="error",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # connections that are kept open are not waited for
    )
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # a caller's mistakes are the caller's to hear
    return _Server(config)


def build_app(
    batcher: Batcher, *, name: str = "", access: Access | None = None, bodies: Bodies | None = None
) -> ASGIApp:
    """The page and the endpoint as an ASGI application.

    Args:
        batcher: answers the images.
        name: of the model, for the page to show.
        access: who may ask; by default whoever runs on this machine.
        bodies: sets the limits of what is sent.
    """
    pages = [_make_page_route(address, file) for address, file in PAGE.items()]
    routes = [*pages, *make_routes(batcher, name=name, bodies=bodies or Bodies())]
    app = Starlette(routes=routes, exception_handlers=answer_errors(name))
    app.router.redirect_slashes = False
    return _Guard(app, access or Access())


def _make_page_route(address: str, name: str) -> BaseRoute:
    content, kind = files("pivotpatch.app").joinpath("page", name).read_bytes(), _KINDS[name.rpartition(".")[2]]

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind)

    return Route(address, answer)


class _Guard:
    """Refuses whoever may not ask, before anything of a body is read; tells browsers what the page may do."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access
        self.names = {*_LOOPBACK, *(name.lower() for name in access.names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        assert scope["type"] == "http"  # uvicorn is told to take nothing else
        await (self._refuse(scope) or self.app)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origins = headers.get("host", ""), headers.getlist("origin")
        if not self._is_own(_get_name(host)):
            wrong = f"request: {host[:80]!r} is no name of this server's; use 127.0.0.1 or localhost, or --allow-host"
            return _refuse(400, wrong)
        if scope["method"] not in ("GET", "HEAD") and not all(_is_same(origin, host) for origin in origins):
            return _refuse(403, "request: it comes from another web site; use the page or send no Origin")
        if scope["path"].startswith("/api/") and not self._knows_token(headers.get("authorization", "")):
            return _refuse(401, "request: its token is missing or wrong; send Authorization: Bearer TOKEN")
        return None

    def _is_own(self, name: str | None) -> bool:
        return name in self.names or (self.access.numbers and name is not None and _is_number(name))

    def _knows_token(self, authorization: str) -> bool:
        if self.access.token is None:
            return True
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), self.access.token.encode())


def _refuse(status: int, wrong: str) -> Response:
    """An answer without having read the body, after which the connection ends."""
    headers = {"Connection": "close", **({"WWW-Authenticate": "Bearer"} if status == 401 else {})}
    return answer_json({"error": wrong}, status, headers=headers)


def _get_name(host: str) -> str | None:
    """The name in a header, without the port."""
    found = _HOST.fullmatch(host)
    return (found["name"] or found["number"]).lower() if found else None


def _is_same(origin: str, host: str) -> bool:
    """Whether a request comes from this server's own page."""
    return origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
