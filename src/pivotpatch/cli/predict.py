"""`pivotpatch predict`: the tags of pictures, one or millions."""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.inference.bulk import Share, Tagging, TagRule
    from pivotpatch.inference.engine import Engine
    from pivotpatch.inference.prediction import Prediction, Tag
    from pivotpatch.inference.predictor import Predictor

DETAILED = 8  # pictures that get a table each
DRAWN = 8  # tags in a figure
LISTED = 5  # pictures that could not be read
BULK_BATCH = 64
BULK_OPTIONS = ("all_probs", "resume", "overwrite", "shards", "workers")


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    predict = verbs.add_parser(
        "predict",
        help="tag pictures",
        description="Tag pictures. With --out any number of them: Ctrl-C keeps what is done, the same command goes on.",
        epilog="Several GPUs: torchrun --nproc-per-node N -m pivotpatch predict ... --out FILE",
    )
    predict.add_argument(
        "words",
        nargs="*",
        metavar="PATH",
        help="pictures, folders of them, patterns such as 'photos/**/*.jpg', or - for a list of files on stdin",
    )
    predict.add_argument(
        "--model",
        default="tagger",
        help="a run, a checkpoint, an exported file, hub:NAME, transformers:WHAT or timm:WHAT (the bundled tagger)",
    )
    predict.add_argument("--device", help="such as cpu or cuda:1; a GPU where there is one by default")
    predict.add_argument(
        "--effort",
        type=float,
        default=1.0,
        help="share of pictures that get a second look, from 0 to 1 (1: all, at patches)",
    )
    predict.add_argument("--batch-size", type=int, metavar="N", help=f"pictures at once (8, with --out {BULK_BATCH})")
    predict.add_argument("--on-error", choices=["skip", "error"], default="skip", help="of unreadable pictures (skip)")
    choice = predict.add_argument_group("which labels")
    choice.add_argument("--threshold", type=float, metavar="P", help="above which a label is given; the fitted ones")
    choice.add_argument("--top-k", type=int, metavar="K", help="the K most probable; with --threshold, K at most")
    output = predict.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="write one JSON object a line; of --out, its summary")
    output.add_argument("--explain", type=Path, metavar="FILE.png", help="draw why; a folder for several pictures")
    bulk = predict.add_argument_group("many pictures")
    bulk.add_argument("--out", type=Path, metavar="FILE", help="write the tags to a .parquet, .jsonl or .csv file")
    bulk.add_argument("--all-probs", action="store_true", help="write the probability of every label, too")
    bulk.add_argument("--workers", type=int, metavar="N", help="processes that decode; one a core by default")
    bulk.add_argument("--resume", action="store_true", help="go on with the pictures that unfinished work began with")
    bulk.add_argument("--overwrite", action="store_true", help="begin anew whatever is there")
    bulk.add_argument(
        "--shards", action="store_true", help="each process leaves a file of its own, FILE-0000N-of-0000M"
    )
    predict.set_defaults(run=run_predict)


def run_predict(args: argparse.Namespace) -> int:
    """Tag a few pictures for people, or many for machines."""
    from pivotpatch.inference.bulk import Share, TagRule

    share = Share(*_read_processes(), args.shards)
    _check_options(args, share)
    rule = TagRule(args.threshold, args.top_k)
    return _show(args, rule) if args.out is None else _tag(args, rule, share)


def _read_processes() -> tuple[int, int]:
    """The number of this process, and how many torchrun or another launcher has started."""
    try:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        raise InputError("RANK, WORLD_SIZE", "they are no numbers", "start with torchrun, or unset them") from None


