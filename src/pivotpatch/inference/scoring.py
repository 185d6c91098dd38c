"""Score a data set: every image once, whatever the number of processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.data.records import LabelSpace
from pivotpatch.errors import InputError
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import KINDS, Scores
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.heads import project_embedding
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_views
from pivotpatch.process import Progress, ignore
from pivotpatch.runtime.values import Patching

if TYPE_CHECKING:  # an image alone needs none of them, and must not wait for their import
    from accelerate import Accelerator

    from pivotpatch.data.loading import Loader

_EVALUATING = Lock()
# How many ask a model right now, and which of its parts were in training mode before.
_USED: WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = WeakKeyDictionary()
_CPU_PIXELS = 8 * 256 * 256  # of images at once; what is computed from more of them outgrows the caches


def get_classifier(model: Classifier | PatchInference, where: str) -> Classifier:
    """The model itself, or the one that PAT-I is around, which must say how it sees images."""
    inner = model.model if isinstance(model, PatchInference) else model
    if not isinstance(inner, Classifier):
        raise InputError(where, f"a {type(inner).__name__} says no preprocessing", "give a Classifier")
    return inner


def look_again(
    model: PatchClassifier, images: Tensor, image_logits: Tensor, *, closer_size: int | None
) -> CounterfactualLogits:
    """What a model says on a second look at images (B,3,h,w) from the loader, whose logits (B,L) are known.

    It is at the whole images, `closer_size` rows and columns of them, or at their patches where that is None.
    """
    if closer_size is not None:
        closer = make_views(model, images, patches=False, size=closer_size).image
        return model.combine_closer(image_logits, *model.embed_regions(closer))
    views = make_views(model, images)
    if model.regions:
        return model.forward_views(views.image, views.patches)
    return model.combine(image_logits, model.embed_patches(views.patches))


def score_images(
    model: Classifier | PatchInference, images: Tensor, *, closer_size: int | None = None
) -> CounterfactualLogits | Tensor:
    """What a model says of images from the loader: image logits (B,L), or with patches all there is.

    Args:
        model: a classifier, or PAT-I around one.
        images: (B,3,h,w) uint8 on the model's device. PAT-I cuts its patches from them where they are larger
            than the model's input; a `PatchClassifier` as it was trained.
        closer_size: a `PatchClassifier` looks at the whole images once more, at so many rows and columns, and not at
            their patches.
    """
    classifier = get_classifier(model, "score_images")
    if closer_size is not None:
        assert isinstance(classifier, PatchClassifier), "callers check it, `check_closer`"
        first = classifier.embed_images(make_views(classifier, images, patches=False).image)
        logits = project_embedding(classifier.head.project, first)
        return look_again(classifier, images, logits, closer_size=closer_size)
    views = make_views(classifier, images)
    if isinstance(classifier, PatchClassifier):
        return classifier.forward_views(views.image, views.patches)
    if not isinstance(model, PatchInference):
        return classifier(views.image)
    own, source = images.shape[-1], None
    if own > classifier.preprocessing.image_size:
        source = make_views(classifier, images, size=own).image
    return model(views.image, source=source)


def split_for_device(images: Tensor) -> tuple[Tensor, ...]:
    """Images (B,C,H,W) in parts that their device is quickest with: a GPU takes all at once, a CPU a few."""
    pixels = max(images.shape[-2] * images.shape[-1], 1)
    at_once = max(_CPU_PIXELS // pixels, 1) if images.device.type == "cpu" else max(len(images), 1)
    return tuple(torch.split(images, at_once))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while; afterwards each part is in its own again.

    Where several threads ask one model, that is when the last of them is done.
    """
    with _EVALUATING:
        users, training = _USED.get(model) or (0, [part for part in model.modules() if part.training])
        _USED[model] = users + 1, training  # a part may be kept in evaluation mode
        model.eval()
    try:
        yield
    finally:
        with _EVALUATING:
            users, training = _USED.pop(model)
            if users > 1:
                _USED[model] = users - 1, training
            else:
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
    score: Callable[[Tensor], CounterfactualLogits | Tensor] | None = None,
    progress: Progress = ignore,
) -> Scores:
    """Score what a loader ships, in evaluation mode; each process gets the scores of all.

    A model that was trained on patches alone has "patch" logits alone.

    Args:
        model: as in `score_images`, on the accelerator's device.
        loader: of this process's share, each batch of it, also an empty one. The model may know more labels than
            its records have, and in another order; scores are those of the records.
        accelerator: which processes there are.
        dtype: of autocast; float32 for none.
        keep_patches: keep logits and weights of each patch too.
        closer_size: as in `score_images`.
        score: in the place of `score_images`, for a loader that ships something else than images.
        progress: told what is done after each batch.
    """
    from accelerate.utils import gather_object

    device, labels = accelerator.device, loader.records.labels.names
    classifier = get_classifier(model, "score_pictures")
    known = LabelSpace(classifier.labels)
    columns = torch.tensor([known.index(name) for name in labels], device=device)
    indices, target = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, len(labels))]
    batches: list[dict[str, Tensor]] = []
    with evaluating(model), torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for number, batch in enumerate(loader, 1):
            indices.append(batch.indices)
            target.append(batch.target)
            for images in split_for_device(batch.images.to(device, non_blocking=True)) if len(batch.indices) else ():
                out = score(images) if score else score_images(model, images, closer_size=closer_size)
                said = _list_parts(out, keep_patches=keep_patches)
                batches.append({name: part.float()[..., columns] for name, part in said.items()})
            progress("validate", number, len(loader))
    shares = gather_object([(torch.cat(indices), torch.cat(target), _join(batches))])
    scores = replace(_make_scores(shares, model, loader), closer_size=closer_size)
    _check_finite(scores, classifier.called)
    return scores if isinstance(model, PatchInference) else _keep_rule(scores, model)


