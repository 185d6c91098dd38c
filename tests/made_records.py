"""Records of pictures whose colour tells their index, for tests of loading."""

from io import BytesIO

import numpy as np
from PIL import Image

from pivotpatch.data.records import FileStore, ImageSource, LabelLists, LabelSpace, RecordSet

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
    return RecordSet(
        name,
        LabelSpace(("a", "b", "c")),
        images=store,
        positive=LabelLists.from_lists([[i % 3] for i in range(len(store))]),
        unknown=LabelLists.from_lists([[(i + 1) % 3] if i % 2 else [] for i in range(len(store))]),
    )
