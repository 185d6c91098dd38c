"""A small network learns scenes in which digits keep company; then PAT-I asks it again, patch by patch.

Run `python examples/demo.py`: about two minutes on two CPU cores, nothing to download. The table goes
to stdout, progress to stderr, pictures to the folder demo/.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from pivotpatch import CounterfactualLogits, MultiLabelClassifier, PatchInference, average_precision
from pivotpatch.core.losses import asymmetric_loss
from pivotpatch.core.patches import resize_images
from pivotpatch.data.records import RecordSet
from pivotpatch.data.scenes import SCENE_LABELS, ScenePlan, SceneStore, companion, draw_scene, read_scenes
from pivotpatch.report.plots import Case, plot_case, plot_pair

SCENE, INPUT = 128, 64  # pixels a side of a scene, and of what the network sees
BATCH, PEAK_RATE = 64, 8e-3
RECALL = 0.7  # of the objects of validation scenes, for every row of the table
FOLDER = Path("demo")
PLAIN, PAT, NATIVE = "plain network", "PAT-I", "PAT-I, native"
PASSES = {PLAIN: "1", PAT: "5", NATIVE: "5"}


class Effort(NamedTuple):
    """How many scenes are drawn for training, how often each is seen, and how many are judged in a split."""

    scenes: int
    epochs: int
    judged: int


class Judged(NamedTuple):
    """A split's scenes, their target (N,L) and, for each row of the table, their scores (N,L)."""

    store: SceneStore
    target: Tensor
    scores: dict[str, Tensor]


class Pair(NamedTuple):
    """A scene of `test-removed` before an object is taken out, and after."""

    before: Case
    after: Case


def draw(records: RecordSet, indices: Iterable[int]) -> Tensor:
    """Scenes as uint8 pixels (B,C,H,W)."""
    pixels = np.stack([np.asarray(records.images.source(index)) for index in indices])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def train(effort: Effort, progress: Progress) -> MultiLabelClassifier:
    records = read_scenes("", "train", count=effort.scenes, size=SCENE)
    target = records.target()
    batches = torch.arange(effort.scenes).split(BATCH)
    steps = effort.epochs * len(batches)
    task = progress.add_task("draw scenes", total=len(batches))
    images = torch.empty(effort.scenes, 3, INPUT, INPUT, dtype=torch.uint8)
    for chosen in batches:
        images[chosen] = resize_images(draw(records, chosen.tolist()), (INPUT, INPUT))
        progress.advance(task)
    model = MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=INPUT)
    model.to(memory_format=torch.channels_last)  # much faster convolutions on a CPU, the same numbers
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_RATE, total_steps=steps, pct_start=0.2)
    task = progress.add_task("train", total=steps)
    for _ in range(effort.epochs):
        for chosen in torch.randperm(effort.scenes).split(BATCH):
            loss = asymmetric_loss(model(model.preprocessing(images[chosen])), target[chosen]) / len(chosen)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            progress.advance(task)
    return model.eval()


def ask(model: MultiLabelClassifier, pixels: Tensor) -> dict[str, CounterfactualLogits]:
    """PAT-I for scenes (B,C,H,W): patches cut from what the network sees, and from the scene itself."""
    pat = PatchInference(model)
    images = model.preprocessing(resize_images(pixels, (INPUT, INPUT)))
    source = replace(model.preprocessing, image_size=SCENE)(pixels)
    with torch.inference_mode():
        return {PAT: pat(images), NATIVE: pat(images, source=source)}


def judge(model: MultiLabelClassifier, split: str, *, count: int, progress: Progress) -> Judged:
    records = read_scenes("", split, count=count, size=SCENE)
    task = progress.add_task(f"judge {split}", total=count)
    scores: dict[str, list[Tensor]] = {PLAIN: [], PAT: [], NATIVE: []}
    for chosen in torch.arange(count).split(BATCH):
        answers = ask(model, draw(records, chosen.tolist()))
        scores[PLAIN].append(answers[PAT].image_logits)
        for row, answer in answers.items():
            scores[row].append(answer.tde_logits)
        progress.advance(task, len(chosen))
    assert isinstance(records.images, SceneStore)
    return Judged(records.images, records.target(), {row: torch.cat(parts) for row, parts in scores.items()})


def find_thresholds(val: Judged, row: str) -> Tensor:
    """Thresholds (L,) above which `RECALL` of each label's validation objects score."""
    columns = zip(val.scores[row].T, val.target.T, strict=True)
    return torch.stack([torch.quantile(scores[present == 1], 1 - RECALL) for scores, present in columns])


def find_missing(store: SceneStore) -> Tensor:
    """The label (N,) that was taken out of each scene of `test-removed`."""
    return torch.tensor([next(iter(store.plan(index).removed)) for index in range(len(store))])


