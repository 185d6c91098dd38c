"""The web server: the page at `/` and the endpoint beside it, for this machine alone unless told otherwise."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pivotpatch.app.batching import Batcher
from pivotpatch.app.endpoint import build_endpoint
from pivotpatch.app.page import mount_page
from pivotpatch.core.errors import InputError
from pivotpatch.inference.predictor import Predictor

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
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
    app.add_middleware(_Guard)
    if loopback:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK)
    mount_page(app, batcher, name=name)
    return app


class _Guard:
    """Adds the policy that keeps the page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self.app(scope, receive, send_guarded)


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
