"""`pivotpatch predict`: the tags of images, one or millions."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotpatch.cli.tagging import add_model_options, add_tag_options, add_write_option, check_options, open_predictor
from pivotpatch.errors import InputError, import_extra

if TYPE_CHECKING:
    from pivotpatch.process import Share
    from pivotpatch.runtime.bulk import Work
    from pivotpatch.runtime.engine import Engine
    from pivotpatch.runtime.packed import Found
    from pivotpatch.runtime.prediction import Prediction, Tag
    from pivotpatch.runtime.values import PatchBox

DETAILED = 8  # images that get a table each
LISTED = 5  # images that could not be read
BULK_BATCH = 64
BULK_OPTIONS = ("all_probs", "resume", "workers", "engine")
RAY_OPTIONS = ("address", "cpus_per_worker", "gpus_per_worker")
NO_IMAGE = ("pivotpatch predict", "no image is named", "name files, folders or patterns")
BAR = 16  # cells of a bar in a table


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    predict = verbs.add_parser(
        "predict",
        help="tag images",
        description="Tag images. With --out any number of them: Ctrl-C keeps what is done, the same command goes on.",
        epilog="Several GPUs: torchrun --nproc-per-node N -m pivotpatch predict ... --out FILE",
    )
    predict.add_argument(
        "words",
        nargs="*",
        metavar="PATH",
        help="images, folders of them, patterns such as 'photos/**/*.jpg', or - for a list of files on stdin; "
        "with --out also .txt lists, .parquet tables, .tar shards and addresses such as s3://bucket/photos",
    )
    add_model_options(predict)
    predict.add_argument("--batch-size", type=int, metavar="N", help=f"images at once (8, with --out {BULK_BATCH})")
    predict.add_argument("--on-error", choices=["skip", "error"], default="skip", help="of unreadable images (skip)")
    add_tag_options(predict)
    output = predict.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="write one JSON object per line; of --out and --write, a summary"
    )
    output.add_argument("--explain", type=Path, metavar="FILE.png", help="draw why; a folder for several images")
    beside = predict.add_argument_group("tags beside the images")
    add_write_option(beside)
    beside.add_argument("--skip-tagged", action="store_true", help="leave images alone that an earlier run has tagged")
    bulk = predict.add_argument_group("many images")
    bulk.add_argument("--out", type=Path, metavar="FILE", help="write the tags to a .parquet, .jsonl or .csv file")
    bulk.add_argument("--all-probs", action="store_true", help="write the probability of every label, too")
    bulk.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="threads that decode, one per core by default; workers with --engine ray, as many as there is room for",
    )
    bulk.add_argument("--resume", action="store_true", help="go on with the images that unfinished work began with")
    bulk.add_argument(
        "--overwrite", action="store_true", help="begin anew whatever is there; of --write, replace other captions"
    )
    cluster = predict.add_argument_group("on a cluster (docs/cluster.md)")
    cluster.add_argument("--engine", choices=["ray"], help="share the work out by Ray; all machines must see the files")
    cluster.add_argument("--address", help="of a Ray cluster, or auto for this machine's; else Ray starts here for it")
    cluster.add_argument("--cpus-per-worker", type=float, metavar="N", help="cores that each gets (1)")
    cluster.add_argument("--gpus-per-worker", type=float, metavar="N", help="GPUs that each gets, such as 0.5 (0)")
    predict.set_defaults(run=run_predict)


def run_predict(args: argparse.Namespace) -> int:
    """Tag a few images for people, or many for machines."""
    from pivotpatch.process import Share

    try:
        share = Share(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError:
        raise InputError("RANK, WORLD_SIZE", "they are no numbers", "start with torchrun, or unset them") from None
    refused = _find_fault(args, share)
    if refused:
        raise InputError(*refused)
    unread: Counter[str] = Counter()
    found = _find(args, unread)  # refuses a name that is none before anything is loaded
    check_options(args)
    if args.out is not None:
        return _tag(args, share, found, unread)
    return _write(args, found, unread) if args.write else _show(args, found, unread)


def _find_fault(args: argparse.Namespace, share: "Share") -> tuple[str, str, str] | None:
    """What cannot be meant, told before anything is loaded."""
    from pivotpatch.runtime.files import STDIN

    bulk = [name for name in BULK_OPTIONS if getattr(args, name) not in (None, False)]
    if not args.words and not args.resume:
        return NO_IMAGE
    if args.batch_size is not None and args.batch_size < 1:
        return "--batch-size", f"{args.batch_size} is below 1", "give 1 or more"
    if args.workers is not None and args.workers < 0:
        return "--workers", f"{args.workers} is below 0", "give 0 or more"
    if args.out is None and bulk:
        return f"--{bulk[0].replace('_', '-')}", "it is an option of --out", "give that too"
    ray = [name for name in RAY_OPTIONS if getattr(args, name) is not None]
    if ray and args.engine is None:
        return f"--{ray[0].replace('_', '-')}", "it is an option of --engine ray", "give that too"
    odd = [name for name in RAY_OPTIONS[1:] if not 0 <= (getattr(args, name) or 0) <= 4096]
    if odd:
        return f"--{odd[0].replace('_', '-')}", f"{getattr(args, odd[0]):g} is no number of them", "give 0 or more"
    if args.engine is not None and share.world > 1:
        return "--engine", "Ray makes the processes itself; WORLD_SIZE is for torchrun", "leave out one of them"
    if args.out is None and args.overwrite and not args.write:
        return "--overwrite", "it is an option of --out and --write", "give one of them too"
    if args.skip_tagged and not args.write:
        return "--skip-tagged", "it is an option of --write", "give that too"
    if args.write and (args.out is not None or args.explain is not None):
        other = "--explain" if args.out is None else "--out"
        return "--write", f"tags go beside the images, not to {other}", "give one after the other"
    if args.out is None and share.world > 1:
        return "WORLD_SIZE", f"{share.world} processes would print the same", "write to a file with --out"
    if args.out is not None and args.explain is not None:
        return "--explain", "nothing is drawn with --out", "explain a few images without it"
    if args.resume and (args.words or args.overwrite):
        other = "other images" if args.words else "--overwrite"
        return "--resume", f"work goes on as it began, without {other}", "leave out one of them"
    if STDIN in args.words and share.world > 1:
        return STDIN, "several processes would share one stdin", "name a folder or a pattern"
    return None


def _choose_device(model: str, share: "Share") -> str | None:
    """The GPU that this process takes of those that torch sees, where several share a machine; None without one."""
    from importlib.util import find_spec

    from pivotpatch.runtime.checks import EXPORTED
    from pivotpatch.runtime.engine import is_present

    if find_spec("torch") is None or (model.lower().endswith(EXPORTED) and not is_present("cuda")):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}" if share.world > 1 else "cuda"


def _share_out(args: argparse.Namespace, digest: str) -> "Work":
    """How Ray does the work."""
    from functools import partial

    from pivotpatch.cli.telling import tell
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


def _open_there(args: argparse.Namespace, folder: str) -> "Engine":
    """The model in a worker of a cluster; relative names are those of the driver's folder."""
    from contextlib import suppress

    from pivotpatch.process import Share

    with suppress(OSError):
        os.chdir(folder)
    device = _choose_device(args.model, Share()) if args.gpus_per_worker else "cpu"
    return open_predictor(args, device=device).engine


