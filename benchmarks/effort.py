"""What effort keeps and costs on pictures that it was not fitted to: no network runs, scores are enough.

    pivotpatch evaluate tagger table:coco256@test --save test.parquet
    python benchmarks/effort.py tagger test.parquet
    pivotpatch evaluate tagger table:coco256@test --closer 352 --save closer.parquet
    python benchmarks/effort.py tagger test.parquet --closer closer.parquet

A pass is one over an image of the network's size.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from pivotpatch import PatchClassifier, load_checkpoint
from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.policies import PerLabel
from pivotpatch.inference.score_file import read_scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a tuned checkpoint, or tagger")
    parser.add_argument("scores", type=Path, help="of test pictures, with image and TDE logits")
    parser.add_argument("--plain", type=float, help="mAP in per cent of the same network trained without patches")
    parser.add_argument(
        "--closer", type=Path, help="scores of a closer look at them, the second of efforts between 0 and 1"
    )
    parser.add_argument("--plain-scores", type=Path, help="its scores: tells 95 %% intervals of the last column")
    parser.add_argument("--efforts", type=float, nargs="+", default=[step / 10 for step in range(11)])
    args = parser.parse_args()
    model, scores = load_checkpoint(args.model), read_scores(args.scores)
    if not isinstance(model, PatchClassifier) or model.adaptive is None or model.calibration is None:
        raise SystemExit(f"{args.model}: nobody has fitted an effort; run pivotpatch tune")
    alone = model.adaptive.calibration.apply(scores.get("image"))
    both = again = model.calibration.apply(scores.scaled("tde"))
    cost = model.patch_cost
    if args.closer is not None:
        closer = read_scores(args.closer, like=scores)
        if closer.closer_size is None:
            raise SystemExit(f"{args.closer}: not of a closer look; write it by pivotpatch evaluate --closer PIXELS")
        fitted = model.find_calibration(closer_size=closer.closer_size)
        assert fitted is not None  # there is one of patches at least
        again = fitted.apply(closer.scaled("tde"))
        cost = model.closer_cost(closer.closer_size)
    bottom, top = (100 * average_precision(probs, scores.target).mean for probs in (alone, both))
    beside = "" if args.plain is None else "  of the gain over plain"
    policies = {name: PerLabel(values) for name, values in model.preferences.items()}
    decisions = "".join(f"  {name + ': OP, OR':22}" for name in policies)
    print(f"effort  pictures  passes    mAP  of what patches add{beside}{decisions}")
    for effort in args.efforts:
        looked = torch.full((len(scores),), effort == 1) if effort in (0, 1) else model.adaptive.choose(alone, effort)
        second = both if effort == 1 else again
        mixed = torch.where(looked[:, None], second, alone)
        mean = 100 * average_precision(mixed, scores.target).mean
        share = looked.double().mean().item()
        passes = 1 + share * (model.patch_cost if effort == 1 else cost)
        line = f"{effort:6.3g}  {share:8.1%}  {passes:6.2f}  {mean:5.2f}  {(mean - bottom) / (top - bottom):19.0%}"
        line = line if args.plain is None else f"{line}  {(mean - args.plain) / (top - args.plain):22.0%}"
        if args.plain_scores is not None:
            plain = read_scores(args.plain_scores, like=scores).get("image")
            low, high = resample(plain, mixed, both, target=scores.target)
            line = f"{line}  {low:.0%} to {high:.0%}"
        for policy in policies.values():
            decided = precision_recall(mixed, scores.target, policy=policy)
            line += f"  {100 * decided.OP:9.1f}, {100 * decided.OR:11.1f}"
        print(line)


def resample(plain: Tensor, mixed: Tensor, both: Tensor, *, target: Tensor) -> list[float]:
    """The middle 95 % of what is kept of the gain (N,L) over plain scores, of 400 draws of the pictures."""
    generator, kept = torch.Generator().manual_seed(0), []
    for _ in range(400):
        rows = torch.randint(len(target), (len(target),), generator=generator)
        bottom, mean, top = (average_precision(each[rows], target[rows]).mean for each in (plain, mixed, both))
        kept.append((mean - bottom) / (top - bottom))
    found: list[float] = torch.tensor(kept).quantile(torch.tensor([0.025, 0.975])).tolist()
    return found


if __name__ == "__main__":
    main()
