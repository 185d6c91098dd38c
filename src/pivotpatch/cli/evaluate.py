"""`pivotpatch evaluate`: what a model, or a file of its scores, is worth on pictures whose labels are known."""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pivotpatch.cli.policies import read_policy
from pivotpatch.cli.sources import (
    Scored,
    check_closer,
    find_fitted,
    find_pictures,
    keep_known_labels,
    list_not_read,
    open_source,
    read_score_file,
    score_source,
)
from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.core.calibration import Calibration
    from pivotpatch.core.policies import ThresholdPolicy
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.training.config import RunConfig

SEED = 0  # of the resamples: the same scores have the same intervals
NETWORK_OPTIONS = ("patch_inference", "closer", "keep_patches", "batch_size", "workers", "on_error")
PATCH_OPTIONS = ("lam", "temperature", "grid", "native")


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
        help="a run, a checkpoint, a network by name (tagger, hub:owner/name, timm: or transformers:), or scores "
        "(.parquet, .npz, .csv); then the address of the pictures, a table or a "
        "folder of them, which scores with a target do not need",
    )
    measures = evaluate.add_argument_group("what is measured")
    measures.add_argument(
        "--policy",
        default="fixed:0.5",
        help="what decides: fixed:P, top:K, prior (as often as in training; prior:DATA where WHAT is no run) or fitted "
        "(thresholds in the checkpoint); default fixed:0.5",
    )
    measures.add_argument("--definition", choices=["step", "envelope"], default="step", help="of average precision")
    measures.add_argument("--resamples", type=int, default=1000, metavar="N", help="for intervals; 0 for none (1000)")
    measures.add_argument("--baseline", type=Path, metavar="SCORES", help="compare with these, picture by picture")
    measures.add_argument(
        "--scale", choices=["auto", "logits", "probs"], default="auto", help="of scores that do not say what they are"
    )
    patches = evaluate.add_argument_group("PAT-I around an ordinary network")
    patches.add_argument("--patch-inference", action="store_true", help="add the patches' logits, without training")
    patches.add_argument("--lam", type=float, help="weight of the patches (1)")
    patches.add_argument("--temperature", type=float, help="of the patch weights (1)")
    patches.add_argument("--grid", type=int, help="patches per side (2)")
    patches.add_argument(
        "--native", type=int, metavar="SIZE", help="cut patches from pictures of so many pixels a side"
    )
    scoring = evaluate.add_argument_group("scoring")
    scoring.add_argument(
        "--closer",
        type=int,
        metavar="PIXELS",
        help="judge a closer look at whole pictures, at so many pixels a side, in place of their patches (PAT-T)",
    )
    scoring.add_argument("--batch-size", type=int, metavar="N", help="pictures at once, over all processes (128)")
    scoring.add_argument("--workers", type=int, metavar="N", help="processes that decode; one a core by default")
    scoring.add_argument("--on-error", choices=["error", "skip"], help="what a broken picture does (error)")
    scoring.add_argument("--keep-patches", action="store_true", help="save logits and weights of each patch too")
    out = evaluate.add_argument_group("output")
    out.add_argument("--save", type=Path, metavar="FILE", help="write the scores (.parquet, .npz or .csv)")
    out.add_argument("--csv", type=Path, metavar="FILE", help="write a table with a row a label")
    out.add_argument("--per-label", action="store_true", help="show a row a label")
    out.add_argument("--json", action="store_true", help="write everything as JSON")
    evaluate.set_defaults(run=run_evaluate)


