"""`pivotpatch audit`: which labels a model gives because of co-occurrence, and what else its scores tell."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pivotpatch.cli.usage import POLICY_HELP
from pivotpatch.errors import InputError, shorten

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from PIL.Image import Image
    from rich.table import Table

    from pivotpatch.audit.cooccurrence import Curve
    from pivotpatch.audit.evaluation import Policy
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.scores import Scores

_SIDE = 448  # pixels of the longer side of images in figures


class _Told(NamedTuple):
    """What a part found: for JSON, as lines and tables, and as figures where `--plot` asks for them."""

    plain: Any
    shown: "Sequence[str | Table]"
    figures: "Mapping[str, Figure | Image]"


_Part = Callable[["Scores", "RecordSet | None", argparse.Namespace], _Told]


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb and its parts."""
    audit = verbs.add_parser(
        "audit",
        help="find out which labels a model gives because of co-occurrence",
        description="Audit scores that `pivotpatch evaluate --save` wrote, or anybody's.",
    )
    parts = audit.add_subparsers(title="parts", required=True)
    for name, (part, told, options) in _PARTS.items():
        words = "SCORES PATCH_SCORES [DATA]" if part is _audit_scale else "SCORES [DATA]"
        parser = parts.add_parser(name, help=told, description=told, usage=f"%(prog)s {words} [options]")
        parser.add_argument(
            "words",
            nargs="+",
            metavar=words,
            help="scores (.parquet, .csv); then the address of their images, where the truth is not in the file or "
            "images are to be drawn",
        )
        parser.add_argument("--json", action="store_true", help="write everything as JSON")
        parser.add_argument("--plot", type=Path, metavar="DIR", help="draw to this folder")
        parser.add_argument("--overwrite", action="store_true", help="replace figures that are there")
        for option in options:
            parser.add_argument(f"--{option}", required=(name, option) == ("cases", "baseline"), **_OPTIONS[option])
        parser.set_defaults(run=_run_part, part=part)


def _run_part(args: argparse.Namespace) -> int:
    """Read the scores, audit them, tell it, and draw it where asked to."""
    from pivotpatch.cli.console import Screen, write_figures
    from pivotpatch.cli.sources import open_pictures, read_score_file

    if getattr(args, "count", 1) < 1:
        raise InputError("--count", f"{args.count} entries", "give 1 or more")
    files = 2 if args.part is _audit_scale else 1
    if len(args.words) < files:
        raise InputError("PATCH_SCORES", "they are not given", "name the scores of a model of patches alone")
    records = open_pictures(args.words[files:])
    scores = read_score_file(Path(args.words[0]), records=records)
    if records is not None and scores.indices is not None:
        records = records.select(scores.indices.numpy())  # those that have scores
    if getattr(args, "kind", None) is not None:
        scores = scores.only(args.kind)
    found: _Told = args.part(scores, records, args)
    if args.json:
        print(json.dumps(found.plain))
    else:
        screen = Screen()
        for each in found.shown:
            screen.print(each, soft_wrap=False)
    if args.plot is not None:
        write_figures(found.figures, args.plot, overwrite=args.overwrite)
    return 0


