"""`pivotpatch report`: all that there is to know of a model as one HTML file that opens offline."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.sources import Source, open_pictures, open_source, score_source
from pivotpatch.core.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.scores import Scores
    from pivotpatch.inference.scoring import Progress
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.report.findings import Counts
    from pivotpatch.report.subject import Subject

SEED = 0  # of the resamples: the same scores have the same intervals
MOST = 200  # pictures; more would not be looked at


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    report = verbs.add_parser(
        "report",
        help="write one HTML file with all that there is to know of a model",
        description="Write one HTML file that opens offline: mAP with its interval, a table of the labels, curves, the "
        "pairs of labels that mislead the model, with pictures, case studies, likely label errors and calibration.",
        usage="%(prog)s WHAT [DATA] [options]",
    )
    report.add_argument(
        "words",
        nargs="+",
        metavar="WHAT [DATA]",
        help="a run, a checkpoint, or scores (.parquet, .npz, .csv); then the address of the pictures, a table or a "
        "folder of them; without it a run is judged on its validation pictures, and scores have no pictures",
    )
    report.add_argument("--baseline", metavar="WHAT", help="compare with this run, checkpoint or file of scores")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    report.add_argument(
        "--pictures", type=int, default=60, metavar="N", help=f"pictures to show at most, up to {MOST} (60)"
    )
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Score where need be, measure, and write the file in the first process alone."""
    _check_options(args)
    source = open_source(args.words[0], action="report on")
    other = None if args.baseline is None else open_source(args.baseline, action="report on")
    records = _find_records(args.words[1:], [each for each in (source, other) if each is not None])
    from pivotpatch.cli.train_text import show_training
    from pivotpatch.training.processes import join_processes

    state = join_processes()
    with show_training() as shown:
        subject = _make_subject(source, records, like=None, progress=shown.progress)
        baseline = None
        if other is not None:
            baseline = _make_subject(other, records, like=subject.scores, progress=shown.progress)
        if state.is_main_process:
            size = _write(subject, baseline, records, args, progress=shown.progress)
    if state.is_main_process:
        print(f"wrote {args.out}, {size / 1e6:.2f} MB")
    state.destroy_process_group()
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant before anything is loaded."""
    if len(args.words) > 2:
        raise InputError(f"{args.words[2]!r}", "a third word", "give what to report on and the pictures")
    if not 0 <= args.pictures <= MOST:
        raise InputError("--pictures", f"{args.pictures} pictures", f"give 0 to {MOST}")
    if args.out.suffix.lower() not in (".html", ".htm") or args.out.is_dir():
        raise InputError(str(args.out), "is no name for a page", "end it in .html")
    if not args.out.absolute().parent.is_dir():
        raise InputError(str(args.out), f"there is no folder {args.out.parent}", "make it first")


def _find_records(words: list[str], sources: list[Source]) -> "RecordSet | None":
    """The pictures to judge by: those that were named, else the validation pictures of a run, else none."""
    named = open_pictures(words)
    if named is not None:
        return named
    for source in sources:
        if source.config is not None:
            from pivotpatch.training.build import open_training_records

            held = open_training_records(source.config).val
            if held is not None:
                return held
    for source in sources:
        if source.model is not None:
            wrong = "there are no validation pictures to judge it by"
            raise InputError(str(source.path), wrong, "name pictures after it, such as photos.csv")
    return None


def _make_subject(
    source: Source, records: "RecordSet | None", *, like: "Scores | None", progress: "Progress"
) -> "Subject":
    """Scores of a source on the pictures, and what is known of it."""
    from pivotpatch.core.policies import PerLabel
    from pivotpatch.inference.score_file import read_scores
    from pivotpatch.report.subject import Subject
    from pivotpatch.training.config import load_config
    from pivotpatch.training.folder import read_log

    name = source.path.resolve().name
    if source.model is None:
        scores = read_scores(source.path, records=records) if like is None else read_scores(source.path, like=like)
        return Subject(name, scores, facts=_tell_file(scores))
    assert records is not None
    model = source.model
    started = time.perf_counter()
    scores = score_source(
        model,
        records if model.labels == records.labels.names else records.keep_labels(model.labels),
        config=source.config or load_config(None),
        keep_patches=True,
        progress=lambda done, total: progress(f"score {source.path.name}", done, total),
    ).scores
    facts = _tell_network(source) | _tell_scoring(scores, model, time.perf_counter() - started) | _tell_run(source)
    subject = Subject(name, scores, facts=facts, log=() if source.config is None else read_log(source.path))
    fits = model.calibration is None or model.calibration.kind == scores.ranking
    if model.thresholds is None or not fits:
        return subject
    from dataclasses import replace

    return replace(subject, policy=PerLabel(model.thresholds), calibration=model.calibration)


def _tell_file(scores: "Scores") -> dict[str, str]:
    passes = {} if scores.weights is None else {"forward passes a picture": str(1 + scores.weights.shape[1])}
    return {"model": "known by its scores alone", **passes}


def _tell_network(source: Source) -> dict[str, str]:
    from pivotpatch.models.classifier import IndependentClassifier
    from pivotpatch.models.patch_classifier import PatchClassifier

    model = source.model
    assert model is not None
    built, passes = model.architecture, 1
    if isinstance(model, PatchClassifier):
        passes = 1 + model.grid**2
    elif isinstance(model, IndependentClassifier):
        passes = len(model.labels)
    side = model.preprocessing.image_size
    return {
        "model": f"{type(model).__name__}, {built.backbone}, {built.head} head, {side} x {side} pixels",
        "weights": f"{sum(weight.numel() for weight in model.parameters()):,}",
        "forward passes a picture": str(passes),
    }


def _tell_scoring(scores: "Scores", model: "Classifier", seconds: float) -> dict[str, str]:
    device = next(model.parameters()).device
    speed = f"{len(scores) / seconds:.3g} pictures a second, with decoding"
    return {"scoring": f"{seconds:.3g} s on {device.type}, {speed}"}


def _tell_run(source: Source) -> dict[str, str]:
    """What training cost, where the source is a run that came to its end."""
    from datetime import timedelta

    from pivotpatch.training.folder import METRICS

    path = source.path / METRICS
    if source.config is None or not path.is_file():
        return {}
    try:
        metrics = json.loads(path.read_text("utf-8"))
        took, steps, best = timedelta(seconds=round(metrics["seconds"])), metrics["steps"], metrics["best_step"]
    except (ValueError, KeyError, TypeError):
        raise InputError(str(path), "is not what a run writes", "remove it") from None
    return {"training": f"{steps:,} steps in {took} on {source.config.data.train}; step {best:,} was chosen"}


def _write(
    subject: "Subject",
    baseline: "Subject | None",
    records: "RecordSet | None",
    args: argparse.Namespace,
    *,
    progress: "Progress",
) -> int:
    import torch

    from pivotpatch.report.findings import gather_findings
    from pivotpatch.report.html import write_report

    findings = gather_findings(
        subject,
        baseline=baseline,
        counts=_share_pictures(args.pictures),
        generator=torch.Generator().manual_seed(SEED),
        progress=progress,
    )
    progress("draw", 0, 1)
    size = write_report(args.out, findings, subject, baseline=baseline, records=records, pictures=args.pictures)
    progress("draw", 1, 1)
    return size


def _share_pictures(count: int) -> "Counts":
    """How much to list, so that each part of the report gets its share of the pictures; a little without any."""
    from pivotpatch.report.findings import Counts

    return Counts(cases=max(count // 5, 6), pairs=max(count // 6, 6), examples=3, errors=max(3 * count // 10, 6))
