"""Tagging in processes of its own, to be killed; each starts in a moment."""

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from run_process import WorkProcess, die_at_touch

from pivotpatch.data.files import find_images
from pivotpatch.inference.bulk import ALONE, Share, tag_pictures
from pivotpatch.inference.engine import Answer


class Greens:
    """An engine whose answer for a picture is known: the means of its three channels."""

    labels = ("red", "green", "blue")
    thresholds = (0.5, 0.4, 0.3)
    picture_size = 8
    grid = 0
    overlap = 0.0

    def __call__(self, pictures: torch.Tensor) -> Answer:
        probs = pictures.float().mean((2, 3)) / 255
        return Answer(probs, probs)


def write_pictures(folder: Path, count: int, *, broken: Sequence[int] = ()) -> None:
    """Pictures of one colour each; some of which are none."""
    folder.mkdir(exist_ok=True)
    colours = np.random.default_rng(0).integers(0, 256, (count, 3), dtype=np.uint8)
    for place, colour in enumerate(colours):
        path = folder / f"{place:04d}.png"
        if place in broken:
            path.write_bytes(b"no picture")
        else:
            Image.fromarray(np.broadcast_to(colour, (9, 7, 3)).copy()).save(path)


class TaggingProcess(WorkProcess):
    """Tags all pictures of the folder `pictures` and tells how many are done."""

    def __init__(self, out: Path, *, share: Share = ALONE, workers: int = 0, dies_at_touch: int | None = None) -> None:
        super().__init__(_work, Path.cwd(), out, share, workers, dies_at_touch)


def _work(folder: Path, out: Path, share: Share, workers: int, dies_at_touch: int | None, told: Connection) -> None:
    from pivotpatch.inference import bulk

    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # of workers: a fork server of their own would take seconds
    torch.set_num_threads(1)
    bulk._PART_SECONDS = 0.0  # a part a batch
    if dies_at_touch is not None:
        die_at_touch(out.parent, dies_at_touch)
    tag_pictures(
        Greens(),
        find_images(["pictures"]),
        out,
        share=share,
        batch_size=4,
        num_workers=workers,
        progress=lambda _what, done, _total: told.send(done),
    )
