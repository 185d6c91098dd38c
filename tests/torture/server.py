"""`pivotpatch app` under mixed good and bad requests from 32 callers at once, with slow ones among them."""

import io
import json
import os
import random
import socket
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
_STOLEN = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page/../server.py", "//etc/passwd", "/.git/config")


def run(folder: Path, *, long: bool, seed: int) -> tuple[dict[str, float], list[str]]:
    """Ask for minutes or hours; every request is answered, right where it is right."""
    seconds = float(os.environ.get("SERVED", 7200 if long else 60))
    app = AppProcess(GOLDEN, folder / "asked.txt")
    found, latencies, counts = list[str](), list[float](), dict[int, int]()
    good = [_draw(number) for number in range(8)]
    expected = [json.loads(app.ask(each).body) for each in good]
    begun_with = len(app.log.read_text().splitlines())  # what a start asks and writes
    with socket.create_server(("127.0.0.1", 0)) as bait:  # whoever fetches a user's address comes here
        bait.setblocking(False)
        end = time.monotonic() + seconds
        lock = threading.Lock()

        def call(caller: int) -> None:
            draw = random.Random(f"{seed} {caller}")
            while time.monotonic() < end:
                begun, which = time.monotonic(), draw.randrange(10)
                place = draw.randrange(len(good))
                try:
                    if which < 5:
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
        while time.monotonic() < end:
            time.sleep(max(seconds / 120, 0.5))
            memory.append((time.monotonic(), app.read_memory() / 2**20))
        for thread in callers:
            thread.join()
        with suppress(BlockingIOError):
            bait.accept()
            found.append("the server fetched a user's address")
    later = np.array(memory[len(memory) // 3 :])  # the first requests load what is needed
    slope, scatter = np.polyfit(later[:, 0], later[:, 1], 1)[0] * 60, later[:, 1].std()
    if slope * (later[-1, 0] - later[0, 0]) / 60 > max(3 * scatter, 32):
        found.append(f"memory grows by {slope:.2f} MiB a minute")
    found += [f"on the disk or the net: {line}" for line in app.log.read_text().splitlines()[begun_with:]]
    status, said = app.stop()
    if status not in (0, 130) or "Traceback" in said:
        found.append(f"exit {status}: {said[-500:]}")
    late = np.percentile(latencies, [50, 99, 100])
    return {
        "requests": sum(counts.values()),
        **{f"status_{status}": count for status, count in sorted(counts.items())},
        "median_s": round(late[0], 3),
        "p99_s": round(late[1], 3),
        "longest_s": round(late[2], 3),
        "memory_mib": round(float(later[-1, 1]), 1),
        "memory_mib_per_minute": round(float(slope), 3),
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
    if which == 5:
        reply = app.ask(draw.randbytes(draw.choice([0, 10, 5000])))
        return reply, reply.status in (400, 413, 415, 422, 503)
    if which == 6:
        reply = app.ask(good[: draw.randrange(1, len(good))])  # cut short
        return reply, reply.status in (200, 400, 422, 503)
    if which == 7:
        reply = app.ask(b"", method=draw.choice(["GET", "HEAD", "PUT"]), path=draw.choice(_STOLEN))
        return reply, reply.status in (400, 404, 405) and b"root:" not in reply.body
    if which == 8:
        address = f"http://127.0.0.1:{port}/a.jpg"
        body = draw.choice([address.encode(), json.dumps({"url": address}).encode()])
        reply = app.ask(
            body, query=f"?url={address}", headers={"Content-Type": draw.choice(["text/plain", "application/json"])}
        )
        return reply, reply.status in (400, 415, 422, 503)
    body, headers = write_form(("a.jpg", good), ("b.jpg", b"none"))
    reply = app.ask(body[: draw.choice([len(body), len(body) // 2])], headers=headers)
    return reply, reply.status in (200, 400, 422, 503)
