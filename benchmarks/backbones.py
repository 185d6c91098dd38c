"""Which small backbone gives most for its time on a CPU? EfficientNet-Lite 0 to 2, each at several inputs.

A linear layer on mean features of the backbone as ImageNet left it, learned from training images and judged on others
of train; no test image is opened. That says how much a backbone knows, not what training all of it would make of it.

    python benchmarks/backbones.py --data table:coco256 --weights lite0.safetensors lite1.safetensors lite2.safetensors
    python benchmarks/backbones.py --time      # ONNX Runtime, two threads, into the same file
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from recording import describe_machine, measure, write_json
from torch import nn
from word_vectors import fit_head, judge_head, pool_features

from pivotpatch.data.address import open_records
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.runtime.engine import open_onnx

RESULT = Path(__file__).parent / "results" / "backbones_cpu.json"
INPUTS = {0: (224, 272, 336), 1: (240,), 2: (260,)}
LABELS = tuple(f"label {number}" for number in range(80))
BATCH = 8  # images that are timed together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="address without its split")
    parser.add_argument("--weights", type=Path, nargs=3, help="of Lite 0, 1 and 2")
    parser.add_argument("--images", type=int, nargs=2, default=[3000, 1500], help="to learn from, and to judge on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time", action="store_true", help="time an image instead")
    parser.add_argument("--commit", default="", help="of the code, for the record")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    known = json.loads(RESULT.read_text("utf-8")) if RESULT.exists() else {"models": {}}
    models = known["models"]
    if args.time:
        for name, seconds in time_all().items():
            models.setdefault(name, {})["ms"] = 1000 * seconds / BATCH
    else:
        for number, size in ((number, size) for number, sizes in INPUTS.items() for size in sizes):
            found = judge(number, size, args)
            models.setdefault(f"lite{number} {size}", {})["mAP"] = found
            print(f"lite{number} {size}: {statistics.mean(found):.2f}  {' '.join(f'{each:.2f}' for each in found)}")
    about = {**describe_machine(torch.device("cpu")), "images": args.images, "seeds": args.seeds}
    write_json(RESULT, {**about, "threads": args.threads, "commit": args.commit, "models": models})
    for name, row in sorted(models.items(), key=lambda item: item[1].get("ms", 0)):
        ms, found = row.get("ms", float("nan")), row.get("mAP", [float("nan")])
        print(f"| {name} | {ms:.1f} | {statistics.mean(found):.1f} ({min(found):.1f} to {max(found):.1f}) |")


def judge(number: int, size: int, args: argparse.Namespace) -> list[float]:
    """MAP in per cent on training images held out, of each seed."""
    learned, judged = args.images
    records = open_records(f"{args.data}@train")[: learned + judged]
    name, weights = f"tf_efficientnet_lite{number}", args.weights[number]
    model = MultiLabelClassifier(name, records.labels.names, image_size=size, weights=weights).eval()
    features, target = pool_features(model, records, torch.mean), records.target()
    mean, spread = features[:learned].mean(0), features[:learned].std(0).clamp(min=1e-6)
    features = (features - mean) / spread
    found = []
    for seed in args.seeds:
        torch.manual_seed(seed)
        head = nn.Linear(features.shape[1], target.shape[1])
        fit_head(head, features[:learned], target[:learned], epochs=20, decay=0.1)
        found.append(judge_head(head, features[learned:], target[learned:]))
    return found


def time_all() -> dict[str, float]:
    """Seconds of a batch of each model, all taking turns."""
    from pivotpatch.export import export_onnx

    ways = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, sizes in INPUTS.items():
            for size in sizes:
                model = MultiLabelClassifier(f"tf_efficientnet_lite{number}", LABELS, image_size=size).eval()
                path = Path(folder, f"{number}-{size}.onnx")
                export_onnx(model, path)
                pixels = np.random.default_rng(0).integers(256, size=(BATCH, size, size, 3), dtype=np.uint8)
                ways[f"lite{number} {size}"] = partial(open_onnx(path, device="cpu", effort=1).ask, pixels)
        return measure(ways, rounds=15)


if __name__ == "__main__":
    main()
