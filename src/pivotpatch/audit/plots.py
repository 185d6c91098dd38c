"""Figures of an audit: rates of label pairs, steps from image logits to TDE, and sheets of images."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.audit.cases import CaseStudy
from pivotpatch.audit.cooccurrence import PairComparison, PairRates
from pivotpatch.audit.evaluation import ScaleStudy, StepwiseEvaluation
from pivotpatch.core.bootstrap import wilson_interval
from pivotpatch.data.records import RecordSet
from pivotpatch.runtime.decoding import decode_image
from pivotpatch.runtime.drawing import BASELINE, KINDS, MODEL, draw_tag
from pivotpatch.runtime.prediction import Tag

_MARKERS = {"image": "o", "patch": "^", "tde": "s"}
_KIND_NAMES = {"image": "image logits", "patch": "patch logits", "tde": "TDE logits"}
_NAMED = 100  # labels whose names are written below a plot; more could not be read
_LONGEST = 22  # characters of a name that are shown
_DPI = 150


def plot_pair_curves(comparison: PairComparison, *, names: tuple[str, str] = ("model", "baseline")) -> Figure:
    """Conditional FPR and TPR of all pairs, sorted by the baseline, as in the paper's figure; `names` of both."""
    figure = Figure(figsize=(7.2, 5.4), dpi=_DPI, layout="constrained")
    rates = (comparison.cfpr, "FPR\n(lower"), (comparison.ctpr, "TPR\n(higher")
    for axes, (curve, rate) in zip(figure.subplots(2, 1), rates, strict=True):
        places = np.arange(1, len(curve.model) + 1)
        axes.plot(places, curve.model, ".-", color=MODEL, markersize=3, label=names[0], rasterized=len(places) > 5000)
        axes.plot(places, curve.baseline, color=BASELINE, linewidth=2.2, label=names[1])
        better, tied = (100 * count / max(len(places), 1) for count in (curve.improved, curve.tied))
        title = f"{names[0]} in {len(places):,} pairs: better in {better:.0f} %, tied in {tied:.0f} %"
        axes.set_title(title if len(places) else "no image tells", fontsize=10, parse_math=False)
        axes.set_ylabel(f"conditional {rate} is better)")
        axes.margins(x=0.01)
        _clean(axes, grid=True)
        _write_plainly(axes.legend(loc="best"))
    figure.axes[1].set_xlabel("label pair, sorted by the baseline")
    return figure


def plot_pairs(
    rates: PairRates, *, baseline: PairRates | None = None, names: tuple[str, str] = ("model", "baseline")
) -> Figure:
    """Conditional FPR and TPR of a few pairs as bars, such as the worst, or DeT beside InT as in the paper.

    Whiskers are 95 % intervals; a diamond is the FPR of the label over all images. The first pair is on top; the
    baseline may have others, too.
    """
    models = [(rates, MODEL, names[0])]
    if baseline is not None:
        beside = baseline.select(torch.tensor([baseline.names.index(pair) for pair in rates.names]))
        models.append((beside, BASELINE, names[1]))
    figure = Figure(figsize=(9.6, 1.4 + 0.25 * len(rates) * (1 + len(models))), dpi=_DPI, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rates))
    for axes, rate in zip(panels, ("fpr", "tpr"), strict=True):
        for number, (each, colour, name) in enumerate(models):
            values, counts = getattr(each, rate).nan_to_num(0.0), getattr(each, f"{rate}_counts")
            low, high = wilson_interval(values, counts)
            errors = torch.stack([values - low, high - values]).clamp(min=0) * (counts > 0)
            shifted = places + 0.4 * (number - (len(models) - 1) / 2)
            axes.barh(shifted, values.numpy(), 0.4, xerr=errors.numpy(), color=colour, label=name, capsize=2)
        axes.set(xlabel=f"conditional {rate.upper()}", xlim=(0, None))
        _clean(axes)
    overall = {"color": "white", "markeredgecolor": "black", "label": "FPR of the label overall"}
    panels[0].plot(rates.overall_fpr, places, "D", zorder=3, **overall)
    shown = [f"{{{_shorten(label)}; {_shorten(context)}}}" for label, context in rates.names]
    panels[0].set_yticks(places, shown, fontsize=8, parse_math=False)
    panels[0].set_ylim(len(rates) - 0.4, -0.6)
    handles = panels[0].get_legend_handles_labels()
    _write_plainly(figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False))
    return figure


