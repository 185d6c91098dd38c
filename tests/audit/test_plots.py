"""Figures of an audit show the numbers that they are given."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from pivotpatch.audit.cooccurrence import PairRates, rank_pairs, rate_pairs
from pivotpatch.audit.direct_effect import Among, EffectTracking
from pivotpatch.audit.pair_comparison import PairComparison, compare_pairs
from pivotpatch.audit.plots import (
    plot_effects,
    plot_given_pairs,
    plot_pair_curves,
    plot_scales,
    plot_sheet,
    plot_steps,
    plot_worst_pairs,
)
from pivotpatch.audit.stepwise import LabelSteps, ScaleStudy, StepwiseEvaluation
from pivotpatch.core.bootstrap import Interval
from pivotpatch.errors import InputError
from pivotpatch.inference.plots import BASELINE, MODEL
from pivotpatch.inference.scores import Scores

LABELS = ("cat", "dog $5 & $6", "a label with a very long name indeed", "hat")


def render(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    assert plt.get_fignums() == []  # pyplot never hears of it
    return buffer.getvalue()


def rate(seed: int, pairs: list[tuple[str, str]] | None = None) -> PairRates:
    target = (torch.rand(120, 4, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    logits = 2 * target - 1 + torch.randn(120, 4, generator=torch.Generator().manual_seed(seed))
    return rate_pairs(Scores(LABELS, tuple(map(str, range(120))), target, {"image": logits}), pairs=pairs)


@pytest.fixture
def comparison() -> PairComparison:
    return compare_pairs(rate(1), rate(2))


def test_curves_are_the_rates_of_both_models_and_titles_the_shares(comparison: PairComparison) -> None:
    figure = plot_pair_curves(comparison, names=("PAT-T", "ASL"))
    for axes, curve in zip(figure.axes, (comparison.cfpr, comparison.ctpr), strict=True):
        lines = {line.get_label(): line.get_ydata() for line in axes.lines}
        np.testing.assert_array_equal(lines["PAT-T"], curve.model.numpy())
        np.testing.assert_array_equal(lines["ASL"], curve.baseline.numpy())
        assert f"better in {100 * curve.share_improved:.0f} %" in axes.get_title()
        assert axes.get_ylabel()
    assert render(figure).startswith(b"\x89PNG")


def test_given_pairs_are_bars_of_both_models_and_few_pictures_are_marked() -> None:
    pairs = [("cat", "hat"), ("hat", "dog $5 & $6")]
    comparison = compare_pairs(rate(1, pairs), rate(2, pairs))
    figure = plot_given_pairs(comparison, names=("DeT", "InT"))
    for axes, name in zip(figure.axes, ("tpr", "fpr"), strict=True):
        bars = [part for part in axes.containers if isinstance(part, BarContainer)]
        for part, rates in zip(bars, (comparison.model, comparison.baseline), strict=True):
            assert [bar.get_height() for bar in part] == pytest.approx(getattr(rates, name).tolist())
        few = sum(count < 20 for count in getattr(comparison.model, f"{name}_counts").tolist())
        assert [text.get_text() for text in axes.texts] == ["*"] * few
    names = [text.get_text() for text in figure.axes[1].get_xticklabels()]
    assert names == ["{cat; hat}", "{hat; dog $5 & $6}"]
    assert render(figure)


def test_a_pair_without_pictures_is_said_to_have_none() -> None:
    target = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3)
    scores = Scores(LABELS, ("x", "y", "z"), target, {"image": torch.randn(3, 4)})
    rates = rate_pairs(scores, pairs=[("cat", "dog $5 & $6")])
    figure = plot_given_pairs(compare_pairs(rates, rates))
    assert [text.get_text() for text in figure.axes[1].texts] == ["no picture"]
    assert render(figure)


def test_worst_pairs_are_bars_with_counts_and_the_baseline_beside(comparison: PairComparison) -> None:
    ranked = rank_pairs(comparison.model)
    figure = plot_worst_pairs(ranked, count=3, baseline=comparison.baseline)
    (axes,) = figure.axes
    (bars,) = (part for part in axes.containers if isinstance(part, BarContainer))
    assert [bar.get_width() for bar in bars] == pytest.approx(ranked.fpr[:3].tolist())
    assert [text.get_text() for text in axes.texts] == [f"n = {count}" for count in ranked.fpr_counts[:3].tolist()]
    marks = {line.get_label(): np.asarray(line.get_xdata()).tolist() for line in axes.lines}
    theirs = dict(zip(comparison.baseline.names, comparison.baseline.fpr.tolist(), strict=True))
    assert marks["conditional FPR of the baseline"] == pytest.approx([theirs[pair] for pair in ranked.names[:3]])
    assert max(marks["conditional FPR of the baseline"]) < axes.get_xlim()[1]
    assert marks["FPR of the label overall"] == pytest.approx(ranked.overall_fpr[:3].tolist())
    assert [bar.get_alpha() for bar in bars] == [0.4 if count < 20 else 1.0 for count in ranked.fpr_counts[:3]]
    assert render(figure)


def make_steps(count: int) -> StepwiseEvaluation:
    steps = [LabelSteps(f"label {i}", 5, 0.2 + i / 1000, 0.3, 0.1 + i / 500) for i in range(count)]
    return StepwiseEvaluation("step", tuple(steps), ())


@pytest.mark.parametrize("count", [3, 250])
def test_steps_are_sorted_by_tde_and_gains_are_bars(count: int) -> None:
    found = make_steps(count)
    above, below = plot_steps(found).axes
    order = sorted(found.steps, key=lambda step: -step.tde)
    for line, kind in zip(above.lines, ("image", "patch", "tde"), strict=True):
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx([100 * getattr(step, kind) for step in order])
        assert f"mAP {100 * found.mean[kind]:.1f}" in str(line.get_label())
    (bars,) = (part for part in below.containers if isinstance(part, BarContainer))
    assert [bar.get_height() for bar in bars] == pytest.approx([100 * step.gain for step in order])
    named = [text.get_text() for text in below.get_xticklabels()]
    assert (named == [step.label for step in order]) == (count == 3)
    assert render(plot_steps(found))


def test_scales_are_two_bars_a_study() -> None:
    studies = {
        name: ScaleStudy("step", patch, tde, Interval(tde - patch, 0.0, 0.1), (), (), ())
        for name, patch, tde in (("small", 0.5, 0.55), ("large", 0.6, 0.7))
    }
    figure = plot_scales(studies)
    patch, tde = (part for part in figure.axes[0].containers if isinstance(part, BarContainer))
    assert [bar.get_height() for bar in patch] == pytest.approx([50, 60])
    assert [bar.get_height() for bar in tde] == pytest.approx([55, 70])
    assert render(figure)


def make_tracking(kind: str, among: Among, value: float) -> EffectTracking:
    bound = Interval(value, value - 0.1, value + 0.1)
    return EffectTracking(kind, among, ("one", "two"), (9, 0), (bound, None), bound, None)


def test_each_network_and_choice_of_scenes_has_a_panel_of_its_kinds() -> None:
    rows = [make_tracking(kind, among, 0.5) for among in ("objects", "scenes") for kind in ("image", "tde")]
    figure = plot_effects({"PAT-I": rows, "PAT-T": rows[:2]})
    assert [axes.get_title().partition(":")[0] for axes in figure.axes] == ["PAT-I", "PAT-I", "PAT-T"]
    for axes in figure.axes:
        assert len(axes.containers) == 2
        drawn = np.asarray(axes.containers[0].lines[0].get_ydata())  # type: ignore[attr-defined]
        assert drawn[[0, 2]].tolist() == [0.5, 0.5]
        assert np.isnan(drawn[1])  # nothing could be ranked
        assert [text.get_text() for text in axes.get_xticklabels()] == ["one", "two", "mean"]
    assert render(figure)


def test_a_sheet_shows_each_picture_above_its_caption() -> None:
    images = [np.full((4, 5 + number, 3), number, dtype=np.uint8) for number in range(7)]
    figure = plot_sheet(images, [f"${number}" for number in range(7)], columns=5)
    shown = [axes for axes in figure.axes if axes.images]
    assert [axes.get_xlabel() for axes in shown] == [f"${number}" for number in range(7)]
    for axes, image in zip(shown, images, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), image)
    assert render(figure)


def test_nothing_to_draw_is_refused() -> None:
    empty = rate(1).select(torch.arange(0))
    with pytest.raises(InputError, match="there is no pair; lower the probability"):
        plot_worst_pairs(empty)
    with pytest.raises(InputError, match="there is no pair; give at least one"):
        plot_given_pairs(compare_pairs(empty, empty))
    with pytest.raises(InputError, match="there is no picture"):
        plot_sheet([], [])


NO_FORMULA = "$\\frac$ cash"


def test_names_that_look_like_formulas_are_names() -> None:
    target = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    scores = Scores((NO_FORMULA, "b"), tuple("xyz"), target, {"image": torch.randn(3, 2)})
    rates = rate_pairs(scores, pairs=[(NO_FORMULA, "b")])
    for plot in (plot_given_pairs, plot_pair_curves):
        assert render(plot(compare_pairs(rates, rates), names=(NO_FORMULA, NO_FORMULA)))


def test_the_legend_has_both_colours_where_a_panel_has_no_bar() -> None:
    scores = Scores(LABELS, ("x",), torch.tensor([[0.0, 0.0, 0.0, 1.0]]), {"image": torch.zeros(1, 4)})
    rates = rate_pairs(scores, pairs=[("cat", "hat")])
    figure = plot_given_pairs(compare_pairs(rates, rates), names=("DeT", "InT"))
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["DeT", "InT"]
    shown = [patch.get_facecolor() for patch in legend.get_patches()]
    drawn = [part[0].get_facecolor() for part in figure.axes[1].containers if isinstance(part, BarContainer)]
    assert shown == drawn == [to_rgba(MODEL), to_rgba(BASELINE)]
    for axes in plot_pair_curves(compare_pairs(rates, rates)).axes:
        assert [line.get_color() for line in axes.lines] == [MODEL, BASELINE]  # as in the curves of training


def test_no_mark_covers_the_number_of_pictures(comparison: PairComparison) -> None:
    ranked = rank_pairs(comparison.model)
    baseline = replace(comparison.baseline, fpr=comparison.model.fpr_interval.high.float() + 0.03)
    (axes,) = plot_worst_pairs(ranked, baseline=baseline).axes
    marks = np.max([np.asarray(line.get_xdata()) for line in axes.lines if line.get_marker() in ("D", "o")], axis=0)
    for text, mark in zip(axes.texts, marks, strict=True):
        assert text.xy[0] >= mark  # type: ignore[attr-defined]


def test_curves_of_no_pair_do_not_count() -> None:
    scores = Scores(LABELS, ("x",), torch.tensor([[0.0, 0.0, 0.0, 1.0]]), {"image": torch.zeros(1, 4)})
    rates = rate_pairs(scores, pairs=[("cat", "hat")])
    titles = [axes.get_title() for axes in plot_pair_curves(compare_pairs(rates, rates)).axes]
    assert titles == ["model in 1 pairs: better in 0 %, tied in 100 %", "no picture tells"]


def test_effects_without_a_mean_are_drawn() -> None:
    row = EffectTracking("tde", "objects", ("one", "two"), (1, 0), (None, None), None, None)
    figure = plot_effects({"PAT-I": [row]})
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["TDE logits"]
    assert render(figure)
