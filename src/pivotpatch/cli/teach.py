"""`pivotpatch teach`: a checkpoint that knows one label more, from a few images of it."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.telling import list_not_read, refuse_first
from pivotpatch.errors import InputError, shorten

if TYPE_CHECKING:
    from pivotpatch.inference.embedding import Seen
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.tuning.teach import Background, Lesson

FEW = 5  # images below which little is learned
ENOUGH = 20


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    teach = verbs.add_parser(
        "teach",
        help="add a label from a few images of it",
        description="Make a checkpoint that knows one label more, from about 20 images that show it. Nothing is "
        "trained: all other labels stay exactly as they are.",
    )
    teach.add_argument("label", metavar="LABEL", help='its name, such as "my mug"')
    teach.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders and patterns of images that show it")
    teach.add_argument("--model", default="tagger", help="a run or a checkpoint (the bundled tagger)")
    teach.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new checkpoint")
    teach.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="IMAGES",
        help="images without it, such as the same places when it is away; a model that does not see as the bundled "
        "tagger does needs 20 or more, the more ordinary the better",
    )
    teach.add_argument(
        "--share", type=float, metavar="S", help="of images that show it, where the model will be used (0.02)"
    )
    teach.add_argument("--again", action="store_true", help="make a label that the model knows anew, from these alone")
    teach.add_argument("--json", action="store_true", help="write what came of it as JSON")
    teach.set_defaults(run=run_teach)


def run_teach(args: argparse.Namespace) -> int:
    """Look at the images, learn, store and tell it."""
    from pivotpatch.runtime.checks import check_model
    from pivotpatch.runtime.files import check_name

    check_name(args.label, where="LABEL")
    reserved = "|" in args.label or args.label.startswith("?")
    outside = args.share is not None and not 0 < args.share < 1
    refuse_first(
        (reserved, "LABEL", f"{args.label!r} is no label in a table", "leave out | and a leading ?"),
        (outside, "--share", f"is {args.share}", "give a share above 0 and below 1, such as 0.02"),
        (args.out.exists(), str(args.out), "exists already", "choose another folder"),
    )
    check_model(args.model)
    paths, others = _find(args.images), _find(args.without)
    both = sorted({*paths} & {*others})
    refuse_first((both, both[0] if both else "", "is given with the label and without", "leave it out of one"))
    from pivotpatch.models.checkpoint import save_checkpoint
    from pivotpatch.models.open import open_model
    from pivotpatch.tuning.teach import SHARE, add_label, check_teachable, find_background, teach

    model = open_model(args.model)
    check_teachable(model)
    _check_label(model, args)
    background = find_background(model)
    seen, without = _look(model, paths, others, background)
    list_not_read(seen.not_read | (without.not_read if without else {}))
    if len(seen.names) < 2:
        raise InputError("IMAGES", f"{len(seen.names)} could be read", f"give {FEW} or more; {ENOUGH} are better")
    negatives = without and without.embeddings
    if background is None:
        background, negatives = _measure(without), None
    share = args.share or SHARE
    lesson = teach(model, args.label, seen.embeddings, background=background, without=negatives, share=share)
    taught = add_label(model, lesson)
    save_checkpoint(taught, args.out)
    unlike = [seen.names[place] for place in lesson.unlike]
    if args.json:
        told = {"wrote": str(args.out), "labels": len(taught.labels), **lesson.to_dict(), "unlike": unlike}
        told["without"] = 0 if without is None else len(without.names)
        told["not_read"] = seen.not_read | (without.not_read if without else {})
        print(json.dumps(told))
    else:
        _print_lesson(lesson, unlike, len(taught.labels), args.out)
    return 0


def _find(words: list[str]) -> list[str]:
    """Paths of images, each once; what cannot be read is told by kind."""
    from pivotpatch.cli.telling import tell
    from pivotpatch.runtime.files import describe_unread, find_images

    unread = Counter[str]()
    paths = list(dict.fromkeys(find_images(words, unread=unread)))
    for line in describe_unread(unread):
        tell(line)
    return paths


def _check_label(model: "Classifier", args: argparse.Namespace) -> None:
    known = args.label in model.labels
    count = f"the model knows {len(model.labels)} labels"
    refuse_first(
        (
            known and not args.again,
            args.label,
            f"{count}, this one too",
            "give --again to make it anew from these alone",
        ),
        (args.again and not known, args.label, f"{count}, but not this one", "leave --again out"),
    )


def _look(
    model: "Classifier", paths: list[str], others: list[str], background: "Background | None"
) -> "tuple[Seen, Seen | None]":
    """What the model sees of images with and without the label."""
    from pivotpatch.cli.console import StageProgress
    from pivotpatch.inference.embedding import embed_files
    from pivotpatch.models.classifier import SharedClassifier
    from pivotpatch.tuning.teach import LEAST

    assert isinstance(model, SharedClassifier)

    if background is None and len(others) < LEAST:
        wrong = f"it does not see as the bundled tagger does, and {len(others)} images without the label are given"
        raise InputError(
            model.called, wrong, f"give --without and {LEAST} ordinary images or more; hundreds are better"
        )
    with StageProgress("images") as shown:
        total = len(paths) + len(others)
        seen = embed_files(model, paths, progress=lambda done: shown.tell("look", done, total))
        if not others:
            return seen, None
        return seen, embed_files(model, others, progress=lambda done: shown.tell("look", len(paths) + done, total))


def _measure(without: "Seen | None") -> "Background":
    from pivotpatch.tuning.teach import LEAST, Background

    assert without is not None
    if len(without.names) < LEAST:
        raise InputError("--without", f"{len(without.names)} images could be read", f"give {LEAST} or more")
    return Background.measure(without.embeddings)


def _print_lesson(lesson: "Lesson", unlike: list[str], labels: int, out: Path) -> None:
    """Print what was learned to stdout, and what may be wrong with the images to stderr."""
    from pivotpatch.cli.telling import tell

    if lesson.images < FEW:
        tell(f"{lesson.images} images are few: give {ENOUGH}, in different places and light")
    if lesson.repeated:
        tell(f"{lesson.repeated} of {lesson.images} images are almost the same as another: they teach little")
    if unlike:
        tell(f"looks unlike the others, is it a mistake? {shorten(unlike)}")
    recall = lesson.recall
    print(f"{lesson.label}: learned from {lesson.images} images, each judged by the others alone")
    print(f"finds {100 * recall.value:.0f} % of them ({100 * recall.low:.0f} to {100 * recall.high:.0f})", end="")
    print(f" above its threshold {lesson.threshold:.2f}")
    print(f"gives it to {100 * lesson.given:.1f} % of ordinary images", end="; ")
    print(f"if {100 * lesson.share:.3g} % of images show it, precision is {100 * lesson.precision:.0f} % or more")
    print(f"wrote {out}: {labels} labels; pivotpatch predict IMAGES --model {out}")
