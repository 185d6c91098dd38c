"""What a model says of many images, beside what is true of them: all that evaluation and audit need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import patch_weights, pool_patches, tde_logits
from pivotpatch.errors import InputError, check_known, choose_one_of
from pivotpatch.runtime.values import KINDS as KINDS
from pivotpatch.runtime.values import Calibration, Patching

_BY_IMAGE = ("target", "patch_logits", "weights", "given")  # tensors with a row per image and a column per label


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of N images for L labels."""

    labels: tuple[str, ...]  # their names
    pictures: tuple[str, ...]  # names of the images
    target: Tensor  # (N,L), 1 present, 0 absent, NaN unknown
    # (N,L) by kind, see `KINDS`; a model without patches has "image" alone. On the CPU; float32, or float64 where they
    # were read from probabilities.
    logits: Mapping[str, Tensor]
    patch_logits: Tensor | None = None  # (N,P,L) of each patch, where they were kept
    weights: Tensor | None = None  # (N,P,L) of each patch, likewise
    lam: float = 1.0  # weight of the patches in the "tde" logits
    temperature: float = 1.0  # of the patch weights
    indices: Tensor | None = None  # (N,) positions in the record set that was scored, rising, where there was one
    overlap: float = 0.0  # share of a patch's side that it has in common with its neighbour, see `patch_boxes`
    closer_size: int | None = None  # rows and columns of a closer look, where one took the place of the patches
    data: str | None = None  # address of the record set that was scored, where that is known
    network: str | None = None  # `fingerprint` of the model that scored them, likewise
    thresholds: tuple[float, ...] | None = None  # L, that `own_probs` must be above, where they were fitted
    calibration: Calibration | None = None  # of the logits to rank by, where one was fitted
    given: Tensor | None = None  # (N,L) boolean, decisions that came with the scores, such as the tags of `predict`

    def __post_init__(self) -> None:
        for name in ("labels", "pictures"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # of lists, which equal no tuple
        object.__setattr__(self, "target", self.target.float())
        shape = (len(self.pictures), len(self.labels))
        for name, tensor in {"target": self.target, **self.logits}.items():
            if tuple(tensor.shape) != shape:
                told = f"{name} has shape {tuple(tensor.shape)}"
                raise InputError("scores", told, f"give {shape}, one row per image and one column per label")
        wrong = ~(self.target.isnan() | (self.target == 0) | (self.target == 1))
        if wrong.any():
            told = f"the target holds {self.target[wrong][0].item():g}"
            raise InputError("scores", told, "write 1, 0, or NaN for unknown")
        if not self.logits:
            raise InputError("scores", "there are no logits", f"give at least one kind of {', '.join(KINDS)}")
        for kind in self.logits:
            check_known(kind, KINDS, where="scores", what="kind of logits")
        for name in ("patch_logits", "weights"):
            held = getattr(self, name)
            if held is not None and (held.ndim != 3 or tuple(held.shape[::2]) != shape):
                wanted = f"({shape[0]}, patches, {shape[1]})"
                raise InputError("scores", f"{name} has shape {tuple(held.shape)}", f"give {wanted}")
        counts = {len(self.thresholds or self.labels), len(self.calibration.slope if self.calibration else self.labels)}
        if counts != {len(self.labels)} or (self.calibration and self.calibration.kind != self.ranking):
            told = f"thresholds or calibration are not those of {len(self.labels)} labels' {self.ranking} logits"
            raise InputError("scores", told, "give one value per label, or leave them out")
        Patching(overlap=self.overlap)  # refuses what is none

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def ranking(self) -> str:
        """The kind to rank by: the total direct effect where there is one."""
        return "tde" if "tde" in self.logits else next(iter(self.logits))

    def get(self, kind: str) -> Tensor:
        """Logits (N,L) of a kind."""
        if kind not in self.logits:
            raise InputError("scores", f"there are no {kind!r} logits", choose_one_of(kind, self.logits))
        return self.logits[kind]

    def scaled(self, kind: str) -> Tensor:
        """Logits (N,L) of a kind on one model's scale: those of "tde" are (p + lam q) / (1 + lam)."""
        logits = self.get(kind)
        return logits / (1 + self.lam) if kind == "tde" else logits

    def probs(self, kind: str) -> Tensor:
        """Probabilities (N,L) of a kind, from its scaled logits, not calibrated."""
        return torch.sigmoid(self.scaled(kind))

    def own_probs(self) -> Tensor:
        """Probabilities (N,L) that the model's own thresholds are for: of the ranking, calibrated where it can be."""
        return self.calibration.apply(self.scaled(self.ranking)) if self.calibration else self.probs(self.ranking)

    def select(self, rows: Tensor) -> "Scores":
        """The images that `rows` (M,) names, in that order."""
        tensors = {
            name: tensor[rows] for name in (*_BY_IMAGE, "indices") if (tensor := getattr(self, name)) is not None
        }
        pictures = tuple(self.pictures[row] for row in rows.tolist())
        logits = {kind: logits[rows] for kind, logits in self.logits.items()}
        return replace(self, pictures=pictures, logits=logits, **tensors)

    def keep_labels(self, places: Sequence[int]) -> "Scores":
        """The labels at these places, in that order."""
        columns = torch.tensor(places, dtype=torch.int64)
        tensors = {name: tensor[..., columns] for name in _BY_IMAGE if (tensor := getattr(self, name)) is not None}
        return replace(
            self,
            labels=tuple(self.labels[place] for place in places),
            logits={kind: logits[:, columns] for kind, logits in self.logits.items()},
            thresholds=self.thresholds and tuple(self.thresholds[place] for place in places),
            calibration=self.calibration and self.calibration.select(places),
            **tensors,
        )

    def only(self, kind: str) -> "Scores":
        """One kind of logits alone, without patches and without thresholds and calibration, which may be of another."""
        plain = replace(self, patch_logits=None, weights=None, thresholds=None, calibration=None)
        return replace(plain, logits={kind: self.get(kind)})

    def remix(self, *, lam: float | None = None, temperature: float | None = None) -> "Scores":
        """The same images with another lam or temperature; no model is asked.

        Another temperature needs the patches: weights that were made at T become those at T' by w^(T/T'), made to sum
        to 1.
        Thresholds and calibration are forgotten: they belong to the old probabilities.
        """
        image, pooled, weights = self.get("image"), self.get("patch"), self.weights
        lam = Patching(lam=self.lam if lam is None else lam).lam  # refuses what is none
        if temperature not in (None, self.temperature):
            if self.patch_logits is None or weights is None:
                raise InputError("scores", "the patches were not kept", "score the images again with --keep-patches")
            tiny = torch.finfo(weights.dtype).tiny
            weights = patch_weights(weights.clamp(min=tiny).log() * self.temperature, temperature=temperature)
            pooled = pool_patches(self.patch_logits, weights)
        mixed = {"image": image, "patch": pooled, "tde": tde_logits(image, pooled, lam=lam)}
        temperature = self.temperature if temperature is None else temperature
        changed = replace(self, thresholds=None, calibration=None, logits=mixed, weights=weights)
        return replace(changed, lam=lam, temperature=temperature)
