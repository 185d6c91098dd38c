"""`pivotpatch train`: train what a recipe, a data set and a few changes describe."""

import argparse
import json
import re
import shlex
import textwrap
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotpatch.cli.console import Screen, StageProgress, make_table, tell, write_figures
from pivotpatch.cli.telling import list_not_read
from pivotpatch.data.address import read_address
from pivotpatch.data.prepare import PLANS
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.training.config import RunConfig, dump_config, find_recipe, list_recipes, load_config

if TYPE_CHECKING:
    from pivotpatch.training.dry_run import DryRun

OVERRIDE = re.compile(r"\w+(\.\w+)*\s*=")
RUNS = Path("runs")


def run_train(args: argparse.Namespace) -> int:
    """Train, resume, or only look."""
    if args.resume is not None:
        if args.words or args.corrections or args.show_config or args.dry_run or args.full:
            raise InputError("--resume", "a run goes on with the configuration it has", "give the folder alone")
        return _train(None, args.resume, as_json=args.json)
    changes = ["model.frozen=false"] if args.full else []
    changes += [] if args.corrections is None else [f"data.corrections={json.dumps(args.corrections)}"]
    name, config = read_words([*args.words, *changes])
    if args.show_config:
        print(dump_config(config, explained=True), end="")
        return 0
    _check_prepared(config.data.train or "")
    if args.dry_run:
        return _try(config, as_json=args.json)
    return _train(config, args.out or RUNS / name, as_json=args.json)


def read_words(words: list[str]) -> tuple[str, RunConfig]:
    """A name for the run and its configuration, from a recipe, an address and changes in any order."""
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
        todo = "give one, and others by data.val= or data.test="
        raise InputError(f"{addresses[1]!r}", "a second set of images", todo)
    if addresses:  # a recipe's others belong to its own training images
        changes = [f"data.train={json.dumps(addresses[0])}", "data.val=", "data.test=[]", *changes]
    config = load_config(recipe, changes)
    return recipe.stem if recipe else f"{config.task.kind}-{config.model.backbone}", config


def _check_prepared(address: str) -> None:
    """Say how to get the data of a recipe where it is not there yet."""
    for name in PLANS:
        root = f"data/{name}"
        if f":{root}" in address and not Path(root).exists():
            todo = f"run pivotpatch data prepare {name} --root {root}, or give images of your own"
            raise InputError(address, f"there is no folder {root}", todo)


def _try(config: RunConfig, *, as_json: bool) -> int:
    from pivotpatch.training.dry_run import try_run
    from pivotpatch.training.processes import make_accelerator

    accelerator = make_accelerator(config)
    tried = try_run(config, accelerator, tell=tell)
    if accelerator.is_main_process:
        list_not_read(tried.not_read)
        if as_json:
            print(json.dumps(asdict(tried)))
        else:
            _print_dry_run(tried)
    accelerator.end_training()
    return 0


def _print_dry_run(tried: "DryRun") -> None:
    rows = {
        "device": f"{tried.device}, {tried.processes} process{'es' if tried.processes > 1 else ''}",
        "model": f"{tried.weights / 1e6:.1f} million weights, {tried.labels} labels",
        "images": f"{tried.pictures:,} to train on, {tried.val_pictures:,} to validate",
        "steps": f"{tried.steps:,}, {tried.seconds_per_step:.3g} s each",
        "validation": f"{tried.seconds_per_validation:.3g} s each time",
        "time": f"about {timedelta(seconds=round(tried.seconds))}, if decoding keeps up",
        "memory": f"{tried.memory_bytes / 1e9:.2f} GB, and {tried.held_bytes / 1e9:.2f} GB for decoded images",
        "chosen": next(iter(tried.choices.values())),
        **{" " * number: row for number, row in enumerate(list(tried.choices.values())[1:])},
    }
    for name, row in rows.items():
        print(textwrap.fill(row, 80, initial_indent=f"{name:<12}", subsequent_indent=" " * 12))


