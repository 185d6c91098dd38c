"""Scores and pictures that are drawn by chance, for tests of what is made of them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.data.records import LabelSpace, RecordSet
from pivotpatch.inference.scores import Scores

HOSTILE = (
    "<script>window.hit=1</script>",
    '"><img src=x onerror=window.hit=2>',
    "'; window.hit=3; //",
    "</style></svg><iframe src=https://example.org>",
    "{{ 7 * 7 }} & $x$ &amp;",
    "犬 \u202e\x00\ud800",
)
"""Labels that try to be more than text."""


def make_scores(
    labels: tuple[str, ...], *, count: int = 120, patches: bool = True, seed: int = 0, skill: float = 2.0
) -> Scores:
    """Scores of a model that finds labels and is led by co-occurrence: each brings the next along."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.Generator().manual_seed(99)  # the same for all models
    target = (torch.rand(count, len(labels), generator=truth) < 0.2).float()
    target = torch.maximum(target, target.roll(1, dims=1) * (torch.rand(target.shape, generator=truth) < 0.6))
    target[torch.rand(target.shape, generator=truth) < 0.02] = torch.nan
    known = target.nan_to_num(0.5)

    def draw(strength: float, *shape: int) -> torch.Tensor:
        noise = 1.5 * torch.randn(count, *shape, len(labels), generator=generator)
        spread = (strength * (2 * known - 1) + known.roll(1, dims=1)).view(count, *(1 for _ in shape), len(labels))
        return spread + noise

    names = tuple(f'pictures/it\'s "{place}" <b>.jpg' for place in range(count))
    image, indices = draw(skill), torch.arange(count)
    if not patches:
        return Scores(labels, names, target, {"image": image}, indices=indices)
    out = combine_logits(image, draw(skill / 2, 4))
    return Scores(
        labels,
        names,
        target,
        {"image": image, "patch": out.pooled_logits, "tde": out.tde_logits},
        patch_logits=out.patch_logits,
        weights=out.weights,
        indices=indices,
    )


@dataclass(frozen=True)
class NoiseStore:
    """Pictures of noise, which no format can make small; every tenth cannot be read."""

    names: tuple[str, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """The picture's name."""
        return self.names[index]

    def source(self, index: int) -> NDArray[np.uint8] | bytes:
        """Its pixels."""
        if index % 10 == 9:
            return b"no picture"
        return np.random.default_rng(index).integers(0, 256, (*self.size, 3), dtype=np.uint8)


def make_records(scores: Scores, *, size: tuple[int, int] = (60, 90)) -> RecordSet:
    """The pictures behind scores, without their labels."""
    return RecordSet("made:<up>", LabelSpace(("any",)), images=NoiseStore(scores.pictures, size))