def _check_options(args: argparse.Namespace, share: "Share") -> None:
    """Refuse what cannot be meant before anything is loaded."""
    from pivotpatch.data.files import STDIN

    if not args.words and not args.resume:
        raise _no_picture()
    if args.batch_size is not None and args.batch_size < 1:
        raise InputError("--batch-size", f"{args.batch_size} is below 1", "give 1 or more")
    if args.workers is not None and args.workers < 0:
        raise InputError("--workers", f"{args.workers} is below 0", "give 0 or more")
    if args.out is None:
        given = [name for name in BULK_OPTIONS if getattr(args, name) is not None and getattr(args, name) is not False]
        if given:
            raise InputError(f"--{given[0].replace('_', '-')}", "it is an option of --out", "give that too")
        if share.world > 1:
            raise InputError(
                "WORLD_SIZE", f"{share.world} processes would print the same", "write to a file with --out"
            )
        return
    if args.explain is not None:
        raise InputError("--explain", "nothing is drawn with --out", "explain a few pictures without it")
    if args.resume and (args.words or args.overwrite):
        wrong = f"work goes on as it began, without {'other pictures' if args.words else '--overwrite'}"
        raise InputError("--resume", wrong, "leave out one of them")
    if STDIN in args.words and share.world > 1:
        raise InputError(STDIN, "several processes would share one stdin", "name a folder or a pattern")


def _no_picture() -> InputError:
    return InputError("pivotpatch predict", "no picture is named", "name files, folders or patterns")


def _open_predictor(args: argparse.Namespace, *, world: int = 1) -> "Predictor":
    """The network, on this process's GPU where several share a machine."""
    import torch

    from pivotpatch.inference.predictor import Predictor

    device = args.device
    if device is None and world > 1 and torch.cuda.is_available():
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
    return Predictor.load(args.model, device=device, effort=args.effort)


def _find(args: argparse.Namespace) -> Iterator[str]:
    from io import TextIOWrapper

    from pivotpatch.data.files import find_images

    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as all names of files
    return find_images(args.words, lines=sys.stdin or ())


def _show(args: argparse.Namespace, rule: "TagRule") -> int:
    """Tag pictures one after the other, and print what is in them."""
    from pivotpatch.cli.predict_text import print_row, print_table

    found = _find(args)
    head = list(islice(found, DETAILED + 1))
    if not head:  # on stdin
        raise _no_picture()
    if args.explain is not None:
        _check_explained(args.explain, several=len(head) > 1)
    predictor = _open_predictor(args)
    predictor.batch_size = args.batch_size or predictor.batch_size
    tagged = failed = 0
    for prediction in _predict(predictor, chain(head, found), stop=args.on_error == "error" or len(head) == 1):
        if isinstance(prediction, InputError):
            print(f"not read: {prediction}", file=sys.stderr)
            failed += 1
            continue
        tagged += 1
        tags = rule.choose(prediction)
        if args.json:
            print(json.dumps({**prediction.to_dict(), "tags": [tag.to_dict() for tag in tags]}))
        elif len(head) <= DETAILED:
            print_table(prediction, tags, threshold=args.threshold)
        else:
            print_row(prediction, tags, threshold=args.threshold)
        if args.explain is not None:
            numbered = args.explain / f"{tagged:04d}-{Path(str(prediction.picture)).stem}.png"
            _explain(prediction, tags, numbered if len(head) > 1 else args.explain)
    if failed:
        print(f"{failed:,} of {tagged + failed:,} pictures could not be read", file=sys.stderr)
    return 0 if tagged else 1


def _predict(predictor: "Predictor", paths: Iterable[str], *, stop: bool) -> "Iterator[Prediction | InputError]":
    """What is in each picture, or why it could not be read."""
    from pivotpatch.inference.predictor import ModelError

    rest = iter(paths)
    while batch := list(islice(rest, predictor.batch_size)):
        try:
            yield from predictor(list(batch))
        except ModelError:
            raise
        except InputError:
            for path in batch:  # one of them is to blame
                try:
                    yield predictor(path)
                except InputError as error:
                    if stop or isinstance(error, ModelError):
                        raise
                    yield error


def _check_explained(place: Path, *, several: bool) -> None:
    if several and (place.suffix or place.is_file()):
        raise InputError("--explain", f"{place} is one file for several pictures", "name a folder")
    if not several and place.suffix.lower() != ".png":
        raise InputError("--explain", f"{place} is no PNG file", "end it in .png")


