"""What a model's backbone makes of images, for whoever trains or teaches what comes behind it."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from pivotpatch.accel.inference import quicken_inference
from pivotpatch.errors import InputError
from pivotpatch.inference.scoring import evaluating
from pivotpatch.models.classifier import Embeddings, SharedClassifier
from pivotpatch.models.views import make_views
from pivotpatch.process import count_workers
from pivotpatch.runtime.decoding import decode_image, read_ahead

AT_ONCE = 8
"""Images whose views pass the backbone together."""
Kind = TypeVar("Kind", bound=SharedClassifier)


class Seen(NamedTuple):
    """Embeddings of images, the names of these, and what was wrong with those that could not be read, by name."""

    embeddings: Embeddings
    names: list[str]
    not_read: dict[str, str]


def quicken_model(model: Kind, *, device: torch.device, dtype: torch.dtype) -> Kind:
    """A copy of a model, in evaluation mode, whose backbone says the same sooner, see `quicken_inference`."""
    with evaluating(model.backbone):
        side = model.preprocessing.image_size
        quick = quicken_inference(model.backbone, side=side, device=device, dtype=dtype)
    if quick is model.backbone:
        quick = deepcopy(quick)
    return deepcopy(model, {id(model.backbone): quick}).eval().to(memory_format=torch.channels_last)


def embed_files(model: SharedClassifier, paths: Sequence[str], *, progress: Callable[[int], None]) -> Seen:
    """What a model sees of image files, in evaluation mode, on the CPU; `progress` is told how many are done."""
    quick = quicken_model(model, device=torch.device("cpu"), dtype=torch.float32)
    size, threads = (model.picture_size, model.picture_size), count_workers()
    parts, names, not_read = list[Embeddings](), list[str](), dict[str, str]()
    batches = read_ahead(paths, lambda path: decode_image(Path(path), size=size), batch_size=AT_ONCE, threads=threads)
    for number, batch in enumerate(batches):
        named = list(zip(paths[number * AT_ONCE :], batch, strict=False))
        not_read |= {name: str(each) for name, each in named if isinstance(each, InputError)}
        read = {name: each for name, each in named if not isinstance(each, InputError)}
        if read:
            with torch.inference_mode():
                views = make_views(quick, torch.from_numpy(np.stack([*read.values()])).permute(0, 3, 1, 2))
                parts.append(quick.embed_views(views.image, views.patches))
            names += read
        progress(len(names) + len(not_read))
    if not parts:
        raise InputError(paths[0], "none of the images could be read", "give others")
    patches = [part.patches for part in parts if part.patches is not None]
    joined = Embeddings(torch.cat([part.image for part in parts]), torch.cat(patches) if patches else None)
    return Seen(joined, names, not_read)
