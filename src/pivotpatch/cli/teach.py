"""`pivotpatch teach`: a checkpoint that knows one label more, from a few images of it."""

import argparse
import json
import os
from collections import Counter
from pathlib import Path

from pivotpatch.cli.console import StageProgress
from pivotpatch.cli.telling import list_not_read, refuse_first, tell, tell_unread
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.embedding import embed_files
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import Classifier, SharedClassifier
from pivotpatch.models.open import open_model
from pivotpatch.runtime.checks import check_model
from pivotpatch.runtime.files import check_name, find_images
from pivotpatch.tuning import teach as lessons
from pivotpatch.tuning.teach import LEAST, Background, Lesson

FEW = 5  # images below which little is learned
ENOUGH = 20


def run_teach(args: argparse.Namespace) -> int:
    """Look at the images, learn, store and tell it."""
    check_name(args.label, where="LABEL")
    reserved = "|" in args.label or args.label.startswith("?")
    outside = args.share is not None and not 0 < args.share < 1
    refuse_first(
        (reserved, "LABEL", f"{args.label!r} is no label in a table", "leave out | and a leading ?"),
        (args.label != args.label.strip(), "LABEL", f"{args.label!r} has blanks around it", "leave them out"),
        (outside, "--share", f"is {args.share}", "give a share above 0 and below 1, such as 0.02"),
        (args.out.exists(), str(args.out), "exists already", "choose another folder"),
    )
    check_model(args.model)
    paths, others = _find(args.images), _find(args.without)
    without_it = {*map(os.path.abspath, others)}
    both = [path for path in paths if os.path.abspath(path) in without_it]  # noqa: PTH100
    refuse_first((both, both[0] if both else "", "is given with the label and without", "leave it out of one"))
    model = open_model(args.model)
    lessons.check_teachable(model)
    assert isinstance(model, SharedClassifier)
    _check_label(model, args)
    background = lessons.find_background(model)
    alone = f"it does not see as the bundled tagger does, and {len(others)} images without the label are given"
    more = f"give --without and {LEAST} ordinary images or more; hundreds are better"
    refuse_first((background is None and len(others) < LEAST, model.called, alone, more))
    with StageProgress("images") as shown:
        total = len(paths) + len(others)
        seen = embed_files(model, paths, progress=lambda done: shown.tell("look", done, total))
        without = None
        if others:
            without = embed_files(model, others, progress=lambda done: shown.tell("look", len(paths) + done, total))
    not_read = seen.not_read | (without.not_read if without else {})
    list_not_read(not_read)
    if len(seen.names) < 2:
        raise InputError("IMAGES", f"{len(seen.names)} could be read", f"give {FEW} or more; {ENOUGH} are better")
    negatives = without.embeddings if without else None
    if background is None:
        assert without is not None
        if len(without.names) < LEAST:
            raise InputError("--without", f"{len(without.names)} images could be read", f"give {LEAST} or more")
        background, negatives = Background.measure(without.embeddings), None
    share = args.share or lessons.SHARE
    lesson = lessons.teach(model, args.label, seen.embeddings, background=background, without=negatives, share=share)
    taught = lessons.add_label(model, lesson)
    save_checkpoint(taught, args.out)
    unlike = [seen.names[place] for place in lesson.unlike]
    if args.json:
        told = {"wrote": str(args.out), "labels": len(taught.labels), **lesson.to_dict(), "unlike": unlike}
        told |= {"without": len(without.names) if without else 0, "not_read": not_read}
        print(json.dumps(told))
    else:
        _print_lesson(lesson, unlike, len(taught.labels), args.out)
    return 0


def _find(words: list[str]) -> list[str]:
    """Paths of images, each once; what cannot be read is told by kind."""
    unread = Counter[str]()
    paths = list(dict.fromkeys(find_images(words, unread=unread)))
    tell_unread(unread)
    return paths


def _check_label(model: Classifier, args: argparse.Namespace) -> None:
    known = args.label in model.labels
    count = f"the model knows {len(model.labels)} labels"
    todo = "give --again to make it anew from these alone"
    refuse_first(
        (known and not args.again, args.label, f"{count}, this one too", todo),
        (args.again and not known, args.label, f"{count}, but not this one", "leave --again out"),
    )


def _print_lesson(lesson: Lesson, unlike: list[str], labels: int, out: Path) -> None:
    """Print what was learned to stdout, and what may be wrong with the images to stderr."""
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
