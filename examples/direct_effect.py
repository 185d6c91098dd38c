"""How well logits track the true direct effect of objects, which scenes alone let us know.

Run `python examples/direct_effect.py`: it trains a baseline, and PAT-T from it, on scenes, some ten minutes on two
CPU cores, nothing to download; then it takes each object out of each scene and asks again. The table goes to stdout,
progress to stderr, networks and picture to demo/direct_effect/. A second run uses the networks of the first.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from pivotpatch import PatchInference
from pivotpatch.audit.direct_effect import EffectTracking, measure_direct_effects, track_effects
from pivotpatch.audit.plots import plot_effects
from pivotpatch.cli.train import show_training
from pivotpatch.core import Interval
from pivotpatch.data import open_records
from pivotpatch.models import PatchClassifier, load_checkpoint
from pivotpatch.training import fit, load_config

FOLDER = Path("demo") / "direct_effect"
SPLITS = ("test-same", "test-removed", "test-broken")
DRAWN = "test-broken"  # where company misleads
BASELINE, PAT = "baseline and PAT-I on it", "PAT-T"


class Effort(NamedTuple):
    """Scenes to train on, how often the baseline sees each, scenes to judge in a split, and resamples of them."""

    scenes: int
    epochs: int
    judged: int
    resamples: int


def train(out: Path, effort: Effort, changes: list[str]) -> None:
    """Train a small network that sees scenes at 64 pixels, or go by the one that is there."""
    if (out / "metrics.json").is_file():
        return
    config = load_config(
        None,
        [
            f"data.train=scenes:@train?count={effort.scenes}",
            "data.val=scenes:@val?count=500",
            "data.hold=memory",
            "data.workers=0",
            "loss.detach_focus=false",
            "optimiser.weight_decay=1e-2",
            "augment.cutout=0",
            "augment.operations=0",
            "ema.decay=0",
            "train.batch_size=64",
            "train.seed=2",
            *changes,
        ],
    )
    with show_training() as shown:
        fit(config, out, progress=shown.progress, report=shown.report)


def track(place: Path, split: str, effort: Effort) -> list[EffectTracking]:
    network = load_checkpoint(place / "best")
    model = network if isinstance(network, PatchClassifier) else PatchInference(network)
    records = open_records(f"scenes:@{split}?count={effort.judged}")
    with show_training() as shown:
        effects = measure_direct_effects(
            model, records, progress=lambda _what, done, total: shown.progress(f"ask {split}", done, total)
        )
    rows: list[EffectTracking] = []
    for among in ("objects", "scenes"):
        generator = torch.Generator().manual_seed(0)
        rows += track_effects(effects, among=among, resamples=effort.resamples, generator=generator)
    return rows


def write(bound: Interval | None, sign: str = "") -> str:
    return "" if bound is None else f"{bound.value:{sign}.2f} ({bound.low:{sign}.2f} to {bound.high:{sign}.2f})"


def show(found: dict[str, dict[str, list[EffectTracking]]]) -> None:
    table = Table(title="Rank correlation with the direct effect, mean over the labels (95 %)")
    for column in ("network", "split", "among", "logits", "correlation", "over image logits"):
        table.add_column(column)
    for split, networks in found.items():
        for name, rows in networks.items():
            for row in rows:
                table.add_row(name, split, row.among, row.kind, write(row.mean), write(row.over_image, "+"))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few scenes only: shows that it runs, its numbers mean nothing"
    )
    args = parser.parse_args()
    effort = Effort(64, 1, 8, 20) if args.quick else Effort(16_000, 3, 1000, 1000)
    folder = FOLDER / "quick" if args.quick else FOLDER
    baseline, pat = folder / "baseline", folder / "pat"
    size = ["model.backbone=test_resnet", "model.pretrained=false", "model.image_size=64"]
    train(baseline, effort, [*size, "task.kind=image", "optimiser.lr=8e-3", f"train.epochs={effort.epochs}"])
    further = ["task.kind=patch", f"model.start_from={baseline / 'best'}", "optimiser.lr=4e-3", "train.epochs=1"]
    train(pat, effort, further)
    places = {BASELINE: baseline, PAT: pat}
    found = {split: {name: track(place, split, effort) for name, place in places.items()} for split in SPLITS}
    show(found)
    picture = folder / "effects.png"
    plot_effects(found[DRAWN]).savefig(picture)
    Console(stderr=True).print(f"drew {picture}")


if __name__ == "__main__":
    main()