def _find(args: argparse.Namespace, unread: "Counter[str]") -> Iterator[Any]:
    """Images by their paths; with --out also those that lie in other files."""
    from io import TextIOWrapper

    from pivotpatch.runtime.files import find_images
    from pivotpatch.runtime.packed import find_sources

    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as all names of files
    find = find_images if args.out is None else find_sources
    return find(args.words, lines=sys.stdin or (), unread=unread)


def _tell_unread(unread: "Counter[str]") -> None:
    from pivotpatch.runtime.files import describe_unread

    for line in describe_unread(unread):
        print(line, file=sys.stderr)


def _show(args: argparse.Namespace, found: Iterator[str], unread: "Counter[str]") -> int:
    """Tag images one after the other, and print what is in them."""
    head = list(islice(found, DETAILED + 1))
    if not head:  # on stdin
        raise InputError(*NO_IMAGE)
    several = len(head) > 1
    if args.explain is not None and (args.explain.suffix.lower() != ".png") != several:
        wrong = f"{args.explain} is no name for {'a folder of images' if several else 'one image'}"
        raise InputError("--explain", wrong, "name a folder" if several else "end it in .png")
    from pivotpatch.cli.tagging import Naming
    from pivotpatch.cli.telling import tell
    from pivotpatch.writing import explain_disk_faults, replacing

    predictor = open_predictor(args)
    naming = Naming(args, predictor.labels)
    predictor.batch_size = args.batch_size or predictor.batch_size
    tagged = failed = 0
    stop = args.on_error == "error" or not several
    for prediction in predictor.predict(chain(head, found), skip=not stop):
        if isinstance(prediction, InputError):
            tell(f"not read: {prediction}")
            failed += 1
            continue
        tagged += 1
        tags = naming.choose(prediction)
        if args.json:
            print(json.dumps({**prediction.to_dict(), "tags": [tag.to_dict() for tag in tags]}))
        else:
            _print(prediction, tags, threshold=args.threshold, detailed=len(head) <= DETAILED)
        if args.explain is not None:
            file = args.explain / f"{tagged:04d}-{Path(str(prediction.picture)).stem}.png" if several else args.explain
            with explain_disk_faults(file.parent):
                file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(file) as written:
                    prediction.draw(naming.rule.choose(prediction) or prediction.top(3)).save(written, format="png")
            tell(f"wrote {file}")
    if failed:
        tell(f"{failed:,} of {tagged + failed:,} images could not be read")
    _tell_unread(unread)
    return 0 if tagged else 1


