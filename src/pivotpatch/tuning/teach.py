"""A new label from few images: a linear discriminant between them and ordinary images, on what the model sees anyway.

The backbone and all that belongs to other labels stay as they are. D features of an embedding, R axes along which
ordinary images differ most, K images of the label, P patches of each, N ordinary images.
"""

from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pivotpatch.core.bootstrap import Interval, wilson_interval
from pivotpatch.core.counterfactual import pool_patches, tde_logits
from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import fingerprint
from pivotpatch.models.classifier import Classifier, Embeddings, MultiLabelClassifier
from pivotpatch.models.open import find_bundled
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Calibration
from pivotpatch.tuning.calibration import minimise_log_loss

FILE = "background.safetensors"
"""Ordinary images, beside a bundled model."""
LEAST = 20
"""Images without the label that a model needs of which no background is known."""
RANK = 128
SHARE = 0.02
"""Of images that show a label, where nobody says another: the median of MS-COCO's labels."""
_RIDGE = 100.0  # times the mean variance of a feature, over the number of images: what few of them cannot tell
_SCALE = 6.0  # logit of a usual image of the label, for the softmax over patches
_OWN = 20  # images without the label that count as much as the background does
_UNLIKE = 0.75  # share of ordinary images that a likely mistake looks less like the label than
_FLOOD = 2.0
_SAME = 0.98  # cosine of two embeddings of what is almost one image


@dataclass(frozen=True, eq=False)
class Background:
    """Ordinary images, by their coordinates on the axes along which they differ most."""

    means: Tensor  # (2,D), of the embeddings of images and of patches
    axes: Tensor  # (D,R), orthonormal
    spread: Tensor  # (R,), the variance along each
    level: float  # the mean variance of a feature
    places: Tensor  # (N,1+P,R), of each image and its patches

    @classmethod
    def measure(cls, seen: Embeddings, *, rank: int = RANK) -> "Background":
        """That of images by their embeddings (N,D) and (N,P,D)."""
        views = _stack(seen).double()
        means = torch.stack([views[:, 0].mean(0), (views[:, 1:] if views.shape[1] > 1 else views).mean((0, 1))])
        moved = _centre(views, means)
        kinds = [moved[:, :1], moved[:, 1:]] if moved.shape[1] > 1 else [moved]
        spread = sum(part.flatten(0, 1).T @ part.flatten(0, 1) / part.shape[:2].numel() for part in kinds) / len(kinds)
        assert isinstance(spread, Tensor)
        values, axes = torch.linalg.eigh(spread)
        values, axes = values.flip(0)[:rank].clamp(min=0), axes.flip(1)[:, :rank]
        return cls(
            means.float(),
            axes.float(),
            values.float(),
            spread.trace().item() / len(spread),
            moved.float() @ axes.float(),
        )

    def locate(self, seen: Embeddings) -> Tensor:
        """Coordinates (B,1+P,R) of embeddings (B,D) and (B,P,D)."""
        return _centre(_stack(seen).float(), self.means) @ self.axes

    def restore(self) -> Embeddings:
        """Embeddings (N,D) and (N,P,D) of its images, as nearly as the axes tell."""
        views = _centre(self.places @ self.axes.T, -self.means)
        return Embeddings(views[:, 0], views[:, 1:] if views.shape[1] > 1 else None)

    def save(self, path: Path, model: Classifier) -> None:
        """Write it in a byte per coordinate, for models with the backbone of `model`."""
        scale = self.places.abs().amax((0, 1)).clamp(min=1e-12) / 127
        small = {"means": self.means, "axes": self.axes.half(), "spread": self.spread, "scale": scale}
        small |= {"level": torch.tensor(self.level), "places": (self.places / scale).round().to(torch.int8)}
        save_file({name: value.contiguous() for name, value in small.items()}, path, metadata={"of": name_views(model)})