def _train(config: RunConfig | None, out: Path, *, as_json: bool) -> int:
    """Train in a new folder, or go on in an old one, and tell what came of it in the first process alone."""
    from accelerate import PartialState

    from pivotpatch.training.folder import CONFIG, read_log
    from pivotpatch.training.loop import fit, resume
    from pivotpatch.training.plots import plot_curves

    with StageProgress(outer="train") as shown:
        hear: dict[str, Any] = {"progress": shown.tell, "report": partial(report_entry, shown), "tell": tell}
        result = resume(out, **hear) if config is None else fit(config, out, **hear)
    state = PartialState()
    if state.is_main_process:
        begun = (out / CONFIG).is_file()  # else a teacher of CPSD was stopped, and the same command must find no folder
        where = out / "metrics.json" if begun else f"{out}-teachers"
        list_not_read(result.metrics["not_read"], rest=f", see {where}")
        if as_json:
            print(json.dumps(result.metrics))
        elif begun:
            _print_result(result.metrics, out)
        if begun:
            write_figures({"curves": plot_curves({"": read_log(out)})}, out)
        if result.stopped_by is not None:
            again = f"pivotpatch train --resume {shlex.quote(str(out))}" if begun else "the same command, given again,"
            tell(f"stopped by {result.stopped_by.name}; {again} goes on")
    state.destroy_process_group()
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _print_result(metrics: dict[str, Any], out: Path) -> None:
    screen = Screen()
    if metrics["best_val_mAP"] is not None:
        best = f"{100 * metrics['best_val_mAP']:.2f} ({metrics['ranking']} logits, step {metrics['best_step']})"
        screen.print(f"best validation mAP {best}")
    if "gain" in metrics:
        screen.print(tell_gain(metrics["gain"], frozen=metrics["frozen"]))
    kept = metrics.get("tuned", {}).get("kept")
    if kept is not None:
        screen.print(f"labels that the model knew keep {kept:.0%} of what they learned, best out of fold")
    tests: dict[str, Any] = metrics.get("test", {})
    if tests:
        names = list(next(iter(tests.values())))
        table = make_table(["test mAP (%)", *names])
        for address, found in tests.items():
            table.add_row(address, *(f"{100 * found[name]['mean']:.2f}" for name in names))
        screen.print(table)
    took = timedelta(seconds=round(metrics["seconds"]))
    place = out / ("best" if metrics["finished"] or metrics["best_val_mAP"] is not None else "last")
    where = f"; the model is in {place}" if metrics["steps"] else ""
    screen.print(f"{metrics['steps']} steps in {took}{where}")


def tell_gain(gain: dict[str, Any], *, frozen: bool) -> str:
    """What a run gained, in two lines; where it lost, in a third what to do.

    >>> gain = {"before": 0.8, "after": 0.75, "gained": -0.05, "interval": (-0.08, -0.02)}
    >>> gain |= {"images": 300, "trained_on": 0}
    >>> print(tell_gain(gain, frozen=False))
    mAP 80.00 before any step, now 75.00: -5.00 (-8.00 to -2.00)
    on 300 images, which were held out
    the model was better before: keep that one, or give more images
    >>> print(tell_gain(gain | {"trained_on": 100}, frozen=True).splitlines()[1])
    on 300 images, 100 scored by a model that learned from them, so too high
    """
    low, high = (f"{100 * bound:+.2f}" for bound in gain["interval"])
    noise = ", within noise" if gain["interval"][0] <= 0 <= gain["interval"][1] else ""
    seen = "each scored by heads that did not learn from it" if frozen else "which were held out"
    if gain["trained_on"]:
        seen = f"{gain['trained_on']:,} scored by a model that learned from them, so too high"
    change = f"mAP {100 * gain['before']:.2f} before any step, now {100 * gain['after']:.2f}"
    lost = "\nthe model was better before: keep that one, or give more images" if gain["interval"][1] < 0 else ""
    return f"{change}: {100 * gain['gained']:+.2f} ({low} to {high}){noise}\non {gain['images']:,} images, {seen}{lost}"


def report_entry(shown: StageProgress, entry: dict[str, Any]) -> None:
    """Show an entry of a run's log on stderr: losses beside the progress of training, validation in a line."""
    if "loss" in entry:
        parts = [f"{value:.3g}" for name, value in entry.items() if name.startswith("loss_")]
        loss = f"loss {entry['loss']:.3g}" + (f" ({' + '.join(parts)})" if len(parts) > 1 else "")
        shown.note(f"{loss}, {entry['pictures_per_second']:.3g} images/s")
    else:
        found = {name.removeprefix("val_mAP_"): value for name, value in entry.items() if "mAP" in name}
        means = ", ".join(f"{name} {100 * value:.2f}" for name, value in found.items())
        tell(f"epoch {entry['epoch']}: validation mAP {means}")
