from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

from pivotpatch.core.counterfactual import CounterfactualLogits, combine_logits
from pivotpatch.inference.plots import plot_case
from pivotpatch.runtime.values import patch_boxes

LABELS = ("cat", "dog $5 & more", "hat")


IMAGE = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)


def make_logits(patches: int = 4) -> CounterfactualLogits:
    generator = torch.Generator().manual_seed(1)
    return combine_logits(torch.randn(1, 3, generator=generator), torch.randn(1, patches, 3, generator=generator))


def test_bars_are_the_three_probabilities_of_the_label_below_a_baseline() -> None:
    logits = make_logits()
    for label in range(3):
        figure = plot_case(IMAGE, logits, label=label, labels=LABELS, baseline=0.87, title="$x")
        bars = figure.axes[1]
        widths = [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)]
        opinions = (logits.image_logits.sigmoid(), logits.pooled_logits.sigmoid(), logits.probs)
        assert widths == pytest.approx([0.87, *(float(probs[0, label]) for probs in opinions)])
        assert [text.get_text() for text in bars.texts] == [f"{width:.2f}" for width in widths]
        assert LABELS[label] in bars.get_xlabel()
        assert bars.get_yticklabels()[0].get_text() == "baseline"
        np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), IMAGE)
        figure.savefig(BytesIO(), format="png")  # names are no formulas


@pytest.mark.parametrize(("grid", "overlap"), [(1, 0.0), (2, 0.3), (3, 0.0)])
def test_frames_are_the_patches_and_carry_their_shares(grid: int, overlap: float) -> None:
    logits = make_logits(patches=grid * grid)
    axes = plot_case(IMAGE, logits, label=2, labels=LABELS, overlap=overlap).axes[0]
    frames = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    drawn = [tuple(np.rint(np.add(frame.get_bbox().extents, 0.5)).astype(int)) for frame in frames]
    assert drawn == [tuple(box) for box in patch_boxes(30, 50, grid=grid, overlap=overlap)]
    assert [text.get_text() for text in axes.texts] == [f"{share:.0%}" for share in logits.weights[0, :, 2].tolist()]
    dimmed = [patch.get_alpha() or 0.0 for patch in axes.patches if patch.get_fill()]
    assert np.argsort(dimmed).tolist() == logits.weights[0, :, 2].argsort(descending=True).tolist()
