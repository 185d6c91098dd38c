"""What a run began with, what it gained, and what is fitted to images that nobody was trained on who scores them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pivotpatch.core.bootstrap import resample_average_precision
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.core.metrics import Definition, average_precision
from pivotpatch.data.loading import Loader
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import evaluating, score_pictures
from pivotpatch.models.classifier import Classifier, SharedClassifier
from pivotpatch.process import Progress
from pivotpatch.training.build import Run
from pivotpatch.training.features import Features, read_features
from pivotpatch.training.images import open_loader
from pivotpatch.training.model import open_start
from pivotpatch.tuning.tune import Tuning, tune_scores

SHARES = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Of what labels that a model knew have learned from its last images, see `keep_known`."""
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
        with evaluating(last):
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


def keep_known(run: Run, *, progress: Progress) -> float | None:
    """Take back some of what labels learned that the model knew before: a few images may spoil what many taught.

    The weights of such a label become a mean of what they were and what they are: heads of folds say how much of the
    latter ranks images best that they were not trained on. Labels that are new keep all that they learned.

    Returns:
        The share of what was learned that is kept, one of `SHARES`; None where no label was known.
    """
    start, known = open_start(run.config, run.records.labels.names)
    if start is None or not known:
        return None
    names = [f"{last}.{part}" for last in ("head.project", *start.projections) for part in ("weight", "bias")]
    before = start.to(run.accelerator.device).state_dict()
    models: list[nn.Module] = [run.task.model, *run.task.folds]
    heads = [(each, {name: each.get_parameter(name).detach().clone() for name in names}) for each in models]

    @torch.no_grad()
    def mix(share: float) -> None:
        for each, learned in heads:
            for name in names:
                each.get_parameter(name)[known] = torch.lerp(before[name][known], learned[name][known], share)

    means = []
    for share in SHARES:
        mix(share)
        scores = score_folds(run, progress=progress).keep_labels(known)
        shown = bool((scores.target == 1).any())  # else nothing can be ranked, and nothing was learned of them
        means.append(average_precision(scores.get(run.task.ranking), scores.target).mean if shown else 0.0)
    best = SHARES[int(np.argmax(means))]
    mix(best)
    return best


def tune_folds(run: Run, *, progress: Progress) -> Tuning:
    """All that `pivotpatch tune` fits, on the training images, by what heads say that did not learn from them."""
    model, closer = run.task.model, None
    scores = score_folds(run, progress=progress)
    if model.closer_size is not None:
        closer = score_folds(run, progress=progress, closer=True)
    return tune_scores(scores, model=model, closer=closer, generator=torch.Generator().manual_seed(SEED))