def _audit_pairs(scores: "Scores", records: "RecordSet | None", args: argparse.Namespace) -> _Told:
    import torch

    from pivotpatch.audit import compare_pairs, decide, find_false_positives, match_recall, rank_pairs, rate_pairs
    from pivotpatch.audit.cooccurrence import FEW, RecallMatched, bound_lower
    from pivotpatch.cli.sources import read_policy, read_score_file

    pairs = None if args.pair is None else [_split_pair(text) for text in args.pair]
    other = comparison = lower = None
    if args.baseline is not None:
        like = scores
        if pairs is not None:  # they need their own labels alone, such as an InT of a few
            named = {name for pair in pairs for name in pair}
            like = scores.keep_labels([place for place, name in enumerate(scores.labels) if name in named])
        other = read_score_file(args.baseline, like=like)
    rate = partial(rate_pairs, min_probability=args.min_probability, pairs=pairs)
    policy: Policy = read_policy(args.policy, scores.labels)
    if other is not None:
        others: Policy = read_policy(args.policy, other.labels)
        if args.equal_recall:
            scores = like
            policy, others = match_recall(scores, other, policy=others)
        comparison = compare_pairs(rate(scores, policy=policy), rate(other, policy=others))
    elif args.equal_recall:
        raise InputError("--equal-recall", "there is nothing to compare with", "give --baseline SCORES")
    rates = rate(scores, policy=policy) if comparison is None else comparison.model
    lines = [f"{len(rates):,} pairs, rates in per cent; decisions by {rates.definition}"]
    if comparison is not None:
        lines += [f"conditional FPR: {_tell(comparison.cfpr)}", f"conditional TPR: {_tell(comparison.ctpr)}"]
    moved = 0 if comparison is None else comparison.cfpr.improved + comparison.cfpr.worse
    if moved and isinstance(policy, RecallMatched):
        assert other is not None
        draw: Any = {"resamples": args.resamples, "generator": torch.Generator().manual_seed(0)}
        lower = bound_lower(scores, other, rates.names, recall=policy.recall, **draw)
        told = f"{100 * lower.value:.1f} % are lower (95 %: {100 * lower.low:.1f} to {100 * lower.high:.1f})"
        lines.append(f"of the {moved:,} conditional FPRs that moved at equal recall {told}")
    worst = rank_pairs(rates, by=args.order)
    worst = worst.select(torch.arange(min(args.count, len(worst))))
    decided = decide(scores, policy=policy)
    behind = [find_false_positives(scores, label, context=context, decided=decided) for label, context in worst.names]
    headings = ["label; context", "P", "CFPR", "95 %", "n", "FPR", "CTPR"]
    rows = [
        [
            "; ".join(pair),
            f"{row['probability']:.2f}",
            _percent(row["cfpr"], few=row["cfpr_few"]),
            f"{100 * row['cfpr_low']:.0f}-{100 * row['cfpr_high']:.0f}",
            f"{row['cfpr_pictures']:,}",
            _percent(row["fpr"]),
            _percent(row["ctpr"], few=row["ctpr_few"]),
        ]
        for pair, row in zip(worst.names, worst.to_dict()["pairs"], strict=True)
    ]
    if comparison is not None:
        headings.append("baseline")
        for pair, row in zip(worst.names, rows, strict=True):
            row.append(_percent(comparison.baseline.fpr[rates.names.index(pair)].item()))
    table = _make_table(headings, rows)
    shown: list[str | Table] = [*lines, "", table, f"*: fewer than {FEW} images; n: images behind the CFPR"]
    figures = {}
    if args.plot is not None:
        from pivotpatch.audit.plots import plot_pair_curves, plot_pairs, plot_sheet

        names = (Path(args.words[0]).stem, "" if args.baseline is None else args.baseline.stem)
        if len(rates):
            listed, beside = worst if pairs is None else rates, None if comparison is None else comparison.baseline
            figures["worst_pairs" if pairs is None else "pairs"] = plot_pairs(listed, baseline=beside, names=names)
        if comparison is not None and pairs is None:
            figures["pairs"] = plot_pair_curves(comparison, names=names)
        captions: dict[int, str] = {}  # by row: no image twice
        for (label, context), images in zip(worst.names, behind, strict=True):
            for found in [each for each in images if each.row not in captions][:1]:
                captions[found.row] = f"{label}? {found.probability:.2f}\nbeside {context}"
        if records is not None and captions:
            figures["false_positives"] = plot_sheet(_decode(records, list(captions)), list(captions.values()))
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


def _tell(curve: "Curve") -> str:
    parts = (("better", curve.improved), ("worse", curve.worse), ("tied", curve.tied))
    told = [f"{what} in {count} ({100 * count / max(len(curve.model), 1):.0f} %)" for what, count in parts]
    return ", ".join(told) + (f"; no image tells of {curve.undefined}" if curve.undefined else "")


def _percent(value: float | None, *, few: bool = False) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f}{'*' if few else ''}"


def _audit_steps(scores: "Scores", _records: "RecordSet | None", args: argparse.Namespace) -> _Told:
    from pivotpatch.audit import evaluate_steps
    from pivotpatch.audit.plots import plot_steps
    from pivotpatch.core.metrics import DEFINITIONS

    found = evaluate_steps(scores, definition=args.definition)
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
    return _Told(found.to_dict(), [*lines, "", table], {"steps": plot_steps(found)} if args.plot else {})


def _audit_scale(scores: "Scores", _records: "RecordSet | None", args: argparse.Namespace) -> _Told:
    import torch

    from pivotpatch.audit import study_scale
    from pivotpatch.audit.plots import plot_scale
    from pivotpatch.cli.sources import read_score_file
    from pivotpatch.core.metrics import DEFINITIONS

    alone = read_score_file(Path(args.words[1]), like=scores)
    found = study_scale(scores, alone, definition=args.definition, generator=torch.Generator().manual_seed(0))
    value, low, high = (f"{100 * each:+.2f}" for each in asdict(found.difference).values())
    row = [f"{100 * found.patch:.2f}", f"{100 * found.tde:.2f}", value, f"{low} to {high}"]
    table = _make_table(["patch logits", "TDE logits", "difference", "95 %"], [row])
    line = f"AP is the {DEFINITIONS[found.definition]}; mAP in per cent"
    return _Told(asdict(found), [line, "", table], {"scale": plot_scale(found)} if args.plot else {})


