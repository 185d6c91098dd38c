"""How long a person waits for tags, on two cores: cold starts, memory, answers to mistakes, many images.

    python benchmarks/startup.py [--rounds 5] [--out results/startup.json]

Each cold start is a fresh process, the median of several after one that is not counted; the commands take turns, so
that a busy moment hits all alike. The bundled tagger answers in two ways: by ONNX Runtime, as users have it, and by
torch from the same weights, as everybody had it before there was a base install without torch; a bare script shows what
the libraries alone take.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from loading import write_photographs

from pivotpatch.runtime.predictor import TAGGER, Predictor

PROGRAM = ("-m", "pivotpatch")
GOALS = {
    "predict photo.jpg": "at most 0.6 s, 250 MB and a tenth of torch",
    "predict no-such-file.jpg": "at most 0.2 s",
    "predict --no-such-option": "at most 0.2 s",
}
# A small process that starts another: memory counts from before the start, so that a large one would count itself.
LAUNCHER = """
import os, sys, time
began = time.perf_counter()
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[
    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)])
used = os.wait4(child, 0)[2]
print(time.perf_counter() - began, used.ru_maxrss)
"""
# The least that such tags take: the same libraries and the same file, written down without a program around them.
BARE = """
import sys
import numpy as np
import onnxruntime
from PIL import Image
options = onnxruntime.SessionOptions()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
image = Image.open(sys.argv[2]).convert("RGB").resize((256, 256))
boxes = [(0, 0, 256, 256), (0, 0, 147, 147), (109, 0, 256, 147), (0, 109, 147, 256), (109, 109, 256, 256)]
views = np.stack([np.asarray(image.crop(box).resize((224, 224))) for box in boxes])
print(session.run(None, {session.get_inputs()[0].name: views})[0].mean((2, 3)).argsort()[:, -5:])
"""
IMAGES = 96  # of the comparison of one by one, a list and bulk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind that count (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photos").mkdir()
        photos = write_photographs(folder / "photos", IMAGES)
        shutil.copytree(TAGGER.parent, folder / "checkpoint", ignore=shutil.ignore_patterns("*.onnx"))
        commands = {
            "predict photo.jpg": [*PROGRAM, "predict", str(photos[0])],
            "a bare script": ["-c", BARE, str(TAGGER), str(photos[0])],
            "the same with torch": [*PROGRAM, "predict", str(photos[0]), "--model", str(folder / "checkpoint")],
            "predict no-such-file.jpg": [*PROGRAM, "predict", "no-such-file.jpg"],
            "predict --no-such-option": [*PROGRAM, "predict", "--no-such-option"],
            "--help": [*PROGRAM, "--help"],
        }
        cold = measure_starts(commands, args.rounds)
        speeds = measure_many(photos, folder)
    about = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}
    about |= {package: version(package) for package in ("onnxruntime", "numpy", "torch")}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"\n{'pivotpatch ...':28}{'seconds':>9}{'MB':>7}")
    for name, (seconds, memory) in cold.items():
        print(f"{name:28}{seconds:9.2f}{memory:7.0f}   {GOALS.get(name, '')}")
    ratio = cold["the same with torch"][0] / cold["predict photo.jpg"][0]
    print(f"{'torch takes':28}{ratio:8.1f}x")
    print(f"\n{IMAGES} photographs, images per second")
    for name, speed in speeds.items():
        print(f"{name:28}{speed:9.1f}")
    if args.out is not None:
        found = {"cold": cold, "torch_ratio": ratio, "images_per_second": speeds}
        args.out.write_text(json.dumps({**about, **found}, indent=1) + "\n", "utf-8")


def measure_starts(commands: dict[str, list[str]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds and megabytes of each command in a process of its own."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, words in commands.items():
            spent = run(words)
            if number:
                found[name].append(spent)
    return {name: tuple(map(statistics.median, zip(*all_of, strict=True))) for name, all_of in found.items()}


def run(words: list[str]) -> tuple[float, float]:
    """Seconds until a command ends, and the most memory it held."""
    launch = [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *words]
    seconds, memory = subprocess.run(launch, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(memory) / 1000


def measure_many(photos: list[Path], folder: Path) -> dict[str, float]:
    """Images per second, one by one, as a list, and to a file."""
    predictor = Predictor.load(device="cpu")
    predictor(photos[0])

    def one_by_one() -> None:
        for photo in photos:
            predictor(photo)

    def bulk() -> None:
        out = ["--device", "cpu", "--out", str(folder / "tags.jsonl"), "--overwrite"]
        words = ["predict", str(folder / "photos"), *out]
        subprocess.run([sys.executable, "-m", "pivotpatch", *words], check=True, stderr=subprocess.DEVNULL)

    speeds = {}
    for name, work in {
        "predictor(photo)": one_by_one,
        "predictor(photos)": lambda: predictor(photos),
        "predict --out, start included": bulk,
    }.items():
        began = time.perf_counter()
        work()
        speeds[name] = len(photos) / (time.perf_counter() - began)
    return speeds


if __name__ == "__main__":
    main()
