"""What `pivotpatch tune` prints for people."""

from rich.table import Table
from torch import Tensor

from pivotpatch.cli.console import Screen
from pivotpatch.cli.evaluate_text import MEASURES, NAMES, make_table, write_bounds
from pivotpatch.tuning.effort import EffortCurve
from pivotpatch.tuning.tune import NONE, MixingChoice, Tuning


def print_tuning(found: Tuning) -> None:
    """Print what was fitted to stdout, in per cent; all of it is judged out of fold."""
    console = Screen()
    console.print(f"{found.pictures:,} pictures, {len(found.labels)} labels, {NAMES[found.kind]} logits")
    console.print("what is fitted is judged on pictures that it was not fitted to, fold by fold; all in per cent\n")
    if found.mixing is not None:
        console.print(_make_mixing_table(found.mixing))
        console.print(_tell_mixing(found.mixing) + "\n")
    elif found.kind == "tde":
        lam, temperature = _write_value(found.lam), _write_value(found.temperature)
        console.print(f"lam {lam} and temperature {temperature} as they are\n")
    console.print(_make_calibration_table(found))
    console.print(f"calibration: {found.method}\n")
    table = make_table(["decisions", "before, at 0.5", "by thresholds"])
    for name in (*MEASURES, "macro_f1"):
        values = [f"{100 * getattr(result, name):.1f}" for result in (found.before, found.after)]
        table.add_row("mean F1" if name == "macro_f1" else name, *values)
    console.print(table)
    console.print(f"thresholds: {found.thresholds}")
    if found.effort is not None:
        console.print(f"effort: {tell_effort(found.effort)}")
    if found.effort is not None and found.closer_size is not None:
        console.print(
            f"efforts between 0 and 1 take a closer look, at {found.closer_size} pixels, in the place of the patches"
        )


def _make_mixing_table(mixing: MixingChoice) -> Table:
    table = make_table(["lam and temperature", "lam", "temperature", "mAP", "gain", "95 %"])
    for each in mixing.tried:
        gain = mixing.gains.get(each.name)
        told = ["", ""] if gain is None else [f"{100 * gain.value:+.2f}", write_bounds(gain, sign="+")]
        values = [_write_value(each.lam), _write_value(each.temperature), f"{100 * each.mean:.2f}"]
        table.add_row(each.name, *values, *told)
    return table


def _tell_mixing(mixing: MixingChoice) -> str:
    kept = mixing.chosen is mixing.study.before
    return f"lam: {mixing.chosen.name}" + (", for no gain is beyond noise" if kept else "")


def _make_calibration_table(found: Tuning) -> Table:
    table = make_table(["probabilities", "ECE", "ECE a label", "Brier score", "log loss"])
    for name, quality in found.qualities.items():
        if name == NONE and quality == found.qualities["before"]:  # the mixture is the same, and so are these
            continue
        overall = quality.overall
        table.add_row(
            name,
            f"{100 * overall.ece_width:.2f}",
            f"{100 * quality.mean.ece_width:.2f}",
            f"{overall.brier:.4f}",
            f"{overall.log_loss:.4f}",
        )
    return table


def tell_effort(curve: EffortCurve) -> str:
    """Which effort to choose, in a line."""
    found, gain = curve.find(0.9), f"{100 * curve.gain:+.2f} mAP"
    if found is None:
        alone, best = curve.points[0], max(curve.points, key=lambda point: point.mean)
        if not curve.closer or best == alone:
            return f"the patches gain nothing ({gain}), so that 0 does as well as 1"
        most = f"{100 * (best.mean - alone.mean):+.2f} mAP, at effort {best.effort:.2f} and {best.passes:.2f} passes"
        return f"the patches gain nothing ({gain}), closer looks at most {most}"
    cost = f"{found.passes:.2f} passes over an image instead of {curve.points[-1].passes:.2f}"
    return f"{found.effort:.2f} keeps 90 % of the patches' gain ({gain}) at {cost}"


def _write_value(value: float | Tensor) -> str:
    """A number, or the range of one a label."""
    low, high = (value.min(), value.max()) if isinstance(value, Tensor) else (value, value)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
