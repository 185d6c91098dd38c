"""`pivotpatch app` in a process of its own, watched for every address that it asks for."""

import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from made_scores import HOSTILE

LABELS = ("cat", "cup", HOSTILE[0], HOSTILE[4], "${alert(1)}", "dog", "car")
_WATCHED = """
import sys
def watch(event, args, log=open(sys.argv.pop(1), "a", buffering=1)):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print(event, args, file=log)
sys.addaudithook(watch)
from pivotpatch.cli.main import main
sys.exit(main())
"""


class Reply(NamedTuple):
    """What a server says to a request."""

    status: int
    body: bytes


class AppProcess:
    """Serves a network from another process until it is stopped.

    Attributes:
        told: the line that it prints.
        url: of the page.
        log: names what the process asked for on any network.
    """

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-c", _WATCHED, str(log), "app", "--model", str(model), "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.told = self._process.stdout.readline()
        self.url = self.told.partition(" ")[0]
        self.port = int(self.url.rpartition(":")[2] or 0)
        self.log = log

    def ask(
        self, content: bytes, *, query: str = "", method: str = "POST", headers: Any = None, path: str = "/api/predict"
    ) -> Reply:
        """Send bytes to the endpoint, or to another path."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path + query, content, headers or {})
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        return Reply(reply.status, body)

    def stop(self) -> tuple[int, str]:
        """Press Ctrl-C; its exit status and what it said on stderr."""
        self._process.send_signal(signal.SIGINT)
        _, said = self._process.communicate(timeout=60)
        return self._process.returncode, said
