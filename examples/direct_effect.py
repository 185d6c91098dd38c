"""How well logits track the true direct effect of objects, which scenes alone let us know.

Run `python examples/direct_effect.py`: it trains a baseline, and PAT-T from it, on scenes, some ten minutes on two
CPU cores, nothing to download; then it takes each object out of each scene and asks again. The table goes to stdout,
progress to stderr, models and figure to demo/direct_effect/. A second run uses the models of the first.

Equation 2 of the paper asks what an object x adds to the answer while the co-occurring objects z stay: P(Y=1 | x, z)
less P(Y=1 | x masked, z). In a photograph nobody knows where x is. A scene is drawn from a plan, so that x can be left
out and nothing else: the effect is the model's own image logit of the label with the object, less that without it.
Where a scene does not show a label the effect is 0. PAT-I is judged by the effects in the model that it wraps.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pivotpatch import PatchInference
from pivotpatch.cli.console import StageProgress
from pivotpatch.cli.train import report_entry
from pivotpatch.core import Interval
from pivotpatch.data import RecordSet, open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.data.scenes import SceneStore, draw_scene
from pivotpatch.inference import Scores, score_pictures
from pivotpatch.models import PatchClassifier, load_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.runtime.drawing import KINDS
from pivotpatch.training import fit, load_config

FOLDER = Path("demo") / "direct_effect"
SPLITS = ("test-same", "test-removed", "test-broken")
DRAWN = "test-broken"  # where co-occurrence misleads
BASELINE, PAT = "baseline and PAT-I on it", "PAT-T"


class Effort(NamedTuple):
    """Scenes to train on, how often the baseline sees each, scenes to judge in a split, and resamples of them."""

    scenes: int
    epochs: int
    judged: int
    resamples: int


class Effects(NamedTuple):
    """Of N scenes and L labels: what is shown (N,L), what it adds (N,L), and logits (N,L) by kind."""

    labels: tuple[str, ...]
    shown: Tensor
    effect: Tensor
    logits: Mapping[str, Tensor]


class Tracking(NamedTuple):
    """Spearman's rank correlation of one kind of logits with the effect: per label, in the mean, and over image logits.

    It is among the "objects", the scenes that show the label (is more said where the object does more?), or among all
    "scenes" (is nothing said where there is no object?). None where there is nothing to rank.
    """

    kind: str
    among: str
    labels: tuple[str, ...]
    per_label: tuple[Interval | None, ...]
    mean: Interval | None
    over_image: Interval | None


@dataclass(frozen=True)
class Lacking:
    """Scenes of a store, each without one of its objects."""

    scenes: SceneStore
    places: list[int]
    taken: list[int]

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        """The scene and what it lacks."""
        return f"{self.scenes.name(self.places[index])} without {self.taken[index]}"

    def source(self, index: int) -> NDArray[np.uint8]:
        """The scene, drawn again."""
        plan = self.scenes.plan(self.places[index])
        return draw_scene(plan, without=plan.removed | {self.taken[index]})


def measure(model: Classifier | PatchInference, records: RecordSet) -> Effects:
    """Score scenes as they are and without each of the objects that they show."""
    judged, store = model.model if isinstance(model, PatchInference) else model, records.images
    assert isinstance(judged, Classifier)
    assert isinstance(store, SceneStore)
    side = judged.picture_size
    accelerator = Accelerator(cpu=next(judged.parameters()).device.type == "cpu")

    def score(asked: Classifier | PatchInference, scored: RecordSet) -> Scores:
        return score_pictures(asked, make_loader(scored, size=(side, side), batch_size=128), accelerator=accelerator)

    whole = score(model, records)
    shown = whole.target == 1
    scene, label = shown.nonzero(as_tuple=True)
    images = Lacking(store, [records.place(row) for row in scene.tolist()], label.tolist())
    lacking = score(judged, RecordSet(records.name, records.labels, images=images))  # what they show is not asked
    effect = torch.zeros_like(whole.target)
    effect[shown] = whole.get("image")[shown] - lacking.get("image").gather(1, label[:, None])[:, 0]
    return Effects(records.labels.names, shown, effect, whole.logits)


def track(effects: Effects, *, among: str, resamples: int) -> list[Tracking]:
    """Rank correlations, with 95 % of a bootstrap over scenes; all kinds and labels see the same resamples."""
    ranked = effects.shown if among == "objects" else torch.ones_like(effects.shown)
    # How often each scene counts (1+R,N): once in what was measured, then as often as it is drawn.
    generator, count = torch.Generator().manual_seed(0), len(ranked)
    drawn = [torch.randint(count, (count,), generator=generator).bincount(minlength=count) for _ in range(resamples)]
    weights = torch.stack([torch.ones(count), *drawn]).double()
    found = {}
    for kind, logits in effects.logits.items():
        columns = zip(logits.T, effects.effect.T, ranked.T, strict=True)
        found[kind] = torch.stack(
            [correlate(own[at], effect[at], weights[:, at]) for own, effect, at in columns], dim=1
        )
    return [
        Tracking(
            kind,
            among,
            effects.labels,
            tuple(map(bound, values.T)),
            bound(values.nanmean(dim=1)),
            None if kind == "image" else bound((values - found["image"]).nanmean(dim=1)),
        )
        for kind, values in found.items()
    ]


def correlate(one: Tensor, other: Tensor, weights: Tensor) -> Tensor:
    """Spearman's rank correlation (R,) of pairs (n,) drawn `weights` (R,n) times; NaN where one does not vary."""
    total, centred = weights.sum(1, keepdim=True), []
    for values in (one, other):
        levels, place = values.unique(return_inverse=True)
        held = weights.new_zeros(len(weights), len(levels)).index_add_(1, place, weights)
        ranks = (held.cumsum(1) - (held - 1) / 2)[:, place]  # ties share their mean rank
        centred.append(ranks - (weights * ranks).sum(1, keepdim=True) / total)
    a, b = centred
    return (weights * a * b).sum(1) / ((weights * a**2).sum(1) * (weights * b**2).sum(1)).sqrt()


