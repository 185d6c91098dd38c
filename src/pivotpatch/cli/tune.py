"""`pivotpatch tune`: fit lam, calibration, thresholds and effort on validation images, into the checkpoint."""

import argparse
import json
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pivotpatch.cli import sources
from pivotpatch.cli.console import Screen, StageProgress, make_table, tell, write_figures
from pivotpatch.cli.evaluate import NAMES, write_bounds
from pivotpatch.cli.sources import Scored, Source
from pivotpatch.cli.telling import list_not_read, refuse_first
from pivotpatch.core.metrics import MEASURES
from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.models.checkpoint import DESCRIPTION, WEIGHTS, fingerprint, save_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.checks import PREFERENCES, check_effort
from pivotpatch.runtime.values import choose_effort
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder, open_run_records
from pivotpatch.training.processes import join_processes
from pivotpatch.tuning.plots import plot_effort, plot_lam, plot_reliability
from pivotpatch.tuning.thresholds import Goal, parse_goal
from pivotpatch.tuning.tune import Tuning, tune_scores

SEED = 0  # of the resamples: the same scores have the same intervals
WARNING = "what is measured on these images from now on is worth nothing: never tune on those that you test on"


def run_tune(args: argparse.Namespace) -> int:
    """Score where need be, fit, store and tell it in the first process alone."""
    check_effort(args.effort, "--effort")
    goal = args.thresholds if args.thresholds in PREFERENCES else parse_goal(args.thresholds)
    source = sources.open_source(args.words[0])
    model = source.model
    if model is None:
        raise InputError(args.words[0], "holds scores, no model", f"write RUN --scores {args.words[0]}")
    closer_size = args.closer
    if args.closer is None and args.calibration != "none":  # without one no effort is fitted
        closer_size = model.closer_size
    _check_model(model, source, closer_size, args)
    records = _open_images(source, model, args)
    if records is not None:
        _check_common(model, records.labels.names, records.name, args)
    state = join_processes()
    with ExitStack() as held:
        if args.out is None and source.config is not None and state.is_main_process:
            held.enter_context(closing(RunFolder.open(source.path)))  # nobody trains it while its best is replaced
        with StageProgress() as shown:
            score = partial(
                sources.score_source,
                model,
                config=source.config or load_config(None),
                keep_patches=True,
                progress=partial(shown.tell, "score"),
            )
            if records is None or args.scores is not None:
                scored = Scored(_read(source, model, records, args), {})
            else:
                scored = score(records)
            closer = score(records, closer_size=closer_size).scores if closer_size and records else None
        if state.is_main_process:
            _finish(source, model, scored, closer, goal, args)
    state.destroy_process_group()
    return 0


def _check_model(model: Classifier, source: Source, closer_size: int | None, args: argparse.Namespace) -> None:
    """Refuse what cannot be fitted or stored, before the work is done."""
    folder, more, backup = source.checkpoint, list[str](), ""
    if folder is not None:  # a run goes on from what else is there
        more = sorted({path.name for path in folder.iterdir()} - {DESCRIPTION, WEIGHTS})
        whole = folder.resolve()
        aside = whole.with_name(f"{whole.name}.old")  # where the old model steps; a run removes its own
        backup = str(aside) if source.config is None and aside.exists() else ""
    asked = {"--closer": args.closer, "--effort": args.effort}
    efforts = [name for name, value in asked.items() if value is not None]
    no_effort = bool(efforts) and args.calibration == "none"
    plain = args.effort is not None and not isinstance(model, PatchClassifier)
    foreign = "is somebody else's model, of which no checkpoint is written that could keep what is fitted"
    lost = f"holds more than a checkpoint ({', '.join(more)}), which would be lost"
    refuse_first(
        (isinstance(model, ForeignClassifier), str(source.path), foreign, "tune one of ours"),
        (no_effort, " and ".join(efforts), "without a calibration no effort is fitted", "leave --calibration out"),
        (plain, "--effort", "this model has no patches to look at", "leave it out"),
        (args.out is not None and args.out.exists(), str(args.out), "exists already", "choose another folder"),
        (args.out is None and folder is None, str(source.path), "is not written to", "give --out FOLDER"),
        (args.out is None and more, str(folder), lost, "give --out FOLDER"),
        (args.out is None and backup, backup, "would be deleted", "rename it, or give --out FOLDER"),
    )
    if closer_size:
        sources.check_closer(model, closer_size)
        todo = "leave --scores out, or give --closer 0 to look at patches"
        refuse_first((args.scores, "--closer", "a file of scores shows no images to look at again", todo))


