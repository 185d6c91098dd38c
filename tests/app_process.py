"""`pivotpatch app` in a process of its own, watched for what it asks and writes; or a server in a thread."""

import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from made_scores import HOSTILE
from starlette.types import ASGIApp

from pivotpatch.app.batching import Batcher
from pivotpatch.app.server import Connection, build_app, make_server, open_socket
from pivotpatch.runtime.engine import Engine

LABELS = ("cat", "cup", HOSTILE[0], HOSTILE[4], "${alert(1)}", "dog", "car")
_WATCHED = """
import os, sys
def watch(event, args, log=open(sys.argv.pop(1), "a", buffering=1)):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print(event, args, file=log)
    elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and args[0] != "/dev/null":
        print("written", args[0], file=log)
sys.addaudithook(watch)
from pivotpatch.cli.main import main
sys.exit(main())
"""


class Reply(NamedTuple):
    """What a server says to a request."""

    status: int
    body: bytes
    headers: dict[str, str]


class Asked:
    """A server on this machine."""

    port: int

    def ask(
        self, content: bytes, *, query: str = "", method: str = "POST", headers: Any = None, path: str = "/api/predict"
    ) -> Reply:
        """Send bytes to the endpoint, or to another path."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path + query, content, headers or {})
            reply = connection.getresponse()
            return Reply(reply.status, reply.read(), dict(reply.getheaders()))


def write_form(*files: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    lines = b""
    for name, content in files:
        head = f'--cut\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        lines += head.encode() + content + b"\r\n"
    return lines + b"--cut--\r\n", {"Content-Type": "multipart/form-data; boundary=cut"}


class ServerThread(Asked):
    """Serves an application from a thread of this process, on a real socket."""

    def __init__(self, app: ASGIApp, *, connection: type[Connection] = Connection) -> None:
        listening = open_socket(port=0)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = make_server(app, connection=connection)
        self._thread = threading.Thread(target=self._server.run, args=([listening],))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_fault: object) -> None:
        self._server.should_exit = True
        self._thread.join()


class AppThread(ServerThread):
    """Serves an engine."""

    def __init__(
        self, engine: Engine, *, connection: type[Connection] = Connection, capacity: int = 256, **options: Any
    ) -> None:
        self._batcher = Batcher(engine, capacity=capacity)
        super().__init__(build_app(self._batcher, **options), connection=connection)

    def __exit__(self, *_fault: object) -> None:
        super().__exit__()
        self._batcher.close()


class ServerProcess(Asked):
    """Serves from another process until it is stopped.

    Attributes:
        told: the line that it prints.
        url: of the page.
    """

    def __init__(self, code: str, *words: str, folder: Path | None = None) -> None:
        command = [sys.executable, "-c", code, *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
        assert self._process.stdout is not None
        self.told = self._process.stdout.readline()
        assert self.told.startswith("http"), self._process.communicate()[1]
        self.url = self.told.partition(" ")[0]
        self.port = urlsplit(self.url).port or 0

    def stop(self) -> tuple[int, str]:
        """Press Ctrl-C; its exit status and what it said on stderr."""
        self._process.send_signal(signal.SIGINT)
        _, said = self._process.communicate(timeout=60)
        return self._process.returncode, said

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.communicate()


class AppProcess(ServerProcess):
    """Serves a network; `log` names what the process asked for on any network."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        super().__init__(_WATCHED, str(log), "app", "--model", str(model), "--port", "0", *options)
        self.log = log

    def read_written(self) -> list[str]:
        """The files that it has written so far."""
        return [line for line in self.log.read_text().splitlines() if line.startswith("written")]

    def read_memory(self, kind: str = "VmRSS") -> int:
        """Bytes of memory that it holds; "VmHWM", that it has held at most."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.partition(f"{kind}:")[2].split()[0])

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def count_open(self) -> int:
        """Files and connections that it has open."""
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    def read_written_bytes(self) -> int:
        """Bytes that it has had written to a disk."""
        told = Path(f"/proc/{self._process.pid}/io").read_text()
        return int(re.search(r"^write_bytes: (\d+)", told, re.MULTILINE)[1])  # type: ignore[index]
