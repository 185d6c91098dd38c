"""Tags for the images that `predict` and `watch` were given: shown, written beside them, or gathered in a file."""

import argparse
import errno
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

from pivotpatch.cli.telling import tell, tell_unread
from pivotpatch.cli.usage import BULK_BATCH
from pivotpatch.errors import InputError, import_extra
from pivotpatch.process import Share, StopSignals, count_workers
from pivotpatch.runtime.bulk import Work, check_out, tag_pictures
from pivotpatch.runtime.checks import EXPORTED
from pivotpatch.runtime.engine import Engine, is_present
from pivotpatch.runtime.files import are_same
from pivotpatch.runtime.packed import Found
from pivotpatch.runtime.prediction import Prediction, Tag, TagRule
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.runtime.sidecars import Kind, is_tagged, write_sidecar
from pivotpatch.runtime.tag_names import TagRules
from pivotpatch.runtime.values import PatchBox
from pivotpatch.writing import explain_disk_faults, replacing

DETAILED = 8  # images that get a table each
LISTED = 5  # images that could not be read
BAR = 16  # cells of a bar in a table
# What no other image would mend.
_DISK = {errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def open_predictor(args: argparse.Namespace, *, device: str | None = None) -> Predictor:
    """The model that the options name; `device` where they name none."""
    model = args.model
    if args.architecture is not None or args.labels is not None:
        from pivotpatch.cli.sources import open_given

        model = open_given(args.model, architecture=args.architecture, labels=args.labels)
    explained = getattr(args, "explain", None) is not None  # by patches, which every image then has
    effort = 1.0 if args.effort is None and explained else args.effort
    predictor = Predictor.load(model, device=args.device or device, effort=effort, prefer=args.prefer)
    predictor.batch_size = getattr(args, "batch_size", None) or predictor.batch_size
    return predictor


def read_rules(args: argparse.Namespace, labels: Sequence[str]) -> tuple[TagRule, TagRules]:
    """Which labels an image gets; which of them become tags, and by which names."""
    return TagRule(args.threshold, args.top_k), TagRules() if args.tags is None else TagRules.read(args.tags, labels)


class Sidecars:
    """Writes tags beside images and counts what came of it."""

    def __init__(self, args: argparse.Namespace, labels: Sequence[str]) -> None:
        self._rule, self._rules = read_rules(args, labels)
        self._kinds: list[Kind] = list(dict.fromkeys(args.write))
        self._overwrite, self._stop = args.overwrite, args.on_error == "error"
        self._captions: dict[Path, str] = {}  # whose each is
        self.tagged = self.failed = 0  # images whose tags were written, and that could not be read
        self.written = self.unchanged = self.refused = 0  # files that changed, that said so before, not written

    def are_there(self, image: Path) -> bool:
        """Whether an image has been tagged before, in every kind of file."""
        return all(is_tagged(image, kind) for kind in self._kinds)

    def take(self, prediction: Prediction | InputError) -> str | None:
        """Write the tags of an image and say them in a line; None, and a word on stderr, where it was not read."""
        if isinstance(prediction, InputError):
            tell(f"not read: {prediction}")
            self.failed += 1
            return None
        tags = self._rules.apply(self._rule.choose(prediction))
        self._write(Path(str(prediction.picture)), tags)
        self.tagged += 1
        return f"{prediction.picture}: {', '.join(tag.label for tag in tags) or 'no tag'}"

    def _write(self, image: Path, tags: Sequence[Tag]) -> None:
        """Write an image's tags; what is wrong with one file is told, and ends the work only where it must."""
        for kind in self._kinds:
            try:
                caption = image.with_suffix(".txt")
                owner = self._captions.setdefault(caption, image.name) if kind == "txt" else image.name
                if owner != image.name:  # as of cat.jpg and cat.png
                    wrong = f"is the caption of {owner} and cannot be that of {image.name} too"
                    raise InputError(str(caption), wrong, "rename one of the images")
                changed = write_sidecar(image, [(tag.label, tag.prob) for tag in tags], kind, overwrite=self._overwrite)
            except InputError as error:
                if self._stop or getattr(error.__cause__, "errno", None) in _DISK:
                    raise
                tell(f"not written: {error}")
                self.refused += 1
            else:
                self.written += changed
                self.unchanged += not changed

    def describe(self, *, skipped: int = 0) -> str:
        """What came of it, in a line, with the images that were left alone."""
        said = f"wrote {self.written:,} sidecar{'s' * (self.written != 1)}, {self.unchanged:,} unchanged"
        said += f", {skipped:,} image{'s' * (skipped != 1)} tagged before" * (skipped > 0)
        said += f", {self.refused:,} not written" * (self.refused > 0)
        return f"{said}, {self.failed:,} could not be read"


def show_tags(args: argparse.Namespace, found: Iterator[str], unread: Counter[str]) -> int:
    """Tag images one after the other, and print what is in them."""
    head = list(islice(found, DETAILED + 1))
    several = len(head) > 1
    if args.explain is not None and (args.explain.suffix.lower() != ".png") != several:
        wrong = f"{args.explain} is no name for {'a folder of images' if several else 'one image'}"
        raise InputError("--explain", wrong, "name a folder" if several else "end it in .png")
    if are_same(head[0], args.explain) and not several:
        raise InputError("--explain", f"{args.explain} is the image itself", "name another file")
    if args.explain is not None:
        folder = args.explain if several else args.explain.parent
        with explain_disk_faults(folder):  # now, not after the work
            folder.mkdir(parents=True, exist_ok=True)
    predictor = open_predictor(args)
    rule, rules = read_rules(args, predictor.labels)
    tagged = failed = 0
    stop = args.on_error == "error" or not several
    for prediction in predictor.predict(chain(head, found), threshold=args.threshold, skip=not stop):
        if isinstance(prediction, InputError):
            tell(f"not read: {prediction}")
            failed += 1
            continue
        tagged += 1
        tags = rules.apply(rule.choose(prediction))
        if args.json:
            print(json.dumps({**prediction.to_dict(), "tags": [tag.to_dict() for tag in tags]}))
        else:
            _print(prediction, tags, detailed=len(head) <= DETAILED)
        if args.explain is not None:
            stem = os.fsencode(Path(str(prediction.picture)).stem)[:200].decode("utf-8", "ignore")  # disks allow 255
            file = args.explain / f"{tagged:04d}-{stem}.png" if several else args.explain
            with explain_disk_faults(file.parent), replacing(file) as written:
                prediction.draw(rule.choose(prediction) or prediction.top(3)).save(written, format="png")
            tell(f"wrote {file}")
    if failed:
        tell(f"{failed:,} of {tagged + failed:,} images could not be read")
    tell_unread(unread)
    return 0 if tagged else 1


def _print(prediction: Prediction, tags: Sequence[Tag], *, detailed: bool) -> None:
    """An image's tags as a table or in a line; one that is not above its threshold is in brackets."""
    from rich.padding import Padding

    from pivotpatch.cli.console import Screen, draw_bar, make_table

    screen, (rows, columns) = Screen(), prediction.size
    names = [tag.label if tag.prob > tag.threshold else f"({tag.label})" for tag in tags]
    if not detailed:
        told = ", ".join(f"{name} {tag.prob:.2f}" for name, tag in zip(names, tags, strict=True))
        screen.print(f"{prediction.picture}: {told or 'no tag'}")
        return
    screen.print(f"{prediction.picture} ({columns} x {rows} pixels)", style="bold")
    if not tags:
        best = prediction.top(1)[0]
        why = f"the most probable is {best.label} with {best.prob:.2f}, given above {best.threshold:.3g}"
        screen.print(f"  no tag; {'--tags lets none through' if best.prob > best.threshold else why}\n")
        return
    evidence = ["both (TDE)", "", "image", "patches", "pivot patch"]
    table = make_table(["tag", *(["probability", ""] if prediction.weights is None else evidence)])
    table.columns[0].overflow = "fold"  # the only one that gives way: numbers stay whole
    for place in (2, -1):
        table.columns[place].justify = "left"
    for tag, name in zip(tags, names, strict=True):
        cells = [name, f"{tag.prob:.2f}", draw_bar(tag.prob, width=BAR)]
        if tag.patch_prob is not None and tag.box is not None:
            pivot = f"{place_in_words(tag.box, prediction.size)} {max(tag.weights or ()):.0%}"
            cells += [f"{tag.image_prob:.2f}", f"{tag.patch_prob:.2f}", pivot]
        table.add_row(*cells, style="" if name == tag.label else "dim")
    screen.print(Padding(table, (0, 0, 1, 2), expand=False))


def place_in_words(box: PatchBox, size: tuple[int, int]) -> str:
    """Where a patch lies in an image of some rows and columns.

    >>> from pivotpatch.runtime.values import PatchBox
    >>> place_in_words(PatchBox(left=50, top=0, right=100, bottom=40), (80, 100))
    'top right'
    """
    down, across = (box.top + box.bottom) / 2 / size[0], (box.left + box.right) / 2 / size[1]
    row = "top" if down < 0.4 else "bottom" if down > 0.6 else "middle"
    column = "left" if across < 0.4 else "right" if across > 0.6 else "centre"
    return "centre" if (row, column) == ("middle", "centre") else f"{row} {column}"


def write_tags(args: argparse.Namespace, found: Iterator[str], unread: Counter[str]) -> int:
    """Write the tags of images beside them, until all have theirs or a signal asks to stop."""
    from pivotpatch.cli.console import StageProgress

    predictor, paths = open_predictor(args), list(found)
    sidecars, skipped = Sidecars(args, predictor.labels), 0
    few = len(paths) <= DETAILED
    with StopSignals() as signals, nullcontext() if few else StageProgress("images") as shown:

        def list_wanted() -> Iterator[str]:
            nonlocal skipped
            for path in paths:
                if signals.received is not None:
                    return
                if args.skip_tagged and sidecars.are_there(Path(path)):
                    skipped += 1
                else:
                    yield path

        skip = args.on_error == "skip" and len(paths) > 1
        with closing(predictor.predict(list_wanted(), skip=skip)) as predictions:
            for prediction in predictions:
                line = sidecars.take(prediction)
                if line and few and not args.json:
                    print(line)
                if shown is not None:
                    shown.tell("tag", skipped + sidecars.tagged + sidecars.failed, len(paths))
                if signals.received is not None:
                    break
    tell(sidecars.describe(skipped=skipped))
    tell_unread(unread)
    if signals.received is not None:
        left = len(paths) - skipped - sidecars.tagged - sidecars.failed
        tell(f"stopped by {signals.received.name} with {left:,} images left; the same command goes on")
        return 128 + signals.received
    if args.json:
        counts = {name: getattr(sidecars, name) for name in ("written", "unchanged", "refused")}
        counts |= {"skipped": skipped, "failed": sidecars.failed}
        print(json.dumps({"pictures": len(paths), **counts, "unread": unread}))
    return 0 if sidecars.written + sidecars.unchanged + skipped else 1


def gather_tags(args: argparse.Namespace, share: Share, found: Iterator[Found], unread: Counter[str]) -> int:
    """Tag images to a file, until it is finished or a signal asks to stop."""
    from pivotpatch.cli.console import StageProgress

    job = check_out(args.out, share, overwrite=args.overwrite, resume=args.resume)
    on_ray = args.engine == "ray"
    if on_ray:
        import_extra("ray")
        engine = open_predictor(argparse.Namespace(**vars(args) | {"device": "cpu"})).engine
    else:
        engine = open_predictor(args, device=_choose_device(args.model, share) if args.device is None else None).engine
    rule, rules = read_rules(args, engine.labels)
    with StopSignals() as signals, StageProgress("images") as shown:
        summary = tag_pictures(
            engine,
            None if args.resume else found,
            args.out,
            rule=rule,
            rules=rules,
            unread=unread,
            all_probs=args.all_probs,
            note={
                "model": args.model,
                "architecture": args.architecture,
                "weights": engine.digest(),
                "effort": engine.effort,
            },
            share=share,
            overwrite=args.overwrite,
            batch_size=args.batch_size or BULK_BATCH,
            threads=count_workers() if args.workers is None else args.workers,
            on_error=args.on_error,
            progress=shown.tell,
            stopping=lambda: signals.received is not None,
            work=_share_out(args, engine.digest()) if on_ray else None,
        )
    if summary is None and signals.received is not None:
        tell(f"stopped by {signals.received.name}; the same command goes on")
        return 128 + signals.received
    say = partial(print, file=sys.stderr)  # each process of its own share
    if summary is None:
        say(f"process {share.rank + 1} of {share.world} has done its share; the last one writes {job.out}")
        return 0
    if summary.failed:
        with job.failures.open(encoding="utf-8") as lines:
            for line in islice(lines, LISTED):
                say(f"not read: {json.loads(line)['error']}")
        say(f"{summary.failed:,} of {summary.pictures:,} images could not be read, listed in {job.failures}")
    say(f"wrote {job.out}, {summary.tagged:,} images")
    tell_unread(summary.unread)
    if args.json:
        print(json.dumps({"out": str(job.out), **asdict(summary)}))
    return 0 if summary.tagged or not summary.pictures else 1


def _choose_device(model: str, share: Share) -> str | None:
    """The GPU that this process takes of those that torch sees, where several share a machine; None without one."""
    if find_spec("torch") is None or (model.lower().endswith(EXPORTED) and not is_present("cuda")):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}" if share.world > 1 else "cuda"


def _share_out(args: argparse.Namespace, digest: str) -> Work:
    """How Ray does the work."""
    from pivotpatch.cluster.on_ray import tag_on_ray

    return tag_on_ray(
        partial(_open_there, args, os.getcwd()),  # noqa: PTH109
        digest,
        address=args.address,
        workers=args.workers or None,
        cpus=1 if args.cpus_per_worker is None else args.cpus_per_worker,
        gpus=args.gpus_per_worker or 0,
        say=tell,
    )


def _open_there(args: argparse.Namespace, folder: str) -> Engine:
    """The model in a worker of a cluster; relative names are those of the driver's folder."""
    with suppress(OSError):
        os.chdir(folder)
    device = _choose_device(args.model, Share()) if args.gpus_per_worker else "cpu"
    return open_predictor(args, device=device).engine
