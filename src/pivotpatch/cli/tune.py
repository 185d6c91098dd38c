"""`pivotpatch tune`: fit lam, calibration, thresholds and effort on validation pictures, into the checkpoint."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.figures import write_figures
from pivotpatch.cli.sources import (
    Scored,
    Source,
    check_closer,
    list_not_read,
    open_source,
    read_score_file,
    score_source,
)
from pivotpatch.cli.tune_pictures import check_scores, open_tuning_pictures
from pivotpatch.errors import InputError, shorten

if TYPE_CHECKING:
    from torch import Tensor

    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.training.folder import RunFolder
    from pivotpatch.tuning.effort import CloserLook
    from pivotpatch.tuning.tune import Tuning

SEED = 0  # of the resamples: the same scores have the same intervals
WARNING = "what is measured on these pictures from now on is worth nothing: never tune on those that you test on"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    tune = verbs.add_parser(
        "tune",
        help="fit lam, calibration and thresholds on validation pictures",
        description="Fit lam and temperature, then the calibration of probabilities, then a threshold for each label, "
        "and when the image is enough (predict --effort), on pictures that the network was not trained on; judge "
        "each out of fold and store all in the checkpoint.",
        usage="%(prog)s WHAT [DATA] [options]",
        epilog="Several GPUs: torchrun --nproc-per-node N -m pivotpatch tune ...",
    )
    tune.add_argument(
        "words",
        nargs="+",
        metavar="WHAT [DATA]",
        help="a run, a checkpoint, or with --out hub:owner/name; then the address of validation pictures, a table or a "
        "folder of them, by default those that the run held out",
    )
    tune.add_argument(
        "--scores", type=Path, metavar="FILE", help="what the network says of them: evaluate --save FILE --keep-patches"
    )
    tune.add_argument(
        "--mixing",
        choices=["auto", "keep", "global", "per-label"],
        default="auto",
        help="lam and temperature: as they are, one for all labels, or one for each; auto takes the plainest that no "
        "other beats beyond noise",
    )
    tune.add_argument(
        "--calibration",
        choices=["auto", "none", "temperature", "platt", "platt_per_label"],
        default="auto",
        help="auto takes the least log loss out of fold",
    )
    tune.add_argument(
        "--thresholds", default="f1", metavar="GOAL", help="f1, precision:0.9, or cost:1:5 of mistakes (f1)"
    )
    tune.add_argument(
        "--closer",
        type=int,
        metavar="PIXELS",
        help="efforts between 0 and 1 look at the whole picture again, at so many pixels a side, not at its patches: "
        "about 1.5 times those of the image cost less and keep most; by default as the checkpoint has it, 0 for "
        "patches",
    )
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="write a new checkpoint and leave the old one alone")
    tune.add_argument("--plot", type=Path, metavar="FOLDER", help="draw reliability, mAP against lam and against cost")
    tune.add_argument("--json", action="store_true", help="write everything as JSON")
    tune.set_defaults(run=run_tune)


def run_tune(args: argparse.Namespace) -> int:
    """Score where need be, fit, store and tell it in the first process alone."""
    from pivotpatch.tuning.thresholds import parse_goal

    if len(args.words) > 2:
        raise InputError(f"{args.words[2]!r}", "a third word", "give what to tune and the pictures")
    parse_goal(args.thresholds)
    source = open_source(args.words[0])
    model = source.model
    if model is None:
        raise InputError(args.words[0], "holds scores, no network", f"write RUN --scores {args.words[0]}")
    _check_network(model, source, args)
    closer_size = model.closer_size if args.closer is None else args.closer or None
    if args.calibration == "none":  # then no effort is fitted
        closer_size = None
    if closer_size is not None:
        check_closer(model, closer_size)
    records = open_tuning_pictures(source, args.words, scored=args.scores is not None)
    from pivotpatch.training.processes import join_processes

    state = join_processes()
    folder = _claim(source, args.out) if state.is_main_process else None
    try:
        scored = Scored(_read(source, records, args.scores), {}) if args.scores else _score(source, records)
        closer = None if closer_size is None else _look_closer(source, records, scored.scores, size=closer_size)
        if state.is_main_process:
            _finish(source, scored, closer, folder, args)
    finally:
        if folder is not None:
            folder.close()
    state.destroy_process_group()
    return 0


def _check_network(model: "Classifier", source: Source, args: argparse.Namespace) -> None:
    """Refuse what cannot be stored, before the work is done."""
    from pivotpatch.models.checkpoint import DESCRIPTION, WEIGHTS
    from pivotpatch.models.foreign import ForeignClassifier
    from pivotpatch.models.patch_classifier import PatchClassifier

    if isinstance(model, ForeignClassifier):
        wrong = "is somebody else's network, which is not written as a checkpoint, so nothing could keep what is fitted"
        raise InputError(str(source.path), wrong, "tune one of ours")
    if args.mixing not in ("auto", "keep") and not isinstance(model, PatchClassifier):
        raise InputError("--mixing", "the network has no patches, so there is no lam", "leave it out")
    if args.closer is not None and args.calibration == "none":
        raise InputError("--closer", "without a calibration no effort is fitted", "leave one of both out")
    if args.out is not None:
        if args.out.exists():
            raise InputError(str(args.out), "exists already", "choose another folder")
        return
    if source.checkpoint is None:
        raise InputError(str(source.path), "is not written to", "give --out FOLDER")
    more = sorted({path.name for path in source.checkpoint.iterdir()} - {DESCRIPTION, WEIGHTS})
    if more:  # a run goes on from it
        wrong = f"holds more than a checkpoint ({', '.join(more)}), which would be lost"
        raise InputError(str(source.checkpoint), wrong, "give --out FOLDER")


def _claim(source: Source, out: Path | None) -> "RunFolder | None":
    """Keep a run from being trained while its best network is replaced."""
    from pivotpatch.training.folder import RunFolder

    return RunFolder.open(source.path) if out is None and source.config is not None else None


def _read(source: Source, records: "RecordSet | None", path: Path) -> "Scores":
    """Scores from a file, mixed as the network mixes them."""
    from pivotpatch.models.patch_classifier import PatchClassifier

    model = source.model
    assert model is not None
    scores = read_score_file(path, records=records)
    _check_origin(scores, source, path)
    check_scores(source, scores, records=records, where=path)
    if not isinstance(model, PatchClassifier):
        image = {"image": scores.get("image")}
        return replace(scores, logits=image, patch_logits=None, weights=None, lam=1.0, temperature=1.0)
    if model.patch_only:
        return scores
    if scores.patch_logits is not None:
        return scores.remix(lam=model.lam, temperature=model.temperature)
    if not _are_same(scores.temperature, model.temperature):
        raise InputError(str(path), "its temperature is not the network's", "write it again with --keep-patches")
    return scores.remix(lam=model.lam)


def _check_origin(scores: "Scores", source: Source, path: Path) -> None:
    """Refuse scores that tell of another network: other weights, labels or patches, or another look."""
    from pivotpatch.models.checkpoint import fingerprint
    from pivotpatch.models.patch_classifier import PatchClassifier

    model = source.model
    assert model is not None
    again = f"write it by pivotpatch evaluate {source.path} DATA --save FILE"
    if scores.labels != model.labels:
        wrong = f"its {len(scores.labels)} labels are not the {len(model.labels)} of the network, in its order"
        raise InputError(str(path), wrong, f"{again}, of pictures that have them all")
    if scores.network is not None and scores.network != fingerprint(model):
        raise InputError(str(path), f"another network than {source.path} wrote it, or it was trained on since", again)
    if scores.closer_size is not None:
        wrong = f"it is of a closer look at {scores.closer_size} pixels, not of the patches"
        raise InputError(str(path), wrong, "write it by pivotpatch evaluate without --closer")
    if scores.weights is None or not isinstance(model, PatchClassifier):
        return
    count, own = scores.weights.shape[1], model.grid**2
    if (count, scores.overlap) != (own, model.overlap):
        wrong = f"it is of {count} patches that overlap by {scores.overlap:g}, the network cuts {own} by"
        raise InputError(str(path), f"{wrong} {model.overlap:g}", f"{again} --keep-patches")


def _are_same(one: "float | Tensor", other: "float | Tensor") -> bool:
    import torch

    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())


def _look_closer(source: Source, records: "RecordSet | None", scores: "Scores", *, size: int) -> "CloserLook":
    """The same pictures, seen closer."""
    import torch

    from pivotpatch.models.patch_classifier import PatchClassifier
    from pivotpatch.tuning.effort import CloserLook

    assert isinstance(source.model, PatchClassifier)
    if records is None:
        todo = "name them after the network too, or give --closer 0 to look at patches"
        raise InputError("--closer", "a file of scores alone shows no pictures to look at again", todo)
    again = _score(source, records, closer_size=size).scores
    rows = {name: row for row, name in enumerate(again.pictures)}
    missing = [name for name in scores.pictures if name not in rows]
    if missing:
        wrong = f"{len(missing)} pictures cannot be looked at again ({shorten(missing)})"
        raise InputError("--closer", wrong, "make them readable, or leave --scores out")
    order = torch.tensor([rows[name] for name in scores.pictures])
    return CloserLook(size, source.model.closer_cost(size), again.select(order))


def _score(source: Source, records: "RecordSet | None", *, closer_size: int | None = None) -> Scored:
    from pivotpatch.cli.train_text import show_training
    from pivotpatch.training.config import load_config

    assert source.model is not None
    assert records is not None
    if len(records.positive.indices) == 0:
        raise InputError(records.name, "no picture has any of the labels, so nothing can be fitted", "give others")
    with show_training() as shown:
        return score_source(
            source.model,
            records,
            config=source.config or load_config(None),
            keep_patches=True,
            closer_size=closer_size,
            progress=lambda done, total: shown.progress("score", done, total),
        )


def _finish(
    source: Source,
    scored: Scored,
    closer: "CloserLook | None",
    folder: "RunFolder | None",
    args: argparse.Namespace,
) -> None:
    """Fit, store, draw and print."""
    import torch

    from pivotpatch.cli.tune_text import print_tuning
    from pivotpatch.models.patch_classifier import PatchClassifier
    from pivotpatch.tuning.thresholds import parse_goal
    from pivotpatch.tuning.tune import tune_scores

    list_not_read(scored.not_read)
    found = tune_scores(
        scored.scores,
        mixing=args.mixing,
        calibration=args.calibration,
        goal=parse_goal(args.thresholds),
        patch_cost=source.model.patch_cost if isinstance(source.model, PatchClassifier) else 0.0,
        closer=closer,
        generator=torch.Generator().manual_seed(SEED),
    )
    if not args.json:
        print_tuning(found)
    place = _store(source, found, folder, args.out)
    if args.plot is not None:
        _draw(found, args.plot)
    if args.json:
        told = {"wrote": str(place), "not_read": scored.not_read, "warning": WARNING}
        print(json.dumps({"tuned": args.words, **found.to_dict(), **told}))
    else:
        print(f"\n{'wrote' if args.out else 'replaced'} {place}\n{WARNING}")


def _store(source: Source, found: "Tuning", folder: "RunFolder | None", out: Path | None) -> Path:
    """Write the network with all that was fitted; returns where it is."""
    from pivotpatch.models.checkpoint import save_checkpoint

    model, place = source.model, out or source.checkpoint
    assert model is not None
    assert place is not None
    found.store(model)
    if folder is None:
        save_checkpoint(model, place, overwrite=out is None)
    else:
        folder.save_best(model)
    return place


def _draw(found: "Tuning", folder: Path) -> None:
    from pivotpatch.tuning.plots import plot_effort, plot_lam, plot_reliability

    figures = {"reliability": plot_reliability(found.curves)}
    if found.mixing is not None:
        figures["lam"] = plot_lam(found.mixing.study)
    if found.effort is not None:
        figures["effort"] = plot_effort(found.effort)
    write_figures(figures, folder)