class _Subject(NamedTuple):
    """What is evaluated: a network, perhaps of a run, and the pictures that it looks at, or scores."""

    model: "Classifier | None" = None
    config: "RunConfig | None" = None
    records: "RecordSet | None" = None
    scores: "Scores | None" = None
    closer_size: int | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that are judged."""
        if self.scores is not None:
            return self.scores.labels
        assert self.records is not None
        return self.records.labels.names


class _Rule(NamedTuple):
    """How decisions are made, and of which kind of logits alone, where that matters."""

    policy: "ThresholdPolicy"
    kind: str | None = None
    calibration: "Calibration | None" = None


def run_evaluate(args: argparse.Namespace) -> int:
    """Score where need be, measure, and tell it in the first process alone."""
    _check_options(args)
    what, *more = args.words
    data = find_pictures(more)
    subject = _open_subject(what, data, args)
    rule = _make_rule(args.policy, subject)
    baseline = None if args.baseline is None else _read_baseline(subject, args)
    if subject.scores is not None:
        if os.environ.get("RANK", "0") == "0":
            _finish(Scored(subject.scores, {}), rule, baseline, args)
        return 0
    from pivotpatch.training.processes import join_processes

    state = join_processes()
    scored = _score(subject, args)
    if state.is_main_process:
        _finish(scored, rule, baseline, args)
    state.destroy_process_group()
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant before anything is loaded."""
    from pivotpatch.inference.score_file import check_score_file

    if len(args.words) > 2:
        raise InputError(f"{args.words[2]!r}", "a third word", "give what to evaluate and the pictures")
    if not args.patch_inference:
        for name in PATCH_OPTIONS:
            if getattr(args, name) is not None:
                raise InputError(f"--{name}", "it is an option of --patch-inference", "give that too")
    if args.keep_patches and args.save is None:
        raise InputError("--keep-patches", "nothing is saved", "give --save too")
    if args.resamples < 0:
        raise InputError("--resamples", f"{args.resamples} is below 0", "give 0 for no intervals, or 1000")
    if args.save is not None:
        check_score_file(args.save, patches=args.keep_patches)
    if args.csv is not None and not args.csv.absolute().parent.is_dir():
        raise InputError(str(args.csv), f"there is no folder {args.csv.parent}", "make it first")


def _open_subject(what: str, data: str | None, args: argparse.Namespace) -> _Subject:
    """Load a run's best network or a checkpoint, and the list of the pictures; or scores."""
    from pivotpatch.data.address import open_records

    source = open_source(what)
    records = None if data is None else open_records(data)
    if source.model is not None:
        if args.scale != "auto" and args.baseline is None:
            raise InputError("--scale", "no scores are read from a file", "leave it out")
        if records is None:
            raise InputError(what, "a network needs pictures to look at", "name them after it, such as photos.csv")
        if args.closer is not None:
            check_closer(source.model, args.closer)
        known = keep_known_labels(records, source.model)
        return _Subject(source.model, source.config, known, closer_size=args.closer)
    for name in NETWORK_OPTIONS:
        given = getattr(args, name)
        if given is not None and given is not False:  # 0 is a value too
            raise InputError(f"--{name.replace('_', '-')}", f"{what} holds scores, no network", "leave it out")
    return _Subject(scores=read_score_file(source.path, records=records, scale=args.scale))


def _make_rule(text: str, subject: _Subject) -> _Rule:
    """The policy that a word names."""
    from pivotpatch.core.policies import PriorMatched

    policy = read_policy(text, subject.labels, others=("fitted",))
    if policy is not None:
        return _Rule(policy)
    if text.startswith("prior"):
        from pivotpatch.training.build import open_training_records

        if subject.config is None:
            raise InputError("--policy", f"{text!r} does not say of which pictures", "write prior:DATA")
        trained = open_training_records(subject.config).train
        return _Rule(PriorMatched.from_target(trained.keep_labels(subject.labels).target()))
    from pivotpatch.models.patch_classifier import PatchClassifier

    model = subject.model
    fitted = None if model is None else find_fitted(model, subject.labels, closer_size=subject.closer_size)
    if fitted is None:
        raise InputError("--policy", "no thresholds were fitted", "fit them first, or choose fixed:0.5, top:3 or prior")
    kind = "image"
    if isinstance(model, PatchClassifier):
        kind = "patch" if model.patch_only else "tde"
    policy, calibration = fitted
    return _Rule(policy, calibration.kind if calibration else kind, calibration)


