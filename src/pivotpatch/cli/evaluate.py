"""`pivotpatch evaluate`: what a model, or a file of its scores, is worth on images whose labels are known."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from pivotpatch.audit.evaluation import Difference, Evaluation, Policy, evaluate_scores
from pivotpatch.cli import sources
from pivotpatch.cli.console import Screen, StageProgress, make_table, tell, write_percent
from pivotpatch.cli.sources import Scored, Source
from pivotpatch.cli.telling import list_not_read, refuse_first, refuse_options
from pivotpatch.core.bootstrap import Interval
from pivotpatch.core.metrics import DEFINITIONS, MEASURES, PrecisionRecall, precision_recall
from pivotpatch.core.policies import Given
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.score_file import WRITTEN, check_pictures, write_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.models.checkpoint import fingerprint
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import check_views
from pivotpatch.training.config import load_config
from pivotpatch.training.processes import join_processes
from pivotpatch.writing import check_place

SEED = 0  # of the resamples: the same scores have the same intervals
MODEL_OPTIONS = ("patch_inference", "grid", "native", "closer", "keep_patches", "batch_size", "workers", "on_error")
PATCH_OPTIONS = ("lam", "temperature", "grid", "native")
RANKED_OPTIONS = ("policy", "baseline", "save", "per_label")  # they need the probabilities of all labels
NAMES = {"image": "image", "patch": "patches", "tde": "TDE"}


def run_evaluate(args: argparse.Namespace) -> int:
    """Score where need be, measure, and tell it in the first process alone."""
    refuse_first((args.resamples < 0, "--resamples", f"{args.resamples} is below 0", "give 0 for none, or 1000"))
    if args.save is not None:
        check_place(args.save, WRITTEN, "scores")
    source = sources.open_source(args.words[0], architecture=args.architecture, labels=args.labels)
    records = sources.open_pictures(args.words[1:])
    if source.model is None:
        refuse_options(args, MODEL_OPTIONS, f"{source.path} holds scores, no model", "leave it out")
        scores = sources.read_score_file(source.path, records=records, tags_alone=True)
        if args.lam is not None or args.temperature is not None:
            scores = _mix_again(scores, source.path, args)
        if scores.given is not None and scores.logits["image"].isnan().any():
            _judge_tags(scores, args)
        else:
            _finish(Scored(scores, {}), _read_policy(args, source, scores.labels), args)
        return 0
    if isinstance(source.model, PatchClassifier):
        own = "the model has patches of its own (PAT-T)"
        todo = "keep its scores (--save, --keep-patches) and give it to these"
        refuse_options(args, ("lam", "temperature"), own, todo)
        refuse_options(args, ("patch_inference", "grid", "native"), own, "leave it out")
    if not args.patch_inference:
        refuse_options(args, PATCH_OPTIONS, "it is an option of --patch-inference", "give that too")
    if records is None:
        raise InputError(args.words[0], "a model needs images", "name them after it, such as photos.csv")
    if args.closer is not None:
        sources.check_closer(source.model, args.closer)
    records = sources.keep_known_labels(records, source.model)
    policy = _read_policy(args, source, records.labels.names)
    if args.baseline is not None and args.on_error != "skip":  # one of other images is refused before the work
        names, target = tuple(records.names), records.target()
        like = Scores(records.labels.names, names, target, {"image": target})
        sources.read_score_file(args.baseline, like=like, quiet=True)
    state = join_processes()
    scored = _score(source, records, args)
    if state.is_main_process:
        sources.warn_of_trained(source, records)
        _finish(scored, policy, args)
    state.destroy_process_group()
    return 0


def _read_policy(args: argparse.Namespace, source: Source, labels: tuple[str, ...]) -> Policy | None:
    """The policy that `--policy` names, for the labels that are judged; None for what `predict` decides by."""
    model = source.model
    if args.policy == "fitted" and model is not None and (model.thresholds is None or args.patch_inference):
        todo = f"run pivotpatch tune {source.path}{'' if source.config else ' DATA'}"
        raise InputError("--policy", "no thresholds were fitted", todo)
    return None if args.policy is None else sources.read_policy(args.policy, labels, config=source.config)


def _mix_again(scores: Scores, path: Path, args: argparse.Namespace) -> Scores:
    """Scores of a file with another lam or temperature; the file itself stays, for what was fitted is only there."""
    if "patch" not in scores.logits:
        refuse_options(args, ("lam", "temperature"), f"{path} holds no logits of patches", "leave it out")
    same = args.save is not None and args.save.exists() and args.save.samefile(path)
    refuse_first((same, "--save", f"{args.save} is the file that is mixed anew", "name another"))
    if scores.thresholds is not None or scores.calibration is not None:
        tell("thresholds and calibration are left out: they were fitted to the mixture in the file")
    return scores.remix(lam=args.lam, temperature=args.temperature)


def _score(source: Source, records: RecordSet, args: argparse.Namespace) -> Scored:
    """Score the images, in all processes together."""
    assert source.model is not None
    if args.save is not None:
        check_pictures(records.names, records.name)  # now, for such scores cannot be saved
    changes = {"data.workers": args.workers, "data.on_error": args.on_error, "evaluation.batch_size": args.batch_size}
    if source.config is not None:
        changes["precision.dtype"] = source.config.precision.dtype
    config = load_config(None, [f"{name}={value}" for name, value in changes.items() if value is not None])
    with StageProgress() as shown:
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


def _wrap(model: Classifier, args: argparse.Namespace) -> PatchInference:
    """PAT-I around a model that has no patches of its own."""
    side = model.preprocessing.image_size
    small = args.native is not None and args.native <= side
    refuse_first((small, "--native", f"{args.native} pixels are no more than the model sees", f"give above {side}"))
    given = {name: getattr(args, name) for name in ("lam", "temperature", "grid") if getattr(args, name) is not None}
    wrapped = PatchInference(model, **given)
    if args.native is not None:
        check_views(side, replace(wrapped.patching, source_size=args.native), where="--native")
    return wrapped


def _finish(scored: Scored, policy: Policy | None, args: argparse.Namespace) -> None:
    """Measure, write and print."""
    scores = scored.scores
    list_not_read(scored.not_read)
    if args.save is not None:
        write_scores(scores, args.save)
        tell(f"wrote {args.save}")
    if policy is None and scores.thresholds is not None and scores.given is None:
        tell("CP to OF1 by the model's own thresholds, as predict --effort 1 decides; --policy fixed:0.5 takes 0.5")
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


def _judge_tags(scores: Scores, args: argparse.Namespace) -> None:
    """Measure the decisions of a file that holds nothing else."""
    refuse_options(args, RANKED_OPTIONS, f"{args.words[0]} holds the tags alone", "write it with predict --all-probs")
    assert scores.given is not None
    tell("the file holds the tags alone: mAP, intervals and top-3 need predict --all-probs")
    found = precision_recall(
        scores.given.float(), scores.target, policy=Given(scores.given), empty=args.empty, labels=scores.labels
    )
    if args.json:
        print(json.dumps({"evaluated": args.words, "pictures": len(scores), "decided": asdict(found)}))
        return
    screen = Screen()
    screen.print(f"{len(scores):,} images, {len(scores.labels)} labels; all in per cent\n")
    table = make_table(["", "tags"])
    _add_measures(table, {"tags": found})
    screen.print(table)


def _print_evaluation(found: Evaluation, *, not_read: int, args: argparse.Namespace) -> None:
    """Print an evaluation to stdout, in per cent."""
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
    for difference in filter(None, (found.gain, found.difference)):
        screen.print("\n".join(_tell_difference(difference)))
    skipped = found.kinds[found.ranking].precision.skipped
    if skipped:
        screen.print(f"without a positive image and skipped: {len(skipped)} labels ({shorten(skipped, limit=5)})")
    if args.per_label:
        screen.print("", _make_label_table(found), sep="\n")


def _add_measures(table: Table, results: Mapping[str, PrecisionRecall | None]) -> list[str]:
    """Add CP to OF1 to a table; lines that say which rule decided in which column, where they are several."""
    by_rule: dict[str, list[str]] = {}
    for name, result in results.items():
        if result is not None:
            by_rule.setdefault(result.definition, []).append(name)
    table.add_section()
    table.add_row(next(iter(by_rule)) if len(by_rule) == 1 else "decisions")
    for name in MEASURES:
        table.add_row(f"  {name}", *(write_percent(getattr(result, name, None)) for result in results.values()))
    return [f"decisions of {', '.join(names)} by {rule}" for rule, names in by_rule.items()] if len(by_rule) > 1 else []


def write_bounds(interval: Interval | None, *, sign: str = "", digits: int = 2) -> str:
    """Both ends of an interval in per cent; nothing for none."""
    if interval is None:
        return ""
    return f"{100 * interval.low:{sign}.{digits}f} to {100 * interval.high:{sign}.{digits}f}"


def _tell_difference(difference: Difference) -> Iterator[str]:
    names = [" ".join(NAMES.get(word, word) for word in name.split()) for name in (difference.of, difference.minus)]
    known = [value for value in difference.per_label if value is not None]
    better = f", better for {sum(value > 0 for value in known)} of {len(known)} labels"
    changes = {"mAP": (difference.value, difference.interval)}
    changes |= {name: (change.value, change.interval) for name, change in difference.decided.items()}
    for name, (value, interval) in changes.items():
        bounds = f" ({write_bounds(interval, sign='+')})" if interval is not None else ""
        yield f"{names[0]} less {names[1]}, {name}: {100 * value:+.2f}{bounds}{better}"
        better = ""


def _make_label_table(found: Evaluation) -> Table:
    best = found.kinds[found.ranking]
    headings = ["label", "positives", *(f"AP {NAMES[kind]}" for kind in found.kinds)]
    rows = [[label, f"{positives:,}"] for label, positives in zip(found.labels, best.precision.positives, strict=True)]
    for place, row in enumerate(rows):
        row += [write_percent(kind.precision.per_label[place]) for kind in found.kinds.values()]
        row += [write_bounds(best.label_intervals[place], digits=1)] if best.label_intervals else []
    return make_table([*headings, *(["95 %"] if best.label_intervals else [])], rows)
