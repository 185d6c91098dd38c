"""`pivotpatch app` under mixed good and bad requests from 32 callers at once, with slow ones among them."""

import io
import json
import os
import random
import socket
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import numpy as np
from app_process import AppProcess, Reply, write_form
from PIL import Image

CALLERS, SLOW = 32, 8
GOLDEN = Path(__file__).parents[1] / "golden" / "kept" / "checkpoint"
LATEST = 60.0  # seconds that a right request may wait beside slow callers
_PAGES = ("/", "/page.css", "/page.js", "/icon.svg", "/cat.jpg")
_STOLEN = (
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/..%2f..%2f..%2fetc%2fpasswd",
    "/page/../server.py",
    "/page/..%5cserver.py",
    "/page.css/../../server.py",
    "/cat.jpg%00.txt",
    "//etc/passwd",
    "/.git/config",
    "/api/predict/../../server.py",
    "file:///etc/passwd",
)
_REFUSED = (
    {"Host": "example.com"},
    {"Origin": "http://example.com"},
    {"Content-Type": "multipart/form-data"},
    {"Content-Type": "multipart/form-data; boundary=" + "x" * 500},
)
_QUERIES = ("?top_k=NaN", "?threshold=1e999", "?effort=-1", "?" + "a=1&" * 500, "?threshold=%00")
_HALF = b"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999\r\n\r\n"


