"""Scores with odd names, and tables of scores as others write them."""

from pathlib import Path

import torch

from pivotpatch.inference.scores import Scores

LABELS = ("cat", 'a "dog", said: he', "tde:fish", "α")
PICTURES = ("b.jpg", "007", "folder/a, b.jpg", "ä.png", "1e5")


def make_scores(*, kinds: tuple[str, ...] = ("image", "patch", "tde"), patches: bool = False) -> Scores:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(len(PICTURES), *shape, len(LABELS), generator=generator)

    target = (draw() > 0).float()
    target[0, 1] = torch.nan
    return Scores(
        LABELS,
        PICTURES,
        target,
        {kind: draw() * 1e-3 for kind in kinds},
        patch_logits=draw(9) if patches else None,
        weights=draw(9).softmax(1) if patches else None,
        lam=0.7,
        temperature=2.5,
    )


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path
