"""What a model says of every image, kept beside the table so that a restart does not ask again."""

import base64
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pivotpatch.errors import InputError
from pivotpatch.runtime.prediction import Prediction
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.writing import explain_disk_faults

BATCH = 32


class Looks(NamedTuple):
    """Three opinions of a model about N images; what could not be read has an error.

    Attributes:
        probs: (N,3,L) to decide with, of the whole image, and of the patches; NaN where there is none.
        errors: by the index of the image.
    """

    probs: NDArray[np.float16]
    errors: dict[int, str]


def stack_opinions(prediction: Prediction) -> NDArray[np.float32]:
    """(3,L): probabilities to decide with, of the whole image, and of the patches; NaN where there are none."""
    parts = np.full_like(prediction.probs, np.nan) if prediction.patch_probs is None else prediction.patch_probs
    return np.stack([prediction.probs, prediction.image_probs, parts])


def look_at(
    predictor: Predictor,
    paths: Sequence[Path],
    cache: Path,
    *,
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> Looks:
    """Ask a model about images that it was not asked about before.

    Args:
        predictor: the model.
        paths: files of images; one that has changed since is asked about again.
        cache: a file of lines, which begins anew for another model.
        progress: told how many are done, and of how many.
    """
    model = json.dumps([predictor.engine.digest(), predictor.engine.effort, predictor.labels])
    known, errors = _read(cache, model, labels=len(predictor.labels)), dict[int, str]()
    stamps = [_stamp(path) for path in paths]
    left = [place for place, stamp in enumerate(stamps) if stamp not in known]
    with explain_disk_faults(cache.parent), cache.open("ab" if known else "wb") as file:
        if not known:
            file.write(model.encode() + b"\n")
        asked = Predictor(predictor.engine, batch_size=BATCH).predict([paths[place] for place in left], skip=True)
        for done, (place, answer) in enumerate(zip(left, asked, strict=True), len(paths) - len(left) + 1):
            if isinstance(answer, InputError):
                errors[place] = str(answer)
            else:
                known[stamps[place]] = held = stack_opinions(answer).astype(np.float16)
                line = json.dumps([stamps[place], base64.b64encode(held.tobytes()).decode()])
                file.write(b"\n" + line.encode() + b"\n")  # the first ends a line that a crash has torn
            progress("look at images", done, len(paths))
    nothing = np.full((3, len(predictor.labels)), np.nan, np.float16)
    return Looks(np.stack([known.get(stamp, nothing) for stamp in stamps]), errors)


def _stamp(path: Path) -> str:
    """Tells whether a file is still the same."""
    with suppress(OSError):
        state = path.stat()
        return f"{state.st_size} {state.st_mtime_ns} {os.path.abspath(path)}"  # noqa: PTH100 (links stay)
    return f"missing {path}"


def _read(cache: Path, model: str, *, labels: int) -> dict[str, NDArray[np.float16]]:
    """What was kept of this model, by stamp; nothing of another."""
    with suppress(FileNotFoundError), cache.open("rb") as lines:
        if next(lines, b"") == model.encode() + b"\n":
            return dict(held for line in lines if (held := _parse(line, labels)))
    return {}


def _parse(line: bytes, labels: int) -> tuple[str, NDArray[np.float16]] | None:
    try:
        stamp, text = json.loads(line)
        return stamp, np.frombuffer(base64.b64decode(text), np.float16).reshape(3, labels)
    except (ValueError, TypeError):  # torn by a crash: that image is asked about again
        return None
