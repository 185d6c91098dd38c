"""What people have corrected, laid over a table: their answers win, what they did not look at stays as it was."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.errors import InputError, choose_one_of, shorten


def apply_corrections(
    sets: Sequence[RecordSet], corrections: RecordSet, *, apart: Iterable[RecordSet] = ()
) -> list[RecordSet]:
    """Lay corrections over the images of a run; the notes of the training images say how much changed.

    Images are the same where their files are, links followed. Of a label that the corrections do not know nothing
    changes; an image that is new is trained on, with such labels unknown.

    Args:
        sets: the training images, behind which new ones come, and others that get their corrections too.
        corrections: known states of some labels of some images.
        apart: images that must not be trained on, such as test images.
    """
    train, every = sets[0], (*sets, corrections, *apart)
    inside = next((each.name for each in every if not isinstance(each.images, FileStore)), None)
    if inside is not None:
        raise InputError(inside, "its images are no files, which corrections are matched by", "unpack them to files")
    names = train.labels.names
    common = [name for name in corrections.labels.names if name in names]
    if not common:
        first = corrections.labels.names[0]
        raise InputError(corrections.name, f"knows none of the labels of {train.name}", choose_one_of(first, names))
    said = np.full((len(corrections), len(names)), -1, np.int8)  # 1 present, 0 absent, -1 nothing
    said[:, [names.index(name) for name in common]] = corrections.keep_labels(common).states.toarray()
    row_of = {path: row for row, path in enumerate(_find_files(corrections))}
    counts, parts, elsewhere = [0, 0], list[RecordSet](), set[str]()
    for records in sets:
        paths = _find_files(records)
        elsewhere |= {*paths}
        parts.append(_overlay(records, [row_of.get(path, -1) for path in paths], said, counts=counts))
    elsewhere.update(*(_find_files(records) for records in apart))
    new = {path: row for path, row in row_of.items() if path not in elsewhere and (said[row] >= 0).any()}
    told = f"{corrections.name}: {counts[0]:,} labels of {counts[1]:,} images corrected, {len(new):,} images added"
    others = [name for name in corrections.labels.names if name not in names]
    told += f"; labels that are not in {train.name} left out: {shorten(others)}" if others else ""
    return [_extend(parts[0], new, said, note=told), *parts[1:]]


def _find_files(records: RecordSet) -> list[str]:
    """The file of each record, links followed."""
    return [os.path.realpath(str(records.source_at(index))) for index in range(len(records))]


def _overlay(records: RecordSet, rows: list[int], said: NDArray[np.int8], *, counts: list[int]) -> RecordSet:
    """The same records; what row `rows[i]` of `said` knows takes the place of what record i says, none for -1."""
    matched = np.flatnonzero(np.array(rows) >= 0)
    old = records.states[matched].toarray()
    answers = said[np.array(rows, np.int64)[matched]]
    changed = np.where(answers >= 0, answers, old)
    counts[0] += int((changed != old).sum())
    counts[1] += int((changed != old).any(axis=1).sum())
    order = np.arange(len(records))
    order[matched] = len(records) + np.arange(len(matched))
    return replace(records, states=vstack([records.states, csr_array(changed)], format="csr")[order])


def _extend(records: RecordSet, new: dict[str, int], said: NDArray[np.int8], *, note: str) -> RecordSet:
    """Records and behind them new files, each with its row of `said`."""
    store, records = records.images, replace(records, notes=(*records.notes, note))
    if not new:
        return records
    assert isinstance(store, FileStore)
    chunks = getattr(store.paths, "chunks", [store.paths])
    images = FileStore(store.root, pa.chunked_array([*chunks, pa.array([*new], store.paths.type)]))
    states = vstack([records.states, csr_array(said[[*new.values()]])], format="csr")
    order = np.arange(len(records)) if records.order is None else records.order
    return replace(records, images=images, states=states, order=np.append(order, len(store) + np.arange(len(new))))
