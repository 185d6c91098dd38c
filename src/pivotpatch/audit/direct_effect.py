"""The true direct effect of an object, known on scenes alone, and how well logits track it.

Equation 2 of the paper asks what an object x adds to the answer while the co-occurring objects z stay: P(Y=1 | x, z)
less P(Y=1 | x masked, z). In a photograph nobody knows where x is. A scene is drawn from a plan, so that x can be left
out and nothing else: the effect is the model's own image logit of the label with the object, less that without it.
Where a scene does not show a label the effect is 0.

Effects are taken on logits, as the method is, and always from the model whose logits are judged by them: PAT-I is
judged by the effects in the model that it wraps, PAT-T by those in its own image logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.core.bootstrap import Interval
from pivotpatch.data.loading import make_loader
from pivotpatch.data.records import LabelLists, RecordSet
from pivotpatch.data.scenes import SceneStore, draw_scene
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import Progress, score_pictures
from pivotpatch.models.classifier import Classifier

Among = Literal["objects", "scenes"]


@dataclass(frozen=True, eq=False)
class DirectEffects:
    """What the objects of N scenes add to a model's answers about L labels.

    Attributes:
        shown: (N,L) whether the scene shows the label.
        effect: (N,L) image logit with the object less that without it; 0 where there is none.
        logits: (N,L) by kind, of the scene as it is.
    """

    labels: tuple[str, ...]
    shown: Tensor
    effect: Tensor
    logits: Mapping[str, Tensor]


@dataclass(frozen=True)
class EffectTracking:
    """How well one kind of logits tracks the direct effect: Spearman's rank correlation, label by label.

    Attributes:
        among: "objects", the scenes that show the label, or "scenes", all of them.
        counts: how many scenes of each label were ranked.
        per_label: correlation of each label with its interval; None where there is nothing to rank.
        mean: over the labels; None where no label could be ranked.
        over_image: what `mean` adds to that of the image logits, paired; None for these themselves, and likewise.
    """

    kind: str
    among: Among
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    per_label: tuple[Interval | None, ...]
    mean: Interval | None
    over_image: Interval | None


def find_judged(model: Classifier | PatchInference, records: RecordSet, *, where: str = "direct effect") -> Classifier:
    """The model whose effects are measured; refuse, before the work, what they are not known of.

    Args:
        model: a model, or PAT-I around one. It may know more labels than scenes have, in any order.
        records: of `scenes:`.
        where: the model's name, for messages.
    """
    if not isinstance(records.images, SceneStore):
        raise InputError(records.name, "direct effects are known on scenes only", "give scenes:@test-same or the like")
    judged = model.model if isinstance(model, PatchInference) else model
    known = judged.labels if isinstance(judged, Classifier) else ()
    missing = [name for name in records.labels.names if name not in known]
    if missing or not isinstance(judged, Classifier):
        wrong = f"it does not know {len(missing)} of the {len(records.labels)} labels of scenes ({shorten(missing)})"
        raise InputError(where, wrong, "give a model that was trained on scenes:")
    return judged


def measure_direct_effects(
    model: Classifier | PatchInference, records: RecordSet, *, batch_size: int = 128, progress: Progress | None = None
) -> DirectEffects:
    """Score scenes as they are and without each of the objects that they show.

    Args:
        model: a model, or PAT-I around one.
        records: of `scenes:`, see `read_scenes`.
        batch_size: images at once.
        progress: told what is done after each batch.
    """
    judged, store = find_judged(model, records), records.images
    assert isinstance(store, SceneStore)
    side = judged.picture_size
    accelerator = Accelerator(cpu=next(judged.parameters()).device.type == "cpu")

    def score(asked: Classifier | PatchInference, scored: RecordSet) -> Scores:
        loader = make_loader(scored, size=(side, side), batch_size=batch_size)
        return score_pictures(asked, loader, accelerator=accelerator, progress=progress)

    whole = score(model, records)
    shown = whole.target == 1
    scene, label = shown.nonzero(as_tuple=True)
    images = _Lacking(store, [records.place(row) for row in scene.tolist()], label.tolist())
    nothing = LabelLists.from_lists([[] for _ in images.places])  # what they show is not asked
    lacking = score(judged, RecordSet(records.name, records.labels, images=images, positive=nothing))
    effect = torch.zeros_like(whole.target)
    effect[shown] = whole.get("image")[shown] - lacking.get("image").gather(1, label[:, None])[:, 0]
    return DirectEffects(records.labels.names, shown, effect, whole.logits)


def track_effects(
    effects: DirectEffects, *, among: Among = "objects", resamples: int = 1000, generator: torch.Generator
) -> tuple[EffectTracking, ...]:
    """Rank correlation of each kind of logits with the direct effect, label by label.

    Intervals hold 95 % of a bootstrap over scenes; all kinds and labels see the same resamples.

    Args:
        effects: what was measured.
        among: "objects" ranks, for each label, the scenes that show it: is more said where the object does more?
            "scenes" ranks all of them: is nothing said where there is no object, whatever else is shown?
        resamples: of the bootstrap.
        generator: draws them.
    """
    ranked = effects.shown if among == "objects" else torch.ones_like(effects.shown)
    # How often each scene counts (1+R,N): once in what was measured, then as often as it is drawn.
    count = len(ranked)
    drawn = [torch.randint(count, (count,), generator=generator).bincount(minlength=count) for _ in range(resamples)]
    weights = torch.stack([torch.ones(count), *drawn]).double()
    found = {}
    for kind, logits in effects.logits.items():
        columns = zip(logits.T, effects.effect.T, ranked.T, strict=True)
        values = [rank_correlation(own[rows], effect[rows], weights[:, rows]) for own, effect, rows in columns]
        found[kind] = torch.stack(values, dim=1)
    return tuple(
        EffectTracking(
            kind,
            among,
            effects.labels,
            tuple(ranked.sum(0).tolist()),
            tuple(_bound(column) for column in values.T),
            _bound(values.nanmean(dim=1)),
            None if kind == "image" else _bound((values - found["image"]).nanmean(dim=1)),
        )
        for kind, values in found.items()
    )


def rank_correlation(one: Tensor, other: Tensor, weights: Tensor) -> Tensor:
    """Spearman's rank correlation of n pairs, each of them counted as often as it was drawn.

    Ties share their mean rank. The values are sorted once for all rows of weights.

    Args:
        one: (n,).
        other: (n,).
        weights: (R,n), whole numbers.

    Returns:
        (R,), NaN where one side does not vary.

    >>> a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 8.0, 9.0])
    >>> rank_correlation(a, b, torch.ones(1, 3)).item()
    1.0
    """
    ranks, others = _rank(one, weights), _rank(other, weights)
    total = weights.sum(1, keepdim=True)
    ranks = ranks - (weights * ranks).sum(1, keepdim=True) / total
    others = others - (weights * others).sum(1, keepdim=True) / total
    together = (weights * ranks * others).sum(1)
    return together / ((weights * ranks**2).sum(1) * (weights * others**2).sum(1)).sqrt()


def _rank(values: Tensor, weights: Tensor) -> Tensor:
    """Mean ranks (R,n) of values (n,) that are drawn `weights` (R,n) times."""
    levels, place = values.unique(return_inverse=True)
    held = weights.new_zeros(len(weights), len(levels)).index_add_(1, place, weights)
    return (held.cumsum(1) - (held - 1) / 2)[:, place]


def _bound(values: Tensor) -> Interval | None:
    """What was measured, values[0], with 95 % of what the resamples (R,) behind it give; None where it is NaN."""
    if values[0].isnan() or values[1:].isnan().all():
        return None
    low, high = values[1:].nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return Interval(values[0].item(), low, high)


@dataclass(frozen=True)
class _Lacking:
    """Scenes of a store, each without one of its objects."""

    scenes: SceneStore
    places: list[int]
    taken: list[int]

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        return f"{self.scenes.name(self.places[index])} without {self.taken[index]}"

    def source(self, index: int) -> NDArray[np.uint8]:
        plan = self.scenes.plan(self.places[index])
        return draw_scene(plan, without=plan.removed | {self.taken[index]})
