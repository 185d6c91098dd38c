"""Images and labels of one's own: frozen features against training everything, in time, memory and mAP.

    python benchmarks/own_labels.py own-1/photos.csv own-2/photos.csv --start tagger --test table:coco256@test --full

Each table of images is trained on as a user would, `pivotpatch train tagger TABLE`, in a process of its own whose whole
tree is watched. A comparison of new labels needs a start that has never seen them: --start FOLDER. Time is that of the
whole command; say how busy the machine was.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def watch(words: list[str]) -> dict[str, float]:
    """Run pivotpatch; seconds, and the most memory in GB of it and all its children, shared pages counted once."""
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "pivotpatch", *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        tree, used = [psutil.Process(process.pid)], 0
        try:
            for each in (*tree, *tree[0].children(recursive=True)):
                used += each.memory_full_info().pss
        except psutil.Error:  # it has just ended
            pass
        peak = max(peak, used)
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    return {"seconds": time.perf_counter() - began, "peak_GB": peak / 1e9}


def train(table: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one way on a table; what it took and what came of it."""
    out = args.out / f"{Path(table).parent.name}-{way}"
    words = ["train", "tagger", table, f"model.start_from={args.start}", "--out", str(out), *args.change]
    words += [f"data.test={json.dumps([args.test])}"] if args.test else []
    found: dict[str, Any] = {"table": table, "way": way, "load": os.getloadavg()[0]}
    found |= watch([*words, f"model.frozen={str(way != 'full').lower()}"])
    metrics = json.loads((out / "metrics.json").read_text())
    found["gain"] = metrics.get("gain")
    if args.test:
        found["test_mAP"] = {kind: each["mean"] for kind, each in metrics["test"][args.test].items()}
    return found


def main() -> None:
    """Train on each table in each way, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--start", default="tagger")
    parser.add_argument("--test", help="address of test images; scoring them counts as time of the command")
    parser.add_argument("--full", action="store_true", help="train everything too")
    parser.add_argument("--change", action="append", default=[], help="section.key=value of all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/own_labels"))
    args = parser.parse_args()
    for table in args.tables:
        for way in ("frozen", *(["full"] if args.full else [])):
            print(json.dumps(train(table, way, args)), flush=True)


if __name__ == "__main__":
    main()
