"""`pivotpatch report`: all that there is to know of a model as one HTML file that opens offline."""

import argparse
import time
from dataclasses import replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pivotpatch.cli.console import StageProgress
from pivotpatch.cli.sources import (
    Source,
    keep_known_labels,
    open_pictures,
    open_source,
    read_policy,
    read_score_file,
    score_source,
    warn_of_trained,
)
from pivotpatch.cli.telling import list_not_read
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import evaluating, score_images
from pivotpatch.models.classifier import Classifier
from pivotpatch.process import Progress
from pivotpatch.report import Subject, gather_findings, write_report
from pivotpatch.runtime.checks import is_named
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import open_run_records
from pivotpatch.training.processes import join_processes
from pivotpatch.writing import check_place

SEED = 0  # of the resamples: the same scores have the same intervals
MOST = 200  # images; more would not be looked at


def run_report(args: argparse.Namespace) -> int:
    """Score where need be, measure, and write the file in the first process alone."""
    if not 0 <= args.images <= MOST:
        raise InputError("--images", f"{args.images} images", f"give 0 to {MOST}")
    check_place(args.out, (".html", ".htm"), "a page")
    source = open_source(args.words[0])
    other = None if args.baseline is None else open_source(args.baseline)
    records = open_pictures(args.words[1:])
    held_out = records is None
    records = records or _find_held_out([source] if other is None else [source, other])
    state = join_processes()
    with StageProgress() as shown:
        make = partial(_make_subject, records=records, held_out=held_out, on_error=args.on_error, progress=shown.tell)
        subject = make(source)
        baseline = None if other is None else make(other, like=subject.scores)
        if baseline is not None and len(baseline.scores) < len(subject.scores):
            assert baseline.scores.indices is not None  # both are judged by what both could read
            subject = replace(subject, scores=subject.scores.select(baseline.scores.indices))
        policy = args.policy and read_policy(args.policy, subject.scores.labels, config=source.config)
        if state.is_main_process:
            if records is not None and not held_out:
                warn_of_trained(source, records)
            findings = gather_findings(
                subject,
                baseline=baseline,
                policy=policy,
                definition=args.definition,
                empty=args.empty,
                images=args.images,
                generator=torch.Generator().manual_seed(SEED),
            )
            size = write_report(args.out, findings, records=records, images=args.images)
    if state.is_main_process:
        print(f"wrote {args.out}, {size / 1e6:.2f} MB")
    state.destroy_process_group()
    return 0


def _find_held_out(sources: list[Source]) -> RecordSet | None:
    """The validation images of the first run; None where all are scores."""
    for source in sources:
        held = None if source.config is None else open_run_records(source.path, source.config).val
        if held is not None:
            return replace(held, name=f"{held.name}, the validation images")
    for source in sources:
        if source.model is not None:
            wrong = "there are no validation images to judge it by"
            raise InputError(str(source.path), wrong, "name images after it, such as photos.csv")
    return None


def _make_subject(
    source: Source,
    *,
    records: RecordSet | None,
    like: Scores | None = None,
    held_out: bool,
    on_error: str | None,
    progress: Progress,
) -> Subject:
    """Scores of a source on the images, or on those of other scores, and what is known of it."""
    name, model = str(source.path) if is_named(str(source.path)) else source.path.resolve().name, source.model
    if model is None:
        scores = read_score_file(source.path, records=None if like else records, like=like)
        return Subject(name, scores, {"model": "known by its scores alone"})
    config, facts = source.config or load_config(None), _describe(model)
    if on_error is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": on_error})})
    assert records is not None
    if like is None:
        judged = keep_known_labels(records, model)
    else:
        unknown = [label for label in like.labels if label not in model.labels]
        if unknown:
            wrong = f"it does not know {len(unknown)} of the {len(like.labels)} labels that are judged"
            raise InputError(str(source.path), f"{wrong} ({shorten(unknown)})", "give a baseline that does")
        assert like.indices is not None
        judged = records.select(like.indices.numpy()).keep_labels(like.labels)
    started = time.perf_counter()
    scores, not_read = score_source(
        model, judged, config=config, keep_patches=True, progress=partial(progress, f"score {name}")
    )
    list_not_read(not_read, rest="")
    seconds, device = time.perf_counter() - started, next(model.parameters()).device.type
    facts["scoring"] = f"{seconds:.3g} s on {device}, {len(scores) / seconds:.3g} images a second, with decoding"
    return Subject(name, scores, facts, fitted_here=held_out and bool(scores.thresholds or scores.calibration))


def _describe(model: Classifier) -> dict[str, str]:
    """What a model is made of and what it costs."""
    built, side = model.architecture, model.preprocessing.image_size
    image = torch.zeros(1, 3, model.picture_size, model.picture_size, dtype=torch.uint8)
    plain = sdpa_kernel(SDPBackend.MATH)  # attention as products: older torch does not count the CPU's fused one
    with FlopCounterMode(display=False) as counted, evaluating(model), torch.inference_mode(), plain:
        score_images(model, image)
    return {
        "model": f"{type(model).__name__}, {built.backbone}, {built.head} head, {side} x {side} pixels",
        "labels that it knows": f"{len(model.labels):,}",
        "weights": f"{sum(weight.numel() for weight in model.parameters()):,}",
        "cost of an image": f"{counted.get_total_flops() / 1e9:.3g} GFLOPs",
    }
