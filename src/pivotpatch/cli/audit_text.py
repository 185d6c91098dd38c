"""What `pivotpatch audit` prints for people."""

from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from pivotpatch.audit.cases import CaseStudy
from pivotpatch.audit.cooccurrence import FEW, FalsePositive, PairRates
from pivotpatch.audit.direct_effect import EffectTracking
from pivotpatch.audit.label_errors import LabelError
from pivotpatch.audit.pair_comparison import Curve, PairComparison
from pivotpatch.audit.stepwise import ScaleStudy, StepwiseEvaluation
from pivotpatch.core.bootstrap import Interval
from pivotpatch.core.metrics import DEFINITIONS
from pivotpatch.errors import shorten

_WIDTH = 120  # where no terminal says how wide it is


def print_pairs(
    rates: PairRates,
    ranked: PairRates,
    *,
    behind: Sequence[Sequence[FalsePositive]],
    comparison: PairComparison | None,
    count: int,
) -> None:
    """Print how a model does on pairs of labels, the worst of them, and the most confident picture behind each.

    Pairs without a conditional FPR are listed last.
    """
    console = _open_console()
    console.print(f"{len(rates):,} pairs of labels; decisions by {rates.definition}; rates in per cent")
    unrated = rates.select((rates.fpr_counts == 0).nonzero()[:, 0])
    if len(unrated):
        console.print(f"without a CFPR, for no picture shows the company alone: {len(unrated):,}")
    if comparison is not None:
        for name, curve in (("conditional FPR", comparison.cfpr), ("conditional TPR", comparison.ctpr)):
            console.print(f"{name}: {_tell_curve(curve)}")
    console.print()
    baseline = {} if comparison is None else dict(_index(comparison.baseline, len(comparison.baseline)))
    columns = [
        "label",
        "company",
        "P",
        "CFPR",
        "95 %",
        "n",
        "FPR",
        "CTPR",
        "95 %",
        "n",
        "most confident false positive",
    ]
    if comparison is not None:
        columns.insert(4, "baseline")
    table = _make_table(columns, left=("label", "company", columns[-1]))
    listed = [*_index(ranked, count), *_index(unrated, count)][:count]
    for place, (names, row) in enumerate(listed):
        found = behind[place] if place < len(behind) else ()
        cells = [
            *names,
            f"{row['probability']:.2f}",
            _percent(row["cfpr"]),
            _limits(row, "cfpr"),
            _count(row["cfpr_pictures"]),
            _percent(row["fpr"]),
            _percent(row["ctpr"]),
            _limits(row, "ctpr"),
            _count(row["ctpr_pictures"]),
            f"{found[0].probability:.2f} {found[0].picture}" if found else "",
        ]
        if comparison is not None:
            cells.insert(4, _percent(baseline[names]["cfpr"]))
        table.add_row(*cells)
    _show(console, table)
    print(f"* fewer than {FEW} pictures stand behind the rate")


def _index(rates: PairRates, count: int) -> list[tuple[tuple[str, str], dict[str, float]]]:
    """The first pairs, by their names."""
    rates = rates.select(torch.arange(min(count, len(rates))))
    return list(zip(rates.names, rates.to_dict()["pairs"], strict=True))


def _tell_curve(curve: Curve) -> str:
    if not len(curve.pairs):
        return "no picture tells"
    parts = (("better", curve.improved), ("worse", curve.worse), ("tied", curve.tied))
    told = ", ".join(f"{what} in {count} ({100 * count / len(curve.pairs):.0f} %)" for what, count in parts)
    return told + (f"; no picture tells of {curve.undefined}" if curve.undefined else "")


