"""Tags for three photographs, then what PAT changes where objects stand among strangers.

Run `python examples/demo.py`: under five minutes on two CPU cores, nothing to download. It tags the photographs of the
package with the bundled tagger. Then it draws scenes in which each digit tends to bring the next one along, trains a
plain model on them, wraps it in PAT-I, trains PAT-T on as many views from the same start, and judges all three on
scenes with the same co-occurrence and on scenes where strangers come instead. Tables go to stdout, progress to stderr,
images to demo/.
"""

import argparse
import json
import tempfile
from functools import partial
from importlib.resources import files
from itertools import permutations
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from pivotpatch import (
    CounterfactualLogits,
    MultiLabelClassifier,
    PatchClassifier,
    PatchInference,
    Predictor,
    average_precision,
    load_checkpoint,
)
from pivotpatch.audit import decide, rate_pairs
from pivotpatch.cli.console import Screen, StageProgress, make_table, tell
from pivotpatch.core import PerLabel
from pivotpatch.data import hold_images, make_loader
from pivotpatch.data.scenes import SCENE_LABELS, ScenePlan, SceneStore, companion, draw_scene, read_scenes
from pivotpatch.inference import Scores, score_images, score_pictures
from pivotpatch.process import keep_freed_memory
from pivotpatch.runtime.drawing import draw_tag
from pivotpatch.runtime.prediction import Tag
from pivotpatch.runtime.values import PatchBox
from pivotpatch.training import fit
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
from pivotpatch.tuning.thresholds import BEST_F1, fit_thresholds

SCENE, INPUT = 96, 48  # pixels per side of a scene, and of a model's input
VIEWS = 5  # of an image, for PAT: the whole and four patches
PAT_I_LAM = 0.5  # better than 1 on validation scenes
FOLDER = Path("demo")
NAMES = SCENE_LABELS.names
KEPT = tuple((NAMES[companion(host)], NAMES[host]) for host in range(len(NAMES)))  # a digit, and the one that brings it
ALL = tuple(permutations(NAMES, 2))  # with broken co-occurrence these are strangers
PLAIN, PAT_I, PAT_T = "plain model", "PAT-I around it", "PAT-T"
COLUMNS = ("mAP, as trained", "mAP, strangers", "found", "false alarms")
LEGEND = """
In per cent. As trained: digits bring each other along as in training; strangers: others come instead.
found: objects found while a stranger is there. false alarms: a digit is claimed beside the one that used to bring it,
but is not there (lower is better). Thresholds: best F1 on validation scenes."""


class Size(NamedTuple):
    """How much is done: scenes to train on, epochs of the start and of PAT-T, scenes of each split that is judged."""

    scenes: int
    first: int
    epochs: int
    judged: int


class Trained(NamedTuple):
    """The two models."""

    plain: MultiLabelClassifier
    pat: PatchClassifier


class Answer(NamedTuple):
    """What a row of the table says of a split: scores, and the kind of logits that count."""

    scores: Scores
    kind: str


Answers = dict[str, Answer]


def tag_photographs() -> None:
    """Tag the photographs of the package, and draw why for one."""
    predictor, screen = Predictor.load(effort=1), Screen()
    for photograph in sorted(files("pivotpatch").joinpath("app", "page").iterdir(), key=lambda each: each.name):
        if photograph.name.endswith(".jpg"):
            prediction = predictor(photograph.read_bytes())
            tags = ", ".join(f"{tag.label} {tag.prob:.2f}" for tag in prediction.tags)
            screen.print(f"{photograph.name}: {tags}")
            prediction.plot().save(FOLDER / photograph.name.replace(".jpg", ".png"))
    screen.print(f"why: {FOLDER}/*.png\n")


def configure(
    size: Size, kind: Literal["image", "patch"], *, epochs: int, seed: int, start: Path | None = None
) -> RunConfig:
    """What differs from the defaults of `pivotpatch train`; chosen on validation scenes."""
    new = ModelSection(backbone="test_resnet", pretrained=False, image_size=INPUT)
    return RunConfig(
        data=DataSection(
            train=f"scenes:@train?count={size.scenes}&size={SCENE}",
            val=f"scenes:@val?count={size.judged}&size={SCENE}",
            hold="memory",
        ),
        model=new if start is None else ModelSection(start_from=str(start), frozen=False),
        task=TaskSection(kind=kind, source_size=SCENE if kind == "patch" else None),
        optimiser=OptimiserSection(lr=8e-3, weight_decay=1e-2),
        augment=AugmentSection(cutout=0, operations=0),
        train=TrainSection(epochs=epochs, batch_size=64 if kind == "image" else 16, seed=seed),  # 64 and 80 views
        evaluation=EvaluationSection(every=2 if kind == "image" else 1),
        output=OutputSection(trackers=()),
    )


