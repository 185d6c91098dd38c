"""Figures of what is fitted after training: reliability, lam, effort."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pivotpatch.runtime.drawing import BASELINE, KINDS
from pivotpatch.tuning.calibration import Reliability
from pivotpatch.tuning.mixing import MixingStudy
from pivotpatch.tuning.tune import EffortCurve

CURVE_COLOURS = {**KINDS, "baseline": BASELINE}
# Of the Okabe-Ito set: told apart by every kind of colour vision. Markers and line styles tell the same.
_COLOURS = ("#E69F00", "#0072B2")


def _make_axes(width: float, height: float, *, rows: tuple[int, ...] = (1,)) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches, and axes with a grid above each other."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    all_axes = list(figure.subplots(len(rows), 1, height_ratios=rows, sharex=True, squeeze=False)[:, 0])
    for axes in all_axes:
        axes.grid(alpha=0.3)
    return figure, all_axes


def plot_reliability(curves: Mapping[str, Reliability]) -> Figure:
    """Draw the share of positives against the mean probability; below, the number of decisions.

    Bars are 95 % intervals, and the expected calibration error stands in the legend.

    Args:
        curves: one or two, by name, such as "before" and "after".
    """
    figure, (above, below) = _make_axes(4.8, 5.2, rows=(3, 1))
    above.plot((0, 1), (0, 1), color="0.5", linewidth=1, linestyle=":", label="ideal")
    for (name, curve), colour, marker in zip(curves.items(), _COLOURS, "os", strict=False):
        x, share = curve.mean_prob.numpy(), curve.share.numpy()
        # Rounding may put an end a hair on the wrong side of the share.
        bars = [(share - curve.low.numpy()).clip(0), (curve.high.numpy() - share).clip(0)]
        text = f"{name}: ECE {100 * curve.ece:.2f} %"
        above.errorbar(x, share, bars, color=colour, marker=marker, markersize=4, capsize=2, linewidth=1.2, label=text)
        below.plot(x, curve.counts.numpy(), color=colour, marker=marker, markersize=4, drawstyle="steps-mid")
    above.set(ylabel="share of positives", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    below.set(xlabel="mean probability", ylabel="decisions", yscale="log")
    above.legend(fontsize=8, loc="upper left")
    return figure


def plot_lam(study: MixingStudy) -> Figure:
    """Draw mAP against lam, at the fitted temperature and, thin, at the others; marks what was scored with.

    The scale is lam / (1 + lam), the share of the patches: 0 is the image alone, 1 the patches alone.
    """
    figure, (axes,) = _make_axes(5.4, 3.4)
    shares = [each / (1 + each) for each in study.lams]
    before, (lam, fitted) = 100 * study.mean_before, study.fitted
    others = "other temperatures"
    for temperature, means in zip(study.temperatures, (100 * study.means).tolist(), strict=True):
        if temperature == fitted:
            axes.plot(shares, means, color=_COLOURS[1], marker=".", zorder=3, label=f"temperature {temperature:g}")
        else:
            axes.plot(shares, means, color="0.6", linewidth=0.8, label=others)
            others = ""  # one line in the legend stands for all
    axes.axhline(before, color=_COLOURS[0], linestyle="--", label=f"as scored: {before:.1f}")
    text = f"fitted lam {lam:.2g}: {100 * study.mean_fitted:.1f} out of fold"
    axes.axvline(lam / (1 + lam), color=_COLOURS[1], linestyle=":", label=text)
    ticks = (0, 0.25, 0.5, 1, 2, 4, 16)
    axes.set_xticks([each / (1 + each) for each in ticks], [f"{each:g}" for each in ticks])
    axes.set(xlabel="lam", ylabel="mAP (%)", xlim=(-0.02, 1))
    axes.legend(fontsize=8)
    return figure


def plot_effort(curve: EffortCurve) -> Figure:
    """Draw mAP against the mean cost per image, from the image alone to the patches of every image.

    A dotted line is at 90 % of what the patches gain, and a square at the cheapest effort that keeps as much. Patches
    stand apart where other efforts take a closer look.
    """
    figure, (axes,) = _make_axes(5.4, 3.4)
    for points in (curve.points[:-1], curve.points[-1:]) if curve.closer else (curve.points,):
        axes.plot([p.passes for p in points], [100 * p.mean for p in points], color=_COLOURS[1], marker=".")
    ends = (curve.points[0], "image alone", "left", (9, -3)), (curve.points[-1], "all patches", "right", (0, 8))
    for point, name, side, shift in ends:
        text, place = f"{name}: {100 * point.mean:.1f}", (point.passes, 100 * point.mean)
        axes.annotate(text, place, xytext=shift, textcoords="offset points", ha=side, fontsize=8)
    found = curve.find(0.9)
    if found is not None:
        level = 100 * (curve.points[0].mean + 0.9 * curve.gain)
        axes.axhline(level, color="0.4", linestyle=":", label="90 % of the gain")
        text = f"effort {found.effort:.2f}: {found.passes:.2f} passes"
        axes.plot(found.passes, 100 * found.mean, "s", color=_COLOURS[0], zorder=3, label=text)
        axes.legend(fontsize=8, loc="lower right")
    axes.set(xlabel="cost per image, in passes over an image", ylabel="mAP (%)")
    axes.margins(y=0.15)
    return figure
