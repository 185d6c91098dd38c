"""Whoever connects and does not ask, or asks and does not listen, must not stay."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from app_process import AppThread
from made_engines import FixedEngine

from pivotpatch.app.server import Connection

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


class Hasty(Connection):
    """With limits that a test can wait for."""

    most = 4
    header_seconds = 0.4
    request_seconds = 1.0


@pytest.fixture
def app() -> Iterator[AppThread]:
    with AppThread(FixedEngine(), connection=Hasty) as made:
        yield made


@contextmanager
def connect(app: AppThread) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", app.port), timeout=10) as caller:
        yield caller


def read_status(caller: socket.socket) -> bytes:
    """The status of an answer, of which all is read."""
    answer = b""
    while not answer.endswith((b"}\n", b"Content-Length: 0\r\n\r\n")):
        received = caller.recv(1000)
        assert received, answer
        answer += received
    return answer.split(b" ")[1]


def is_closed(caller: socket.socket) -> bool:
    """Waits for the other side to say something or to hang up."""
    try:
        return caller.recv(1000) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("sent", "drops", "most"), [(b"", REQUEST[:-2], 3), (HEAD, b"x" * 999, 5)], ids=["header", "body"]
)
def test_whoever_sends_in_drops_is_hung_up_on(sent: bytes, drops: bytes, most: float, app: AppThread) -> None:
    with connect(app) as slow:
        slow.sendall(sent)
        begun = time.monotonic()
        with suppress(ConnectionError):
            for sign in drops:  # never idle, yet never done
                slow.sendall(bytes([sign]))
                time.sleep(0.05)
        assert time.monotonic() - begun < most
        assert is_closed(slow)


def test_who_stays_after_an_answer_is_hung_up_on(app: AppThread) -> None:
    with connect(app) as idle:
        for _ in range(3):  # a connection may be used again, each time with the full time
            time.sleep(0.25)
            idle.sendall(REQUEST)
            assert read_status(idle) == b"200"
        assert is_closed(idle)


def test_a_newcomer_takes_the_place_of_whoever_waits_longest(app: AppThread) -> None:
    with ExitStack() as stack:
        waiting = []
        for _ in range(Hasty.most):
            waiting.append(stack.enter_context(connect(app)))
            time.sleep(0.02)
        assert app.ask(b"", method="GET", path="/health").status == 200
        begun = time.monotonic()
        assert is_closed(waiting[0])
        assert time.monotonic() - begun < 0.1  # long before its own time was over
        waiting[-1].sendall(REQUEST)
        assert read_status(waiting[-1]) == b"200"


def test_where_all_are_at_work_one_more_is_refused(photo: Path) -> None:
    engine, content = FixedEngine(), photo.read_bytes()
    engine.gate.clear()
    head = f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with AppThread(engine, connection=Hasty) as app, ExitStack() as stack:
        callers = [stack.enter_context(connect(app)) for _ in range(Hasty.most)]
        for caller in callers:
            caller.sendall(head + content)
        assert engine.entered.wait(30)
        time.sleep(0.2)
        with connect(app) as late:
            assert read_status(late) == b"503"
        engine.gate.set()
        assert [read_status(caller) for caller in callers] == [b"200"] * Hasty.most


@pytest.mark.parametrize("sent", [HEAD + b"x", b"GET /coffee.jpg HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200])
def test_who_sends_or_reads_nothing_more_gives_way(sent: bytes, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 4)
    with AppThread(FixedEngine()) as app, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(app)).sendall(sent)
        end = time.monotonic() + 20
        while app.ask(photo.read_bytes()).status != 200:  # until they have sent, or have been sent, all they can
            assert time.monotonic() < end
        for _ in range(8):
            assert app.ask(photo.read_bytes()).status == 200
