"""The web server: the page at `/` and the endpoint beside it, for this machine alone unless told otherwise."""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pivotpatch.app.batching import Batcher
from pivotpatch.app.endpoint import answer_json, build_endpoint
from pivotpatch.app.page import mount_page
from pivotpatch.core.errors import InputError
from pivotpatch.inference.predictor import Predictor

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What Gradio answers besides the page: files that it would leave on the disk, and its functions by name.
_CLOSED = tuple(f"/gradio_api/{name}" for name in ("upload", "api/", "call/", "run/", "openapi.json"))
# The browser itself keeps the page from asking anybody else, whatever a library or a dropped address would have it do.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; frame-ancestors 'self'"
)
_SETTINGS = {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


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


def serve(predictor: Predictor, listening: socket.socket, *, name: str = "") -> None:
    """Serve the page and the endpoint until the process is told to end.

    Args:
        predictor: answers the pictures.
        listening: from `open_socket`; closed afterwards.
        name: of the network, for the page to show.
    """
    batcher = Batcher(predictor)
    try:
        with _settings():
            app = build_app(batcher, name=name, loopback=is_loopback(listening))
            # Pages hold a connection open: they are not waited for at the end.
            config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, server_header=False)
            uvicorn.Server(config).run([listening])
    finally:
        batcher.close()


def build_app(batcher: Batcher, *, name: str = "", loopback: bool = True) -> FastAPI:
    """The page and the endpoint as an ASGI application.

    Args:
        batcher: answers the pictures.
        name: of the network, for the page to show.
        loopback: whether only this machine asks; then requests under other names than its own are refused, so that no
            web site can make a browser ask in its stead.
    """
    app = build_endpoint(batcher)
    app.add_middleware(_Guard, hosts=_LOOPBACK if loopback else None)
    mount_page(app, batcher, name=name)
    return app


class _Guard:
    """Adds the policy that keeps the page to itself, and refuses what neither page nor endpoint need."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self.app = app
        self.hosts = hosts

    def _refuse(self, scope: Scope) -> Response | None:
        host = Headers(scope=scope).get("host", "")
        if self.hosts is not None and _get_name(host) not in self.hosts:
            wrong = f"request: {host!r} is no name of this server's; use {' or '.join(self.hosts[:2])}"
            return answer_json({"error": wrong}, 400)
        if scope["type"] == "websocket" or scope["path"].startswith(_CLOSED):
            return answer_json({"error": "request: nothing is at this address; use the page or /api/predict"}, 404)
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        refused = self._refuse(scope) if scope["type"] in ("http", "websocket") else None
        await (refused or self.app)(scope, receive, send_guarded)


def _get_name(host: str) -> str | None:
    """The name in a header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


@contextmanager
def _settings() -> Iterator[None]:
    """Gradio told to ask nobody."""
    before = dict(os.environ)
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