def _open_images(source: Source, model: Classifier, args: argparse.Namespace) -> RecordSet | None:
    """The images that are named, or that the run held out; None where scores alone are given."""
    what, *words = args.words
    records = sources.open_pictures(words)
    if records is not None:
        _refuse_trained(source, records, records.name)
        return sources.keep_known_labels(records, model)
    if args.scores is not None:
        return None
    held = None if source.config is None else open_run_records(source.path, source.config).val
    if held is None:
        wrong = "a checkpoint knows no images" if source.config is None else "the run held out no images"
        raise InputError(what, wrong, "name validation images after it, such as val.csv")
    assert source.config is not None
    if source.config.data.val is not None:
        _refuse_trained(source, held, held.name, todo="name others behind the run, such as val2.csv")
    unknown = held.count_labels(-1) == len(held)
    return held.keep_labels([name for name, none in zip(held.labels.names, unknown, strict=True) if not none])


def _check_common(model: Classifier, labels: tuple[str, ...], where: str, args: argparse.Namespace) -> None:
    """Keep what all labels have in common where the images tell of some alone; refuse to be asked for more."""
    if labels == model.labels:
        return
    lacks = f"{where} has {len(labels)} of the model's {len(model.labels)} labels, and all have it in common"
    closer = args.closer is not None and (args.closer or None) != model.closer_size
    refuse_first(
        (closer, "--closer", lacks, "leave it out, or label the others too"),
        (args.effort is not None, "--effort", lacks, "leave it out, or label the others too"),
    )
    args.mixing = "keep"


def _refuse_trained(
    source: Source, records: RecordSet, where: str, *, todo: str = "give the run alone, which takes what it held out"
) -> None:
    """Refuse images that the run was trained on, where these can still be found."""
    wrong = sources.find_trained(source, records)
    if wrong is not None:
        raise InputError(where, wrong, todo)


def _read(source: Source, model: Classifier, records: RecordSet | None, args: argparse.Namespace) -> Scores:
    """Scores of this model from a file, mixed as it mixes them now; none of the images that it was trained on."""
    scores, where = sources.read_score_file(args.scores, records=records), str(args.scores)
    again = f"write it by pivotpatch evaluate {source.path} DATA --save FILE --keep-patches"
    odd = scores.labels != tuple(name for name in model.labels if name in scores.labels)
    labels = f"its {len(scores.labels)} labels are not among the {len(model.labels)} of the model, in its order"
    other = f"another model than {source.path} wrote it, or it was trained on since"
    closer = f"it is of a closer look at {scores.closer_size} pixels, not of the patches"
    refuse_first(
        (odd, where, labels, again),
        (scores.network not in (None, fingerprint(model)), where, other, again),
        (scores.closer_size is not None, where, closer, "write it by pivotpatch evaluate without --closer"),
    )
    _check_common(model, scores.labels, where, args)
    if records is None and scores.data is not None:
        named, scored = set(scores.pictures), None
        with suppress(InputError):  # the images may be gone
            scored = open_records(scores.data)
        if scored is not None:
            rows = np.flatnonzero([name in named for name in scored.names])
            _refuse_trained(source, scored.select(rows), where)
    if not isinstance(model, PatchClassifier):
        return replace(scores.only("image"), lam=1.0, temperature=1.0)
    if model.patch_only:
        return scores
    lost = scores.patch_logits is None and scores.temperature != model.patching.temperature
    refuse_first((lost, where, "its temperature is not the model's", again))
    return scores.remix(lam=model.patching.lam, temperature=model.patching.temperature)


