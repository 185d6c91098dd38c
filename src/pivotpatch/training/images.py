"""From a configuration to the images of a run: those to train on, those held out of them, test sets; their loaders."""

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import Dataset

from pivotpatch.data.address import open_records
from pivotpatch.data.check import count_shared, doubt_labels, find_unreadable
from pivotpatch.data.corrections import apply_corrections
from pivotpatch.data.loading import Batch, Loader, hold_images, make_loader
from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.data.split import split_records
from pivotpatch.errors import InputError, shorten
from pivotpatch.models.classifier import Classifier
from pivotpatch.process import Progress, count_workers, ignore
from pivotpatch.training.config import RunConfig
from pivotpatch.training.processes import Place

SPLIT_SEED = 0  # the same images are held out whatever the seed of the run, so that runs can be compared
_NAMED = 10  # labels in a line about a model or about images
_UNSCORED = "no image has any of the labels, so it is not scored"
_FAULTS = 5  # faults that are told in a line each


class RunRecords(NamedTuple):
    """The images that are trained on, those that choose the model, where there are any, and test sets by address."""

    train: RecordSet
    val: RecordSet | None
    tests: Mapping[str, RecordSet] = {}


def open_data(config: RunConfig, *, look: bool = True, progress: Progress = ignore, tell: Tell = ignore) -> RunRecords:
    """Read all that a run will need; whatever is wrong with any of it is told together, before any work is done.

    With `look`, and unless `data.on_error` is to skip them, images that are not there or cannot be read are wrong, too.
    """
    data, faults, opened, tests = config.data, list[InputError](), list[RecordSet](), dict[str, RecordSet]()
    train, val, lines = None, None, list[str]()
    try:
        train, val, _ = open_training_records(config)
        opened += [train] if val is None else [train, val]
    except InputError as error:
        faults.append(error)
    some = data.labels is not None  # which may be rare ones
    for address in (*data.test, *([data.val] if train is None and data.val is not None else [])):
        try:
            test = open_records(address)
            if some and train is not None and not {*test.labels.names} & {*train.labels.names}:
                lines.append(f"{test.name}: {_UNSCORED}")
                continue
            tests[address] = test if train is None else test.take_labels(train.labels.names, chosen=some)
        except InputError as error:
            faults.append(error)
    if some and val is not None and data.val is None and not val.count_labels().any():
        lines.append(f"{val.name}: no image that is held out has any of the labels, so the last model is kept")
        opened, val = [*opened[:1]], None
    silent = [address for address, test in tests.items() if some and not test.count_labels().any()]
    lines += [f"{tests.pop(address).name}: {_UNSCORED}" for address in silent]
    opened += tests.values()
    for each in opened[1:]:
        if not each.count_labels().any():
            wrong = "no image has any of the labels, so nothing can be ranked"
            faults.append(InputError(each.name, wrong, "give others"))
    if train is not None:
        if val is None and not data.val_fraction and config.evaluation.patience is not None:
            todo = "give data.val or data.val_fraction, or leave it out"
            faults.append(InputError("evaluation.patience", "there are no validation images to judge by", todo))
        counts, names = train.count_labels(), train.labels.names
        own = 2 if val is not None and data.val is None else 1  # the training images, with those held out of them
        lines += [*(line for each in opened for line in each.notes), *doubt_labels(*opened[:own])]
        others = opened[own:] if look else []
        for each, shared in zip(others, count_shared(train, *others), strict=True):
            if shared:
                too = "are training images too, so its metrics are too high; take them out of one"
                lines.append(f"{each.name}: {shared:,} of its {len(each):,} images {too}")
        lines = [*dict.fromkeys(lines)]
        never = [name for name, count in zip(names, counts, strict=True) if not count]
        if never:
            left = f"no training image has {len(never)} of {len(names)} labels, so none is learned"
            lines.append(f"{left}: {shorten(never, limit=_NAMED)}")
    if look and data.on_error == "error":
        faults += find_unreadable(opened, progress=progress)
    found = {str(fault): fault.parts for fault in faults}  # each once
    for line in (*(islice(found, _FAULTS) if len(found) > 1 else ()), *lines):
        tell(line)
    if train is None or found:
        where, wrong, todo = next(iter(found.values()))
        more = f" (the first of {len(found):,} faults that were found)" if len(found) > 1 else ""
        raise InputError(where, wrong + more, todo)
    return RunRecords(train, val, tests)


def open_training_records(config: RunConfig) -> RunRecords:
    """Read the training images and hold the validation part out of them, or read that too; then correct them.

    What is held out depends neither on corrections nor on `data.labels`: it is the same after each further correction,
    and for teachers of some of the labels as for their student.
    """
    data = config.data
    if data.train is None:
        raise InputError("data.train", "no images are named", "give an address, such as table:photos.csv")
    whole, val = open_records(data.train), None
    train = whole.keep_labels(data.labels)
    if data.val is not None:
        val = open_records(data.val).take_labels(train.labels.names, chosen=data.labels is not None)
    elif data.val_fraction:
        shares = {"train": 1 - data.val_fraction, "val": data.val_fraction}
        parts = split_records(whole, shares, generator=np.random.default_rng(SPLIT_SEED))
        train, val = train.select(parts["train"]), train.select(parts["val"])
    if data.corrections is not None:
        tests = [open_records(address) for address in data.test]
        sets, corrections = [train] if val is None else [train, val], open_records(data.corrections)
        told = set(corrections.labels.names)
        if told & set(train.labels.names) or not told & set(whole.labels.names):  # else they are of other labels
            train, *held_out = apply_corrections(sets, corrections, apart=tests)
            val = held_out[0] if held_out else None
    return RunRecords(train, val)


def draw_folds(records: RecordSet, folds: int) -> Tensor:
    """The fold (N,) of each record, each with its share of every label; always the same ones."""
    fold = torch.zeros(len(records), dtype=torch.int64)
    if folds:
        parts = {str(number): 1 / folds for number in range(folds)}
        for name, rows in split_records(records, parts, generator=np.random.default_rng(SPLIT_SEED)).items():
            fold[rows] = int(name)
    return fold


def open_loader(
    records: RecordSet,
    config: RunConfig,
    *,
    model: Classifier,
    accelerator: Accelerator,
    training: bool = False,
    size: int | None = None,
    hold: Place = "nothing",
    held: Dataset[Batch] | None = None,
    progress: Progress = ignore,
) -> Loader:
    """A loader of this process's share of some images, at the size that a model wants or at another.

    `held` is shipped in their place. On a CPU threads decode: worker processes would each hold a copy of this one.
    """
    data, side = config.data, size or model.picture_size
    own = 0 if accelerator.device.type == "cpu" else count_workers()
    workers = own if data.workers is None else data.workers
    if hold != "nothing":
        device = accelerator.device if hold == "device" else torch.device("cpu")
        held = hold_images(records, size=(side, side), device=device, on_error=data.on_error, progress=progress)
    return make_loader(
        records,
        size=(side, side),
        batch_size=config.train.batch_size if training else config.evaluation.batch_size,
        shuffle=training,
        seed=config.train.seed,
        num_workers=workers,
        on_error=data.on_error,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        every_batch=True,
        held=held,
        interpolation=model.preprocessing.interpolation,
    )


def none_read(records: RecordSet) -> InputError:
    """The error of a record set all of whose images were skipped."""
    return InputError(records.name, "none of the images could be read", "see pivotpatch data check")
