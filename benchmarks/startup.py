"""How long a person waits for `pivotpatch --help` and for the tags of one picture, and where that time goes.

    python benchmarks/startup.py [--model RUN] [--rounds 7] [--out result.json]

Each time is that of a fresh process, the median of several after one that is not counted; the commands take turns, so
that a busy moment hits all alike. The network is tf_efficientnet_lite0, never trained, unless one is given.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import torchvision
from loading import write_photographs

from pivotpatch import PatchClassifier, save_checkpoint

PREDICT = "pivotpatch predict photo.jpg"
# The command itself, with a clock at the doors of its stages; what they took is written before it leaves.
STAGES = """
import json, sys, time
began, file, *sys.argv = sys.argv[1:]
spent = {"interpreter": time.time() - float(began)}
def timed(stage, work):
    def do(*args, **options):
        begun = time.time()
        try:
            return work(*args, **options)
        finally:
            spent[stage] = spent.get(stage, 0) + time.time() - begun
    return do
def load(*args, **options):
    predictor = open_network(*args, **options)
    engine = type(predictor.engine)
    engine.__call__ = timed("first forward pass", engine.__call__)
    return predictor
timed("importing torch", __import__)("torch")
def import_rest():
    import pivotpatch.cli.main, pivotpatch.runtime.bulk, pivotpatch.runtime.predictor
timed("importing the rest", import_rest)()
from pivotpatch.inference import predictor
open_network = predictor.Predictor.load
predictor.Predictor.load = timed("loading the checkpoint", load)
predictor.decode_with_size = timed("reading the picture", predictor.decode_with_size)
command = sys.modules["pivotpatch.cli.main"]
main = command.main
def tell():
    status = main()
    with open(file, "w") as opened:
        json.dump(spent, opened)
    return status
sys.exit(tell())
"""
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pyarrow", "accelerate", "rich", "pydantic", "pivotpatch")
COMPILER = "torch._dynamo"  # torch does not import its compiler, but torchvision and timm do


class Spent(NamedTuple):
    """Seconds of a process: until it ended, and of the processor."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a run, a checkpoint or an exported file instead of a network made for this")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind that count (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (picture,) = write_photographs(Path(name), 1)
        model = args.model or make_checkpoint(Path(name) / "model")
        predict = ["-m", "pivotpatch", "predict", str(picture), "--model", str(model)]
        commands = {
            "python -c pass": ["-c", "pass"],
            "pivotpatch --help": ["-m", "pivotpatch", "--help"],
            'python -c "import torch"': ["-c", "import torch"],
            PREDICT: predict,
        }
        times, stages = measure(commands, predict[1:], file=Path(name) / "spent.json", rounds=args.rounds)
        imports = attribute_imports(trace_imports(predict))
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{package.__name__: package.__version__ for package in (torch, torchvision, timm)},
        "model": args.model or "tf_efficientnet_lite0",
        "rounds": args.rounds,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print_tables(times, stages, imports)
    if args.out is not None:
        seconds = {name: spent._asdict() for name, spent in times.items()}
        found = {"commands": seconds, "stages": stages, "imports": imports}
        args.out.write_text(json.dumps({**about, **found}, indent=1) + "\n", "utf-8")


def make_checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    model = PatchClassifier("tf_efficientnet_lite0", [f"label {index}" for index in range(80)], image_size=224)
    save_checkpoint(model, folder)
    return folder


def measure(
    commands: dict[str, list[str]], predict: list[str], *, file: Path, rounds: int
) -> tuple[dict[str, Spent], dict[str, float]]:
    """Medians: what each command takes, and each stage of a prediction, which is told in a file."""
    times: dict[str, list[Spent]] = {name: [] for name in commands}
    stages: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, words in commands.items():
            spent = run(words)
            if number:
                times[name].append(spent)
        laps = run_stages(predict, file)
        if number:
            for name, seconds in laps.items():
                stages.setdefault(name, []).append(seconds)
    commands_took = {name: Spent(*map(statistics.median, zip(*all_of, strict=True))) for name, all_of in times.items()}
    return commands_took, {name: statistics.median(seconds) for name, seconds in stages.items()}


def run(words: list[str]) -> Spent:
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Spent(wall, cpu)


def run_stages(predict: list[str], file: Path) -> dict[str, float]:
    """Seconds of each stage."""
    began = time.time()
    spent = run(["-c", STAGES, str(began), str(file), *predict])
    stages: dict[str, float] = json.loads(file.read_text("utf-8"))
    return {**stages, "the rest: printing, leaving": spent.wall - sum(stages.values())}


def trace_imports(words: list[str]) -> list[tuple[int, str, float]]:
    """Depth, name and own seconds of each module that is imported, after those that it imports itself."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    return [
        (len(name) - len(name.lstrip()), name.strip(), int(own) / 1e6)
        for own, _, name in rows
        if own.strip().isdecimal()
    ]


def attribute_imports(modules: list[tuple[int, str, float]]) -> dict[str, float]:
    """Seconds by package, the longest first; a module of no known package counts for the one that wants it."""
    spent: dict[str, float] = {}
    above: list[tuple[int, str]] = []  # depth and package of those that want the next one
    for depth, name, own in reversed(modules):
        while above and above[-1][0] >= depth:
            above.pop()
        wanted = above[-1][1] if above else "the standard library"
        package = name.partition(".")[0]
        if wanted != COMPILER:
            wanted = COMPILER if f"{name}.".startswith(f"{COMPILER}.") else package if package in PACKAGES else wanted
        above.append((depth, wanted))
        spent[wanted] = spent.get(wanted, 0.0) + own
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def print_tables(times: dict[str, Spent], stages: dict[str, float], imports: dict[str, float]) -> None:
    print(f"\n{'':32}{'wall ms':>9}{'CPU ms':>9}")
    for name, spent in times.items():
        print(f"{name:32}{1000 * spent.wall:9.0f}{1000 * spent.cpu:9.0f}")
    for title, rows in ((PREDICT, stages), ("importing, by package (traced, so a little slower)", imports)):
        whole = sum(rows.values())
        print(f"\n{title}")
        for name, seconds in rows.items():
            print(f"  {name:30}{1000 * seconds:9.0f}{100 * seconds / whole:8.0f} %")
    print(f"\nlargest of the rest: {next(name for name in imports if name != 'torch')}")


if __name__ == "__main__":
    main()
