"""A hub on loopback that speaks as much of the Hugging Face hub's language as downloads and uploads need."""

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download, utils


@dataclass
class Repository:
    """What the hub holds under one name: files by revision, the token that who asks must show, and a gate."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    token: str | None = None
    gated: bool = False

    @property
    def files(self) -> dict[str, bytes]:
        return self.revisions["main"]

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a branch, tag or commit, and its files."""
        for name, files in self.revisions.items():
            if revision in (name, _commit(files)):
                return _commit(files), files
        return None


class HubServer(ThreadingHTTPServer):
    """Serves repositories on loopback; notes which files were fetched, what was made, and messages of commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.writer = "may-write"
        self.fetched: list[str] = []
        self.made: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def offer(self, name: str, folder: Path, revision: str = "main") -> Repository:
        """Hold the files of a folder."""
        held = self.repositories.setdefault(name, Repository())
        held.revisions[revision] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return held


def point_client(patch: pytest.MonkeyPatch, address: str) -> None:
    """Let the client of the hub ask another address, and notice whether it is offline."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", address)
    for module in (constants, file_download):  # clients before 1.0 have a copy in the latter
        patch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    getattr(utils, "reset_sessions", lambda: None)()  # the same clients ask for "offline" once a session


@contextmanager
def serving_hub(patch: pytest.MonkeyPatch, copies: Path) -> Iterator[HubServer]:
    """What the client takes for the hub, for a while; it keeps copies in a folder."""
    patch.setattr(constants, "HF_HUB_CACHE", str(copies))
    patch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server:
        point_client(patch, server.address)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _commit(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        asks_api = parts[:2] == ["api", "models"]
        owner, repository, *asked = parts[2:] if asks_api else parts
        what, revision, *rest = asked or ("revision", "main")
        name = f"{owner}/{repository}"
        held = self.server.repositories.get(name)
        if held is None or (held.token and self._token() != held.token):
            return self._refuse(401, "RepoNotFound")
        if held.gated:
            return self._refuse(403, "GatedRepo")
        found = held.find(revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound")
        commit, files = found
        if what == "revision":
            return self._say({"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]})
        if what == "tree":
            digest = {file: hashlib.sha1(content).hexdigest() for file, content in files.items()}
            sizes = [{"path": file, "size": len(content), "oid": digest[file]} for file, content in files.items()]
            return self._say([{"type": "file", **each} for each in sizes])
        file = "/".join(rest)
        if file not in files:
            return self._refuse(404, "EntryNotFound", commit)
        if self.command == "GET":
            self.server.fetched.append(f"{name}/{file}")
        return self._send(200, files[file], commit)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        if self._token() != self.server.writer:
            return self._refuse(403, "")
        if path == "/api/repos/create":
            told = json.loads(body)
            self.server.made.append(told)
            name = f"{told['organization']}/{told['name']}"
            known = name in self.server.repositories
            self.server.repositories.setdefault(name, Repository())
            return self._say({"url": f"{self.server.address}/{name}"}, 409 if known else 200)
        if path == "/api/validate-yaml":
            known = "license: nonsense" not in json.loads(body)["content"]
            faults = [] if known else [{"message": '"license" must be one of a list'}]
            return self._say({"warnings": [], "errors": faults}, 200 if known else 400)
        owner, repository, what, revision = path.removeprefix("/api/models/").split("/")
        held = self.server.repositories[f"{owner}/{repository}"]
        if what == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._say({"files": modes})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                held.revisions[revision][line["value"]["path"]] = b64decode(line["value"]["content"])
            elif line["key"] == "header":
                self.server.messages.append(line["value"]["summary"])
        commit = _commit(held.revisions[revision])
        address = f"{self.server.address}/{owner}/{repository}/commit/{commit}"
        return self._say({"success": True, "commitUrl": address, "commitOid": commit})

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _say(self, answer: object, status: int = 200) -> None:
        self._send(status, json.dumps(answer).encode())

    def _refuse(self, status: int, code: str, commit: str | None = None) -> None:
        self._send(status, b"{}", commit, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, commit: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        told = {"Content-Length": str(len(body)), "Content-Type": "application/json", **(headers or {})}
        if commit is not None:
            told |= {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        pass
