"""A batch of rows in, the same rows with their tags out: what every engine for many machines can call."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pivotpatch.errors import InputError, import_extra, shorten
from pivotpatch.process import count_workers, read_threads
from pivotpatch.runtime.decoding import read_ahead
from pivotpatch.runtime.prediction import TagRule
from pivotpatch.runtime.predictor import Predictor, Read, answer_batch, decode_for, get_pixels

COLUMNS = ("bytes", "image", "path")
"""Where images are looked for: a file's bytes, decoded pixels, the name of a file that the worker can read."""
RESULTS = ("labels", "probs", "error")
"""The columns that are added."""
FITTED = TagRule()
_AT_ONCE = 64  # images that a model is asked about; a batch may have any number


class PatchTagger:
    """Adds the columns `labels`, `probs` and `error` to batches of images; made once per worker.

    `labels` are an image's tags, the most probable first, `probs` their probabilities. An image that cannot be read is
    a row without tags whose `error` says why. Their values are Arrow's (`.as_py()` gives Python's): in a batch without
    any tag, too, an engine then knows that `labels` are lists of texts, and what all workers write fits together.
    Threads may share a tagger. It can be pickled: whoever unpickles it opens the model again.

    Example:
        tagger = PatchTagger(effort=0.6)
        rows = tagger({"path": ["photo.jpg", "notes.txt"]})
        print(rows["labels"][0].as_py(), rows["error"][1].as_py())
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "tagger",
        effort: float | None = None,
        *,
        device: str | None = None,
        columns: str | Sequence[str] = COLUMNS,
        rule: TagRule = FITTED,
        prefix: str = "",
    ) -> None:
        """Open the model.

        Args:
            model: as in `Predictor.load`; a folder or file must be there for every worker.
            effort: as in `Predictor.load`: share of images that get a second look.
            device: as in `Predictor.load`; a GPU where the worker has one by default.
            columns: where images are looked for; of each row the first that is not None counts. Its value says what it
                is: a file's bytes, an array (H,W,3) or (H,W) of uint8, a Pillow image, a path, or a mapping with
                "bytes" or "path", as `datasets` has.
            rule: which labels an image gets; by default those above the fitted thresholds.
            prefix: stands before the names of the three columns, where a batch has such already.
        """
        arrow = import_extra("pyarrow", "parquet")  # every engine brings it
        types = arrow.list_(arrow.string()), arrow.list_(arrow.float32()), arrow.string()
        self._make_columns = [partial(arrow.array, type=each) for each in types]
        self.columns = (columns,) if isinstance(columns, str) else tuple(columns)
        self.rule, self.results = rule, tuple(prefix + name for name in RESULTS)
        self.engine = Predictor.load(model, effort=effort, device=device).engine
        given: dict[str, Any] = {"device": device, "columns": self.columns, "rule": rule, "prefix": prefix}
        self._make_again = partial(PatchTagger, os.fspath(model), effort, **given)
        self._asking = threading.Lock()  # models need not answer two threads at once; decoding goes on meanwhile

    def __reduce__(self) -> tuple[Any, ...]:
        # The digest is for `datasets`, which takes what it has made before where the pickle is the same.
        return self._make_again, (), {"made_with": self.engine.digest()}

    def __call__(self, batch: Any) -> Any:
        """The batch with three more columns.

        Args:
            batch: N rows: a mapping of columns, arrays or lists; or a table or record batch of Arrow.

        Returns:
            A dict for a mapping, else what was given. All columns are as they came; `labels` are N lists of texts,
            `probs` N lists of float32, `error` N texts, null where the image was read.
        """
        mapping = isinstance(batch, Mapping)
        names = list(batch) if mapping else batch.schema.names
        if names and not any(name in names for name in self.columns):
            wrong = f"the batch has the columns {shorten(names)}, none of {shorten(self.columns)}"
            raise InputError("PatchTagger", wrong, "name the one with images: columns='...'")
        taken = [name for name in self.results if name in names]
        if taken:
            wrong = f"the batch has {shorten(taken)} already"
            raise InputError("PatchTagger", wrong, "rename the column, or give prefix='tagged_'")
        present = {name: _list_values(batch[name]) for name in self.columns if name in names}
        rows = (dict(zip(present, values, strict=True)) for values in zip(*present.values(), strict=True))
        tagged = list(self._tag(rows))
        made = (make([row[place] for row in tagged]) for place, make in enumerate(self._make_columns))
        added = dict(zip(self.results, made, strict=True))
        if mapping:  # lists, because `datasets` takes no arrays of Arrow's
            return {**batch, **{name: list(column) for name, column in added.items()}}
        for name, column in added.items():
            batch = batch.append_column(name, column)
        return batch

    def _tag(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[str], list[float], str | None]]:
        """Labels, their probabilities and the error of each row."""
        threads = min(read_threads() or 64, count_workers())  # Ray and Spark say how many cores a worker has
        for batch in read_ahead(rows, self._read, batch_size=_AT_ONCE, threads=threads):
            with self._asking:
                found = answer_batch(self.engine, batch)
            for each in found:
                if isinstance(each, InputError):
                    yield [], [], str(each)
                else:
                    tags = self.rule.choose(each)
                    yield [tag.label for tag in tags], [tag.prob for tag in tags], None

    def _read(self, row: Mapping[str, Any]) -> Read:
        name, value = next((each for each in row.items() if each[1] is not None), (" or ".join(row), None))
        if isinstance(value, Mapping):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if value is None:
            raise InputError(name, "there is no image in this row", "fill it, or leave the row out")
        given = Path(value) if isinstance(value, str | os.PathLike) else get_pixels(value, name)
        decoded = decode_for(self.engine, given, name=name)
        return name, decoded.pixels, decoded


def _list_values(column: Any) -> Iterable[Any]:
    """A column's values; numpy's bytes of a fixed length would lose zeros at their end, which some files have."""
    if hasattr(column, "to_pylist"):
        return column.to_pylist()
    if isinstance(column, np.ndarray) and column.dtype.kind == "S":
        return (value.tobytes() for value in np.ascontiguousarray(column).view(f"V{column.itemsize}"))
    return column
