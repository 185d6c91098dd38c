from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from pivotpatch.core.counterfactual import CounterfactualLogits, combine_logits
from pivotpatch.core.patches import patch_boxes
from pivotpatch.inference.plots import plot_case

LABELS = ("cat", "dog $5 & more", "hat")


@pytest.fixture
def image() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)


def logits_of(patches: int = 4) -> CounterfactualLogits:
    generator = torch.Generator().manual_seed(1)
    return combine_logits(torch.randn(1, 3, generator=generator), torch.randn(1, patches, 3, generator=generator))


def frames(figure: Figure, axes: int = 0) -> list[Rectangle]:
    return [patch for patch in figure.axes[axes].patches if isinstance(patch, Rectangle) and not patch.get_fill()]


def test_bars_are_the_three_probabilities_of_the_label_below_a_baseline(image: NDArray[np.uint8]) -> None:
    logits = logits_of()
    for label in range(3):
        bars = plot_case(image, logits, label=label, labels=LABELS).axes[1]
        widths = [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)]
        opinions = (logits.image_logits.sigmoid(), logits.pooled_logits.sigmoid(), logits.probs)
        assert widths == pytest.approx([float(probs[0, label]) for probs in opinions])
        shown = [text.get_text() for text in bars.texts]
        assert shown == [f"{width:.2f}" for width in widths]
        assert LABELS[label] in bars.get_xlabel()
        beside = plot_case(image, logits, label=label, labels=LABELS, baseline=0.87).axes[1]
        assert [text.get_text() for text in beside.texts] == ["0.87", *shown]
        assert beside.get_yticklabels()[0].get_text() == "baseline"


@pytest.mark.parametrize(("grid", "overlap"), [(1, 0.0), (2, 0.3), (3, 0.0)])
def test_frames_are_the_patches_and_carry_their_shares(image: NDArray[np.uint8], grid: int, overlap: float) -> None:
    logits = logits_of(patches=grid * grid)
    figure = plot_case(image, logits, label=2, labels=LABELS, overlap=overlap)
    drawn = [tuple(np.rint(np.add(frame.get_bbox().extents, 0.5)).astype(int)) for frame in frames(figure)]
    assert drawn == [tuple(box) for box in patch_boxes(30, 50, grid=grid, overlap=overlap)]
    shares = [text.get_text() for text in figure.axes[0].texts]
    assert shares == [f"{share:.0%}" for share in logits.weights[0, :, 2].tolist()]
    dimmed = [patch.get_alpha() or 0.0 for patch in figure.axes[0].patches if patch.get_fill()]
    assert np.argsort(dimmed).tolist() == logits.weights[0, :, 2].argsort(descending=True).tolist()


def test_a_title_is_no_formula_and_pixels_are_those_of_the_image(image: NDArray[np.uint8]) -> None:
    figure = plot_case(image, logits_of(), label=1, labels=LABELS, title="$x")
    assert figure.get_suptitle() == "$x"
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), image)
    figure.savefig(BytesIO(), format="png")
