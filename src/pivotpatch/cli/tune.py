"""`pivotpatch tune`: fit lam, calibration, thresholds and effort on validation pictures, into the checkpoint."""

import argparse
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.figures import write_figures
from pivotpatch.cli.sources import (
    Scored,
    Source,
    find_pictures,
    list_not_read,
    open_source,
    read_score_file,
    score_source,
)
from pivotpatch.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from pivotpatch.audit.tuning import Tuning
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.training.build import TrainingRecords
    from pivotpatch.training.folder import RunFolder

SEED = 0  # of the resamples: the same scores have the same intervals
WARNING = "what is measured on these pictures from now on is worth nothing: never tune on those that you test on"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    tune = verbs.add_parser(
        "tune",
        help="fit lam, calibration and thresholds on validation pictures",
        description="Fit lam and temperature, then the calibration of probabilities, then a threshold for each label, "
        "and when patches may be left out (predict --effort), on pictures that the network was not trained on; judge "
        "each out of fold and store all in the checkpoint.",
        usage="%(prog)s WHAT [DATA] [options]",
        epilog="Several GPUs: torchrun --nproc-per-node N -m pivotpatch tune ...",
    )
    tune.add_argument(
        "words",
        nargs="+",
        metavar="WHAT [DATA]",
        help="a run or a checkpoint; then the address of validation pictures, a table or a folder of them, by default "
        "those that the run held out",
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
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="write a new checkpoint and leave the old one alone")
    tune.add_argument("--plot", type=Path, metavar="FOLDER", help="draw reliability, mAP against lam and against cost")
    tune.add_argument("--json", action="store_true", help="write everything as JSON")
    tune.set_defaults(run=run_tune)


def run_tune(args: argparse.Namespace) -> int:
    """Score where need be, fit, store and tell it in the first process alone."""
    from pivotpatch.inference.thresholds import parse_goal

    if len(args.words) > 2:
        raise InputError(f"{args.words[2]!r}", "a third word", "give what to tune and the pictures")
    parse_goal(args.thresholds)
    source = open_source(args.words[0], action="tune")
    model = source.model
    if model is None:
        raise InputError(args.words[0], "holds scores, no network", f"write RUN --scores {args.words[0]}")
    _check_network(model, source, args)
    records = _find_records(source, args)
    from pivotpatch.training.processes import join_processes

    state = join_processes()
    folder = _claim(source, args.out) if state.is_main_process else None
    try:
        scored = Scored(_read(source, records, args.scores), {}) if args.scores else _score(source, records)
        if state.is_main_process:
            _finish(source, scored, folder, args)
    finally:
        if folder is not None:
            folder.close()
    state.destroy_process_group()
    return 0


def _check_network(model: "Classifier", source: Source, args: argparse.Namespace) -> None:
    """Refuse what cannot be stored, before the work is done."""
    from pivotpatch.models.checkpoint import DESCRIPTION, WEIGHTS
    from pivotpatch.models.patch_classifier import PatchClassifier

    if args.mixing not in ("auto", "keep") and not isinstance(model, PatchClassifier):
        raise InputError("--mixing", "the network has no patches, so there is no lam", "leave it out")
    if args.out is not None:
        if args.out.exists():
            raise InputError(str(args.out), "exists already", "choose another folder")
        return
    assert source.checkpoint is not None
    more = sorted({path.name for path in source.checkpoint.iterdir()} - {DESCRIPTION, WEIGHTS})
    if more:  # a run goes on from it
        wrong = f"holds more than a checkpoint ({', '.join(more)}), which would be lost"
        raise InputError(str(source.checkpoint), wrong, "give --out FOLDER")


def _claim(source: Source, out: Path | None) -> "RunFolder | None":
    """Keep a run from being trained while its best network is replaced."""
    from pivotpatch.training.folder import RunFolder

    return RunFolder.open(source.path) if out is None and source.config is not None else None


def _find_records(source: Source, args: argparse.Namespace) -> "RecordSet | None":
    """The pictures that are named, or that the run held out; None where scores alone are given."""
    from pivotpatch.training.build import open_aligned, open_training_records

    assert source.model is not None
    address = find_pictures(args.words[1:])
    if address is not None:
        records = open_aligned(address, source.model.labels)
        _refuse_training_pictures(source, records, records.name)
        return records
    if args.scores is not None:
        return None
    held = None if source.config is None else open_training_records(source.config).val
    if held is None:
        what = "a checkpoint knows no pictures" if source.config is None else "the run held out no pictures"
        raise InputError(args.words[0], what, "name validation pictures after it, such as val.csv")
    return held


def _open_trained(source: Source) -> "TrainingRecords | None":
    """The pictures of a run, where they can still be found."""
    from pivotpatch.training.build import open_training_records

    with suppress(InputError):  # a run may have moved away from its pictures, and can be tuned all the same
        return None if source.config is None else open_training_records(source.config)
    return None


