"""`pivotpatch predict`: the tags of images, one or millions."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import chain
from typing import Any

from pivotpatch.cli.telling import refuse_first, refuse_options
from pivotpatch.errors import InputError
from pivotpatch.process import Share
from pivotpatch.runtime.checks import check_effort, check_model, check_rule
from pivotpatch.runtime.files import STDIN, are_same, find_images
from pivotpatch.runtime.packed import find_sources

NO_IMAGE = ("predict", "no image is named", "name files, folders or patterns")
RAY_NUMBERS = ("cpus_per_worker", "gpus_per_worker")


def run_predict(args: argparse.Namespace) -> int:
    """Tag a few images for people, or many for machines; what cannot be meant is refused before anything is loaded."""
    try:
        share = Share(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError:
        raise InputError("RANK, WORLD_SIZE", "they are no numbers", "start with torchrun, or unset them") from None
    _check(args, share)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as all names of files
    unread, find = Counter[str](), find_images if args.out is None else find_sources
    found: Iterator[Any] = find(args.words, lines=sys.stdin or (), unread=unread)
    check_options(args)
    from pivotpatch.cli.tagging import gather_tags, show_tags, write_tags

    if args.out is not None:
        return gather_tags(args, share, found, unread)
    first = next(found, None)
    if first is None:  # on stdin
        raise InputError(*NO_IMAGE)
    return (write_tags if args.write else show_tags)(args, chain([first], found), unread)


def _check(args: argparse.Namespace, share: Share) -> None:
    """Refuse options that contradict each other."""
    few, several = args.out is None, share.world > 1
    for given, what, options in (
        (args.out, "--out", ("all_probs", "resume", "workers", "engine")),
        (args.engine, "--engine ray", ("address", *RAY_NUMBERS)),
        (args.out or args.write, "--out or --write", ("overwrite",)),
        (args.write, "--write", ("skip_tagged",)),
    ):
        if not given:
            refuse_options(args, options, f"it is an option of {what}", f"give {what} too")
    numbers = {"--batch-size": (args.batch_size, 1), "--workers": (args.workers, 0)}
    numbers |= {f"--{name.replace('_', '-')}": (getattr(args, name), 0) for name in RAY_NUMBERS}
    for name, (number, least) in numbers.items():
        if number is not None and not number >= least:
            raise InputError(name, f"{number:g} is below {least}", f"give {least} or more")
    ray = "Ray makes the processes itself; WORLD_SIZE is for torchrun"
    beside = f"tags go beside the images, not to {'--explain' if few else '--out'}"
    begun = f"work goes on as it began, without {'other images' if args.words else '--overwrite'}"
    own = any(are_same(word, args.out) for word in args.words)
    refuse_first(
        (not args.words and not args.resume, *NO_IMAGE),
        (args.engine and several, "--engine", ray, "leave out one of them"),
        (args.write and not (few and args.explain is None), "--write", beside, "give one after the other"),
        (few and several, "WORLD_SIZE", f"{share.world} processes would print the same", "write to a file with --out"),
        (own, "--out", f"{args.out} holds the images themselves", "write to another file"),
        (not few and args.explain, "--explain", "nothing is drawn with --out", "explain a few images without it"),
        (args.resume and (args.words or args.overwrite), "--resume", begun, "leave out one of them"),
        (several and STDIN in args.words, STDIN, "several processes would share one stdin", "name a folder instead"),
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    check_rule(args.threshold, args.top_k)
    check_effort(args.effort, "--effort")
    if args.prefer is not None and (args.threshold is not None or args.top_k is not None):
        other = "--top-k" if args.threshold is None else "--threshold"
        raise InputError("--prefer", f"{other} decides without the fitted thresholds", "leave out one of them")
    check_model(args.model)
    if args.tags is not None and not args.tags.is_file():
        raise InputError(str(args.tags), "there is no such file", "give a TOML file (docs/predict.md)")