def bound(values: Tensor) -> Interval | None:
    """What was measured, values[0], with 95 % of the resamples behind it."""
    if values[0].isnan() or values[1:].isnan().all():
        return None
    low, high = values[1:].nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return Interval(values[0].item(), low, high)


def plot(models: Mapping[str, Sequence[Tracking]]) -> Figure:
    """A panel for each model and choice of scenes: labels, then their mean."""
    panels = [
        (name, among, [row for row in rows if row.among == among])
        for name, rows in models.items()
        for among in ("objects", "scenes")
    ]
    figure = Figure(figsize=(7.2, 0.5 + 2.1 * len(panels)), dpi=150, layout="constrained")
    for axes, (name, among, rows) in zip(figure.subplots(len(panels), 1), panels, strict=True):
        places = np.arange(len(rows[0].labels) + 1)
        for number, row in enumerate(rows):
            bounds = [astuple(each or Interval(*3 * [np.nan])) for each in (*row.per_label, row.mean)]
            values, low, high = np.array(bounds).T
            axes.errorbar(
                places + 0.2 * (number - 1),
                values,
                np.clip([values - low, high - values], 0, None),
                fmt="o^s"[number],
                color=KINDS[row.kind],
                markeredgecolor="black",
                capsize=2,
                label=f"{row.kind} logits",
            )
        axes.axvline(places[-1] - 0.5, color="0.7", linewidth=0.8)
        axes.set_xticks(places, [*rows[0].labels, "mean"])
        axes.set(ylabel="rank correlation", ylim=(min(axes.get_ylim()[0] - 0.4, -0.1), 1.02))
        axes.legend(fontsize=8, ncols=3, loc="lower center")
        of_what = "scenes that show the label" if among == "objects" else "all scenes, effect 0 where it is not shown"
        axes.set_title(f"{name}: {of_what}", fontsize=10)
    return figure


def train(out: Path, effort: Effort, changes: list[str]) -> None:
    """Train a small model that sees scenes at 64 pixels, or go by the one that is there."""
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
    with StageProgress(outer="train") as shown:
        fit(config, out, progress=shown.tell, report=partial(report_entry, shown))


def judge(place: Path, split: str, effort: Effort) -> list[Tracking]:
    model = load_checkpoint(place / "best")
    records = open_records(f"scenes:@{split}?count={effort.judged}")
    effects = measure(model if isinstance(model, PatchClassifier) else PatchInference(model), records)
    amongs = ("objects", "scenes")
    return [row for among in amongs for row in track(effects, among=among, resamples=effort.resamples)]


def write(bound: Interval | None, sign: str = "") -> str:
    return "" if bound is None else f"{bound.value:{sign}.2f} ({bound.low:{sign}.2f} to {bound.high:{sign}.2f})"


def show(found: dict[str, dict[str, list[Tracking]]]) -> None:
    table = Table(title="Rank correlation with the direct effect, mean over the labels (95 %)")
    for column in ("model", "split", "among", "logits", "correlation", "over image logits"):
        table.add_column(column)
    for split, models in found.items():
        for name, rows in models.items():
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
    further = ["task.kind=patch", f"model.start_from={baseline / 'best'}", "model.frozen=false", "optimiser.lr=4e-3"]
    train(pat, effort, [*further, "train.epochs=1"])
    places = {BASELINE: baseline, PAT: pat}
    found = {split: {name: judge(place, split, effort) for name, place in places.items()} for split in SPLITS}
    show(found)
    figure = folder / "effects.png"
    plot(found[DRAWN]).savefig(figure)
    Console(stderr=True).print(f"drew {figure}")


if __name__ == "__main__":
    main()