def _audit_label_errors(scores: "Scores", records: "RecordSet | None", args: argparse.Namespace) -> _Told:
    from pivotpatch.audit import find_label_errors
    from pivotpatch.audit.plots import plot_sheet

    found = find_label_errors(scores, count=args.count)
    rows = [
        [error.label, error.direction, f"{error.probability:.3f}", f"{error.self_confidence:.3f}", error.picture]
        for error in found
    ]
    table = _make_table(["label", "is probably", "p", "self-confidence", "file"], rows)
    line = "p: calibrated probability; self-confidence: 1 is usual for the label"
    images = _decode(records, [error.row for error in found]) if args.plot else []
    captions = [f"{error.rank}. {error.label}: {error.direction}?\np = {error.probability:.2f}" for error in found]
    figures = {"label_errors": plot_sheet(images, captions)} if images else {}
    return _Told([error._asdict() for error in found], [table, line], figures)


def _audit_cases(scores: "Scores", records: "RecordSet | None", args: argparse.Namespace) -> _Told:
    from pivotpatch.audit.cases import find_cases
    from pivotpatch.audit.plots import plot_case
    from pivotpatch.cli.sources import read_score_file

    found = find_cases(scores, read_score_file(args.baseline, like=scores), count=args.count)
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
        f"case_{number}": plot_case(case, image, overlap=scores.overlap)
        for number, (case, image) in enumerate(zip(found, images, strict=False), 1)
    }
    table = _make_table(["label", "there", "baseline", "image", "patches", "TDE", "file"], rows)
    return _Told([case.to_dict() for case in found], [table], figures)


def _decode(records: "RecordSet | None", rows: Sequence[int]) -> "list[NDArray[np.uint8]]":
    """Pixels (H,W,3) of the images in these rows, small enough for a figure."""
    import numpy as np

    from pivotpatch.audit.plots import shrink_image

    if records is None:
        raise InputError("--plot", "it is not known where the images are", "give their address behind the scores")
    return [np.asarray(shrink_image(records, row, side=_SIDE)) for row in rows]


def _make_table(headings: list[str], rows: Sequence[Sequence[str]]) -> "Table":
    """A table whose last column, where it holds names of images, is folded and not cut."""
    from pivotpatch.cli.console import make_table

    table = make_table(headings)
    if headings[-1] == "file":
        table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].overflow = "left", False, "fold"
    for row in rows:
        table.add_row(*row)
    return table


_OPTIONS: dict[str, dict[str, Any]] = {
    "baseline": {"type": Path, "metavar": "SCORES", "help": "compare with these scores of the same images"},
    "pair": {
        "action": "append",
        "metavar": "LABEL;CONTEXT",
        "help": "look at this pair, may be given again (such as DeT against InT); else at all that co-occur",
    },
    "min-probability": {"type": float, "default": 0.2, "metavar": "P", "help": "of pairs, P(label | context) (0.2)"},
    "policy": {"default": "target", "help": f"{POLICY_HELP}; target by default: models are compared at equal counts"},
    "equal-recall": {
        "action": "store_true",
        "help": "compare where both find the same share of each label: that which the baseline finds by --policy",
    },
    "resamples": {"type": int, "default": 500, "metavar": "N", "help": "behind the interval at equal recall (500)"},
    "order": {"choices": ["rate", "gap"], "default": "rate", "help": "pairs by conditional FPR (rate), or by its rise"},
    "kind": {"choices": ["image", "patch", "tde"], "help": "of logits; by default those to rank by"},
    "definition": {"choices": ["step", "envelope"], "default": "step", "help": "of average precision (step)"},
    "count": {"type": int, "default": 15, "metavar": "N", "help": "entries to list (15)"},
}
_PARTS: dict[str, tuple[_Part, str, tuple[str, ...]]] = {
    "pairs": (
        _audit_pairs,
        "FPR and TPR of labels that co-occur, the worst first",
        ("baseline", "equal-recall", "resamples", "pair", "min-probability", "policy", "order", "kind", "count"),
    ),
    "steps": (_audit_steps, "AP of image, patch and TDE logits, label by label", ("definition", "count")),
    "scale": (_audit_scale, "TDE logits against a model of patches alone", ("definition",)),
    "label-errors": (_audit_label_errors, "labels that are probably missing or wrong", ("kind", "count")),
    "cases": (_audit_cases, "the clearest images for and against a baseline", ("baseline", "count")),
}
