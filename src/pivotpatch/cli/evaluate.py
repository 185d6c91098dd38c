"""`pivotpatch evaluate`: what a model, or a file of its scores, is worth on images whose labels are known."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli import sources
from pivotpatch.cli.sources import Scored, Source, refuse_first
from pivotpatch.errors import InputError, shorten

if TYPE_CHECKING:
    from rich.table import Table

    from pivotpatch.audit.evaluation import Difference, Evaluation, Policy
    from pivotpatch.core.bootstrap import Interval
    from pivotpatch.core.metrics import PrecisionRecall
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier

SEED = 0  # of the resamples: the same scores have the same intervals
MODEL_OPTIONS = ("patch_inference", "closer", "keep_patches", "batch_size", "workers", "on_error")
PATCH_OPTIONS = ("lam", "temperature", "grid", "native")
RANKED_OPTIONS = ("policy", "baseline", "save", "per_label")  # they need the probabilities of all labels
NAMES = {"image": "image", "patch": "patches", "tde": "TDE"}
MEASURES = ("CP", "CR", "CF1", "OP", "OR", "OF1")


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    evaluate = verbs.add_parser(
        "evaluate",
        help="measure a model, or a file of scores",
        description="Measure mAP with its interval, CP CR CF1 OP OR OF1 and top-3 for image, patch and TDE logits.",
        usage="%(prog)s WHAT [DATA] [options]",
        epilog="Several GPUs: torchrun --nproc-per-node N -m pivotpatch evaluate ...",
    )
    evaluate.add_argument(
        "words",
        nargs="+",
        metavar="WHAT [DATA]",
        help="a run, a checkpoint, a model by name (tagger, hub:owner/name, timm: or transformers:), a file of scores, "
        "or of tags that predict --out wrote; then the address of the images, a table or a folder of them, which "
        "scores with a target do not need",
    )
    sources.add_weights_options(evaluate)
    measures = evaluate.add_argument_group("what is measured")
    default = "by default fitted where there are such, else fixed:0.5"
    measures.add_argument("--policy", help=f"{sources.POLICY_HELP}; {default}")
    add_definitions(measures)
    measures.add_argument("--resamples", type=int, default=1000, metavar="N", help="for intervals; 0 for none (1000)")
    measures.add_argument("--baseline", type=Path, metavar="SCORES", help="compare with these, image by image")
    patches = evaluate.add_argument_group("PAT-I around an ordinary model")
    patches.add_argument("--patch-inference", action="store_true", help="add the patches' logits, without training")
    patches.add_argument("--lam", type=float, help="weight of the patches (1)")
    patches.add_argument("--temperature", type=float, help="of the patch weights (1)")
    patches.add_argument("--grid", type=int, help="patches per side (2)")
    patches.add_argument("--native", type=int, metavar="SIZE", help="cut patches from images of so many pixels a side")
    scoring = evaluate.add_argument_group("scoring")
    scoring.add_argument(
        "--closer",
        type=int,
        metavar="PIXELS",
        help="judge a closer look at whole images, at so many pixels a side, in place of their patches (PAT-T)",
    )
    scoring.add_argument("--batch-size", type=int, metavar="N", help="images at once, over all processes (128)")
    scoring.add_argument("--workers", type=int, metavar="N", help="processes that decode; one per core by default")
    scoring.add_argument("--on-error", choices=["error", "skip"], help="what a broken image does (error)")
    scoring.add_argument("--keep-patches", action="store_true", help="save logits and weights of each patch too")
    out = evaluate.add_argument_group("output")
    out.add_argument("--save", type=Path, metavar="FILE", help="write the scores (.parquet)")
    out.add_argument("--per-label", action="store_true", help="show a row per label")
    out.add_argument("--json", action="store_true", help="write everything as JSON")
    evaluate.set_defaults(run=run_evaluate)


def add_definitions(parser: "argparse._ActionsContainer") -> None:
    """Add the options that say how measures are defined."""
    parser.add_argument(
        "--definition", choices=["step", "envelope"], default="step", help="of average precision (step)"
    )
    told = "what a label that is given to no image does in CP: counts 0, or is left out (zero)"
    parser.add_argument("--empty", choices=["zero", "skip"], default="zero", help=told)


def run_evaluate(args: argparse.Namespace) -> int:
    """Score where need be, measure, and tell it in the first process alone."""
    from pivotpatch.inference.score_file import check_score_file
    from pivotpatch.training.processes import join_processes

    if not args.patch_inference:
        _refuse(args, PATCH_OPTIONS, "it is an option of --patch-inference", "give that too")
    refuse_first((args.resamples < 0, "--resamples", f"{args.resamples} is below 0", "give 0 for none, or 1000"))
    if args.save is not None:
        check_score_file(args.save)
    source = sources.open_source(args.words[0], architecture=args.architecture, labels=args.labels)
    records = sources.open_pictures(args.words[1:])
    if source.model is None:
        _refuse(args, MODEL_OPTIONS, f"{source.path} holds scores, no model", "leave it out")
        scores = sources.read_score_file(source.path, records=records, tags_alone=True)
        if scores.given is not None and scores.logits["image"].isnan().any():
            _judge_tags(scores, args)
        else:
            _finish(Scored(scores, {}), _read_policy(args, source, scores.labels), args)
        return 0
    if records is None:
        raise InputError(args.words[0], "a model needs images", "name them after it, such as photos.csv")
    if args.closer is not None:
        sources.check_closer(source.model, args.closer)
    records = sources.keep_known_labels(records, source.model)
    policy = _read_policy(args, source, records.labels.names)
    if args.baseline is not None and args.on_error != "skip":
        _check_baseline(records, args.baseline)
    state = join_processes()
    scored = _score(source, records, args)
    if state.is_main_process:
        _finish(scored, policy, args)
    state.destroy_process_group()
    return 0


def _refuse(args: argparse.Namespace, options: Sequence[str], wrong: str, todo: str) -> None:
    for name in options:
        given = getattr(args, name)
        if given is not None and given is not False:  # 0 is a value too
            raise InputError(f"--{name.replace('_', '-')}", wrong, todo)


def _read_policy(args: argparse.Namespace, source: Source, labels: tuple[str, ...]) -> "Policy | None":
    """The policy that `--policy` names, for the labels that are judged; None for what `predict` decides by."""
    model = source.model
    if args.policy == "fitted" and model is not None and (model.thresholds is None or args.patch_inference):
        todo = f"run pivotpatch tune {source.path}{'' if source.config else ' DATA'}"
        raise InputError("--policy", "no thresholds were fitted", todo)
    return None if args.policy is None else sources.read_policy(args.policy, labels, config=source.config)


def _check_baseline(records: "RecordSet", path: Path) -> None:
    """Refuse a baseline of other images or labels before the work."""
    from pivotpatch.inference.scores import Scores

    names, target = tuple(record.name for record in records), records.target()
    sources.read_score_file(path, like=Scores(records.labels.names, names, target, {"image": target}), quiet=True)


def _score(source: Source, records: "RecordSet", args: argparse.Namespace) -> Scored:
    """Score the images, in all processes together."""
    from pivotpatch.cli.console import show_progress
    from pivotpatch.inference.score_file import check_pictures
    from pivotpatch.models.checkpoint import fingerprint
    from pivotpatch.training.config import load_config

    assert source.model is not None
    if args.save is not None:
        check_pictures([record.name for record in records], records.name)  # now, for such scores cannot be saved
    changes = {"data.workers": args.workers, "data.on_error": args.on_error, "evaluation.batch_size": args.batch_size}
    if source.config is not None:
        changes["precision.dtype"] = source.config.precision.dtype
    config = load_config(None, [f"{name}={value}" for name, value in changes.items() if value is not None])
    with show_progress() as shown:
        scored = sources.score_source(
            _wrap(source.model, args) if args.patch_inference else source.model,
            records,
            config=config,
            size=args.native,
            keep_patches=args.keep_patches,
            closer_size=args.closer,
            progress=partial(shown.tell, "score"),
        )
    if args.save is None:
        return scored
    return scored._replace(scores=replace(scored.scores, network=fingerprint(source.model)))


def _wrap(model: "Classifier", args: argparse.Namespace) -> "PatchInference":
    """PAT-I around a model that has no patches of its own."""
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.models.patch_classifier import PatchClassifier

    own, side = isinstance(model, PatchClassifier), model.preprocessing.image_size
    small = args.native is not None and args.native <= side
    refuse_first(
        (own, "--patch-inference", "the model has patches of its own (PAT-T)", "leave it out"),
        (small, "--native", f"{args.native} pixels are no more than the model sees", f"give above {side}"),
    )
    given = {name: getattr(args, name) for name in ("lam", "temperature", "grid") if getattr(args, name) is not None}
    return PatchInference(model, **given)


def _finish(scored: Scored, policy: "Policy | None", args: argparse.Namespace) -> None:
    """Measure, write and print."""
    import torch

    from pivotpatch.audit.evaluation import evaluate_scores
    from pivotpatch.cli.console import tell
    from pivotpatch.inference.score_file import write_scores

    scores = scored.scores
    sources.list_not_read(scored.not_read)
    if args.save is not None:
        write_scores(scores, args.save)
        tell(f"wrote {args.save}")
    if policy is None and scores.thresholds is not None and scores.given is None:
        tell("CP to OF1 by the model's own thresholds, as predict decides; --policy fixed:0.5 takes 0.5")
    found = evaluate_scores(
        scores,
        policy=policy,
        definition=args.definition,
        empty=args.empty,
        resamples=args.resamples,
        baseline=None if args.baseline is None else sources.read_score_file(args.baseline, like=scores),
        generator=torch.Generator().manual_seed(SEED),
    )
    if args.json:
        print(json.dumps({"evaluated": args.words, **found.to_dict(), "not_read": scored.not_read}))
    else:
        _print_evaluation(found, not_read=len(scored.not_read), args=args)


def _judge_tags(scores: "Scores", args: argparse.Namespace) -> None:
    """Measure the decisions of a file that holds nothing else."""
    from pivotpatch.cli.console import Screen, make_table, tell
    from pivotpatch.core.metrics import precision_recall
    from pivotpatch.core.policies import Given

    _refuse(args, RANKED_OPTIONS, f"{args.words[0]} holds the tags alone", "write it with predict --all-probs")
    assert scores.given is not None
    tell("the file holds the tags alone: mAP, intervals and top-3 need predict --all-probs")
    found = precision_recall(
        scores.given.float(), scores.target, policy=Given(scores.given), empty=args.empty, labels=scores.labels
    )
    if args.json:
        print(json.dumps({"evaluated": args.words, "pictures": len(scores), "decided": found.to_dict()}))
        return
    screen = Screen()
    screen.print(f"{len(scores):,} images, {len(scores.labels)} labels; all in per cent\n")
    table = make_table(["", "tags"])
    _add_measures(table, {"tags": found})
    screen.print(table)


def _print_evaluation(found: "Evaluation", *, not_read: int, args: argparse.Namespace) -> None:
    """Print an evaluation to stdout, in per cent."""
    from pivotpatch.cli.console import Screen, make_table
    from pivotpatch.core.metrics import DEFINITIONS

    screen = Screen()
    left_out = f"; {not_read:,} images could not be read and are left out" if not_read else ""
    screen.print(f"{found.pictures:,} images, {len(found.labels)} labels{left_out}")
    screen.print(f"average precision: {DEFINITIONS[found.definition]}; all in per cent")
    if found.resamples:
        screen.print(f"intervals hold 95 % of {found.resamples:,} resamples of the images")
    if args.empty == "skip":
        screen.print("labels that are given to no image are left out of CP")
    screen.print()
    columns = {NAMES[kind]: each for kind, each in found.kinds.items()}
    columns |= {"baseline": found.baseline} if found.baseline is not None else {}
    each = columns.values()
    table = make_table(["", *columns])
    table.add_row("mAP", *(f"{100 * kind.precision.mean:.2f}" for kind in each))
    if found.resamples:
        table.add_row("", *(write_bounds(kind.interval) for kind in each))
    rules = _add_measures(table, {name: kind.decided for name, kind in columns.items()})
    _add_measures(table, {name: kind.top for name, kind in columns.items()})
    screen.print(table)
    for rule in rules:
        screen.print(rule)
    for difference in (found.gain, found.difference):
        if difference is not None:
            screen.print("\n".join(_tell_difference(difference)))
    skipped = found.kinds[found.ranking].precision.skipped
    if skipped:
        screen.print(f"without a positive image and skipped: {len(skipped)} labels ({shorten(skipped, limit=5)})")
    if args.per_label:
        screen.print()
        screen.print(_make_label_table(found))


def _add_measures(table: "Table", results: "Mapping[str, PrecisionRecall | None]") -> list[str]:
    """Add CP to OF1 to a table; lines that say which rule decided in which column, where they are several."""
    by_rule: dict[str, list[str]] = {}
    for name, result in results.items():
        if result is not None:
            by_rule.setdefault(result.definition, []).append(name)
    table.add_section()
    table.add_row(next(iter(by_rule)) if len(by_rule) == 1 else "decisions")
    for name in MEASURES:
        table.add_row(f"  {name}", *(_percent(getattr(result, name, None)) for result in results.values()))
    return [f"decisions of {', '.join(names)} by {rule}" for rule, names in by_rule.items()] if len(by_rule) > 1 else []


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def write_bounds(interval: "Interval | None", *, sign: str = "", digits: int = 2) -> str:
    """Both ends of an interval in per cent; nothing for none."""
    if interval is None:
        return ""
    return f"{100 * interval.low:{sign}.{digits}f} to {100 * interval.high:{sign}.{digits}f}"


def _tell_difference(difference: "Difference") -> list[str]:
    names = [" ".join(NAMES.get(word, word) for word in name.split()) for name in (difference.of, difference.minus)]
    known = [value for value in difference.per_label if value is not None]
    better = f", better for {sum(value > 0 for value in known)} of {len(known)} labels"
    changes = {"mAP": (difference.value, difference.interval)}
    changes |= {name: (change.value, change.interval) for name, change in difference.decided.items()}
    lines = []
    for name, (value, interval) in changes.items():
        bounds = f" ({write_bounds(interval, sign='+')})" if interval is not None else ""
        lines.append(f"{names[0]} less {names[1]}, {name}: {100 * value:+.2f}{bounds}{better}")
        better = ""
    return lines


def _make_label_table(found: "Evaluation") -> "Table":
    from pivotpatch.cli.console import make_table

    best = found.kinds[found.ranking]
    headings = ["label", "positives", *(f"AP {NAMES[kind]}" for kind in found.kinds)]
    table = make_table([*headings, *(["95 %"] if best.label_intervals else [])])
    for place, label in enumerate(found.labels):
        row = [label, f"{best.precision.positives[place]:,}"]
        row += [_percent(kind.precision.per_label[place]) for kind in found.kinds.values()]
        row += [write_bounds(best.label_intervals[place], digits=1)] if best.label_intervals else []
        table.add_row(*row)
    return table
