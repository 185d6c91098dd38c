"""Labels in scripts that the usual font lacks."""

from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib.font_manager import fontManager

from pivotpatch.inference.prediction import Prediction

DOG, HOOK = "犬", "\u1d81"  # the second is in a font that matplotlib brings along, but not in its usual one


def draw(label: str, *fonts: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The texts of both figures of a prediction, each with its fonts, where only some are installed."""
    monkeypatch.setattr(fontManager, "ttflist", [font for font in fontManager.ttflist if font.name in fonts])
    some = torch.tensor([0.5, 0.25])
    prediction = Prediction(
        picture=None,
        source=np.zeros((8, 8, 3), np.uint8),
        size=(8, 8),
        labels=(f"{label} dog", "cat"),
        probs=some,
        image_probs=some,
        patch_probs=some,
        weights=torch.full((4, 2), 0.25),
        thresholds=torch.zeros(2),
    )
    shown: dict[str, set[str]] = {}
    for figure in (prediction.plot(), prediction.plot(f"{label} dog")):
        figure.savefig(BytesIO(), bbox_inches="tight")  # a warning is an error here
        picture, bars = figure.axes
        for text in (*picture.texts, *bars.get_yticklabels(), bars.xaxis.label):
            shown.setdefault(text.get_text(), set()).update(text.get_fontfamily())
    return shown


def test_signs_that_no_font_has_are_boxes_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = draw(DOG, "DejaVu Sans", "Last Resort High-Efficiency", monkeypatch=monkeypatch)
    assert shown["□ dog"] == {"sans-serif"}
    assert shown["cat"] == {"sans-serif"}
    assert "probability of “□ dog”, given above 0.00" in shown
    assert not any(DOG in text for text in shown)


def test_another_font_draws_what_the_usual_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = draw(HOOK, "DejaVu Sans", "STIXGeneral", monkeypatch=monkeypatch)
    assert shown[f"{HOOK} dog"] == {"sans-serif", "STIXGeneral"}
