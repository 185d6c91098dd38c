"""Scenes in which digits keep company: a baseline, PAT-I around it, and PAT-T, in one table.

Run `python examples/demo.py`: under five minutes on two CPU cores, nothing to download. The table goes
to stdout, progress to stderr, pictures to the folder demo/.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from accelerate import Accelerator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pivotpatch import (
    CounterfactualLogits,
    MultiLabelClassifier,
    PatchClassifier,
    PatchInference,
    average_precision,
    load_checkpoint,
)
from pivotpatch.allocator import keep_freed_memory
from pivotpatch.audit.cooccurrence import decide, rate_pairs
from pivotpatch.cli.train import show_training
from pivotpatch.core.patches import resize_images
from pivotpatch.core.policies import PerLabel
from pivotpatch.data.loading import hold_pictures, make_loader
from pivotpatch.data.scenes import SCENE_LABELS, ScenePlan, SceneStore, companion, draw_scene, read_scenes
from pivotpatch.inference.plots import Case, plot_case, plot_pair
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_images, score_pictures
from pivotpatch.training.config import (
    AugmentSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimiserSection,
    OutputSection,
    RunConfig,
    TaskSection,
    TrainSection,
)
from pivotpatch.training.loop import fit
from pivotpatch.tuning.thresholds import BestF1, fit_thresholds

SCENE, INPUT = 96, 48  # pixels a side of a scene, and of what the network sees
VIEWS = 5  # of a picture, for PAT: the whole and four patches
PAT_I_LAM = 0.5  # better than 1 on validation scenes
FOLDER = Path("demo")
NAMES = SCENE_LABELS.names
KEPT = tuple((NAMES[companion(host)], NAMES[host]) for host in range(len(NAMES)))  # a guest, and who brings it
ALL = tuple(permutations(NAMES, 2))  # of which broken company shows strangers alone
BASELINE, RESIZED, NATIVE, PAT_T = "baseline", "PAT-I", "PAT-I, native", "PAT-T, native"
VIEWS_JUDGED = {BASELINE: 1, RESIZED: VIEWS, NATIVE: VIEWS, PAT_T: VIEWS}
COLUMNS = tuple(f"{number} {split}" for split in ("same", "broken") for number in ("mAP", "CTPR", "CFPR"))
LEGEND = (
    "same: digits keep the company that they kept in training; broken: strangers come instead",
    "CTPR: how often an object is found while the digit that brings it (same) or a stranger (broken) is there too",
    "CFPR: how often an object is claimed while the digit that brings it is there, but not the object",
    "CTPR and CFPR are means over pairs of digits; each row decides by the thresholds of best F1 on validation scenes",
    f"baseline and PAT-T train on the same scenes, on equally many views; PAT-I trains nothing, its lam is {PAT_I_LAM}",
    "views: how many of a scene are judged; native: patches cut from the scene, else from what the network sees of it",
)


class Effort(NamedTuple):
    """How much is done.

    Attributes:
        scenes: that are trained on.
        first: epochs of the network that PAT-T starts from.
        epochs: of PAT-T itself.
        judged: scenes of each split that is judged.
    """

    scenes: int
    first: int
    epochs: int
    judged: int


class Trained(NamedTuple):
    """The two networks, and the minutes that each took."""

    baseline: MultiLabelClassifier
    pat: PatchClassifier
    minutes: dict[str, float]


class Answer(NamedTuple):
    """What a row of the table says of a split: scores, and the kind of logits that count."""

    scores: Scores
    kind: str


Answers = dict[str, Answer]


class Measured(NamedTuple):
    """A seed's numbers for each row, in the order of `COLUMNS`, and its minutes of training."""

    numbers: dict[str, list[float]]
    minutes: dict[str, float]


class Pair(NamedTuple):
    """A scene of `test-removed` before an object is taken out, and after."""

    before: Case
    after: Case


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def configure(
    effort: Effort, kind: Literal["image", "patch"], *, epochs: int, seed: int, start: Path | None = None
) -> RunConfig:
    """What differs from the defaults of `pivotpatch train`; chosen on validation scenes."""
    new = ModelSection(backbone="test_resnet", pretrained=False, image_size=INPUT)
    return RunConfig(
        data=DataSection(
            train=f"scenes:@train?count={effort.scenes}&size={SCENE}",
            val=f"scenes:@val?count={effort.judged}&size={SCENE}",
            hold="memory",
        ),
        model=new if start is None else ModelSection(start_from=str(start)),
        task=TaskSection(kind=kind, source_size=SCENE if kind == "patch" else None),
        optimiser=OptimiserSection(lr=8e-3, weight_decay=1e-2),
        augment=AugmentSection(cutout=0, operations=0),
        train=TrainSection(epochs=epochs, batch_size=64 if kind == "image" else 16, seed=seed),  # 64 and 80 views
        evaluation=EvaluationSection(every=2 if kind == "image" else 1),
        output=OutputSection(trackers=()),
    )