def _write(args: argparse.Namespace, found: Iterator[str], unread: "Counter[str]") -> int:
    """Write the tags of images beside them, until all have theirs or a signal asks to stop."""
    paths = list(found)
    if not paths:  # on stdin
        raise InputError(*NO_IMAGE)
    from contextlib import closing, nullcontext

    from pivotpatch.cli.console import show_progress
    from pivotpatch.cli.tagging import Naming, Sidecars
    from pivotpatch.cli.telling import tell
    from pivotpatch.process import StopSignals

    predictor = open_predictor(args)
    predictor.batch_size = args.batch_size or predictor.batch_size
    sidecars, skipped = Sidecars(args, Naming(args, predictor.labels)), 0
    few = len(paths) <= DETAILED
    with StopSignals() as signals, nullcontext() if few else show_progress("images") as shown:

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
    _tell_unread(unread)
    if signals.received is not None:
        left = len(paths) - skipped - sidecars.tagged - sidecars.failed
        tell(f"stopped by {signals.received.name} with {left:,} images left; the same command goes on")
        return 128 + signals.received
    if args.json:
        counts = {name: getattr(sidecars, name) for name in ("written", "unchanged", "refused")}
        counts |= {"skipped": skipped, "failed": sidecars.failed}
        print(json.dumps({"pictures": len(paths), **counts, "unread": unread}))
    return 0 if sidecars.written + sidecars.unchanged + skipped else 1


def _print(prediction: "Prediction", tags: "Sequence[Tag]", *, threshold: float | None, detailed: bool) -> None:
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
        limit = best.threshold if threshold is None else threshold
        why = f"the most probable is {best.label} with {best.prob:.2f}, given above {limit:.3g}"
        screen.print(f"  no tag; {'--tags lets none through' if best.prob > limit else why}\n")
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


def place_in_words(box: "PatchBox", size: tuple[int, int]) -> str:
    """Where a patch lies in an image of some rows and columns.

    >>> from pivotpatch.runtime.values import PatchBox
    >>> place_in_words(PatchBox(left=50, top=0, right=100, bottom=40), (80, 100))
    'top right'
    """
    down, across = (box.top + box.bottom) / 2 / size[0], (box.left + box.right) / 2 / size[1]
    row = "top" if down < 0.4 else "bottom" if down > 0.6 else "middle"
    column = "left" if across < 0.4 else "right" if across > 0.6 else "centre"
    return "centre" if (row, column) == ("middle", "centre") else f"{row} {column}"


def _tag(args: argparse.Namespace, share: "Share", found: "Iterator[Found]", unread: "Counter[str]") -> int:
    """Tag images to a file, until it is finished or a signal asks to stop."""
    from dataclasses import asdict
    from functools import partial

    from pivotpatch.cli.console import show_progress
    from pivotpatch.cli.tagging import Naming
    from pivotpatch.cli.telling import tell
    from pivotpatch.process import StopSignals, count_workers
    from pivotpatch.runtime.bulk import check_out, tag_pictures

    job = check_out(args.out, share, overwrite=args.overwrite, resume=args.resume)
    on_ray = args.engine == "ray"
    if on_ray:
        import_extra("ray")
        engine = open_predictor(argparse.Namespace(**vars(args) | {"device": "cpu"})).engine
    else:
        engine = open_predictor(args, device=_choose_device(args.model, share) if args.device is None else None).engine
    naming = Naming(args, engine.labels)
    with StopSignals() as signals, show_progress("images") as shown:
        summary = tag_pictures(
            engine,
            None if args.resume else found,
            args.out,
            rule=naming.rule,
            rules=naming.rules,
            unread=unread,
            all_probs=args.all_probs,
            note={
                "model": args.model,
                "architecture": args.architecture,
                "weights": engine.digest(),
                "effort": args.effort,
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
    _tell_unread(Counter(summary.unread))
    if args.json:
        print(json.dumps({"out": str(job.out), **asdict(summary)}))
    return 0 if summary.tagged or not summary.pictures else 1
