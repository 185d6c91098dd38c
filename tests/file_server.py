"""A web server on loopback that can break in every way that downloads know."""

import re
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """A file on the test server and how it misbehaves.

    Attributes:
        content: its bytes.
        ranges: whether the server knows the Range header.
        cuts: one a request: how many bytes of the body are sent before the connection closes; None for all.
        announced: length to announce in place of the true one, which need not be a number; "" for none at all.
        pause: seconds between pieces of 1,000 bytes.
    """

    content: bytes
    ranges: bool = True
    cuts: deque[int | None] = field(default_factory=deque)
    announced: int | str | None = None
    pause: float = 0.0


class FileServer(ThreadingHTTPServer):
    """Serves files on loopback: what there is, where a path leads on to, and which bytes each request asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, Served] = {}
        self.asked: list[str | None] = []
        self.moved: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def serve(self, name: str, content: bytes) -> Served:
        """Offer a file; the result can be told how to misbehave."""
        self.files[name] = Served(content)
        return self.files[name]


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Range"))
        served = self.server.files.get(self.path.lstrip("/"))
        if self.path in self.server.moved:
            self._answer(301, {"Location": self.server.moved[self.path], "Content-Length": "0"})
        elif served is None:
            self.send_error(404)
        else:
            self._send(served)

    def _send(self, served: Served) -> None:
        start, size = 0, len(served.content)
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if found and served.ranges:
            start = int(found[1])
            if start >= size:
                self._answer(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
                return
        headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if found and served.ranges else {}
        announced = size - start if served.announced is None else served.announced
        self._answer(206 if headers else 200, headers | ({"Content-Length": str(announced)} if announced != "" else {}))
        body = served.content[start:][: served.cuts.popleft() if served.cuts else None]
        with suppress(OSError):  # the client went away, which some tests are about
            for at in range(0, len(body), 1000):
                self.wfile.write(body[at : at + 1000])
                time.sleep(served.pause)
        self.close_connection = True

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        pass