@cache
def _read(path: Path) -> tuple[str, Background]:
    with safe_open(path, "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        of = file.metadata()["of"]
    places = held["places"].float() * held["scale"]
    return of, Background(held["means"], held["axes"].float(), held["spread"], held["level"].item(), places)


def find_background(model: Classifier) -> Background | None:
    """The bundled tagger's, for every model that sees images as it does, whatever its labels; else None."""
    folder = find_bundled("tagger")
    assert folder is not None
    of, background = _read(folder / FILE)
    return background if of == name_views(model) else None


def name_views(model: Classifier) -> str:
    """What decides what embeddings are: weights of the backbone, head, and how images are cut."""
    assert isinstance(model, MultiLabelClassifier | PatchClassifier)
    held = model.patching
    cut = () if held is None else (held.grid, held.overlap, held.source_size, held.patch_size)
    return repr((fingerprint(model.backbone), model.architecture.head, model.preprocessing.image_size, cut))


def check_teachable(model: Classifier) -> None:
    """Refuse a model to which no label can be added by a row."""
    todo = "teach the bundled tagger or another model with a linear head, or train with the new label in the table"
    if not isinstance(model, MultiLabelClassifier | PatchClassifier):
        raise InputError(model.called, f"a {type(model).__name__} has no head of ours", todo)
    if model.architecture.head not in ("linear", "max"):
        wrong = f"the labels of its {model.architecture.head} head have more than a row each"
        raise InputError(model.called, wrong, todo)
    if isinstance(model, PatchClassifier) and model.patch_only:
        raise InputError(model.called, "it was trained on patches alone and does not see the whole image", todo)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a label's images teach, and what that is worth, each image judged by all others alone.

    What share of ordinary images shows the label is not known, so that no average precision can be told.
    """

    label: str
    images: int  # how many there are
    row: Tensor  # (D,) of the image and patch projections
    offsets: tuple[float, float]  # their biases, of the image's logit and of the patches'
    weights: Tensor  # (D,) the row of the weight projection
    image_calibration: tuple[float, float]  # slope and offset of the image's logit alone
    threshold: float  # of the probability, for the best F1
    share: float  # of images that are taken to show the label
    recall: Interval  # at the threshold, with its 95 % interval
    given: float  # share of ordinary images that get the label; some of them may show it, nobody has looked
    precision: float  # the least to be expected where `share` of images show it, and no ordinary one
    uncertainty: float  # p (1 - p) of the label in an ordinary image, judged by the image alone
    unlike: tuple[int, ...]  # places of images that look unlike the others
    repeated: int  # images that are almost the same as an earlier one

    def to_dict(self) -> dict[str, Any]:
        """What is told of it, in plain types."""
        names = ("label", "images", "share", "threshold", "given", "precision", "repeated")
        return {name: getattr(self, name) for name in names} | {"recall": asdict(self.recall)}


def fit_axis(places: Tensor, background: Background, *, away: Tensor) -> Tensor:
    """The discriminant (R,) between images of a label and ordinary ones: a logit on the scale of `_SCALE`.

    It is S^-1 (m - away), with the mean m of the label's images and the covariance S of ordinary ones, whose ridge
    falls with the number of images. Half of m are whole images, half their patches, weighted by how much they show.

    Args:
        places: (K,1+P,R) coordinates of images and patches.
        background: of ordinary images.
        away: (R,) the mean of what the label is told from, 0 for the background.
    """
    inverse = 1 / (background.spread + _RIDGE * background.level / len(places))

    def draw(mean: Tensor) -> Tensor:
        axis = (mean - away) * inverse
        return axis * _SCALE / (places[:, 0] @ axis - away @ axis).mean().abs().clamp(min=1e-6)

    if places.shape[1] == 1:
        return draw(places[:, 0].mean(0))
    patches = places[:, 1:]
    first = draw(places.mean((0, 1)))
    shown = (patches * torch.softmax(patches @ first, dim=1)[..., None]).sum(1)
    return draw((places[:, 0].mean(0) + shown.mean(0)) / 2)


def score(places: Tensor, axis: Tensor, *, lam: float) -> tuple[Tensor, Tensor]:
    """Logits (B,) of whole images, and the normalised ones with their patches, from coordinates (B,1+P,R)."""
    logits = places @ axis
    image, patches = logits[:, :1], logits[:, 1:, None]
    if not patches.shape[1]:
        return image[:, 0], image[:, 0]
    pooled = pool_patches(patches, torch.softmax(patches, dim=1))
    return image[:, 0], tde_logits(image, pooled, lam=lam, normalised=True)[:, 0]


def teach(
    model: Classifier,
    label: str,
    seen: Embeddings,
    *,
    background: Background,
    without: Embeddings | None = None,
    share: float = SHARE,
) -> Lesson:
    """Learn a label from images of it.

    Args:
        model: that the embeddings are of; it is not changed, see `add_label`.
        label: its name.
        seen: embeddings of K >= 2 images that show it.
        background: of ordinary images.
        without: of images that do not show it, though one might think so: where it stands when it is away.
        share: of images that show it, where the model will be used.
    """
    places, others = background.locate(seen), background.places
    away = torch.zeros_like(background.spread)
    if without is not None:
        own = background.locate(without)
        away = own.mean((0, 1)) * len(own) / (len(own) + _OWN)
        others = torch.cat([others, own])
    lam, temperature = (0.0, 1.0) if model.patching is None else (model.patching.lam, model.patching.temperature)
    axis = fit_axis(places, background, away=away)
    usual_image, usual = score(others, axis, lam=lam)
    rows, found = torch.arange(len(places)), list[tuple[Tensor, Tensor]]()
    for row in rows:
        alone = fit_axis(places[rows != row], background, away=away)
        mine, theirs = (score(part, alone, lam=lam) for part in (places[row : row + 1], others))
        # Each axis has a scale of its own: ordinary images say how far above them this one is.
        found.append((_rescale(mine[0], theirs[0], usual_image), _rescale(mine[1], theirs[1], usual)))
    image, both = (torch.cat(part) for part in zip(*found, strict=True))
    slope, offset = _calibrate(both, usual, share)
    probs, usual_probs = ((slope * part + offset).sigmoid() for part in (both, usual))
    threshold = _choose_threshold(probs, usual_probs, share)
    image_fit = _calibrate(slope * image + offset, slope * usual_image + offset, share)
    first = (image_fit[0] * (slope * usual_image + offset) + image_fit[1]).sigmoid()
    hits, alarms = (probs > threshold).float().mean().item(), (usual_probs > threshold).float().mean().item()
    expected = share * hits + (1 - share) * alarms
    bounds = wilson_interval(torch.tensor(hits), torch.tensor(len(places)))
    bias = -(background.means @ background.axes @ axis)
    row = background.axes @ axis
    alike = nn.functional.normalize(places[:, 0], dim=1)
    return Lesson(
        label=label,
        images=len(places),
        row=slope * row,
        offsets=(slope * bias[0].item() + offset, slope * bias[1].item() + offset),
        weights=temperature * row,
        image_calibration=image_fit,
        threshold=threshold,
        share=share,
        recall=Interval(hits, *(bound.item() for bound in bounds)),
        given=alarms,
        precision=share * hits / expected if expected else 0.0,
        uncertainty=(first * (1 - first)).mean().item(),
        unlike=tuple(rows[both < usual.quantile(_UNLIKE)].tolist()),
        repeated=int(((alike @ alike.T).tril(-1) > _SAME).any(1).sum()),
    )


def add_label(model: Classifier, lesson: Lesson) -> MultiLabelClassifier | PatchClassifier:
    """A copy of a model that knows one label more, or one anew; what belongs to others is the same, bit by bit."""
    taught = deepcopy(model)
    assert isinstance(taught, MultiLabelClassifier | PatchClassifier)
    count = len(model.labels)
    place = model.labels.index(lesson.label) if lesson.label in model.labels else count
    rows = {"project": (lesson.row, lesson.offsets[0])}
    if isinstance(taught, PatchClassifier):
        rows |= {"patch_projection": (lesson.row, lesson.offsets[1]), "weight_projection": (lesson.weights, 0.0)}
    for name, (weight, bias) in rows.items():
        owner: Any = taught.head if name == "project" else taught
        setattr(owner, name, _lay_in(getattr(owner, name), weight, bias, place=place))
    taught.labels = (*model.labels, lesson.label) if place == count else model.labels

    def put(values: tuple[float, ...], value: float) -> tuple[float, ...]:
        return (*values[:place], value, *values[place + 1 :])

    def put_in(fitted: Calibration, slope: float, offset: float) -> Calibration:
        return replace(fitted, slope=put(fitted.slope, slope), offset=put(fitted.offset, offset))

    taught.thresholds = put(model.thresholds or (0.5,) * count, lesson.threshold)
    taught.preferences = {name: put(values, lesson.threshold) for name, values in model.preferences.items()}
    fitted, adaptive = model.calibration, model.adaptive
    if fitted is not None:
        taught.calibration = put_in(fitted, 1.0, 0.0)  # the row is calibrated
    if fitted is not None and adaptive is not None:
        # A label more is a little more to be unsure about; efforts keep their meaning.
        cutoffs = adaptive.cutoffs if place < count else tuple(each + lesson.uncertainty for each in adaptive.cutoffs)
        again = adaptive.again
        if again is not None:  # as the closer look differs from the patches for the other labels
            was, now = (torch.tensor([each.slope, each.offset], dtype=torch.float64) for each in (fitted, again))
            slope = (now[0] / was[0]).median().item()
            again = put_in(again, slope, (now[1] - was[1] * now[0] / was[0]).median().item())
        first = put_in(adaptive.calibration, *lesson.image_calibration)
        taught.adaptive = replace(adaptive, calibration=first, cutoffs=cutoffs, again=again)
    return taught


def _stack(seen: Embeddings) -> Tensor:
    """Embeddings (B,1+P,D)."""
    return seen.image[:, None] if seen.patches is None else torch.cat([seen.image[:, None], seen.patches], dim=1)


def _centre(views: Tensor, means: Tensor) -> Tensor:
    return torch.cat([views[:, :1] - means[0], views[:, 1:] - means[1]], dim=1)


def _lay_in(layer: nn.Linear, weight: Tensor, bias: float, *, place: int) -> nn.Linear:
    """A layer with one row more, or another one in its place."""
    made = nn.Linear(layer.in_features, max(layer.out_features, place + 1)).to(layer.weight)
    with torch.no_grad():
        made.weight[: layer.out_features], made.bias[: layer.out_features] = layer.weight, layer.bias
        made.weight[place], made.bias[place] = weight, bias
    return made


def _rescale(logits: Tensor, usual: Tensor, wanted: Tensor) -> Tensor:
    """Logits (B,) moved as those of ordinary images (N,) must be to have the mean and the spread of others (N,)."""
    return (logits - usual.mean()) / usual.std().clamp(min=1e-6) * wanted.std() + wanted.mean()


def _calibrate(shown: Tensor, usual: Tensor, share: float) -> tuple[float, float]:
    """Slope and offset of logits (K,) of images that show a label and (N,) of others, where a share shows it.

    Answers are moved a little towards doubt, as Platt did, so that images without a mistake do not make it sure.
    """
    count, rest = len(shown), len(usual)
    target = torch.cat([torch.full((count,), (count + 1) / (count + 2)), torch.full((rest,), 1 / (rest + 2))])
    start = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    logits = torch.cat([shown, usual]).double()[:, None]
    fitted, _ = minimise_log_loss(logits, target.double()[:, None], centre=start, strength=torch.full_like(start, 1e-3))
    slope, offset = fitted[:, 0].tolist()
    odds = torch.logit(torch.tensor([share, count / (count + rest)], dtype=torch.float64))
    return max(slope, 0.05), offset + (odds[0] - odds[1]).item()


def _choose_threshold(probs: Tensor, usual: Tensor, share: float) -> float:
    """The threshold of the best F1 that calibrated probabilities (K,) and (N,) expect of a share that shows a label.

    Images that teach nothing would have it given to all: no more ordinary images get it than `_FLOOD` times the share.
    """
    mixed = torch.cat([probs, usual]).double()
    weight = torch.cat([torch.full_like(probs, share / len(probs)), torch.full_like(usual, (1 - share) / len(usual))])
    mixed, order = mixed.sort(descending=True)
    weight = weight.double()[order]
    expected = 2 * (mixed * weight).cumsum(0) / (weight.cumsum(0) + share)
    best = int(expected.argmax())
    chosen = float((mixed[best] + (mixed[best + 1] if best + 1 < len(mixed) else 0)) / 2)
    return max(chosen, usual.quantile(1 - min(_FLOOD * share, 0.5)).item())