def plot_steps(evaluation: StepwiseEvaluation) -> Figure:
    """Average precision of image, patch and TDE logits (above) and the gain over the better part (below), by label."""
    steps = sorted(evaluation.steps, key=lambda step: -step.tde)
    places = np.arange(len(steps))
    figure = Figure(figsize=(9.6, 5.6), dpi=_DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    for kind, mean in evaluation.mean.items():
        if kind in KINDS:
            values, name = [100 * getattr(step, kind) for step in steps], f"{_KIND_NAMES[kind]}, mAP {100 * mean:.1f}"
            above.plot(places, values, _MARKERS[kind], color=KINDS[kind], markersize=4.5, label=name)
    above.set_ylabel("average precision (%)")
    above.legend(fontsize=9, loc="lower left")
    gains = [100 * step.gain for step in steps]
    below.bar(places, gains, color=[KINDS["tde"] if gain > 0 else KINDS["image"] for gain in gains])
    below.axhline(0, color="black", linewidth=0.8)
    below.set_title(f"above 0 in {100 * evaluation.share_gained:.0f} % of the labels", fontsize=10)
    below.set_ylabel("TDE less the better\nof the two (points)")
    below.margins(x=0.01)
    if len(steps) > _NAMED:
        below.set_xlabel(f"{len(steps):,} labels, sorted by TDE")
    else:
        size, names = min(9.0, 9.6 * 72 * 0.75 / len(steps)), [_shorten(step.label) for step in steps]
        below.set_xticks(places, names, rotation=90, fontsize=size, parse_math=False)
    for axes in (above, below):
        _clean(axes, grid=True)
    return figure


def plot_scale(study: ScaleStudy) -> Figure:
    """MAP of patch logits beside TDE logits, as in the paper's study of image scale."""
    figure = Figure(figsize=(3.6, 3.6), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    names = ["patch logits,\ntrained alone", "TDE logits"]
    bars = axes.bar(names, [100 * study.patch, 100 * study.tde], color=[KINDS["patch"], KINDS["tde"]])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set_ylabel("mAP (%)")
    _clean(axes)
    return figure


def shrink_image(records: RecordSet, row: int, *, side: int) -> Image.Image:
    """A copy of the image of a record, its longer side no more than `side` pixels."""
    small = Image.fromarray(decode_image(records.source_at(row), name=records.name_at(row)))
    small.thumbnail((side, side))
    return small


def plot_sheet(images: Sequence[NDArray[np.uint8]], captions: Sequence[str]) -> Figure:
    """Images (H,W,3) of any size, at least one, in rows of five, each with its caption below it."""
    columns = min(5, len(images))
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


def plot_case(case: CaseStudy, image: NDArray[np.uint8], *, overlap: float) -> Image.Image:
    """Why a label is given to an image (H,W,3) or not, beside a baseline; `overlap` of the patches, as scored."""
    tag = Tag(case.label, case.tde, 0.5, case.image, case.patch, case.weights)
    told = f"probability of “{case.label}”, which is {'there' if case.shown else 'not there'}"
    return draw_tag(image, tag, overlap=overlap, baseline=case.baseline, told=told)


def _write_plainly(legend: Legend) -> None:
    """Names of files and labels are no mathematics."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _clean(axes: Axes, *, grid: bool = False) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis="y", alpha=0.3)