def train(size: Size, seed: int) -> Trained:
    """The plain model and PAT-T, both from the same start: they see equally many views."""

    def run(name: str, config: RunConfig, folder: Path) -> Path:
        tell(f"train {name}: {config.train.epochs} epochs of {size.scenes:,} scenes")
        with StageProgress(outer="train") as shown:
            result = fit(config, folder, progress=shown.tell)
        if result.stopped_by is not None:
            raise SystemExit(128 + result.stopped_by)
        return folder / "best"

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        start = run("the start of both", configure(size, "image", epochs=size.first, seed=seed), place / "start")
        longer = configure(size, "image", epochs=VIEWS * size.epochs, seed=seed, start=start)
        patch = configure(size, "patch", epochs=size.epochs, seed=seed, start=start)
        plain = run("the plain model", longer, place / "plain")
        trained, pat = load_checkpoint(plain), load_checkpoint(run("PAT-T", patch, place / "patch"))
    for model in (trained, pat):
        model.to(Accelerator().device).to(memory_format=torch.channels_last)
    assert isinstance(trained, MultiLabelClassifier)
    assert isinstance(pat, PatchClassifier)
    return Trained(trained, pat)


def judge(trained: Trained, split: str, *, count: int) -> Answers:
    """Score a split with all three, patches cut from the scene at its own resolution."""
    records = read_scenes("", split, count=count, size=SCENE)
    found = {}
    with StageProgress() as shown:
        held = hold_images(records, size=(SCENE, SCENE), progress=shown.tell)
        for row, model in ((PAT_I, PatchInference(trained.plain, lam=PAT_I_LAM)), (PAT_T, trained.pat)):
            loader = make_loader(records, size=(SCENE, SCENE), batch_size=128, held=held)
            found[row] = score_pictures(model, loader, accelerator=Accelerator(), progress=shown.tell)
    return {PLAIN: Answer(found[PAT_I], "image"), **{row: Answer(scores, "tde") for row, scores in found.items()}}


def choose_thresholds(val: Answer) -> PerLabel:
    """Per label the threshold with the best F1 on validation scenes."""
    scores, kind = val
    return fit_thresholds(scores.probs(kind), scores.target, goal=BEST_F1, labels=NAMES).policy


def measure(row: str, judged: dict[str, Answers]) -> list[float]:
    """The numbers of a row, in per cent, in the order of `COLUMNS`."""
    same, (strangers, kind) = judged["test-same"][row].scores, judged["test-broken"][row]
    rates = partial(rate_pairs, strangers.only(kind), policy=choose_thresholds(judged["val"][row]))
    numbers = [
        average_precision(same.get(kind), same.target, labels=NAMES).mean,
        average_precision(strangers.get(kind), strangers.target, labels=NAMES).mean,
        rates(pairs=ALL).tpr.nanmean().item(),
        rates(pairs=KEPT).fpr.nanmean().item(),
    ]
    return [100 * number for number in numbers]


def show_table(numbers: dict[str, list[float]]) -> None:
    """Print the table, and what each way of PAT changes."""
    screen, table = Screen(), make_table(["", *COLUMNS])
    for row, values in numbers.items():
        table.add_row(row, *(f"{value:.1f}" for value in values))
    screen.print(table)
    screen.print(LEGEND)
    for row in (PAT_I, PAT_T):
        changes = (one - other for one, other in zip(numbers[row], numbers[PLAIN], strict=True))
        told = ", ".join(f"{column} {change:+.1f}" for column, change in zip(COLUMNS, changes, strict=True))
        screen.print(f"{row} against the plain model: {told}")


class Case(NamedTuple):
    """A scene with what PAT-T and the plain model say of it; `mark` is where the object is that can be missing."""

    image: NDArray[np.uint8]
    logits: CounterfactualLogits
    title: str
    mark: PatchBox
    baseline: float


