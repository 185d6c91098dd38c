"""Which pictures `pivotpatch tune` may fit to: they have all labels of the network, which was not trained on them."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.sources import Source, find_pictures
from pivotpatch.errors import InputError, shorten

if TYPE_CHECKING:
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.scores import Scores
    from pivotpatch.training.build import TrainingRecords


def open_tuning_pictures(source: Source, words: list[str], *, scored: bool) -> "RecordSet | None":
    """The pictures that are named, or that the run held out; None where scores alone are given.

    Args:
        source: the network that is tuned.
        words: what the user named: the network, then the pictures, if any.
        scored: whether a file of scores is given.
    """
    from pivotpatch.training.build import open_training_records

    address = find_pictures(words[1:])
    if address is not None:
        records = _open_labelled(address, source, what=words[0])
        _refuse_training_pictures(source, records, records.name)
        return records
    if scored:
        return None
    held = None if source.config is None else open_training_records(source.config).val
    if held is None:
        what = "a checkpoint knows no pictures" if source.config is None else "the run held out no pictures"
        raise InputError(words[0], what, "name validation pictures after it, such as val.csv")
    return held


def check_scores(source: Source, scores: "Scores", *, records: "RecordSet | None", where: Path) -> None:
    """Refuse scores of pictures that may not be tuned on.

    Args:
        source: the network that is tuned.
        scores: what it says of the pictures.
        records: the pictures from `open_tuning_pictures`; None where the scores alone tell of them.
        where: the file of the scores.
    """
    if records is None:
        _refuse_training_scores(source, scores, where)
    else:
        _refuse_other_scenes(scores, records, where)


def _open_labelled(address: str, source: Source, *, what: str) -> "RecordSet":
    """Pictures with all labels of the network in its order, for each of them is fitted."""
    from pivotpatch.data.address import open_records
    from pivotpatch.models.named import BUNDLED

    assert source.model is not None
    records, labels = open_records(address), source.model.labels
    there = set(records.labels.names)
    missing = [name for name in labels if name not in there]
    if missing:
        wrong = f"it lacks {len(missing)} of the {len(labels)} labels, each of which is fitted ({shorten(missing)})"
        start = f"{what} {address}" if what in BUNDLED else f"{address} model.start_from={source.checkpoint or what}"
        raise InputError(address, wrong, f"label them too, or train it for yours first: pivotpatch train {start}")
    return records.keep_labels(labels)


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