def _explain(prediction: "Prediction", tags: "tuple[Tag, ...]", file: Path) -> None:
    """Draw the tags that are told, or the most probable labels where there are none."""
    from pivotpatch.cli.console import write_figures
    from pivotpatch.inference.plots import plot_tags

    shown = tags[:DRAWN] or prediction.top(3)
    write_figures({file.name: plot_tags(prediction.image, shown, size=prediction.size)}, file.parent)


def _tag(args: argparse.Namespace, rule: "TagRule", share: "Share") -> int:
    """Tag pictures to a file, until it is finished or a signal asks to stop."""
    from pivotpatch.cli.predict_text import show_tagging
    from pivotpatch.inference.bulk import check_out, tag_pictures
    from pivotpatch.training.build import count_workers
    from pivotpatch.training.signals import StopSignals

    check_out(args.out, share, overwrite=args.overwrite, resume=args.resume)
    paths = None if args.resume else _find(args)
    predictor = _open_predictor(args, world=share.world)
    with StopSignals() as signals, show_tagging(quiet=share.rank > 0) as progress:
        tagging = tag_pictures(
            predictor.engine,
            paths,
            args.out,
            rule=rule,
            all_probs=args.all_probs,
            note={"model": args.model, "weights": digest_engine(predictor.engine, args.model), "effort": args.effort},
            share=share,
            overwrite=args.overwrite,
            batch_size=args.batch_size or BULK_BATCH,
            num_workers=count_workers() if args.workers is None else args.workers,
            on_error=args.on_error,
            progress=progress,
            stopping=lambda: signals.received is not None,
        )
    if tagging.stopped:
        assert signals.received is not None
        print(f"stopped by {signals.received.name}; the same command goes on", file=sys.stderr)
        return 128 + signals.received
    return _finish(tagging, share, as_json=args.json)


def digest_engine(engine: "Engine", model: str) -> str:
    """Tells networks of the same name apart, by what they are made of, whatever device they run on."""
    import torch

    from pivotpatch.inference.engine import TorchEngine
    from pivotpatch.models.checkpoint import DESCRIPTION, WEIGHTS
    from pivotpatch.models.named import is_named
    from pivotpatch.models.open import find_checkpoint

    content = hashlib.sha256()
    paths = [Path(model)]  # of an exported file
    if isinstance(engine, TorchEngine):
        paths = [] if is_named(model) else [find_checkpoint(model) / name for name in (DESCRIPTION, WEIGHTS)]
    for path in paths:
        with path.open("rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    if isinstance(engine, TorchEngine) and not paths:
        # Somebody else's, or on the hub. A backbone of ours is made into what a device is fastest with: it is left out,
        # for no training changes a backbone and not what stands on it.
        mixed = [torch.as_tensor(getattr(engine.model, name, 0)).tolist() for name in ("lam", "temperature")]
        fitted = engine.thresholds, engine.calibration, engine.adaptive, getattr(engine.model, "closer_size", None)
        content.update(repr((engine.labels, fitted, mixed)).encode())
        held = engine.model.state_dict().items()
        for name, value in ((name, value) for name, value in held if not name.startswith("backbone.")):
            content.update(name.encode())
            content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return content.hexdigest()


def _finish(tagging: "Tagging", share: "Share", *, as_json: bool) -> int:
    """Tell what came of it."""
    from pivotpatch.inference.bulk_file import name_files

    summary, files = tagging.summary, name_files(tagging.out)
    if summary is None:
        told = f"process {share.rank + 1} of {share.world} has done its share; the last one writes {tagging.out}"
        print(told, file=sys.stderr)
        return 0
    if summary.failed:
        with files.failures.open(encoding="utf-8") as failures:
            for line in islice(failures, LISTED):
                print(f"not read: {json.loads(line)['error']}", file=sys.stderr)
        told = f"{summary.failed:,} of {summary.pictures:,} pictures could not be read, listed in {files.failures}"
        print(told, file=sys.stderr)
    print(f"wrote {tagging.out}, {summary.tagged:,} pictures", file=sys.stderr)
    if as_json:
        print(json.dumps({"out": str(tagging.out), **asdict(summary)}))
    return 0 if summary.tagged or not summary.pictures else 1
