"""Score a data set: every picture once, whatever the number of processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.data.records import LabelSpace
from pivotpatch.errors import InputError
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import KINDS, Scores
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_closer_view, make_network_views, make_views

if TYPE_CHECKING:  # a picture alone needs none of them, and must not wait for their import
    from accelerate import Accelerator

    from pivotpatch.data.loading import Loader

Progress = Callable[[str, int, int | None], None]
_CPU_PIXELS = 8 * 256 * 256  # of images at once; what is computed from more of them outgrows the caches


class _Part(NamedTuple):
    """A batch: indices (B,), target (B,L) and K rows of numbers a picture (B,K,L), the last on the device."""

    indices: Tensor
    target: Tensor
    rows: Tensor


def look_again(
    model: PatchClassifier, images: Tensor, image_logits: Tensor, *, closer_size: int | None
) -> CounterfactualLogits:
    """What a network says on a second look at images (B,3,h,w) from the loader, whose logits (B,L) are known.

    Args:
        model: the network.
        images: uint8, on its device.
        image_logits: of the first look.
        closer_size: rows and columns at which it sees the whole images again; None for their patches.
    """
    if closer_size is None:
        return model.add_patches(image_logits, make_network_views(model, images).patches)
    return model.look_closer(image_logits, make_closer_view(model, images, size=closer_size))


def score_images(
    model: Classifier | PatchInference, images: Tensor, *, closer_size: int | None = None
) -> CounterfactualLogits | Tensor:
    """What a network says of images from the loader: image logits (B,L), or with patches all there is.

    Args:
        model: a network, or PAT-I around a `MultiLabelClassifier`.
        images: (B,3,h,w) uint8 on the network's device. PAT-I cuts its patches from them where they are larger
            than the network's input; a `PatchClassifier` as it was trained.
        closer_size: a `PatchClassifier` looks at the whole images once more, at so many rows and columns, and not at
            their patches.
    """
    network = model.model if isinstance(model, PatchInference) else model
    if not isinstance(network, Classifier):
        raise InputError("score_images", f"a {type(network).__name__} says no preprocessing", "give a Classifier")
    if closer_size is not None:
        if not isinstance(network, PatchClassifier):
            raise InputError("score_images", "the network has no patches to look closer for", "leave closer_size out")
        first = network.forward_images(make_network_views(network, images, patches=False).image)
        return look_again(network, images, first, closer_size=closer_size)
    views = make_network_views(network, images)
    if isinstance(network, PatchClassifier):
        return network.forward_views(views.image, views.patches)
    if not isinstance(model, PatchInference):
        logits: Tensor = network(views.image)
        return logits
    own, prepare = (images.shape[-2], images.shape[-1]), network.preprocessing
    source = None
    if min(own) > prepare.image_size:
        source = make_views(images, size=own, mean=prepare.mean, std=prepare.std, grid=0).image
    out: CounterfactualLogits = model(views.image, source=source)
    return out


def split_for_device(images: Tensor) -> tuple[Tensor, ...]:
    """Images (B,C,H,W) in parts that their device is quickest with: a GPU takes all at once, a CPU a few."""
    pixels = max(images.shape[-2] * images.shape[-1], 1)
    at_once = max(_CPU_PIXELS // pixels, 1) if images.device.type == "cpu" else max(len(images), 1)
    return tuple(torch.split(images, at_once))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode for a while; afterwards each part is in its own again."""
    training = [part for part in model.modules() if part.training]  # a part may be kept in evaluation mode
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def score_pictures(
    model: Classifier | PatchInference,
    loader: "Loader",
    *,
    accelerator: "Accelerator",
    dtype: torch.dtype = torch.float32,
    keep_patches: bool = False,
    closer_size: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score what a loader ships, in evaluation mode; each process gets the scores of all.

    A network that was trained on patches alone has "patch" logits alone.

    Args:
        model: as in `score_images`, on the accelerator's device.
        loader: of this process's share, each batch of it, also an empty one. The network may know more labels than
            its records have, and in another order; scores are those of the records.
        accelerator: which processes there are.
        dtype: of autocast; float32 for none.
        keep_patches: keep logits and weights of each patch too.
        closer_size: as in `score_images`.
        progress: told what is done after each batch.
    """
    device = accelerator.device
    held: list[_Part] = []
    columns = _find_columns(model, loader.records.labels.names)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with evaluating(model), torch.inference_mode(), autocast:
        for number, batch in enumerate(loader, 1):
            if len(batch.indices):
                parts = split_for_device(batch.images.to(device, non_blocking=True))
                rows = [
                    _pack(score_images(model, part, closer_size=closer_size), keep_patches=keep_patches)
                    for part in parts
                ]
                packed = torch.cat(rows)
                held.append(_Part(batch.indices, batch.target, packed if columns is None else packed[..., columns]))
            if progress is not None:
                progress("validate", number, len(loader))
    joined = _gather(held, model, loader, accelerator=accelerator, keep_patches=keep_patches)
    scores = replace(_unpack(joined, model, loader, columns=columns), closer_size=closer_size)
    _check_finite(scores, model)
    return scores


def _find_columns(model: Classifier | PatchInference, labels: tuple[str, ...]) -> list[int] | None:
    """Where each label stands among those of a network; None where they are the same."""
    network = model.model if isinstance(model, PatchInference) else model
    if not isinstance(network, Classifier) or network.labels == labels:
        return None
    known = LabelSpace(network.labels)
    return [known.index(name) for name in labels]


def _pack(out: CounterfactualLogits | Tensor, *, keep_patches: bool) -> Tensor:
    """Rows (B,K,L): image logits; with patches the pooled and TDE logits, then those of each patch, then weights."""
    if isinstance(out, Tensor):
        return out.float()[:, None]
    rows = [out.image_logits[:, None], out.pooled_logits[:, None], out.tde_logits[:, None]]
    if keep_patches:
        rows += [out.patch_logits, out.weights]
    return torch.cat([row.float() for row in rows], dim=1)


def _gather(
    held: list[_Part], model: nn.Module, loader: "Loader", *, accelerator: "Accelerator", keep_patches: bool
) -> _Part:
    """Join the parts of all processes, in the order of the records, on the CPU."""
    device, labels = accelerator.device, len(loader.records.labels)
    count = 3 + 2 * keep_patches * model.grid**2 if isinstance(model, PatchInference | PatchClassifier) else 1
    indices = torch.cat([torch.empty(0, dtype=torch.int64), *(part.indices for part in held)])
    target = torch.cat([torch.empty(0, labels), *(part.target for part in held)])
    rows = torch.cat([torch.empty(0, count, labels, device=device), *(part.rows for part in held)])
    if accelerator.num_processes > 1:  # shares differ in length: fill them up, and tell the filling by its index
        indices = accelerator.gather(accelerator.pad_across_processes(indices.to(device), pad_index=-1))
        target = accelerator.gather(accelerator.pad_across_processes(target.to(device)))
        rows = accelerator.gather(accelerator.pad_across_processes(rows))
    indices, target, rows = indices.cpu(), target.cpu(), rows.cpu()
    order = indices.argsort()[(indices < 0).sum() :]
    return _Part(indices[order], target[order], rows[order])


def _unpack(joined: _Part, model: nn.Module, loader: "Loader", *, columns: list[int] | None) -> Scores:
    records, rows = loader.records, joined.rows
    names = tuple(records.images.name(records.place(index)) for index in joined.indices.tolist())
    patches = rows[:, 3:].unflatten(1, (2, -1)) if rows.shape[1] > 3 else None
    mixed = model if isinstance(model, PatchInference | PatchClassifier) else None
    patch_only = isinstance(model, PatchClassifier) and model.patch_only
    trained = {"patch"} if patch_only else set(KINDS)  # an image head that was never trained has nothing to say
    return Scores(
        labels=records.labels.names,
        pictures=names,
        target=joined.target,
        logits={kind: rows[:, place] for place, kind in enumerate(KINDS[: rows.shape[1]]) if kind in trained},
        patch_logits=None if patches is None else patches[:, 0],
        weights=None if patches is None else patches[:, 1],
        lam=1.0 if mixed is None else _fetch(mixed.lam, columns),
        temperature=1.0 if mixed is None else _fetch(mixed.temperature, columns),
        indices=joined.indices,
        overlap=0.0 if mixed is None else mixed.overlap,
        data=records.name,
    )


def _check_finite(scores: Scores, model: Classifier | PatchInference) -> None:
    """Refuse logits that cannot be ranked, in all processes alike: what is checked are the scores of all."""
    for kind, logits in scores.logits.items():
        odd = (~logits.isfinite()).nonzero()
        if len(odd):
            row, column = odd[0].tolist()
            network = model.model if isinstance(model, PatchInference) else model
            assert isinstance(network, Classifier)
            said = f"{logits[row, column].item():g} for {scores.pictures[row]}"
            wrong = f"its {kind} logit of {scores.labels[column]!r} is {said}"
            raise InputError(network.called, wrong, "its weights or its description are damaged; use a sound model")


def _fetch(value: float | Tensor, columns: list[int] | None) -> float | Tensor:
    """A number, or on the CPU one for each label that was scored."""
    if not isinstance(value, Tensor):
        return value
    return value.cpu() if columns is None or value.ndim == 0 else value.cpu()[columns]