def _finish(
    source: Source,
    model: Classifier,
    scored: Scored,
    closer: Scores | None,
    goal: Goal | str,
    args: argparse.Namespace,
) -> None:
    """Fit, store, draw and print."""
    place = args.out or source.checkpoint
    assert place is not None
    list_not_read(scored.not_read)
    found = tune_scores(
        scored.scores,
        mixing=args.mixing,
        calibration=args.calibration,
        goal=goal,
        model=model,
        closer=closer,
        effort=choose_effort(args.effort, model.adaptive),
        generator=torch.Generator().manual_seed(SEED),
    )
    if not args.json:
        _print_tuning(found)
    run = source.config
    if args.out is None and run is not None and run.model.frozen is True and run.frozen.folds:
        fitted = "train fitted calibration, thresholds and effort to all its training images, out of fold"
        tell(f"{fitted}; those of {found.pictures:,} images take their place (--out FOLDER keeps both)")
    had = model.adaptive is not None
    found.store(model)
    stored = {f"--prefer {name}": name in model.preferences for name in found.preferences}
    if had or found.adaptive is not None:
        stored["an effort"] = model.adaptive is not None
    if lost := [name for name, there in stored.items() if not there]:
        part = len(found.labels) < len(model.labels)
        why = "the model has none for its other labels; label these too" if part else "that takes a calibration"
        tell(f"not stored: {', '.join(lost)}; {why}")
    save_checkpoint(model, place, overwrite=args.out is None)
    if args.plot is not None:
        figures = {"reliability": plot_reliability(found.curves)}
        figures |= {} if found.mixing is None else {"lam": plot_lam(found.mixing)}
        figures |= {} if found.effort is None else {"effort": plot_effort(found.effort)}
        write_figures(figures, args.plot)
    if args.json:
        told = {"wrote": str(place), "not_read": scored.not_read, "warning": WARNING}
        print(json.dumps({"tuned": args.words, **found.to_dict(), **told}))
    else:
        print(f"\n{'wrote' if args.out else 'replaced'} {place}\n{WARNING}")


def _print_tuning(found: Tuning) -> None:
    """Print what was fitted to stdout, in per cent; all of it is judged out of fold."""
    screen = Screen()
    screen.print(f"{found.pictures:,} images, {len(found.labels)} labels, {NAMES[found.kind]} logits")
    screen.print("each image is judged by a fit that did not see it; all in per cent\n")
    if found.mixing is not None:
        study = found.mixing
        gain = f"{100 * study.gain.value:+.2f}", write_bounds(study.gain, sign="+")
        tried = ("as scored", study.before, study.mean_before, ()), ("shared", study.fitted, study.mean_fitted, gain)
        rows = [
            [name, *(f"{number:.3g}" for number in pair), f"{100 * mean:.2f}", *told]
            for name, pair, mean, told in tried
        ]
        screen.print(make_table(["lam and temperature", "lam", "temperature", "mAP", "gain", "95 %"], rows))
        screen.print(f"lam: {'shared' if study.pays else 'as scored, for nothing is gained beyond noise'}\n")
    elif found.kind == "tde":
        screen.print(f"lam {found.lam:.3g} and temperature {found.temperature:.3g} as they are\n")
    table = make_table(["probabilities", "ECE", "ECE per label", "Brier score", "log loss"])
    for name, quality in found.qualities.items():
        if name == "none" and quality == found.qualities["before"]:  # the mixture is the same, and so are these
            continue
        errors = [f"{100 * each:.2f}" for each in (quality.ece, quality.ece_per_label)]
        table.add_row(name, *errors, f"{quality.brier:.4f}", f"{quality.log_loss:.4f}")
    screen.print(table)
    screen.print(f"calibration: {found.method}\n")
    table = make_table(["decisions", "before, at 0.5", "by thresholds", *(f"for {name}" for name in found.preferred)])
    for name in (*MEASURES, "macro_f1"):
        judged = (found.before, found.after, *found.preferred.values())
        values = [f"{100 * getattr(result, name):.1f}" for result in judged]
        table.add_row("mean F1" if name == "macro_f1" else name, *values)
    screen.print(table)
    screen.print(f"thresholds: {found.thresholds}")
    for name, fitted in found.preferences.items():
        screen.print(f"predict --prefer {name}: {fitted}")
    if found.effort is not None:
        screen.print(f"effort: {found.effort}")
        if found.closer_size is not None:
            look = f"a closer look at {found.closer_size} pixels, not at the patches"
            screen.print(f"efforts between 0 and 1 take {look}")
