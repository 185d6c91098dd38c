"""How long requests to `pivotpatch app` wait when many come at once, and what batching gains over one after the other.

By default a tiny untrained network is served, so that the time is the server's: reading, decoding, batching, answering.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path

import numpy as np
import starlette
import torch
import uvicorn
from PIL import Image

from pivotpatch import PatchClassifier, save_checkpoint


def write_pictures(count: int) -> list[bytes]:
    """JPEG files of 640 x 480 pixels, each another one."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(count):
        written = BytesIO()
        colours = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((640, 480), Image.Resampling.BICUBIC).save(written, "JPEG")
        files.append(written.getvalue())
    return files


def ask(port: int, picture: bytes) -> float:
    """Seconds until a picture is answered."""
    start = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/api/predict", picture)
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    assert reply.status == 200, answer
    connection.close()
    return time.perf_counter() - start


def ask_together(port: int, pictures: list[bytes]) -> tuple[list[float], float]:
    """Seconds of each of many requests that start at the same moment, and of all together."""
    start = threading.Barrier(len(pictures) + 1)

    def wait_and_ask(picture: bytes) -> float:
        start.wait()
        return ask(port, picture)

    with ThreadPoolExecutor(len(pictures)) as askers:
        waiting = [askers.submit(wait_and_ask, picture) for picture in pictures]
        start.wait()
        begun = time.perf_counter()
        return [asked.result() for asked in waiting], time.perf_counter() - begun


def describe(name: str, latencies: list[float], seconds: float) -> None:
    shares = np.percentile(np.array(latencies) * 1000, [0, 50, 90, 99, 100])
    print(f"{name:22}{len(latencies) / seconds:>12.0f}" + "".join(f"{value:>9.0f}" for value in shares))


def measure(port: int, count: int) -> None:
    pictures = write_pictures(count)
    for picture in pictures[:8]:  # the first requests also load libraries
        ask(port, picture)
    begun = time.perf_counter()
    single = [ask(port, picture) for picture in pictures]
    alone = time.perf_counter() - begun
    latencies, together = ask_together(port, pictures)
    columns = ("min ms", "50 %", "90 %", "99 %", "max")
    print(f"{f'{count} requests':22}{'pictures/s':>12}" + "".join(f"{column:>9}" for column in columns))
    describe("one after the other", single, alone)
    describe("all at once", latencies, together)
    print(f"all {len(latencies)} were answered; all at once is {alone / together:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="requests at once (200)")
    parser.add_argument("--model", help="a run, a checkpoint, an exported file or a bundled model; else a tiny network")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, starlette {starlette.__version__}, uvicorn {uvicorn.__version__}, "
        f"model {args.model or 'test_resnet at 64 pixels'}"
    )
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            tiny = PatchClassifier("test_resnet", [f"label {place}" for place in range(80)], image_size=64)
            save_checkpoint(tiny, Path(folder) / "tiny")
        command = [sys.executable, "-m", "pivotpatch", "app", "--port", "0"]
        command += ["--model", args.model or str(Path(folder) / "tiny")]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().partition(" ")[0]
            measure(int(address.rpartition(":")[2]), args.count)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