def print_steps(found: StepwiseEvaluation, *, count: int) -> None:
    """Print the step-wise evaluation: the mean, and the labels that gain and lose most."""
    console = _open_console()
    mean = found.mean
    console.print(f"AP is the {DEFINITIONS[found.definition]}, in per cent")
    kinds = {"image": "image", "patch": "patches", "tde": "TDE"}
    means = ", ".join(f"{name} {100 * mean[kind]:.2f}" for kind, name in kinds.items())
    share, gain = f"{100 * found.share_gained:.0f} % of {len(found.steps)} labels", f"{100 * mean['gain']:+.2f} points"
    console.print(f"mAP: {means}; TDE beats the better of the two in {share}, by {gain} in the mean")
    if found.skipped:
        console.print(f"without a positive picture and skipped: {shorten(found.skipped)}")
    console.print()
    table = _make_table(["label", "pictures", "image", "patches", "TDE", "gain"], left=("label",))
    ranked = sorted(found.steps, key=lambda step: -step.gain)
    cut = len(ranked) > 2 * count
    for place, step in enumerate([*ranked[:count], *ranked[-count:]] if cut else ranked):
        if cut and place == count:
            table.add_section()
        values = (f"{100 * value:.1f}" for value in (step.image, step.patch, step.tde))
        table.add_row(step.label, f"{step.positives:,}", *values, f"{100 * step.gain:+.1f}")
    _show(console, table)


def print_scale(found: ScaleStudy) -> None:
    """Print a row of the study of image scale."""
    console = _open_console()
    console.print(f"AP is the {DEFINITIONS[found.definition]}; mAP in per cent\n")
    table = _make_table(["patch logits", "TDE logits", "difference", "95 %"])
    low, high = found.difference.low, found.difference.high
    table.add_row(
        f"{100 * found.patch:.2f}",
        f"{100 * found.tde:.2f}",
        f"{100 * found.difference.value:+.2f}",
        f"{100 * low:+.2f} to {100 * high:+.2f}",
    )
    _show(console, table)


def print_label_errors(found: Sequence[LabelError]) -> None:
    """Print likely annotation errors, the most suspicious first."""
    console = _open_console()
    table = _make_table(["rank", "label", "is probably", "p", "self-confidence", "picture"], left=("label", "picture"))
    for error in found:
        chance, confidence = f"{error.probability:.3f}", f"{error.self_confidence:.3f}"
        table.add_row(str(error.rank), error.label, error.direction, chance, confidence, error.picture)
    _show(console, table)
    print("p: calibrated probability that the picture shows the label. Self-confidence: 1 is usual for the label.")


def print_cases(found: Sequence[CaseStudy]) -> None:
    """Print case studies."""
    console = _open_console()
    columns = ["label", "there", "baseline", "image", "patches", "TDE", "weights of the patches", "picture"]
    table = _make_table(columns, left=("label", "picture"))
    for case in found:
        chances = (case.baseline, case.image, case.patch, case.tde)
        shares = " ".join(f"{weight:.2f}" for weight in case.weights)
        there = "?" if case.shown is None else "yes" if case.shown else "no"
        told = ("" if chance is None else f"{chance:.2f}" for chance in chances)
        table.add_row(case.label, there, *told, shares, case.picture)
    _show(console, table)


def print_effects(networks: Mapping[str, Sequence[EffectTracking]]) -> None:
    """Print how well logits track the true direct effect, in the mean over the labels."""
    console = _open_console()
    console.print(
        "Spearman's rank correlation with the direct effect in the same network's image logits, mean over labels"
    )
    if any(row.mean is None for rows in networks.values() for row in rows):
        console.print("-: a label can be ranked where two scenes or more differ in it; give more of them")
    console.print()
    table = _make_table(["network", "among", "logits", "correlation", "95 %", "over image", "95 %"], left=("network",))
    for name, rows in networks.items():
        for row in rows:
            over = ("", "") if row.kind == "image" else _bounds(row.over_image, sign="+")
            table.add_row(name, row.among, row.kind, *_bounds(row.mean), *over)
    _show(console, table)


def _bounds(bound: Interval | None, *, sign: str = "") -> tuple[str, str]:
    if bound is None:
        return "-", "-"
    return f"{bound.value:{sign}.3f}", f"{bound.low:{sign}.3f} to {bound.high:{sign}.3f}"


def _limits(row: Mapping[str, float], rate: str) -> str:
    return f"{100 * row[f'{rate}_low']:.0f}-{100 * row[f'{rate}_high']:.0f}" if row[f"{rate}_pictures"] else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _count(pictures: float) -> str:
    return f"{pictures:,}*" if pictures < FEW else f"{pictures:,}"


def _open_console() -> Console:
    # Labels and file names are printed as they are: what looks like markup in them is not.
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def _make_table(headings: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading not in left)
    return table


def _show(console: Console, table: Table) -> None:
    with console.capture() as printed:
        console.print(table, soft_wrap=False)
    print(printed.get(), end="")
