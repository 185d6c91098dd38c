"""What a run began with, what it gained, and what is fitted to images that nobody was trained on who scores them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pivotpatch.core.bootstrap import resample_average_precision
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.core.metrics import Definition
from pivotpatch.data.loading import Loader
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.classifier import Classifier, SharedClassifier
from pivotpatch.process import Progress
from pivotpatch.training.build import Run, open_loader
from pivotpatch.training.features import Features, read_features
from pivotpatch.tuning.tune import Tuning, tune_scores

SEED = 0  # of resamples: the same scores have the same intervals


def score_loader(
    run: Run, model: Classifier, loader: Loader, *, progress: Progress, heads: Any = None, closer: bool = False
) -> Scores:
    """Scores of a loader's images; of the features that it ships in their place where the backbone is frozen.

    Of features, `heads` of a fold may speak in the place of the model's own, and a closer look in that of the patches.
    """
    options: dict[str, Any] = {"accelerator": run.accelerator, "dtype": run.dtype, "progress": progress}
    if not isinstance(loader.batches.dataset, Features):
        return score_pictures(model, loader, **options)
    assert isinstance(model, SharedClassifier)
    last: Any = heads or model

    def score(kept: Tensor) -> CounterfactualLogits | Tensor:
        seen = read_features(kept, model)
        return last.project_closer(seen) if closer else last.project_embeddings(seen)

    size = model.closer_size if closer else None
    return score_pictures(model, loader, score=score, closer_size=size, keep_patches=True, **options)


def score_folds(run: Run, *, progress: Progress, closer: bool = False) -> Scores:
    """Scores of the training images, each by heads that learned from the other folds."""
    features = run.loader.batches.dataset
    assert isinstance(features, Features)
    found = []
    for number, heads in enumerate(run.task.folds):
        part = features.select(np.flatnonzero(run.folds.numpy() == number))
        model = run.task.model
        loader = open_loader(part.records, run.config, model=model, accelerator=run.accelerator, held=part)
        found.append(score_loader(run, model, loader, progress=progress, heads=heads, closer=closer))
    return join_scores(found)


def score_unseen(run: Run, model: Classifier, *, progress: Progress) -> Scores:
    """Scores of all images that who scores them was not trained on: those held out, and of folds all others."""
    assert run.val_loader is not None
    held = score_loader(run, model, run.val_loader, progress=progress)
    return join_scores([score_folds(run, progress=progress), held]) if run.task.folds else join_scores([held])


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Scores of the images of several, without the thresholds and the calibration of a model."""
    first = replace(parts[0], thresholds=None, calibration=None, indices=None)
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("target", "patch_logits", "weights")
        if getattr(first, name) is not None and all(getattr(part, name) is not None for part in parts)
    }
    logits = {kind: torch.cat([part.get(kind) for part in parts]) for kind in first.logits}
    return replace(first, pictures=sum((part.pictures for part in parts), ()), logits=logits, **tensors)


def measure_gain(before: Tensor, after: Scores, *, definition: Definition) -> dict[str, Any]:
    """MAP before any step and now, and the difference with its paired 95 % interval; before (N,L) are logits."""
    drawn = resample_average_precision(
        {"before": before, "after": after.get(after.ranking)},
        after.target,
        definition=definition,
        generator=torch.Generator().manual_seed(SEED),
    )
    gained = drawn.bound_mean("after", minus="before")
    means = {name: drawn.bound_mean(name).value for name in ("before", "after")}
    return {"images": len(after), **means, "gained": gained.value, "interval": [gained.low, gained.high]}


def tune_folds(run: Run, *, progress: Progress) -> Tuning:
    """All that `pivotpatch tune` fits, on the training images, by what heads say that did not learn from them."""
    model, closer = run.task.model, None
    scores = score_folds(run, progress=progress)
    if model.closer_size is not None:
        closer = score_folds(run, progress=progress, closer=True)
    return tune_scores(scores, model=model, closer=closer, generator=torch.Generator().manual_seed(SEED))
