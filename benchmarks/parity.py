"""Whether the bundled tagger says the same with ONNX Runtime, as users have it, as with torch.

    python benchmarks/parity.py --data table:coco256@test [--images 5000] [--out results/parity.json]

Both decode, cut and resize in their own way: Pillow and numpy, or torch. An hour on one core for 5,000 images.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from pivotpatch.data.address import open_records
from pivotpatch.data.loading import resize_quickly
from pivotpatch.inference.engine import open_engine
from pivotpatch.runtime.decoding import Resize, decode_image, resize_pixels
from pivotpatch.runtime.engine import Engine, open_onnx
from pivotpatch.runtime.predictor import TAGGER

AT_ONCE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="address of the images")
    parser.add_argument("--images", type=int, help="the first so many; all by default")
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    records = open_records(args.data)
    engines: dict[str, tuple[Engine, Resize]] = {
        "ONNX Runtime": (open_onnx(TAGGER, device="cpu", effort=args.effort), resize_pixels),
        "torch": (open_engine("tagger", device="cpu", effort=args.effort), resize_quickly),
    }
    count, found = min(args.images or len(records), len(records)), []
    for start in track(range(0, count, AT_ONCE), "compare"):
        sources = [records.images.source(records.place(row)) for row in range(start, min(start + AT_ONCE, count))]
        found.append(
            [
                engine.ask(np.stack([decode_image(each, size=(side, side), resize=resize) for each in sources])).probs
                for engine, resize in engines.values()
                for side in (engine.picture_size,)
            ]
        )
    one, other = (np.concatenate(parts) for parts in zip(*found, strict=True))
    thresholds = np.array(engines["torch"][0].thresholds, dtype=np.float32)
    differ = int(((one > thresholds) != (other > thresholds)).sum())
    figures = {
        "images": count,
        "effort": args.effort,
        "largest_difference": float(np.abs(one - other).max()),
        "decisions": one.size,
        "decisions_that_differ": differ,
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