def _read_baseline(subject: _Subject, args: argparse.Namespace) -> "Scores | None":
    """Scores to compare with, read before the work; None where skipped pictures, known afterwards, may lack there."""
    from pivotpatch.inference.scores import Scores

    expected, records = subject.scores, subject.records
    if expected is None:
        assert records is not None
        if args.on_error == "skip":
            read_score_file(args.baseline, records=records, scale=args.scale)
            return None
        target = records.target()
        expected = Scores(records.labels.names, _name_pictures(records), target, {"image": target})
    return read_score_file(args.baseline, like=expected, scale=args.scale)


def _name_pictures(records: "RecordSet") -> tuple[str, ...]:
    return tuple(records.images.name(records.place(index)) for index in range(len(records)))


def _score(subject: _Subject, args: argparse.Namespace) -> Scored:
    """Score the pictures, in all processes together."""
    from pivotpatch.cli.train_text import show_training
    from pivotpatch.inference.score_file import check_pictures
    from pivotpatch.models.checkpoint import fingerprint
    from pivotpatch.training.config import load_config

    records = subject.records
    assert records is not None
    if len(records.positive.indices) == 0:
        raise InputError(records.name, "no picture has any of the labels, so nothing can be ranked", "give others")
    if args.save is not None:
        check_pictures(_name_pictures(records), records.name)  # now, for such scores could not be read again
    changes = {"data.workers": args.workers, "data.on_error": args.on_error, "evaluation.batch_size": args.batch_size}
    if subject.config is not None:
        changes["precision.dtype"] = subject.config.precision.dtype
    config = load_config(None, [f"{name}={value}" for name, value in changes.items() if value is not None])
    assert subject.model is not None
    with show_training() as shown:
        scored = score_source(
            _wrap(subject.model, args) if args.patch_inference else subject.model,
            records,
            config=config,
            size=args.native,
            keep_patches=args.keep_patches,
            closer_size=args.closer,
            progress=lambda done, total: shown.progress("score", done, total),
        )
    if args.save is None:
        return scored
    return scored._replace(scores=replace(scored.scores, network=fingerprint(subject.model)))


def _wrap(network: "Classifier", args: argparse.Namespace) -> "PatchInference":
    """PAT-I around a network that has no patches of its own."""
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.models.patch_classifier import PatchClassifier

    if isinstance(network, PatchClassifier):
        raise InputError("--patch-inference", "the network has patches of its own (PAT-T)", "leave it out")
    side = network.preprocessing.image_size
    if args.native is not None and args.native <= side:
        raise InputError("--native", f"{args.native} pixels are no more than the network sees", f"give above {side}")
    given = {name: getattr(args, name) for name in ("lam", "temperature", "grid") if getattr(args, name) is not None}
    return PatchInference(network, **given)


def _finish(scored: Scored, rule: _Rule, baseline: "Scores | None", args: argparse.Namespace) -> None:
    """Measure, write and print."""
    import torch

    from pivotpatch.audit.evaluation import evaluate_scores
    from pivotpatch.cli.evaluate_text import print_evaluation, write_label_table
    from pivotpatch.inference.score_file import write_scores

    scores = scored.scores
    list_not_read(scored.not_read)
    if args.save is not None:
        write_scores(scores, args.save)
        print(f"wrote {args.save}", file=sys.stderr)
    if args.baseline is not None and baseline is None:
        baseline = read_score_file(args.baseline, like=scores, scale=args.scale)
    kinds = [kind for kind in scores.logits if rule.kind in (None, kind)]
    found = evaluate_scores(
        scores,
        policies=dict.fromkeys(kinds, rule.policy),
        calibration=rule.calibration,
        definition=args.definition,
        resamples=args.resamples,
        baseline=baseline,
        generator=torch.Generator().manual_seed(SEED),
    )
    if args.csv is not None:
        write_label_table(found, args.csv)
        print(f"wrote {args.csv}", file=sys.stderr)
    if args.json:
        print(json.dumps({"evaluated": args.words, **found.to_dict(), "not_read": scored.not_read}))
    else:
        print_evaluation(found, not_read=len(scored.not_read), per_label=args.per_label)