def measure(row: str, judged: dict[str, Judged]) -> list[float]:
    """The numbers of a row, in per cent."""
    same, broken, removed = (judged[f"test-{kind}"] for kind in ("same", "broken", "removed"))
    means = [
        average_precision(part.scores[row], part.target, labels=SCENE_LABELS.names).mean for part in (same, broken)
    ]
    claimed = removed.scores[row] > find_thresholds(judged["val"], row)
    missing = claimed.gather(1, find_missing(removed.store)[:, None])
    host_there = torch.zeros_like(removed.target)
    host_there[:, [companion(label) for label in range(len(SCENE_LABELS))]] = removed.target
    alone = claimed[(removed.target == 0) & (host_there == 0)]
    return [100 * value for value in (*means, missing.float().mean().item(), alone.float().mean().item())]


def show_table(judged: dict[str, Judged], console: Console) -> None:
    table = Table(title=f"{len(judged['val'].target):,} scenes a split, in per cent")
    columns = ("mAP\nsame", "mAP\nbroken", "false alarms\nhost there", "false alarms\nno host")
    table.add_column("", no_wrap=True)
    for column in (*columns, "forward\npasses"):
        table.add_column(column, justify="right")
    numbers = {row: measure(row, judged) for row in PASSES}
    for row, values in numbers.items():
        table.add_row(row, *(f"{value:.1f}" for value in values), PASSES[row])
    console.print(table)
    console.print(
        f"False alarms: in every row the thresholds find {RECALL:.0%} of each label's validation objects. Host there: "
        "an object was taken out and the one that brings it stays; how often is it still claimed? No host: how often "
        "is a label claimed when neither it nor its host is there?"
    )
    for row in (PAT, NATIVE):
        changes = [round(value - plain, 1) for value, plain in zip(numbers[row], numbers[PLAIN], strict=True)]
        worse = (changes[0] < 0, changes[1] < 0, changes[2] > 0, changes[3] > 0)
        lost = [
            f"{column.replace(chr(10), ' ')} {change:+.1f}"
            for column, change, is_worse in zip(columns, changes, worse, strict=True)
            if is_worse
        ]
        if lost:
            console.print(f"{row} is worse than the plain network: {'; '.join(lost)}")


def explain(model: MultiLabelClassifier, plan: ScenePlan, *, without: frozenset[int], title: str) -> Case:
    """What PAT-I with native patches says of a scene, with the place of the object that can be missing."""
    image = draw_scene(plan, without=without)
    logits = ask(model, torch.from_numpy(image).permute(2, 0, 1)[None])[NATIVE]
    (mark,) = [item.box for item in plan.objects if item.label in plan.removed]
    return Case(image, logits, title, mark)


def explain_pair(model: MultiLabelClassifier, plan: ScenePlan) -> Pair:
    (missing,) = plan.removed
    (host,) = [item.label for item in plan.objects if companion(item.label) == missing]
    names = SCENE_LABELS.names
    return Pair(
        explain(model, plan, without=frozenset(), title=f"“{names[missing]}” is there, and so is “{names[host]}”"),
        explain(model, plan, without=plan.removed, title=f"“{names[missing]}” is taken out, “{names[host]}” stays"),
    )


def write_pictures(model: MultiLabelClassifier, judged: dict[str, Judged], *, alarm: Path, pair: Path) -> None:
    """Two false alarms of the plain network.

    `alarm` is the first one, whatever PAT-I makes of it. `pair` shows a small object before and after
    it is taken out, where PAT-I drops the claim: the clearest of them, for the average see the table.
    """
    removed, names = judged["test-removed"], SCENE_LABELS.names
    missing = find_missing(removed.store)
    claimed = {
        row: (removed.scores[row] > find_thresholds(judged["val"], row)).gather(1, missing[:, None])[:, 0]
        for row in PASSES
    }
    first = int(claimed[PLAIN].int().argmax())
    case = explain_pair(model, removed.store.plan(first)).after
    figure = plot_case(case.image, case.logits, label=int(missing[first]), labels=names, title=case.title)
    figure.savefig(alarm)

    def clearness(index: int) -> float:
        before, after = explain_pair(model, removed.store.plan(index))
        assert before.mark is not None
        small = before.mark.right - before.mark.left <= SCENE / 6
        return float((before.logits.probs - after.logits.probs)[0, missing[index]]) if small else 0.0

    best = max(torch.nonzero(claimed[PLAIN] & ~claimed[NATIVE])[:, 0].tolist() or [first], key=clearness)
    plot_pair(*explain_pair(model, removed.store.plan(best)), label=int(missing[best]), labels=names).savefig(pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few scenes only: shows that it runs, its numbers mean nothing"
    )
    parser.add_argument(
        "--picture", type=Path, default=FOLDER / "pair.png", help="where to write the two scenes side by side"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights and of the order of training")
    args = parser.parse_args()
    alarm = FOLDER / "false_alarm.png"
    for path in (alarm, args.picture):
        path.parent.mkdir(parents=True, exist_ok=True)
    effort = Effort(64, 1, 32) if args.quick else Effort(16_000, 3, 2000)
    torch.manual_seed(args.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        model = train(effort, progress)
        splits = ("val", "test-same", "test-broken", "test-removed")
        judged = {split: judge(model, split, count=effort.judged, progress=progress) for split in splits}
    show_table(judged, Console())
    write_pictures(model, judged, alarm=alarm, pair=args.picture)
    Console().print(f"Pictures: {alarm}, {args.picture}")


if __name__ == "__main__":
    main()
