"""Pictures of an audit: rates of label pairs, steps from image logits to TDE, and tracked direct effects."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.audit.cooccurrence import FEW, Limits, PairRates
from pivotpatch.audit.direct_effect import EffectTracking
from pivotpatch.audit.pair_comparison import Curve, PairComparison
from pivotpatch.audit.stepwise import ScaleStudy, StepwiseEvaluation
from pivotpatch.core.bootstrap import Interval
from pivotpatch.errors import InputError
from pivotpatch.inference.plots import BASELINE, KINDS, MODEL

_MARKERS = {"image": "o", "patch": "^", "tde": "s"}
_KIND_NAMES = {"image": "image logits", "patch": "patch logits", "tde": "TDE logits"}
_BARS = {"edgecolor": "black", "linewidth": 0.6}
_THIN = {"linestyle": "none", "markeredgewidth": 0.4}
_ERRORS = {"elinewidth": 0.8, "capsize": 2, "ecolor": "black"}
_NAMED = 100  # labels whose names are written below a plot; more could not be read
_LONGEST = 22  # characters of a name that are shown
_DPI = 150


def plot_pair_curves(comparison: PairComparison, *, names: tuple[str, str] = ("model", "baseline")) -> Figure:
    """Conditional FPR and TPR of all pairs, sorted by the baseline, as in the paper's figure.

    Args:
        comparison: of a model and a baseline.
        names: of the model and the baseline, for the legend.
    """
    figure = Figure(figsize=(7.2, 5.4), dpi=_DPI, layout="constrained")
    above, below = figure.subplots(2, 1)
    _draw_curve(above, comparison.cfpr, "conditional FPR", names, better="lower")
    _draw_curve(below, comparison.ctpr, "conditional TPR", names, better="higher")
    below.set_xlabel("label pair, sorted by the baseline")
    return figure


def _draw_curve(axes: Axes, curve: Curve, rate: str, names: tuple[str, str], *, better: str) -> None:
    places = np.arange(1, len(curve.pairs) + 1)
    model = {"color": MODEL, "linewidth": 1.2, "marker": ".", "markersize": 3, "alpha": 0.85}
    axes.plot(places, curve.model.numpy(), label=names[0], rasterized=len(places) > 5000, **model)  # type: ignore[arg-type]
    axes.plot(places, curve.baseline.numpy(), color=BASELINE, linewidth=2.2, label=names[1])
    better_in, tied_in = (100 * count / max(len(places), 1) for count in (curve.improved, curve.tied))
    title = f"{names[0]} in {len(places):,} pairs: better in {better_in:.0f} %, tied in {tied_in:.0f} %"
    axes.set_title(title if len(places) else "no picture tells", fontsize=10, parse_math=False)
    axes.set(ylabel=f"{rate}\n({better} is better)")
    axes.margins(x=0.01)
    axes.grid(axis="y", alpha=0.3)
    _add_legend(axes, loc="upper left" if better == "lower" else "lower right")
    _clean(axes)


def plot_given_pairs(comparison: PairComparison, *, names: tuple[str, str] = ("model", "baseline")) -> Figure:
    """Conditional TPR and FPR of a few pairs as bars, as in the paper's first figure (DeT beside InT).

    Whiskers are 95 % intervals; a star marks a rate that few pictures stand behind.

    Args:
        comparison: of two models, on pairs that were given.
        names: of the model and the baseline, for the legend.
    """
    pairs = comparison.model.names
    if not pairs:
        raise InputError("plot_given_pairs", "there is no pair", "give at least one")
    figure = Figure(figsize=(max(4.8, 1.6 + 0.85 * len(pairs)), 6.2), dpi=_DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, rate in ((above, "tpr"), (below, "fpr")):
        tops = torch.zeros(len(pairs), dtype=torch.float64)
        for shift, rates, colour in ((-0.2, comparison.model, MODEL), (0.2, comparison.baseline, BASELINE)):
            values, limits = getattr(rates, rate), getattr(rates, f"{rate}_interval")
            _draw_rates(axes, np.arange(len(pairs)) + shift, values, limits, colour=colour)
            tops = tops.maximum(limits.high.where(~values.isnan(), 0.0))
        _mark_few(axes, getattr(comparison.model, f"{rate}_counts"), tops)
        axes.set(ylabel=f"conditional {rate.upper()}", ylim=(0, 1.12 * tops.max().item() or 1.0))
        _clean(axes)
    # Not the bars: a panel may have none.
    colours = [
        Patch(facecolor=colour, label=name, **_BARS)  # type: ignore[arg-type]
        for colour, name in zip((MODEL, BASELINE), names, strict=True)
    ]
    _add_legend(above, handles=colours, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    shown = [_name_pair(*pair) for pair in pairs]
    below.set_xticks(np.arange(len(pairs)), shown, rotation=35, ha="right", parse_math=False)
    return figure


def _draw_rates(axes: Axes, places: NDArray[np.floating], values: Tensor, limits: Limits, *, colour: str) -> None:
    known = (~values.isnan()).numpy()
    rates = values.double().numpy()[known]
    errors = [np.clip(rates - limits.low.numpy()[known], 0, None), np.clip(limits.high.numpy()[known] - rates, 0, None)]
    axes.bar(places[known], rates, 0.4, yerr=errors, color=colour, error_kw=_ERRORS, **_BARS)  # type: ignore[arg-type]


def _mark_few(axes: Axes, counts: Tensor, tops: Tensor) -> None:
    for place, (count, top) in enumerate(zip(counts.tolist(), tops.tolist(), strict=True)):
        if count < FEW:
            text = "*" if count else "no picture"
            axes.annotate(text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=11)


def plot_worst_pairs(ranked: PairRates, *, count: int = 15, baseline: PairRates | None = None) -> Figure:
    """Conditional FPR of the first pairs as bars, each beside the label's FPR overall.

    Whiskers are 95 % intervals; pale bars stand for few pictures.

    Args:
        ranked: from `rank_pairs`.
        count: the most bars.
        baseline: rates of another model, of all pairs; its conditional FPR is marked beside.
    """
    shown = ranked.select(torch.arange(min(count, len(ranked))))
    if not len(shown):
        raise InputError("plot_worst_pairs", "there is no pair", "lower the probability that pairs are chosen by")
    figure = Figure(figsize=(7.2, 1.2 + 0.34 * len(shown)), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    places, rates, limits = np.arange(len(shown)), shown.fpr.double().numpy(), shown.fpr_interval
    errors = [np.clip(rates - limits.low.numpy(), 0, None), np.clip(limits.high.numpy() - rates, 0, None)]
    bars = axes.barh(places, rates, xerr=errors, color=MODEL, error_kw=_ERRORS, **_BARS)  # type: ignore[arg-type]
    for bar, pictures in zip(bars, shown.fpr_counts.tolist(), strict=True):
        bar.set_alpha(0.4 if pictures < FEW else 1.0)
    marks = [_draw_marks(axes, places, shown.overall_fpr, "D", "white", "FPR of the label overall")]
    ends = limits.high.maximum(shown.overall_fpr)
    if baseline is not None:
        theirs = dict(zip(baseline.names, baseline.fpr.tolist(), strict=True))
        values = [theirs.get(pair, float("nan")) for pair in shown.names]
        marks.append(_draw_marks(axes, places, values, "o", BASELINE, "conditional FPR of the baseline"))
        ends = ends.fmax(torch.tensor(values))
    for place, end, pictures in zip(places, ends.tolist(), shown.fpr_counts.tolist(), strict=True):
        axes.annotate(f"n = {pictures:,}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(places, [_name_pair(*pair) for pair in shown.names], fontsize=8, parse_math=False)
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.15 * ends.max().item()))
    axes.set_xlabel("conditional FPR of {label; company}")
    axes.legend(handles=marks, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    _clean(axes)
    return figure


def _draw_marks(
    axes: Axes, places: NDArray[np.int64], values: Tensor | Sequence[float], marker: str, colour: str, name: str
) -> Line2D:
    style = {"linestyle": "none", "markeredgecolor": "black", "markersize": 5, "zorder": 3}
    return axes.plot(values, places, marker=marker, color=colour, label=name, **style)[0]  # type: ignore[arg-type]


def plot_steps(evaluation: StepwiseEvaluation) -> Figure:
    """Average precision of image, patch and TDE logits (above) and the gain over the better part (below), by label.

    Args:
        evaluation: from `evaluate_steps`; labels are sorted by their TDE.
    """
    steps = sorted(evaluation.steps, key=lambda step: -step.tde)
    places = np.arange(len(steps))
    figure = Figure(figsize=(9.6, 5.6), dpi=_DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    means = evaluation.mean
    for kind, marker in _MARKERS.items():
        values = [100 * getattr(step, kind) for step in steps]
        name = f"{_KIND_NAMES[kind]}, mAP {100 * means[kind]:.1f}"
        above.plot(
            places, values, marker, color=KINDS[kind], markersize=4.5, markeredgecolor="black", label=name, **_THIN
        )
    above.set(ylabel="average precision (%)")
    above.legend(fontsize=9, loc="lower left")
    gains = [100 * step.gain for step in steps]
    colours = [KINDS["tde"] if gain > 0 else KINDS["image"] for gain in gains]
    below.bar(places, gains, color=colours, edgecolor="black", linewidth=0.3)
    below.axhline(0, color="black", linewidth=0.8)
    below.set_title(f"above 0 in {100 * evaluation.share_gained:.0f} % of the labels", fontsize=10)
    below.set(ylabel="TDE less the better\nof the two (points)")
    _name_labels(below, [step.label for step in steps])
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
        _clean(axes)
    return figure


def plot_scales(studies: Mapping[str, ScaleStudy]) -> Figure:
    """MAP of patch logits beside TDE logits, as in the paper's study of image scale.

    Args:
        studies: by name, such as the backbone's.
    """
    figure = Figure(figsize=(max(3.6, 1.5 + 1.1 * len(studies)), 3.6), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(studies))
    for shift, kind, name in ((-0.2, "patch", "patch logits, trained alone"), (0.2, "tde", "TDE logits")):
        values = [100 * getattr(study, kind) for study in studies.values()]
        bars = axes.bar(places + shift, values, 0.4, color=KINDS[kind], label=name, **_BARS)  # type: ignore[arg-type]
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.set_xticks(places, list(studies), parse_math=False)
    axes.set(ylabel="mAP (%)", ylim=(0, 1.18 * axes.dataLim.ymax), xlim=(-0.6, len(studies) - 0.4))
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    _clean(axes)
    return figure


def plot_effects(networks: Mapping[str, Sequence[EffectTracking]]) -> Figure:
    """Rank correlation with the true direct effect, label by label and in the mean.

    Args:
        networks: what `track_effects` found, by a name for the network; a panel for each network and choice of scenes.
    """
    panels = [
        (name, among, [row for row in rows if row.among == among])
        for name, rows in networks.items()
        for among in dict.fromkeys(row.among for row in rows)
    ]
    height = 0.5 + 2.1 * len(panels)
    figure = Figure(figsize=(7.2, height), dpi=_DPI, layout="constrained")
    for axes, (name, among, rows) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_effects(axes, rows)
        of_what = "scenes that show the label" if among == "objects" else "all scenes, effect 0 where it is not shown"
        axes.set_title(f"{name}: {of_what}", fontsize=10, parse_math=False)
    return figure


def _draw_effects(axes: Axes, rows: Sequence[EffectTracking]) -> None:
    labels = rows[0].labels
    places = np.arange(len(labels) + 1) + np.r_[np.zeros(len(labels)), 0.5]  # the mean stands apart
    for number, row in enumerate(rows):
        colour, marker = KINDS[row.kind], _MARKERS[row.kind]
        shift = 0.2 * (number - (len(rows) - 1) / 2)
        bounds = [bound or Interval(*3 * [float("nan")]) for bound in (*row.per_label, row.mean)]
        values = np.array([bound.value for bound in bounds])
        errors = np.clip([[b.value - b.low for b in bounds], [b.high - b.value for b in bounds]], 0, None)
        style = {"linestyle": "none", "marker": marker, "markersize": 4.5, "color": colour, "capsize": 2}
        axes.errorbar(
            places + shift,
            values,
            errors,
            elinewidth=1,
            markeredgecolor="black",
            label=_KIND_NAMES[row.kind] + (f", mean {row.mean.value:.2f}" if row.mean else ""),
            **style,  # type: ignore[arg-type]
        )
    axes.axvline(len(labels) - 0.25, color="0.7", linewidth=0.8)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_xticks(places, [*map(_shorten, labels), "mean"], parse_math=False)
    axes.set_ylabel("rank correlation")
    axes.legend(fontsize=8, ncols=3, loc="lower center")
    low = min([bound.low for row in rows for bound in row.per_label if bound] or [0.0])
    axes.set_ylim(min(low - 0.45, -0.1), 1.02)
    _clean(axes)


def plot_sheet(images: Sequence[NDArray[np.uint8]], captions: Sequence[str], *, columns: int = 5) -> Figure:
    """Pictures in rows, each with a few lines below it.

    Args:
        images: RGB pixels (H,W,3) each, of any size.
        captions: one a picture.
        columns: the most pictures in a row.
    """
    if not images:
        raise InputError("plot_sheet", "there is no picture", "give at least one")
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.9 * columns, 2.5 * rows), dpi=_DPI, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, image, caption in zip(grid, images, captions, strict=False):
        axes.imshow(image)
        axes.set_xlabel(caption, fontsize=7, parse_math=False)
        axes.set(xticks=(), yticks=())
    for axes in grid[len(images) :]:
        axes.set_axis_off()
    return figure


def _add_legend(axes: Axes, **style: Any) -> None:
    """Add a legend whose names, such as those of files, are no mathematics."""
    for text in axes.legend(**style).get_texts():
        text.set_parse_math(False)


def _name_labels(axes: Axes, labels: Sequence[str]) -> None:
    axes.margins(x=0.01)
    if len(labels) > _NAMED:
        axes.set_xlabel(f"{len(labels):,} labels, sorted by TDE")
        return
    size = min(9.0, 9.6 * 72 * 0.75 / len(labels))
    axes.set_xticks(np.arange(len(labels)), [*map(_shorten, labels)], rotation=90, fontsize=size, parse_math=False)


def _name_pair(label: str, company: str) -> str:
    return f"{{{_shorten(label)}; {_shorten(company)}}}"


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
