"""What an order of review is worth: mAP against the number of reviewed images, beside random order.

A pool of images that nobody has looked at, ten labels. Reviewing begins with 100 at random; a linear head is trained on
what was reviewed, on frozen features; the next 100 are the first of an order of all images that were not reviewed yet.
Embeddings are those of `teach.py`. `--judge 0.3` judges on the last 30 % of the pool, to choose by, and not on test.

    python benchmarks/review.py --model tagger --images table:pool.parquet --test table:coco256@test \
        --labels held.json --cache cache --out benchmarks/results/review.json --figure docs/images/review_order.png
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from teach import choose, embed, take_first
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.models.open import open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.review.order import order_images, rate_doubts
from pivotpatch.tuning.teach import Background
from pivotpatch.tuning.thresholds import BEST_F1, fit_thresholds

STEP, MOST = 100, 1000
RIDGE = 3e-3  # of the head's weights, on axes of about unit variance
STEPS = 60


class Said(NamedTuple):
    """Logits (N,L) of the whole image, of its patches, and of both."""

    image: Tensor
    patches: Tensor
    both: Tensor


def answer(places: Tensor, weight: Tensor, bias: Tensor) -> Said:
    """What a head (R,L), (L,) says of coordinates (N,1+P,R): PAT-I, lam 1."""
    logits = places @ weight + bias
    image, parts = logits[:, 0], logits[:, 1:]
    pooled = (torch.softmax(parts, dim=1) * parts).sum(1)
    return Said(image, pooled, (image + pooled) / 2)


def train(places: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A head by least binary cross entropy of both, from coordinates (n,1+P,R) and target (n,L)."""
    weight = torch.zeros(places.shape[2], target.shape[1], requires_grad=True)
    bias = torch.full((target.shape[1],), -3.0, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.binary_cross_entropy_with_logits(answer(places, weight, bias).both, target, reduction="none")
        total = loss.mean(0).sum() + RIDGE * weight.square().sum()
        total.backward()
        return total

    optimiser.step(closure)
    return weight.detach(), bias.detach()


def choose_random(
    said: Said, _thresholds: np.ndarray, _labels: list[str], generator: np.random.Generator
) -> np.ndarray:
    return generator.permutation(len(said.both))


def choose_uncertain(said: Said, _thresholds: np.ndarray, _labels: list[str], _: np.random.Generator) -> np.ndarray:
    probs = said.both.sigmoid()
    return np.argsort(-(probs * (1 - probs)).sum(1).numpy(), kind="stable")


def choose_review(said: Said, thresholds: np.ndarray, labels: list[str], _: np.random.Generator) -> np.ndarray:
    """The order that `pivotpatch review` shows images in."""
    image, patches, both = (part.sigmoid().double().numpy() for part in said)
    doubts = rate_doubts(both, labels=labels, thresholds=thresholds, image_probs=image, patch_probs=patches)
    return order_images(doubts)


ORDERS: dict[str, Callable[..., np.ndarray]] = {
    "random": choose_random,
    "uncertainty": choose_uncertain,
    "review": choose_review,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True)
    parser.add_argument("--count", type=int, help="of which only the first so many")
    judges = parser.add_mutually_exclusive_group(required=True)
    judges.add_argument("--test")
    judges.add_argument("--judge", type=float, metavar="SHARE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="tagger")
    for name in ("--labels", "--cache", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    model, names = open_model(args.model), json.loads(args.labels.read_text("utf-8"))
    assert isinstance(model, PatchClassifier)
    pool = take_first(open_records(args.images), args.count)
    seen = embed(model, pool, args.cache / f"{Path(args.model).name}-images.npy")
    if args.judge is None:
        tests = open_records(args.test)
        shown = embed(model, tests, args.cache / f"{Path(args.model).name}-test.npy")
    else:
        kept = round(len(pool) * (1 - args.judge))
        tests, pool = pool.select(np.arange(kept, len(pool))), pool.select(np.arange(kept))
        shown, seen = seen[kept:], seen[:kept]
    background = Background.measure(choose(seen, np.arange(len(seen))))
    scale = (background.spread + background.level).rsqrt()  # small variances are noise as much as anything
    places, judged = (background.locate(choose(part, np.arange(len(part)))) * scale for part in (seen, shown))
    truth, target = (records.target()[:, [records.labels.index(name) for name in names]] for records in (pool, tests))
    curves: dict[str, list[list[float]]] = {name: [] for name in ORDERS}
    for name, order in ORDERS.items():
        for seed in range(args.seeds):
            generator = np.random.default_rng(seed)
            reviewed, curve = list(generator.permutation(len(places))[:STEP]), []
            while True:
                head = train(places[reviewed], truth[reviewed])
                curve.append(average_precision(answer(judged, *head).both, target).mean)
                if len(reviewed) >= MOST:
                    break
                said = answer(places, *head)
                fitted = fit_thresholds(said.both[reviewed].sigmoid(), truth[reviewed], goal=BEST_F1)
                ranked = order(said, np.array(fitted.values), names, generator)
                reviewed += ranked[~np.isin(ranked, reviewed)][:STEP].tolist()
            curves[name].append(curve)
            print(name, seed, [round(100 * value, 1) for value in curve], flush=True)
    result = {
        "model": args.model,
        "note": args.note,
        "pool": len(pool),
        "test_images": len(tests),
        "reviewed": list(range(STEP, MOST + 1, STEP)),
        "mAP": curves,
        "area": {name: summarise([float(np.mean(curve)) for curve in each]) for name, each in curves.items()},
        "last": {name: summarise([curve[-1] for curve in each]) for name, each in curves.items()},
    }
    print({key: result[key] for key in ("area", "last")})
    args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if args.figure is not None:
        draw(result["reviewed"], curves, args.figure)


def summarise(values: list[float]) -> dict[str, float]:
    """Mean and range over seeds."""
    return {"mean": float(np.mean(values)), "low": min(values), "high": max(values)}


def draw(reviewed: list[int], curves: dict[str, list[list[float]]], path: Path) -> None:
    """MAP against reviewed images: the mean of seeds, and their range."""
    from matplotlib.figure import Figure

    figure = Figure((5.5, 3.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, colour in zip(curves, ("0.5", "tab:orange", "tab:blue"), strict=True):
        values = 100 * np.array(curves[name])
        axes.plot(reviewed, values.mean(0), color=colour, label=f"{name} order" if name != "uncertainty" else name)
        axes.fill_between(reviewed, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="reviewed images", ylabel="mAP of ten labels (%)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