def _keep_rule(scores: Scores, model: Classifier) -> Scores:
    """Scores with the thresholds and the calibration that a model decides about their labels by, where it has them."""
    places = [model.labels.index(name) for name in scores.labels]
    thresholds, calibration = model.thresholds, model.find_calibration(closer_size=scores.closer_size)
    if calibration is not None and calibration.kind != scores.ranking:
        return scores
    return replace(
        scores,
        thresholds=thresholds and tuple(thresholds[place] for place in places),
        calibration=calibration and calibration.select(places),
    )


def _list_parts(out: CounterfactualLogits | Tensor, *, keep_patches: bool) -> dict[str, Tensor]:
    """Logits (B,L) by kind, and where they are kept those of each patch and its weights (B,P,L)."""
    if isinstance(out, Tensor):
        return {"image": out}
    parts = {"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits}
    return parts | ({"patch_logits": out.patch_logits, "weights": out.weights} if keep_patches else {})


def _join(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The parts of all batches, on the CPU; a process may have had none."""
    names = max(batches, key=len, default={})
    return {name: torch.cat([each[name] for each in batches if each]).cpu() for name in names}


def _make_scores(
    shares: Sequence[tuple[Tensor, Tensor, dict[str, Tensor]]], model: Classifier | PatchInference, loader: "Loader"
) -> Scores:
    """Scores in the order of the records, from the places (N,) in these, targets (N,L) and parts of each process."""
    places, targets, said = zip(*shares, strict=True)
    indices, order = torch.cat(places).sort()
    target, records = torch.cat(targets)[order], loader.records
    parts = {name: part[order] for name, part in _join(said).items()}
    patch_only = isinstance(model, PatchClassifier) and model.patch_only
    trained = ("patch",) if patch_only else KINDS  # an image head that was never trained has nothing to say
    mixing = model.patching or Patching()
    return Scores(
        labels=records.labels.names,
        pictures=tuple(map(records.name_at, indices.tolist())),
        target=target,
        logits={kind: parts[kind] for kind in trained if kind in parts} or {"image": target},
        patch_logits=parts.get("patch_logits"),
        weights=parts.get("weights"),
        lam=mixing.lam,
        temperature=mixing.temperature,
        indices=indices,
        overlap=mixing.overlap,
        data=records.name,
    )


def _check_finite(scores: Scores, name: str) -> None:
    """Refuse logits that cannot be ranked, in all processes alike: what is checked are the scores of all."""
    for kind, logits in scores.logits.items():
        odd = (~logits.isfinite()).nonzero()
        if len(odd):
            row, column = odd[0].tolist()
            said = f"{logits[row, column].item():g} for {scores.pictures[row]}"
            wrong = f"its {kind} logit of {scores.labels[column]!r} is {said}"
            raise InputError(name, wrong, "its weights or its description are damaged; use a sound model")