def train(effort: Effort, seed: int) -> Trained:
    """The baseline, and PAT-T from a shorter one: both see equally many views."""
    minutes = {}

    def run(name: str, config: RunConfig, folder: Path) -> Path:
        say(f"train {name}: {config.train.epochs} epochs of {effort.scenes:,} scenes")
        with show_training() as shown:
            result = fit(config, folder, progress=shown.progress, report=shown.report)
        if result.stopped_by is not None:
            raise SystemExit(128 + result.stopped_by)
        minutes[name] = result.metrics["seconds"] / 60
        return folder / "best"

    early = "the start of PAT-T"
    with tempfile.TemporaryDirectory() as scratch:
        place, views = Path(scratch), effort.first + VIEWS * effort.epochs
        whole = run(BASELINE, configure(effort, "image", epochs=views, seed=seed), place / "whole")
        start = run(early, configure(effort, "image", epochs=effort.first, seed=seed), place / "start")
        patch = configure(effort, "patch", epochs=effort.epochs, seed=seed, start=start)
        baseline, pat = load_checkpoint(whole), load_checkpoint(run(PAT_T, patch, place / "patch"))
    assert isinstance(baseline, MultiLabelClassifier)
    assert isinstance(pat, PatchClassifier)
    minutes[PAT_T] += minutes.pop(early)
    for network in (baseline, pat):
        network.to(Accelerator().device).to(memory_format=torch.channels_last)
    return Trained(baseline, pat, minutes)


def judge(trained: Trained, split: str, *, count: int) -> Answers:
    say(f"judge {split}: {count:,} scenes")
    records = read_scenes("", split, count=count, size=SCENE)
    pat_i = PatchInference(trained.baseline, lam=PAT_I_LAM)
    found = {}
    with show_training() as shown:
        held = hold_pictures(records, size=(SCENE, SCENE), progress=shown.progress)
        small = replace(held, images=resize_images(held.images, (INPUT, INPUT)))
        for row, model, pictures, side in (
            (RESIZED, pat_i, small, INPUT),
            (NATIVE, pat_i, held, SCENE),
            (PAT_T, trained.pat, held, SCENE),
        ):
            found[row] = score_pictures(
                model,
                make_loader(records, size=(side, side), batch_size=128, held=pictures),
                accelerator=Accelerator(),
                progress=shown.progress,
            )
    return {BASELINE: Answer(found[NATIVE], "image"), **{row: Answer(each, "tde") for row, each in found.items()}}


def choose_thresholds(val: Answer) -> PerLabel:
    """For each label the threshold with the best F1 on validation scenes."""
    scores, kind = val
    return fit_thresholds(scores.probs(kind), scores.target, goal=BestF1(), labels=NAMES).policy


def measure(row: str, judged: dict[str, Answers]) -> list[float]:
    """The numbers of a row, in per cent, in the order of `COLUMNS`."""
    policy, numbers = choose_thresholds(judged["val"][row]), []
    for split, shown_together in (("test-same", KEPT), ("test-broken", ALL)):
        scores, kind = judged[split][row]
        rates = partial(rate_pairs, scores, policy=policy, kind=kind)
        numbers += [
            average_precision(scores.get(kind), scores.target, labels=NAMES).mean,
            rates(pairs=shown_together).tpr.nanmean().item(),
            rates(pairs=KEPT).fpr.nanmean().item(),
        ]
    return [100 * number for number in numbers]


def average(measured: Sequence[Measured]) -> Measured:
    """The mean over some seeds."""
    numbers = {
        row: [fmean(values) for values in zip(*(seed.numbers[row] for seed in measured), strict=True)]
        for row in VIEWS_JUDGED
    }
    minutes = {row: fmean(seed.minutes[row] for seed in measured) for row in measured[0].minutes}
    return Measured(numbers, minutes)


def show_table(measured: Measured, *, title: str) -> None:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in (*COLUMNS, "train min", "views"):
        table.add_column(column.replace(" ", "\n"), justify="right")
    for row, numbers in measured.numbers.items():
        minutes = f"{measured.minutes[row]:.1f}" if row in measured.minutes else "-"
        table.add_row(row, *(f"{number:.1f}" for number in numbers), minutes, str(VIEWS_JUDGED[row]))
    Console().print(table)


def show_legend(measured: Measured) -> None:
    """Say what the columns are, and where PAT loses."""
    print(*LEGEND, sep="\n")
    baseline = measured.numbers[BASELINE]
    for row, numbers in measured.numbers.items():
        changes = [(column, one - other) for column, one, other in zip(COLUMNS, numbers, baseline, strict=True)]
        worse = [
            f"{column} {change:+.1f}"
            for column, change in changes
            if (change if column.startswith("CFPR") else -change) >= 0.05
        ]
        if worse:
            print(f"{row} is worse than the baseline: {', '.join(worse)}")


