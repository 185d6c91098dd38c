"""Figures of an audit show the numbers that they are given."""

from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from pivotpatch.audit.cooccurrence import PairComparison, PairRates, compare_pairs, rank_pairs, rate_pairs
from pivotpatch.audit.direct_effect import Among, EffectTracking
from pivotpatch.audit.plots import plot_effects, plot_pair_curves, plot_pairs, plot_scale, plot_sheet, plot_steps
from pivotpatch.audit.stepwise import LabelSteps, ScaleStudy, StepwiseEvaluation
from pivotpatch.core.bootstrap import Interval
from pivotpatch.inference.plots import BASELINE, MODEL
from pivotpatch.inference.scores import Scores

LABELS = ("cat", "$\\frac$ cash", "a label with a very long name indeed", "hat")  # no formulas


def render(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    assert plt.get_fignums() == []  # pyplot never hears of it
    return buffer.getvalue()


def rate(seed: int) -> PairRates:
    target = (torch.rand(120, 4, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    logits = 2 * target - 1 + torch.randn(120, 4, generator=torch.Generator().manual_seed(seed))
    return rate_pairs(Scores(LABELS, tuple(map(str, range(120))), target, {"image": logits}))


@pytest.fixture
def comparison() -> PairComparison:
    return compare_pairs(rate(1), rate(2))


def test_curves_are_the_rates_of_both_models_and_titles_the_shares(comparison: PairComparison) -> None:
    figure = plot_pair_curves(comparison, names=LABELS[:2])
    for axes, curve in zip(figure.axes, (comparison.cfpr, comparison.ctpr), strict=True):
        ours, theirs = (np.asarray(line.get_ydata()) for line in axes.lines)
        np.testing.assert_array_equal(ours, curve.model.numpy())
        np.testing.assert_array_equal(theirs, curve.baseline.numpy())
        assert [line.get_color() for line in axes.lines] == [MODEL, BASELINE]
        assert f"better in {100 * (curve.share_improved or 0):.0f} %" in axes.get_title()
    assert render(figure).startswith(b"\x89PNG")


def find_bars(figure: Figure, place: int) -> list[BarContainer]:
    return [part for part in figure.axes[place].containers if isinstance(part, BarContainer)]


def test_pairs_are_bars_of_both_models_with_the_images_behind_them(comparison: PairComparison) -> None:
    ranked = rank_pairs(comparison.model).select(torch.arange(3))
    figure = plot_pairs(ranked, baseline=comparison.baseline, names=LABELS[:2])
    theirs = {pair: row for row, pair in enumerate(comparison.baseline.names)}
    beside = comparison.baseline.select(torch.tensor([theirs[pair] for pair in ranked.names]))
    for place, name in enumerate(("fpr", "tpr")):
        counts = getattr(ranked, f"{name}_counts").tolist()
        for bars, rates, colour in zip(find_bars(figure, place), (ranked, beside), (MODEL, BASELINE), strict=True):
            assert [bar.get_width() for bar in bars] == pytest.approx(getattr(rates, name).tolist())
            assert [bar.get_alpha() for bar in bars] == [0.4 if count < 20 else 1.0 for count in counts]
            assert bars[0].get_facecolor()[:3] == to_rgba(colour)[:3]
        texts = figure.axes[place].texts
        assert [text.get_text() for text in texts] == [f"n = {count}" for count in counts]
        ends = np.max([[bar.get_width() for bar in bars] for bars in find_bars(figure, place)], axis=0)
        assert all(text.xy[0] >= end for text, end in zip(texts, ends, strict=True))  # type: ignore[attr-defined]
    (overall,) = (line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert np.asarray(overall.get_xdata()).tolist() == pytest.approx(ranked.overall_fpr.tolist())
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names[0].startswith("{")
    assert render(figure)


def test_pairs_without_images_have_no_bar_and_say_so() -> None:
    target = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3)
    scores = Scores(LABELS, ("x", "y", "z"), target, {"image": torch.randn(3, 4)})
    rates = rate_pairs(scores, pairs=[LABELS[:2]])
    figure = plot_pairs(rates, baseline=rates, names=("DeT", "InT"))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no image"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["DeT", "InT", "FPR of the label overall"]
    assert render(figure)
    titles = [axes.get_title() for axes in plot_pair_curves(compare_pairs(rates, rates)).axes]
    assert titles == ["no image tells", "model in 1 pairs: better in 0 %, tied in 100 %"]


@pytest.mark.parametrize("count", [3, 250])
def test_steps_are_sorted_by_tde_and_gains_are_bars(count: int) -> None:
    steps = [LabelSteps(f"label {i}", 5, 0.2 + i / 1000, 0.3, 0.1 + i / 500, i / 1000 - 0.1) for i in range(count)]
    found = StepwiseEvaluation("step", tuple(steps), ())
    figure = plot_steps(found)
    above, below = figure.axes
    order = sorted(found.steps, key=lambda step: -step.tde)
    for line, kind in zip(above.lines, ("image", "patch", "tde"), strict=True):
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx([100 * getattr(step, kind) for step in order])
        assert f"mAP {100 * found.mean[kind]:.1f}" in str(line.get_label())
    (bars,) = find_bars(figure, 1)
    assert [bar.get_height() for bar in bars] == pytest.approx([100 * step.gain for step in order])
    named = [text.get_text() for text in below.get_xticklabels()]
    assert (named == [step.label for step in order]) == (count == 3)
    assert render(figure)


def test_the_scale_study_is_two_bars() -> None:
    figure = plot_scale(ScaleStudy("step", 0.5, 0.55, Interval(0.05, 0.0, 0.1), (), (), ()))
    (bars,) = find_bars(figure, 0)
    assert [bar.get_height() for bar in bars] == pytest.approx([50, 55])
    assert render(figure)


def make_tracking(kind: str, among: Among, value: float | None) -> EffectTracking:
    bound = None if value is None else Interval(value, value - 0.1, value + 0.1)
    return EffectTracking(kind, among, ("one", "two"), (9, 0), (bound, None), bound, None)


def test_each_model_and_choice_of_scenes_has_a_panel_of_its_kinds() -> None:
    rows = [make_tracking(kind, among, 0.5) for among in ("objects", "scenes") for kind in ("image", "tde")]
    figure = plot_effects({"PAT-I": rows, "PAT-T": rows[:2], "none": [make_tracking("tde", "objects", None)]})
    assert [axes.get_title().partition(":")[0] for axes in figure.axes] == ["PAT-I", "PAT-I", "PAT-T", "none"]
    for axes in figure.axes[:3]:
        assert len(axes.containers) == 2
        drawn = np.asarray(axes.containers[0].lines[0].get_ydata())  # type: ignore[attr-defined]
        np.testing.assert_array_equal(drawn, [0.5, np.nan, 0.5])  # nothing could be ranked in the second
        assert [text.get_text() for text in axes.get_xticklabels()] == ["one", "two", "mean"]
    assert render(figure)


def test_a_sheet_shows_each_image_above_its_caption() -> None:
    images = [np.full((4, 5 + number, 3), number, dtype=np.uint8) for number in range(7)]
    figure = plot_sheet(images, [f"${number}" for number in range(7)], columns=5)
    shown = [axes for axes in figure.axes if axes.images]
    assert [axes.get_xlabel() for axes in shown] == [f"${number}" for number in range(7)]
    for axes, image in zip(shown, images, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), image)
    assert render(figure)