def explain(trained: Trained, plan: ScenePlan, *, without: frozenset[int], title: str) -> Case:
    """What PAT-T and the plain model say of a scene, with the place of the object that can be missing."""
    image = draw_scene(plan, without=without)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].to(next(trained.pat.parameters()).device)
    with torch.inference_mode():
        logits, plain = score_images(trained.pat, pixels), score_images(trained.plain, pixels)
    assert isinstance(logits, CounterfactualLogits)
    assert isinstance(plain, Tensor)
    (missing,) = plan.removed
    (mark,) = [item.box for item in plan.objects if item.label == missing]
    logits = CounterfactualLogits(*(part.cpu() for part in logits))
    return Case(image, logits, title, mark, plain[0, missing].sigmoid().item())


def explain_pair(trained: Trained, plan: ScenePlan) -> tuple[Case, Case]:
    """A scene before an object is taken out, and after."""
    (missing,) = plan.removed
    (host,) = [item.label for item in plan.objects if companion(item.label) == missing]
    guest, bringer = f"“{NAMES[missing]}”", f"“{NAMES[host]}”"
    return (
        explain(trained, plan, without=frozenset(), title=f"{guest} is there, and so is {bringer}"),
        explain(trained, plan, without=plan.removed, title=f"{guest} is taken out, {bringer} stays"),
    )


def draw_pair(trained: Trained, judged: dict[str, Answers], path: Path) -> None:
    """Draw the clearest false alarm of the plain model about a small object that PAT-T drops."""
    count = len(judged["test-removed"][PAT_T].scores)
    store = read_scenes("", "test-removed", count=count, size=SCENE).images
    assert isinstance(store, SceneStore)
    plans = [store.plan(index) for index in range(count)]
    missing = torch.tensor([next(iter(plan.removed)) for plan in plans])
    claimed = {}
    for row in (PLAIN, PAT_T):
        scores, kind = judged["test-removed"][row]
        decided = decide(scores.only(kind), policy=choose_thresholds(judged["val"][row]))
        claimed[row] = decided.gather(1, missing[:, None])[:, 0]

    def clearness(index: int) -> float:
        before, after = explain_pair(trained, plans[index])
        small = before.mark.right - before.mark.left <= SCENE / 6
        return float((before.logits.probs - after.logits.probs)[0, missing[index]]) if small else 0.0

    dropped = torch.nonzero(claimed[PLAIN] & ~claimed[PAT_T])[:, 0].tolist()
    best = max(dropped or [int(claimed[PLAIN].int().argmax())], key=clearness)
    drawn = [draw_why(case, int(missing[best])) for case in explain_pair(trained, plans[best])]
    both = Image.new("RGB", (drawn[0].width, drawn[0].height + drawn[1].height))
    for number, each in enumerate(drawn):
        both.paste(each, (0, number * drawn[0].height))
    both.save(path)


def draw_why(case: Case, label: int) -> Image.Image:
    """What each opinion says of a label in a scene, with a frame around the place of the object."""
    image, (left, top, right, bottom) = Image.fromarray(case.image), case.mark
    ImageDraw.Draw(image).rectangle((left - 1, top - 1, right, bottom), outline="#F0E442")
    out = case.logits
    opinions = out.probs, out.image_logits.sigmoid(), out.pooled_logits.sigmoid()
    probs = [part[0, label].item() for part in opinions]
    shares = tuple(out.weights[0, :, label].tolist())
    tag = Tag(NAMES[label], probs[0], 0.5, probs[1], probs[2], shares)
    return draw_tag(np.asarray(image), tag, overlap=0.0, baseline=case.baseline, told=case.title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few scenes only: its numbers mean nothing")
    parser.add_argument("--picture", type=Path, default=FOLDER / "pair.png", help="where to draw a scene (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of the table")
    args = parser.parse_args()
    keep_freed_memory()
    for folder in (FOLDER, args.picture.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.json:
        tag_photographs()
    quick = Size(scenes=64, first=1, epochs=1, judged=48)
    size = quick if args.quick else Size(scenes=5000, first=8, epochs=2, judged=1500)
    trained = train(size, args.seed)
    judged = {split: judge(trained, split, count=size.judged) for split in ("val", "test-same", "test-broken")}
    numbers = {row: measure(row, judged) for row in (PLAIN, PAT_I, PAT_T)}
    if args.json:
        print(json.dumps({"seed": args.seed, "threads": torch.get_num_threads(), "columns": COLUMNS, **numbers}))
        return
    show_table(numbers)
    judged["test-removed"] = judge(trained, "test-removed", count=size.judged // 3)
    draw_pair(trained, judged, args.picture)
    print(f"drawn: {args.picture}")


if __name__ == "__main__":
    main()