def _refuse_training_pictures(source: Source, records: "RecordSet", where: str) -> None:
    trained = _open_trained(source)
    if trained is None:
        return
    known = set(_identify(trained.train))
    _refuse(trained, where, sum(name in known for name in _identify(records)), len(records))


def _identify(records: "RecordSet") -> list[str]:
    """What tells a picture from all others: a file's path; else its name in its data set.

    Options of an address choose pictures or say how one is read; the seed of scenes alone makes others of them.
    """
    from pivotpatch.data.address import parse_address
    from pivotpatch.data.records import FileStore
    from pivotpatch.data.scenes import SceneStore

    images = records.images
    if isinstance(images, FileStore):
        root = images.root.resolve()
    elif isinstance(images, SceneStore):
        root = Path("scenes:", str(images.seed))
    else:
        root = Path(parse_address(records.name).location).resolve()
    return [os.path.normpath(root / images.name(records.place(row))) for row in range(len(records))]


def _open_scored(scores: "Scores") -> "RecordSet | None":
    """The pictures that have scores, where the file tells of which data set and it can still be found."""
    import numpy as np

    from pivotpatch.data.address import open_records

    if scores.data is None:
        return None
    with suppress(InputError):
        records, named = open_records(scores.data), set(scores.pictures)
        return records.select(np.flatnonzero([record.name in named for record in records]))
    return None


def _refuse_other_scenes(scores: "Scores", records: "RecordSet", where: Path) -> None:
    """Refuse scores of scenes that were made in another way: they have the names of these."""
    from pivotpatch.data.scenes import SceneStore

    scored = _open_scored(scores)
    if scored is None or not (isinstance(scored.images, SceneStore) and isinstance(records.images, SceneStore)):
        return
    if replace(scored.images, count=1) != replace(records.images, count=1):
        raise InputError(str(where), f"it was made of {scores.data}, not of {records.name}", "give the scores of these")


def _refuse_training_scores(source: Source, scores: "Scores", where: Path) -> None:
    """Refuse scores of training pictures.

    Where the file does not tell of which data set they are: most of them have such a name, and all of these its labels.
    """
    scored = _open_scored(scores)
    if scored is not None:
        _refuse_training_pictures(source, scored, str(where))
        return
    trained = _open_trained(source)
    if trained is None or trained.train.labels.names != scores.labels:
        return
    images = trained.train.images
    rows = {images.name(trained.train.place(row)): row for row in range(len(trained.train))}
    found = [(row, rows[name]) for row, name in enumerate(scores.pictures) if name in rows]
    if 2 * len(found) <= len(scores):
        return
    ours, theirs = zip(*found, strict=True)
    if scores.target[list(ours)].nan_to_num(-1).equal(trained.train.target()[list(theirs)].nan_to_num(-1)):
        _refuse(trained, str(where), len(found), len(scores))


def _refuse(trained: "TrainingRecords", where: str, found: int, count: int) -> None:
    if found:
        wrong = f"{found:,} of its {count:,} pictures are among those that the run was trained on"
        held = "give the run alone, which takes the pictures that it held out"
        raise InputError(where, wrong, "name others" if trained.val is None else held)


def _read(source: Source, records: "RecordSet | None", path: Path) -> "Scores":
    """Scores from a file, mixed as the network mixes them."""
    from pivotpatch.models.patch_classifier import PatchClassifier

    model = source.model
    assert model is not None
    scores = read_score_file(path, records=records)
    if scores.labels != model.labels:
        wrong = f"its {len(scores.labels)} labels are not the {len(model.labels)} of the network, in its order"
        raise InputError(str(path), wrong, f"write it by pivotpatch evaluate {source.path} DATA --save FILE")
    if records is None:
        _refuse_training_scores(source, scores, path)
    else:
        _refuse_other_scenes(scores, records, path)
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


def _are_same(one: "float | Tensor", other: "float | Tensor") -> bool:
    import torch

    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())


def _score(source: Source, records: "RecordSet | None") -> Scored:
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
            progress=lambda done, total: shown.progress("score", done, total),
        )


def _finish(source: Source, scored: Scored, folder: "RunFolder | None", args: argparse.Namespace) -> None:
    """Fit, store, draw and print."""
    import torch

    from pivotpatch.audit.tuning import tune_scores
    from pivotpatch.cli.tune_text import print_tuning
    from pivotpatch.inference.thresholds import parse_goal
    from pivotpatch.models.patch_classifier import PatchClassifier

    list_not_read(scored.not_read)
    found = tune_scores(
        scored.scores,
        mixing=args.mixing,
        calibration=args.calibration,
        goal=parse_goal(args.thresholds),
        patch_cost=source.model.patch_cost if isinstance(source.model, PatchClassifier) else 0.0,
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
    from pivotpatch.report.calibration_plots import plot_effort, plot_lam, plot_reliability

    figures = {"reliability": plot_reliability(found.curves)}
    if found.mixing is not None:
        figures["lam"] = plot_lam(found.mixing.study)
    if found.effort is not None:
        figures["effort"] = plot_effort(found.effort)
    write_figures(figures, folder)
