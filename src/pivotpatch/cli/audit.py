"""`pivotpatch audit`: where a model is led by company, step by step, picture by picture."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pivotpatch.cli.audit_options import DEFAULTS, refuse_unused, split_pairs
from pivotpatch.cli.figures import decode_small, write_figures
from pivotpatch.cli.policies import read_policy
from pivotpatch.cli.sources import open_pictures, open_source, read_score_file
from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pivotpatch.audit.cooccurrence import FalsePositive, PairRates
    from pivotpatch.audit.pair_comparison import PairComparison
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier

SEED = 0  # of resamples and folds: the same scores have the same intervals
SCENES = "scenes:@test-same"
_FOLDS = 5  # of the calibration behind likely label errors


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    audit = verbs.add_parser(
        "audit",
        help="find out which labels a model gives because of their company",
        description="Audit scores that pivotpatch evaluate saved, or anybody's; --pairs where nothing else is asked.",
    )
    audit.add_argument(
        "words",
        nargs="+",
        metavar="WORD",
        help="scores (.parquet, .npz, .csv), with --effect a run, a checkpoint or a network by name; then the "
        "address of their pictures, where the truth is not in the file or pictures are to be drawn",
    )
    part = audit.add_mutually_exclusive_group()
    part.add_argument("--pairs", action="store_true", help="conditional FPR and TPR of labels that keep company")
    part.add_argument("--steps", action="store_true", help="AP of image, patch and TDE logits, label by label")
    part.add_argument("--scale-study", type=Path, metavar="SCORES", help="TDE against a network of patches alone")
    part.add_argument("--label-errors", action="store_true", help="labels that are probably missing or wrong")
    part.add_argument("--cases", action="store_true", help="the clearest pictures for and against the baseline")
    part.add_argument("--effect", action="store_true", help="how well logits track the true direct effect, on scenes")
    audit.add_argument("--baseline", type=Path, metavar="WHAT", help="compare with this, picture by picture")
    audit.add_argument(
        "--pair",
        action="append",
        metavar="LABEL;COMPANY",
        help="look at this pair, may be given again (such as DeT against InT); else at all that keep company",
    )
    audit.add_argument(
        "--min-probability",
        type=float,
        default=DEFAULTS["min_probability"],
        metavar="P",
        help="pairs with P(label | company) above it (0.2)",
    )
    audit.add_argument(
        "--policy",
        default=DEFAULTS["policy"],
        help="what decides: prior (as often as in the scores' own target), prior:DATA, fixed:P or top:K (prior)",
    )
    audit.add_argument("--kind", choices=["image", "patch", "tde"], help="of logits; by default those to rank by")
    audit.add_argument(
        "--order", choices=["rate", "gap"], default=DEFAULTS["order"], help="worst pairs by CFPR, or by its rise"
    )
    audit.add_argument("--count", type=int, default=DEFAULTS["count"], metavar="N", help="entries to list (15)")
    audit.add_argument("--json", action="store_true", help="write everything as JSON")
    audit.add_argument("--plot", type=Path, metavar="DIR", help="draw to this folder")
    audit.set_defaults(run=run_audit)


def run_audit(args: argparse.Namespace) -> int:
    """Audit one thing, tell it, and draw it where asked to."""
    if len(args.words) > 2:
        raise InputError(f"{args.words[2]!r}", "a third word", "give scores and the address of their pictures")
    refuse_unused(args)
    if args.count < 1:
        raise InputError("--count", f"{args.count} entries", "give 1 or more")
    if args.plot is not None and (args.label_errors or args.cases) and len(args.words) < 2:
        raise InputError("--plot", "it is not known where the pictures are", "give their address behind the scores")
    if args.effect:
        return _audit_effect(args)
    if args.steps:
        return _audit_steps(args)
    if args.scale_study is not None:
        return _audit_scale(args)
    if args.label_errors:
        return _audit_label_errors(args)
    return _audit_cases(args) if args.cases else _audit_pairs(args)


def _audit_pairs(args: argparse.Namespace) -> int:
    from pivotpatch.audit.cooccurrence import decide, find_false_positives, rank_pairs, rate_pairs
    from pivotpatch.audit.pair_comparison import compare_pairs
    from pivotpatch.cli.audit_text import print_pairs

    records, scores, baseline = _read(args)
    chosen = {"min_probability": args.min_probability, "pairs": split_pairs(args.pair, scores.labels)}
    policy = read_policy(args.policy, scores.labels)
    rates = rate_pairs(scores, policy=policy, kind=args.kind, **chosen)
    comparison = None
    if baseline is not None:
        comparison = compare_pairs(
            rates, rate_pairs(baseline, policy=read_policy(args.policy, baseline.labels), **chosen)
        )
    ranked = rank_pairs(rates, by=args.order)
    decided = decide(scores, policy=policy, kind=args.kind)
    behind = [
        find_false_positives(scores, label, company=company, kind=args.kind, decided=decided)
        for label, company in ranked.names[: args.count]
    ]
    if args.json:
        worst = [
            {"label": label, "company": company, "false_positives": [found._asdict() for found in pictures]}
            for (label, company), pictures in zip(ranked.names, behind, strict=False)
        ]
        told = rates.to_dict() if comparison is None else comparison.to_dict()
        print(json.dumps({"worst": worst, **told}))
    else:
        print_pairs(rates, ranked, behind=behind, comparison=comparison, count=args.count)
    if args.plot is not None:
        _draw_pairs(_Pairs(ranked, behind, comparison, records), args)
    return 0


class _Pairs(NamedTuple):
    """What is drawn of pairs: the worst first, the false positives behind these, and what they are compared with."""

    ranked: "PairRates"
    behind: "list[list[FalsePositive]]"
    comparison: "PairComparison | None"
    records: "RecordSet | None"


def _draw_pairs(pairs: _Pairs, args: argparse.Namespace) -> None:
    from pivotpatch.audit.plots import plot_given_pairs, plot_pair_curves, plot_worst_pairs

    ranked, behind, comparison, records = pairs
    figures = {}
    if len(ranked):
        theirs = None if comparison is None else comparison.baseline
        figures["worst_pairs"] = plot_worst_pairs(ranked, count=args.count, baseline=theirs)
    if comparison is not None and len(comparison.model):
        names = (Path(args.words[0]).stem, args.baseline.stem)
        figures["pairs"] = (plot_pair_curves if args.pair is None else plot_given_pairs)(comparison, names=names)
    if records is not None and any(behind):
        shown: dict[int, tuple[tuple[str, str], FalsePositive]] = {}  # no picture twice
        for pair, pictures in zip(ranked.names, behind, strict=False):
            for found in (each for each in pictures if each.row not in shown):
                shown[found.row] = (pair, found)
                break
        captions = [f"{label}? {found.probability:.2f}\nbeside {other}" for (label, other), found in shown.values()]
        figures["false_positives"] = _draw_sheet(records, list(shown), captions)
    write_figures(figures, args.plot)


def _audit_steps(args: argparse.Namespace) -> int:
    from pivotpatch.audit.plots import plot_steps
    from pivotpatch.audit.stepwise import evaluate_steps
    from pivotpatch.cli.audit_text import print_steps

    found = evaluate_steps(_read(args).scores)
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        print_steps(found, count=args.count)
    if args.plot is not None:
        write_figures({"steps": plot_steps(found)}, args.plot)
    return 0


def _audit_scale(args: argparse.Namespace) -> int:
    import torch

    from pivotpatch.audit.plots import plot_scales
    from pivotpatch.audit.stepwise import study_scale
    from pivotpatch.cli.audit_text import print_scale

    scores = _read(args).scores
    other = read_score_file(args.scale_study, like=scores)
    found = study_scale(scores, other, generator=torch.Generator().manual_seed(SEED))
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        print_scale(found)
    if args.plot is not None:
        write_figures({"scale": plot_scales({Path(args.words[0]).stem: found})}, args.plot)
    return 0


def _audit_label_errors(args: argparse.Namespace) -> int:
    from pivotpatch.audit.label_errors import find_label_errors
    from pivotpatch.cli.audit_text import print_label_errors

    records, scores, _ = _read(args)
    if len(scores) < _FOLDS:
        raise InputError(
            "--label-errors", f"{len(scores)} pictures are too few to calibrate by", f"give {_FOLDS} or more"
        )
    found = find_label_errors(scores, kind=args.kind, count=args.count)
    if args.json:
        print(json.dumps([error.to_dict() for error in found]))
    else:
        print_label_errors(found)
    if args.plot is not None and not found:
        write_figures({}, args.plot)
    elif args.plot is not None:
        assert records is not None
        captions = [f"{error.rank}. {error.label}: {error.direction}?\np = {error.probability:.2f}" for error in found]
        write_figures({"label_errors": _draw_sheet(records, [error.row for error in found], captions)}, args.plot)
    return 0


def _audit_cases(args: argparse.Namespace) -> int:
    from pivotpatch.audit.cases import find_cases, gather_logits
    from pivotpatch.cli.audit_text import print_cases
    from pivotpatch.inference.plots import plot_case

    records, scores, baseline = _read(args)
    if baseline is None:
        raise InputError("--cases", "there is nothing to compare with", "give --baseline SCORES")
    found = find_cases(scores, baseline, count=args.count)
    if args.json:
        print(json.dumps([case.to_dict() for case in found]))
    else:
        print_cases(found)
    if args.plot is None:
        return 0
    assert records is not None
    figures = {}
    images = decode_small(records, [case.row for case in found])
    for number, (case, image) in enumerate(zip(found, images, strict=True), 1):
        figures[f"case_{number}"] = plot_case(
            image,
            gather_logits(scores, case.row),
            label=scores.labels.index(case.label),
            labels=scores.labels,
            title=f"“{case.label}” is {'there' if case.shown else 'not there'}",
            overlap=scores.overlap,
            baseline=case.baseline,
        )
    write_figures(figures, args.plot)
    return 0


def _audit_effect(args: argparse.Namespace) -> int:
    import torch

    from pivotpatch.audit.direct_effect import find_judged_network, measure_direct_effects, track_effects
    from pivotpatch.audit.plots import plot_effects
    from pivotpatch.cli.audit_text import print_effects
    from pivotpatch.cli.train_text import show_training
    from pivotpatch.data.address import open_records
    from pivotpatch.models.named import shorten_name

    named = open_pictures(args.words[1:])
    records = open_records(SCENES) if named is None else named
    places = [args.words[0], *([] if args.baseline is None else [args.baseline])]
    networks = {str(place): _open_network(place) for place in places}
    for name, network in networks.items():  # all of them, before the first is asked
        find_judged_network(network, records, where=name)
    found = {}
    with show_training() as shown:
        for name, network in networks.items():
            effects = measure_direct_effects(
                network, records, progress=lambda _what, done, total: shown.progress("score", done, total)
            )
            found[name] = [
                row
                for among in ("objects", "scenes")
                for row in track_effects(effects, among=among, generator=torch.Generator().manual_seed(SEED))
            ]
    if args.json:
        print(json.dumps({name: [row.to_dict() for row in rows] for name, rows in found.items()}))
    else:
        print_effects(found)
    if args.plot is not None:
        short = {shorten_name(name): rows for name, rows in found.items()}
        write_figures({"direct_effect": plot_effects(short if len(short) == len(found) else found)}, args.plot)
    return 0


class _Subject(NamedTuple):
    """What is audited: the pictures where they are known, their scores, and those of the baseline in the same order."""

    records: "RecordSet | None"
    scores: "Scores"
    baseline: "Scores | None"


def _read(args: argparse.Namespace) -> _Subject:
    records = open_pictures(args.words[1:])
    scores = read_score_file(Path(args.words[0]), records=records)
    if records is not None and scores.indices is not None:
        records = records.select(scores.indices.numpy())  # those that have scores
    if args.baseline is None:
        return _Subject(records, scores, None)
    try:
        return _Subject(records, scores, read_score_file(args.baseline, like=scores))
    except InputError:
        if args.pair is None:
            raise
    # Pairs that are named need their labels alone: the baseline may know others, such as an InT of a few.
    baseline = read_score_file(args.baseline, records=records)
    return _Subject(records, scores, _align(baseline, scores, where=str(args.baseline)))


def _align(baseline: "Scores", scores: "Scores", *, where: str) -> "Scores":
    """A baseline that knows other labels, in the order of the scores' pictures; the truth of common ones is one."""
    import torch

    places = {name: row for row, name in enumerate(baseline.pictures)}
    if places.keys() != set(scores.pictures):
        raise InputError(where, "its pictures are not those of the scores", "score the same pictures with both")
    baseline = baseline.select(torch.tensor([places[name] for name in scores.pictures]))
    for name in set(baseline.labels) & set(scores.labels):
        own, other = (held.target[:, held.labels.index(name)].nan_to_num(-1) for held in (scores, baseline))
        if not torch.equal(own, other):
            todo = "take the same truth for both, for example by naming the data set"
            raise InputError(where, f"what is true of {name!r} is not what the scores say", todo)
    return baseline


def _open_network(what: str | Path) -> "Classifier | PatchInference":
    """A checkpoint, or the best of a run; PAT-I around a network that has no patches of its own."""
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.models.patch_classifier import PatchClassifier

    network = open_source(what).model
    if network is None:
        raise InputError(str(what), "holds scores, no network", "give a run or a checkpoint")
    return network if isinstance(network, PatchClassifier) else PatchInference(network)


def _draw_sheet(records: "RecordSet", rows: Sequence[int], captions: list[str]) -> "Figure":
    from pivotpatch.audit.plots import plot_sheet

    return plot_sheet(decode_small(records, rows), captions)
