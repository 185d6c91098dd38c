"""`pivotpatch audit`: which labels a model gives because of co-occurrence, and what else its scores tell."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL.Image import Image
from rich.table import Table

from pivotpatch import audit
from pivotpatch.audit import plots
from pivotpatch.audit.cooccurrence import FEW, Curve, bound_lower
from pivotpatch.audit.evaluation import Policy
from pivotpatch.cli.console import Screen, make_table, write_figures, write_percent
from pivotpatch.cli.sources import open_pictures, read_policy, read_score_file
from pivotpatch.core.metrics import DEFINITIONS
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.scores import Scores

_SIDE = 448  # pixels of the longer side of images in figures


class _Told(NamedTuple):
    """What a part found: for JSON, as lines and tables, and as figures where `--plot` asks for them."""

    plain: Any
    shown: Sequence[str | Table]
    figures: Mapping[str, Figure | Image]


def run_audit(args: argparse.Namespace) -> int:
    """Read the scores, audit them, tell it, and draw it where asked to."""
    if getattr(args, "count", 1) < 1:
        raise InputError("--count", f"{args.count} entries", "give 1 or more")
    files = 2 if args.part == "scale" else 1
    if len(args.words) < files:
        raise InputError("PATCH_SCORES", "they are not given", "name the scores of a model of patches alone")
    records = open_pictures(args.words[files:])
    scores = read_score_file(Path(args.words[0]), records=records)
    if records is not None and scores.indices is not None:
        records = records.select(scores.indices.numpy())  # those that have scores
    found = _PARTS[args.part](scores, records, args)
    if args.json:
        print(json.dumps(found.plain))
    else:
        screen = Screen()
        for each in found.shown:
            screen.print(each, soft_wrap=False)
    if args.plot is not None:
        write_figures(found.figures, args.plot, overwrite=args.overwrite)
    return 0


def _audit_pairs(scores: Scores, records: RecordSet | None, args: argparse.Namespace) -> _Told:
    if not 0 <= args.min_probability <= 1:
        raise InputError("--min-probability", f"is {args.min_probability}", "give a probability, 0 to 1")
    pairs = None if args.pair is None else [_split_pair(text) for text in args.pair]
    other = comparison = lower = matched = None
    if args.baseline is not None:
        like = scores
        if pairs is not None:  # they need their own labels alone, such as an InT of a few
            named = {name for pair in pairs for name in pair}
            like = scores.keep_labels([place for place, name in enumerate(scores.labels) if name in named])
        other = read_score_file(args.baseline, like=like)
        scores = like  # both decide among the same labels
    rate = partial(audit.rate_pairs, min_probability=args.min_probability, pairs=pairs)
    policy: Policy = read_policy(args.policy, scores.labels)
    if other is not None:
        others: Policy = read_policy(args.policy, other.labels)
        if args.equal_recall:
            matched = audit.match_recall(scores, other, policy=others)
            policy, others, _ = matched
        comparison = audit.compare_pairs(rate(scores, policy=policy), rate(other, policy=others))
    elif args.equal_recall:
        raise InputError("--equal-recall", "there is nothing to compare with", "give --baseline SCORES")
    rates = rate(scores, policy=policy) if comparison is None else comparison.model
    lines = [f"{len(rates):,} pairs, rates in per cent; decisions by {rates.definition}"]
    if len(rates):
        judged = [rates] if comparison is None else [rates, comparison.baseline]
        means = [f"FPR {100 * each.fpr.nanmean():.1f}, TPR {100 * each.tpr.nanmean():.1f}" for each in judged]
        lines.append(f"mean conditional {'; of the baseline '.join(means)}")
    if comparison is not None:
        lines += [f"conditional FPR: {_tell(comparison.cfpr)}", f"conditional TPR: {_tell(comparison.ctpr)}"]
    moved = 0 if comparison is None else comparison.cfpr.improved + comparison.cfpr.worse
    if moved and matched is not None:
        assert other is not None
        draw: Any = {"resamples": args.resamples, "generator": torch.Generator().manual_seed(0)}
        lower = bound_lower(scores, other, rates.names, recall=matched.recall, **draw)
        told = f"{100 * lower.value:.1f} % are lower (95 %: {100 * lower.low:.1f} to {100 * lower.high:.1f})"
        lines.append(f"of the {moved:,} conditional FPRs that moved at equal recall {told}")
    worst = audit.rank_pairs(rates, by=args.order)
    worst = worst.select(torch.arange(min(args.count, len(worst))))
    decided = audit.decide(scores, policy=policy)
    find = partial(audit.find_false_positives, scores, decided=decided)
    behind = [find(label, context=context) for label, context in worst.names]
    headings = ["label; context", "P", "CFPR", "95 %", "n", "FPR", "CTPR"]
    rows = [
        [
            "; ".join(pair),
            f"{row['probability']:.2f}",
            write_percent(row["cfpr"], few=row["cfpr_few"]),
            f"{100 * row['cfpr_low']:.0f}-{100 * row['cfpr_high']:.0f}",
            f"{row['cfpr_pictures']:,}",
            write_percent(row["fpr"]),
            write_percent(row["ctpr"], few=row["ctpr_few"]),
        ]
        for pair, row in zip(worst.names, worst.to_dict()["pairs"], strict=True)
    ]
    if comparison is not None:
        headings.append("baseline")
        for pair, row in zip(worst.names, rows, strict=True):
            row.append(write_percent(comparison.baseline.fpr[rates.names.index(pair)].item()))
    table = _make_table(headings, rows)
    shown: list[str | Table] = [*lines, "", table, f"*: fewer than {FEW} images; n: images behind the CFPR"]
    figures = {}
    if args.plot is not None:
        names = (Path(args.words[0]).stem, "" if args.baseline is None else args.baseline.stem)
        if len(rates):
            listed, beside = worst if pairs is None else rates, None if comparison is None else comparison.baseline
            name = "worst_pairs" if pairs is None else "pairs"
            figures[name] = plots.plot_pairs(listed, baseline=beside, names=names)
        if comparison is not None and pairs is None:
            figures["pairs"] = plots.plot_pair_curves(comparison, names=names)
        captions: dict[int, str] = {}  # by row: no image twice
        for (label, context), images in zip(worst.names, behind, strict=True):
            for found in [each for each in images if each.row not in captions][:1]:
                captions[found.row] = f"{label}? {found.probability:.2f}\nbeside {context}"
        if records is not None and captions:
            figures["false_positives"] = plots.plot_sheet(_decode(records, list(captions)), list(captions.values()))
    plain = [
        {"label": label, "company": context, "false_positives": [found._asdict() for found in images]}
        for (label, context), images in zip(worst.names, behind, strict=True)
    ]
    more = {} if lower is None else {"lower": asdict(lower)}
    return _Told({"worst": plain, **more, **(comparison or rates).to_dict()}, shown, figures)


def _split_pair(text: str) -> tuple[str, str]:
    label, semicolon, context = text.strip("{}").partition(";")
    if not semicolon:
        raise InputError("--pair", f"{text!r} has no semicolon", "write for example 'car;parking meter'")
    return label.strip(), context.strip()


def _tell(curve: Curve) -> str:
    parts = (("better", curve.improved), ("worse", curve.worse), ("tied", curve.tied))
    told = [f"{what} in {count} ({100 * count / max(len(curve.model), 1):.0f} %)" for what, count in parts]
    return ", ".join(told) + (f"; no image tells of {curve.undefined}" if curve.undefined else "")


def _audit_steps(scores: Scores, _records: RecordSet | None, args: argparse.Namespace) -> _Told:
    found = audit.evaluate_steps(scores, definition=args.definition)
    mean = {kind: f"{100 * value:.2f}" for kind, value in found.mean.items()}
    lines = [
        f"AP is the {DEFINITIONS[found.definition]}, in per cent",
        f"mAP: image {mean['image']}, patches {mean['patch']}, TDE {mean['tde']}",
        f"TDE beats the better of the two in {100 * found.share_gained:.0f} % of {len(found.steps)} labels; "
        f"mean gain {mean['gain']}",
    ]
    if found.skipped:
        lines.append(f"without a positive image and skipped: {shorten(found.skipped)}")
    ranked = sorted(found.steps, key=lambda step: -step.gain)
    listed = ranked[: args.count] + ranked[max(args.count, len(ranked) - args.count) :]  # those that gain and lose most
    rows = [
        [
            step.label,
            f"{step.positives:,}",
            *(f"{100 * value:.1f}" for value in (step.image, step.patch, step.tde)),
            f"{100 * step.gain:+.1f}",
        ]
        for step in listed
    ]
    table = _make_table(["label", "images", "image", "patches", "TDE", "gain"], rows)
    return _Told(found.to_dict(), [*lines, "", table], {"steps": plots.plot_steps(found)} if args.plot else {})


def _audit_scale(scores: Scores, _records: RecordSet | None, args: argparse.Namespace) -> _Told:
    alone = read_score_file(Path(args.words[1]), like=scores)
    found = audit.study_scale(scores, alone, definition=args.definition, generator=torch.Generator().manual_seed(0))
    value, low, high = (f"{100 * each:+.2f}" for each in asdict(found.difference).values())
    row = [f"{100 * found.patch:.2f}", f"{100 * found.tde:.2f}", value, f"{low} to {high}"]
    table = _make_table(["patch logits", "TDE logits", "difference", "95 %"], [row])
    line = f"AP is the {DEFINITIONS[found.definition]}; mAP in per cent"
    return _Told(asdict(found), [line, "", table], {"scale": plots.plot_scale(found)} if args.plot else {})


def _audit_label_errors(scores: Scores, records: RecordSet | None, args: argparse.Namespace) -> _Told:
    found = audit.find_label_errors(scores, count=args.count)
    rows = [
        [error.label, error.direction, f"{error.probability:.3f}", f"{error.self_confidence:.3f}", error.picture]
        for error in found
    ]
    table = _make_table(["label", "is probably", "p", "self-confidence", "file"], rows)
    line = "p: calibrated probability; self-confidence: 1 is usual for the label"
    images = _decode(records, [error.row for error in found]) if args.plot else []
    captions = [f"{error.rank}. {error.label}: {error.direction}?\np = {error.probability:.2f}" for error in found]
    figures = {"label_errors": plots.plot_sheet(images, captions)} if images else {}
    return _Told([error._asdict() for error in found], [table, line], figures)


def _audit_cases(scores: Scores, records: RecordSet | None, args: argparse.Namespace) -> _Told:
    found = audit.find_cases(scores, read_score_file(args.baseline, like=scores), count=args.count)
    rows = [
        [
            case.label,
            "yes" if case.shown else "no",
            *(f"{prob:.2f}" for prob in (case.baseline, case.image, case.patch, case.tde)),
            case.picture,
        ]
        for case in found
    ]
    images = _decode(records, [case.row for case in found]) if args.plot else []
    figures = {
        f"case_{number}": plots.plot_case(case, image, overlap=scores.overlap)
        for number, (case, image) in enumerate(zip(found, images, strict=False), 1)
    }
    table = _make_table(["label", "there", "baseline", "image", "patches", "TDE", "file"], rows)
    return _Told([case.to_dict() for case in found], [table], figures)


def _decode(records: RecordSet | None, rows: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Pixels (H,W,3) of the images in these rows, small enough for a figure."""
    if records is None:
        raise InputError("--plot", "it is not known where the images are", "give their address behind the scores")
    return [np.asarray(plots.shrink_image(records, row, side=_SIDE)) for row in rows]


def _make_table(headings: list[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose last column, where it holds names of images, is folded and not cut."""
    table = make_table(headings, rows)
    if headings[-1] == "file":
        table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].overflow = "left", False, "fold"
    return table


_PARTS: dict[str, Callable[[Scores, RecordSet | None, argparse.Namespace], _Told]] = {
    "pairs": _audit_pairs,
    "steps": _audit_steps,
    "scale": _audit_scale,
    "label-errors": _audit_label_errors,
    "cases": _audit_cases,
}
