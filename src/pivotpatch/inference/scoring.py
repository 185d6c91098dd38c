"""Score a data set: every picture once, whatever the number of processes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from pivotpatch.core.errors import InputError
from pivotpatch.data.augment import Augmentation, Views, make_views
from pivotpatch.data.loading import Loader
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier, PatchClassifier

Progress = Callable[[str, int, int | None], None]


class Scores(NamedTuple):
    """What a network says of N pictures.

    Attributes:
        logits: (N,L) by name: "image"; with patches also "patch" (pooled) and "tde". Float32, on the CPU.
        target: (N,L), NaN unknown.
        indices: (N,) positions in the record set, rising.
    """

    logits: dict[str, Tensor]
    target: Tensor
    indices: Tensor


class _Part(NamedTuple):
    """A batch: indices (B,), target (B,L) and logits (B,K,L) of K kinds, the last on the device."""

    indices: Tensor
    target: Tensor
    logits: Tensor


def make_network_views(model: Classifier, images: Tensor, *, augmentation: Augmentation | None = None) -> Views:
    """The views that a network sees of images (B,3,h,w) uint8 from the loader, on their device."""
    prepare = model.preprocessing
    make = partial(
        make_views,
        images,
        size=(prepare.image_size, prepare.image_size),
        mean=prepare.mean,
        std=prepare.std,
        augmentation=augmentation,
    )
    if not isinstance(model, PatchClassifier):
        return make(grid=0)
    return make(grid=model.grid, overlap=model.overlap, native=model.source_size is not None)


def score_images(model: Classifier | PatchInference, images: Tensor) -> dict[str, Tensor]:
    """Logits (B,L) by name, of images from the loader.

    Args:
        model: a network, or PAT-I around a `MultiLabelClassifier`.
        images: (B,3,h,w) uint8 on the network's device. PAT-I cuts its patches from them where they are larger
            than the network's input; a `PatchClassifier` as it was trained.
    """
    network = model.model if isinstance(model, PatchInference) else model
    if not isinstance(network, Classifier):
        raise InputError("score_images", f"a {type(network).__name__} says no preprocessing", "give a Classifier")
    views = make_network_views(network, images)
    if isinstance(network, PatchClassifier):
        out = network.forward_views(views.image, views.patches)
    elif isinstance(model, PatchInference):
        own, prepare = (images.shape[-2], images.shape[-1]), network.preprocessing
        source = None
        if min(own) > prepare.image_size:
            source = make_views(images, size=own, mean=prepare.mean, std=prepare.std, grid=0).image
        out = model(views.image, source=source)
    else:
        return {"image": network(views.image)}
    return {"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits}


def score_pictures(
    model: Classifier | PatchInference,
    loader: Loader,
    *,
    accelerator: Accelerator,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Scores:
    """Score what a loader ships, in evaluation mode; each process gets the scores of all.

    Args:
        model: as in `score_images`, on the accelerator's device.
        loader: of this process's share, each batch of it, also an empty one.
        accelerator: which processes there are.
        dtype: of autocast; float32 for none.
        progress: told what is done after each batch.
    """
    device = accelerator.device
    training = [part for part in model.modules() if part.training]  # a part may be kept in evaluation mode
    names = ("image", "patch", "tde") if isinstance(model, PatchInference | PatchClassifier) else ("image",)
    held: list[_Part] = []
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            for number, batch in enumerate(loader, 1):
                if len(batch.indices):
                    logits = score_images(model, batch.images.to(device, non_blocking=True))
                    held.append(_Part(batch.indices, batch.target, torch.stack([logits[n].float() for n in names], 1)))
                if progress is not None:
                    progress("validate", number, len(loader))
    finally:
        for part in training:
            part.training = True
    return _gather(held, names=names, labels=len(loader.records.labels), accelerator=accelerator)


def _gather(held: list[_Part], *, names: tuple[str, ...], labels: int, accelerator: Accelerator) -> Scores:
    """Join the parts of all processes, in the order of the records."""
    device = accelerator.device
    indices = torch.cat([torch.empty(0, dtype=torch.int64), *(part.indices for part in held)])
    target = torch.cat([torch.empty(0, labels), *(part.target for part in held)])
    logits = torch.cat([torch.empty(0, len(names), labels, device=device), *(part.logits for part in held)])
    if accelerator.num_processes > 1:  # shares differ in length: fill them up, and tell the filling by its index
        indices = accelerator.gather(accelerator.pad_across_processes(indices.to(device), pad_index=-1))
        target = accelerator.gather(accelerator.pad_across_processes(target.to(device)))
        logits = accelerator.gather(accelerator.pad_across_processes(logits))
    indices, target, logits = indices.cpu(), target.cpu(), logits.cpu()
    order = indices.argsort()[(indices < 0).sum() :]
    by_name = {name: logits[order, place] for place, name in enumerate(names)}
    return Scores(by_name, target[order], indices[order])