def explain(trained: Trained, plan: ScenePlan, *, without: frozenset[int], title: str) -> Case:
    """What PAT-T and the baseline say of a scene, with the place of the object that can be missing."""
    image = draw_scene(plan, without=without)
    device = next(trained.pat.parameters()).device
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].to(device)
    with torch.inference_mode():
        logits, baseline = score_images(trained.pat, pixels), score_images(trained.baseline, pixels)
    assert isinstance(logits, CounterfactualLogits)
    assert isinstance(baseline, Tensor)
    (missing,) = plan.removed
    (mark,) = [item.box for item in plan.objects if item.label == missing]
    logits = CounterfactualLogits(*(part.cpu() for part in logits))
    return Case(image, logits, title, mark, baseline=baseline[0, missing].sigmoid().item())


def explain_pair(trained: Trained, plan: ScenePlan) -> Pair:
    (missing,) = plan.removed
    (host,) = [item.label for item in plan.objects if companion(item.label) == missing]
    guest, bringer = f"“{NAMES[missing]}”", f"“{NAMES[host]}”"
    return Pair(
        explain(trained, plan, without=frozenset(), title=f"{guest} is there, and so is {bringer}"),
        explain(trained, plan, without=plan.removed, title=f"{guest} is taken out, {bringer} stays"),
    )


def write_pictures(trained: Trained, judged: dict[str, Answers], *, alarm: Path, pair: Path) -> None:
    """Two false alarms of the baseline.

    `alarm` is the first one, whatever PAT-T makes of it. `pair` shows a small object before and after
    it is taken out, where PAT-T drops the claim: the clearest of them, for the average see the table.
    """
    count = len(judged["test-removed"][PAT_T].scores)
    store = read_scenes("", "test-removed", count=count, size=SCENE).images
    assert isinstance(store, SceneStore)
    plans = [store.plan(index) for index in range(count)]
    missing = torch.tensor([next(iter(plan.removed)) for plan in plans])
    claimed = {}
    for row in (BASELINE, PAT_T):
        scores, kind = judged["test-removed"][row]
        decided = decide(scores, policy=choose_thresholds(judged["val"][row]), kind=kind)
        claimed[row] = decided.gather(1, missing[:, None])[:, 0]
    first = int(claimed[BASELINE].int().argmax())
    case, label = explain_pair(trained, plans[first]).after, int(missing[first])
    figure = plot_case(case.image, case.logits, label=label, labels=NAMES, title=case.title, baseline=case.baseline)
    figure.savefig(alarm)

    def clearness(index: int) -> float:
        before, after = explain_pair(trained, plans[index])
        assert before.mark is not None
        small = before.mark.right - before.mark.left <= SCENE / 6
        return float((before.logits.probs - after.logits.probs)[0, missing[index]]) if small else 0.0

    best = max(torch.nonzero(claimed[BASELINE] & ~claimed[PAT_T])[:, 0].tolist() or [first], key=clearness)
    plot_pair(*explain_pair(trained, plans[best]), label=int(missing[best]), labels=NAMES).savefig(pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few scenes only: shows that it runs, its numbers mean nothing"
    )
    parser.add_argument(
        "--picture", type=Path, default=FOLDER / "pair.png", help="where to write the two scenes side by side"
    )
    parser.add_argument(
        "--seed",
        type=int,
        nargs="+",
        default=[0],
        help="of weights and order; several give their mean too, and pictures of the first",
    )
    args = parser.parse_args()
    keep_freed_memory()
    alarm = FOLDER / "false_alarm.png"
    for path in (alarm, args.picture):
        path.parent.mkdir(parents=True, exist_ok=True)
    full, quick = Effort(scenes=5000, first=8, epochs=3, judged=1500), Effort(scenes=64, first=1, epochs=1, judged=48)
    effort = quick if args.quick else full
    measured: list[Measured] = []
    for seed in args.seed:
        trained = train(effort, seed)
        judged = {split: judge(trained, split, count=effort.judged) for split in ("val", "test-same", "test-broken")}
        if not measured:
            judged["test-removed"] = judge(trained, "test-removed", count=effort.judged // 3)
            write_pictures(trained, judged, alarm=alarm, pair=args.picture)
        measured.append(Measured({row: measure(row, judged) for row in VIEWS_JUDGED}, trained.minutes))
        show_table(measured[-1], title=f"seed {seed}: {effort.judged:,} scenes a split, in per cent")
    mean = average(measured)
    if len(measured) > 1:
        show_table(mean, title=f"mean of {len(measured)} seeds")
    show_legend(mean)
    print(f"pictures: {alarm}, {args.picture}")


if __name__ == "__main__":
    main()
