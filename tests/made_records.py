"""Records of pictures whose colour tells their index, for tests of loading."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike
from PIL import Image
from scipy.sparse import csr_array

from pivotpatch.data.records import FileStore, ImageSource, ImageStore, LabelSpace, RecordSet

SIZE = (12, 16)
COUNT = 11


class ListStore:
    """Pictures given one by one."""

    def __init__(self, sources: list[ImageSource]) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources)

    def name(self, index: int) -> str:
        return f"row {index}"

    def source(self, index: int) -> ImageSource:
        return self.sources[index]


def picture(index: int) -> Image.Image:
    """A picture whose colour tells its index."""
    return Image.new("RGB", (20 + index, 24), (20 * index, 255 - 20 * index, index))


def encoded(index: int) -> bytes:
    stream = BytesIO()
    picture(index).save(stream, "PNG")
    return stream.getvalue()


def noise(seed: int, *, side: int = 16, kind: str = "JPEG") -> bytes:
    """An image file of noise."""
    stream = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)).save(stream, kind)
    return stream.getvalue()


def make_records(sources: list[ImageSource] | FileStore, *, name: str = "test") -> RecordSet:
    store = sources if isinstance(sources, FileStore) else ListStore(sources)
    target = np.eye(3)[np.arange(len(store)) % 3]
    odd = np.arange(1, len(store), 2)
    target[odd, (odd + 1) % 3] = np.nan
    return records_of(target, images=store, labels="abc", name=name)


def records_of(
    target: ArrayLike, *, images: ImageStore | None = None, labels: Sequence[str] = (), name: str = "made"
) -> RecordSet:
    """Records with a target (N,L): 1 present, 0 absent, NaN unknown; files that are not there unless given."""
    states = np.nan_to_num(np.asarray(target, dtype=float), nan=-1).astype(np.int8)
    images = images or FileStore(Path("images"), pa.array([f"{i:05}.jpg" for i in range(len(states))]))
    space = LabelSpace(tuple(labels) or tuple(f"label{i}" for i in range(states.shape[1])))
    return RecordSet(name, space, images=images, states=csr_array(states))