def run(folder: Path, *, long: bool, seed: int) -> tuple[dict[str, float], list[str]]:
    """Ask for minutes or hours; every request is answered, right where it is right."""
    seconds = float(os.environ.get("SERVED", 7200 if long else 60))
    app = AppProcess(GOLDEN, folder / "asked.txt")
    found, latencies, counts = list[str](), list[float](), dict[int, int]()
    good = [_draw(number) for number in range(8)]
    expected = [json.loads(app.ask(each).body) for each in good]
    begun_with, written = len(app.log.read_text().splitlines()), app.read_written_bytes()  # by its start
    with socket.create_server(("127.0.0.1", 0)) as bait:  # whoever fetches a user's address comes here
        bait.setblocking(False)
        end = time.monotonic() + seconds
        lock = threading.Lock()

        def call(caller: int) -> None:
            draw = random.Random(f"{seed} {caller}")
            while time.monotonic() < end:
                begun, which = time.monotonic(), draw.randrange(14)
                place = draw.randrange(len(good))
                try:
                    if which == 0:
                        reply = app.ask(b"", method="GET", path=draw.choice(_PAGES))
                        right = reply.status == 200 and len(reply.body) > 100
                    elif which < 6:
                        reply = app.ask(good[place])
                        with lock:
                            latencies.append(time.monotonic() - begun)
                        right = reply.status == 503 or (
                            reply.status == 200 and _near(json.loads(reply.body), expected[place])
                        )
                    else:
                        reply, right = _ask_badly(app, draw, good[place], which, bait.getsockname()[1])
                    with lock:
                        counts[reply.status] = counts.get(reply.status, 0) + 1
                        if not right:
                            found.append(f"request {which}: status {reply.status}, {reply.body[:200]!r}")
                except (OSError, HTTPException, ValueError) as error:
                    with lock:
                        found.append(f"request {which}: no answer ({type(error).__name__}: {error})")

        def dawdle() -> None:
            """Open a connection, send a byte a second, be thrown out, come again."""
            while time.monotonic() < end:
                with suppress(OSError), socket.create_connection(("127.0.0.1", app.port)) as slow:
                    slow.sendall(b"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\n")
                    while time.monotonic() < end:
                        slow.sendall(b"x")
                        time.sleep(1)

        callers = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
        callers += [threading.Thread(target=dawdle) for _ in range(SLOW)]
        for thread in callers:
            thread.start()
        memory: list[tuple[float, float]] = []
        pause = max(seconds / 120, 0.5)
        while time.monotonic() < end and app.is_alive():
            time.sleep(pause)
            memory.append((time.monotonic(), app.read_memory() / 2**20))
            if pause >= 30:  # a long run tells how it is
                told = f"{end - memory[-1][0]:.0f} s left, {sum(counts.values())} answered, {len(found)} found"
                handles = f"{app.count_open()} open files, {app.read_written_bytes()} bytes written"
                print(f"server: {told}, {memory[-1][1]:.1f} MiB, {handles}", file=sys.stderr, flush=True)
        if not app.is_alive():
            found.append("the server has ended")
            end = 0.0
        for thread in callers:
            thread.join()
        with suppress(BlockingIOError):
            bait.accept()
            found.append("the server fetched a user's address")
    later = np.array(memory[len(memory) // 3 :])  # the first requests load what is needed
    since = later[:, 0] - later[0, 0]
    slope, start = np.polyfit(since, later[:, 1], 1)
    scatter = (later[:, 1] - start - slope * since).std()
    if slope * since[-1] > max(3 * scatter, 16):
        found.append(f"memory grows by {slope * 60:.2f} MiB a minute")
    if app.read_written_bytes() > written:
        found.append(f"{app.read_written_bytes() - written} bytes written to the disk")
    found += [f"on the disk or the net: {line}" for line in app.log.read_text().splitlines()[begun_with:]]
    status, said = app.stop()
    if status not in (0, 130) or "Traceback" in said:
        found.append(f"exit {status}: {said[-500:]}")
    late = np.percentile(latencies, [50, 99, 100])
    if late[2] > LATEST:
        found.append(f"a right request waited for {late[2]:.0f} s")
    return {
        "requests": sum(counts.values()),
        **{f"status_{status}": count for status, count in sorted(counts.items())},
        "median_s": round(late[0], 3),
        "p99_s": round(late[1], 3),
        "longest_s": round(late[2], 3),
        "memory_mib": round(float(later[-1, 1]), 1),
        "memory_mib_per_minute": round(float(slope) * 60, 3),
        "memory_scatter_mib": round(float(scatter), 1),
    }, found


def _draw(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((320, 240)).save(stream, "JPEG")
    return stream.getvalue()


def _near(one: object, other: object) -> bool:
    """Whether two answers are the same, but for the last digits of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-4
    return one == other


def _ask_badly(app: AppProcess, draw: random.Random, good: bytes, which: int, port: int) -> tuple[Reply, bool]:
    """A request that is wrong in some way, its reply, and whether that is as it should be."""
    if which == 6:
        reply = app.ask(draw.randbytes(draw.choice([0, 10, 5000])))
        return reply, reply.status in (400, 413, 415, 422, 503)
    if which == 7:
        reply = app.ask(good[: draw.randrange(1, len(good))])  # cut short
        return reply, reply.status in (200, 400, 422, 503)
    if which == 8:
        reply = app.ask(b"", method=draw.choice(["GET", "HEAD", "PUT"]), path=draw.choice(_STOLEN))
        return reply, reply.status in (400, 404, 405) and b"root:" not in reply.body
    if which == 9:
        address = f"http://127.0.0.1:{port}/a.jpg"
        body = draw.choice([address.encode(), json.dumps({"url": address}).encode()])
        reply = app.ask(
            body, query=f"?url={address}", headers={"Content-Type": draw.choice(["text/plain", "application/json"])}
        )
        return reply, reply.status in (400, 415, 422, 503)
    if which == 10:
        reply = app.ask(good, headers=draw.choice(_REFUSED))
        return reply, reply.status in (400, 403, 413, 415, 422)
    if which == 11:
        reply = app.ask(b"", method="POST", query=draw.choice(_QUERIES))
        return reply, reply.status in (400, 422, 503)
    if which == 12:  # no HTTP, or a caller that leaves; then whether others are still heard
        with suppress(OSError), socket.create_connection(("127.0.0.1", app.port), timeout=5) as raw:
            raw.sendall(draw.choice([draw.randbytes(300), b"GET / HTTP/9.9\r\n\r\n", _HALF + good[: len(good) // 2]]))
        reply = app.ask(b"", method="GET", path="/")
        return reply, reply.status == 200
    body, headers = write_form(("a.jpg", good), ("b.jpg", b"none"))
    reply = app.ask(body[: draw.choice([len(body), len(body) // 2])], headers=headers)
    return reply, reply.status in (200, 400, 422, 503)
