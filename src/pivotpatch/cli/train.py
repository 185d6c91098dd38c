"""`pivotpatch train`: train what a recipe, a data set and a few changes describe."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pivotpatch.cli.sources import list_not_read
from pivotpatch.errors import InputError, choose_one_of

if TYPE_CHECKING:
    from pivotpatch.training.config import RunConfig
    from pivotpatch.training.loop import FitResult

OVERRIDE = re.compile(r"\w+(\.\w+)*\s*=")
RUNS = Path("runs")
CURVES = "curves.png"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    train = verbs.add_parser(
        "train",
        help="train a network, or go on with a run",
        description="Train a network. Ctrl-C finishes the step and saves; --resume goes on as if nothing had happened.",
        epilog="Several GPUs: torchrun --nproc-per-node N -m pivotpatch train ...",
    )
    train.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a recipe (see pivotpatch recipes) or a .toml file; an address of pictures or a file with their list; "
        "and changes such as train.epochs=3, the last word wins",
    )
    place = train.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the run (default: {RUNS}/ and the recipe)")
    place.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in this folder")
    only = train.add_mutually_exclusive_group()
    only.add_argument("--show-config", action="store_true", help="print the whole configuration as TOML and stop")
    only.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, train one batch, tell time and memory, write nothing",
    )
    train.add_argument("--json", action="store_true", help="write the result as JSON")
    train.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Train, resume, or only look."""
    from pivotpatch.training.signals import StoppedEarly, raise_signals

    try:
        with raise_signals():
            ended = _begin(args) if args.resume is None else _resume(args)
    except StoppedEarly as stopped:
        from pivotpatch.cli.console import tell

        what = "began" if args.resume is None else "went on"
        tell(f"stopped by {stopped.asked.name} before training {what}; nothing is lost")
        return 128 + stopped.asked
    return 0 if ended is None else _end(*ended, as_json=args.json)


class _Ended(NamedTuple):
    """How a run ended, and its folder."""

    result: "FitResult"
    out: Path


def _begin(args: argparse.Namespace) -> _Ended | None:
    """Train a new run; None where there is only something to look at."""
    name, config = read_words(args.words)
    if args.show_config:
        from pivotpatch.training.config import dump_config

        print(dump_config(config, explained=True), end="")
        return None
    if config.data.train is None:
        wrong, todo = "no pictures are named", "give an address such as table:photos.csv, or data.train=..."
        raise InputError("pivotpatch train", wrong, todo)
    if args.dry_run:
        _try(config, as_json=args.json)
        return None
    from pivotpatch.cli.console import tell
    from pivotpatch.cli.train_text import show_training
    from pivotpatch.training.loop import fit

    out = args.out or RUNS / name
    with show_training() as shown:
        return _Ended(fit(config, out, progress=shown.progress, report=shown.report, tell=tell), out)


def read_words(words: list[str]) -> tuple[str, "RunConfig"]:
    """A name for the run and its configuration, from a recipe, an address and changes in any order."""
    from pivotpatch.data.address import read_address
    from pivotpatch.training.config import load_config
    from pivotpatch.training.recipes import find_recipe, list_recipes

    recipe, addresses, changes = None, [], []
    named = {known.name for known in list_recipes()}  # a folder of the same name, say of a run, does not hide it
    for word in words:
        if OVERRIDE.match(word):
            changes.append(word)
        elif word not in named and (address := read_address(word)) is not None:
            addresses.append(address)
        elif word not in named and not word.endswith(".toml"):
            wrong = "is neither a recipe nor a table or folder that is there"
            raise InputError(f"{word!r}", wrong, choose_one_of(word, named))
        elif recipe is None:
            recipe = find_recipe(word)
        else:
            raise InputError(f"{word!r}", f"a second recipe besides {recipe.stem!r}", "give one")
    if len(addresses) > 1:
        raise InputError(
            f"{addresses[1]!r}", "a second set of pictures", "give one, and others by data.val= or data.test="
        )
    given = [f"data.train={json.dumps(address)}" for address in addresses]
    if given:
        given += ["data.val=", "data.test=[]"]  # a recipe's belong to its own training pictures
    config = load_config(recipe, [*given, *changes])
    name = recipe.stem if recipe else f"{config.task.kind}-{config.model.backbone}"
    return name, config


def _resume(args: argparse.Namespace) -> _Ended:
    if args.words or args.show_config or args.dry_run:
        raise InputError("--resume", "a run goes on with the configuration it has", "give the folder alone")
    from pivotpatch.cli.train_text import show_training
    from pivotpatch.training.loop import resume

    with show_training() as shown:
        return _Ended(resume(args.resume, progress=shown.progress, report=shown.report), args.resume)


def _try(config: "RunConfig", *, as_json: bool) -> None:
    from dataclasses import asdict

    from pivotpatch.cli.console import tell
    from pivotpatch.cli.train_text import print_dry_run
    from pivotpatch.training.dry_run import try_run
    from pivotpatch.training.processes import make_accelerator

    accelerator = make_accelerator(config)
    tried = try_run(config, accelerator, tell=tell)
    if accelerator.is_main_process:
        list_not_read(tried.not_read)
        if as_json:
            print(json.dumps(asdict(tried)))
        else:
            print_dry_run(tried)
    accelerator.end_training()


def _end(result: "FitResult", out: Path, *, as_json: bool) -> int:
    """Tell what came of it, in the first process alone."""
    from accelerate import PartialState

    from pivotpatch.cli.train_text import print_result

    state = PartialState()
    if state.is_main_process:
        list_not_read(result.metrics["not_read"], rest=f", see {out / 'metrics.json'}")
        if as_json:
            print(json.dumps(result.metrics))
        else:
            print_result(result, out)
        _draw_curves(out)
        if result.stopped_by is not None:
            goes_on = f"pivotpatch train --resume {shlex.quote(str(out))} goes on"
            print(f"stopped by {result.stopped_by.name}; {goes_on}", file=sys.stderr)
    state.destroy_process_group()
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _draw_curves(out: Path) -> None:
    """Draw what the log of a run says."""
    from pivotpatch.training.folder import read_log
    from pivotpatch.training.plots import plot_curves
    from pivotpatch.writing import explain_disk_faults, replacing

    with explain_disk_faults(out), replacing(out / CURVES) as written:
        plot_curves({"": read_log(out)}).savefig(written, format="png")
    print(f"drew {out / CURVES}", file=sys.stderr)
