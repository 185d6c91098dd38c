"""What a user may type: the words and options of the verbs, without anything that a verb needs to run."""

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pivotpatch.runtime.checks import PREFERENCES, check_words

Verbs = Any  # what `add_subparsers` gives
BULK_BATCH = 64  # images at once with `predict --out`
ADDRESS_HELP = "a table, a folder of images, or an address such as coco:/data/coco@train2014 or scenes:@train"
POLICY_HELP = (
    "what decides: fixed:P, best-fixed (of 0.5, 0.55 .. 0.95), top:K, prior (as often as in training; prior:DATA where "
    "that is no run's), target (as often as in these images) or fitted (the model's own thresholds)"
)
_EVERYTHING = "write everything as JSON"
_NAMED = "a model by name (tagger, hub:owner/name, timm: or transformers:)"
_GPU = "such as cpu or cuda:1; a GPU where there is one by default"


def add_verb(verbs: Verbs, name: str) -> None:
    """Add the parser of a verb."""
    _VERBS[name](verbs)


def _run(module: str, function: str, what: str, args: argparse.Namespace) -> int:
    if what:
        check_words(args.words)
    return getattr(import_module(f"pivotpatch.cli.{module}"), function)(args)


def _add_verb(
    verbs: Verbs,
    name: str,
    told: str,
    does: str,
    *,
    run: str = "",
    torchrun: bool = False,
    what: str = "",
    words: str = "WHAT [DATA]",
) -> argparse.ArgumentParser:
    """A verb, or an action of one, that is imported when it is run; `told` is for the list of all, `does` for its own.

    `run` names module and function, where they are not the verb's name and `run_` before it; `torchrun` says that
    several processes may share its work, `what` what its `words` are: a model or scores, then perhaps images.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=told,
        description=does,
        usage=f"%(prog)s {words} [options]" if what else None,
        epilog=f"Several GPUs: torchrun --nproc-per-node N -m pivotpatch {name} ..." if torchrun else None,
    )
    if what:
        parser.add_argument("words", nargs="+", metavar=words, help=what)
    module, _, function = run.partition(":")
    parser.set_defaults(run=partial(_run, module or name, function or f"run_{name}", what))
    return parser


def _add_app(verbs: Verbs) -> None:
    does = (
        "Serve a web page that tags images and shows why, and the endpoint POST /api/predict. "
        "Nothing leaves this machine. Ctrl-C ends it."
    )
    app = _add_verb(verbs, "app", "tag images on a web page", does)
    told = "a run, a checkpoint, an exported file, or a name such as hub:owner/name (tagger)"
    app.add_argument("--model", default="tagger", help=told)
    app.add_argument("--device", help=_GPU)
    app.add_argument("--effort", type=float, default=1.0, help="from 0 to 1 (1: patches, which the page shows)")
    _add_address_options(app, port=7860)


def _add_address_options(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Add where to listen, and who may ask."""
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1, which others cannot reach)")
    parser.add_argument("--port", type=int, default=port, help=f"0 for any that is free ({port})")
    parser.add_argument(
        "--token",
        nargs="?",
        const="",
        help="answer only requests that carry this token; without a value one is made up and printed. "
        "The variable PIVOTPATCH_TOKEN does the same and is not seen in the list of processes",
    )
    told = "a name under which others reach this machine; may be repeated"
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=told)


def _add_audit(verbs: Verbs) -> None:
    does = "Audit scores that `pivotpatch evaluate --save` wrote, or anybody's."
    told = "find out which labels a model gives because of co-occurrence"
    parts = verbs.add_parser("audit", help=told, description=does).add_subparsers(title="parts", required=True)
    what = (
        "scores (.parquet, .csv); then the address of their images, where the truth is not in the file or images are "
        "to be drawn"
    )
    for part, told in (
        ("pairs", "FPR and TPR of labels that co-occur, the worst first"),
        ("steps", "AP of image, patch and TDE logits, label by label"),
        ("scale", "TDE logits against a model of patches alone"),
        ("label-errors", "labels that are probably missing or wrong"),
        ("cases", "the clearest images for and against a baseline"),
    ):
        words = "SCORES PATCH_SCORES [DATA]" if part == "scale" else "SCORES [DATA]"
        audit = _add_verb(parts, part, told, told, run="audit:run_audit", what=what, words=words)
        audit.set_defaults(part=part)
        audit.add_argument("--json", action="store_true", help=_EVERYTHING)
        audit.add_argument("--plot", type=Path, metavar="DIR", help="draw to this folder")
        audit.add_argument("--overwrite", action="store_true", help="replace figures that are there")
        if part in ("pairs", "cases"):
            told = "compare with these scores of the same images"
            audit.add_argument("--baseline", type=Path, metavar="SCORES", required=part == "cases", help=told)
        if part == "pairs":
            _add_pair_options(audit)
        if part in ("steps", "scale"):
            _add_definition(audit)
        if part != "scale":
            audit.add_argument("--count", type=int, default=15, metavar="N", help="entries to list (15)")


def _add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add which pairs of labels to look at, and how models are compared."""
    told = "compare where both find the same share of each label: that which the baseline finds by --policy"
    parser.add_argument("--equal-recall", action="store_true", help=told)
    told = "behind the interval at equal recall (500)"
    parser.add_argument("--resamples", type=int, default=500, metavar="N", help=told)
    told = "look at this pair, may be given again (such as DeT against InT); else at all that co-occur"
    parser.add_argument("--pair", action="append", metavar="LABEL;CONTEXT", help=told)
    told = "of pairs, P(label | context) (0.2)"
    parser.add_argument("--min-probability", type=float, default=0.2, metavar="P", help=told)
    told = f"{POLICY_HELP}; target by default: models are compared at equal counts"
    parser.add_argument("--policy", default="target", help=told)
    told = "pairs by conditional FPR (rate), or by its rise"
    parser.add_argument("--order", choices=["rate", "gap"], default="rate", help=told)


def _add_data(verbs: Verbs) -> None:
    data = verbs.add_parser("data", help="prepare, split or check a data set")
    actions = data.add_subparsers(title="actions", required=True, metavar="ACTION")

    does = "Download a data set, unpack it and count it. Run it again after a break: it goes on where it was."
    told = "download, unpack and count a published data set"
    prepare = _add_verb(actions, "prepare", told, does, run="data:run_prepare")
    prepare.add_argument("dataset", choices=["coco", "voc2007", "vg256"], help="which one")
    prepare.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder to put it in")
    prepare.add_argument("--base-url", metavar="URL", help="a mirror that holds the archives in one folder")

    does = "Split a data set so that each part has its share of each label, and write the split as a table."
    split = _add_verb(actions, "split", "split a data set, every label in its share", does, run="data:run_split")
    split.add_argument("address", help=ADDRESS_HELP)
    split.add_argument(
        "--parts",
        type=_read_part,
        nargs="+",
        default=[("train", 0.8), ("val", 0.1), ("test", 0.1)],
        metavar="NAME=FRACTION",
        help="the parts and their shares, together 1 (default: train=0.8 val=0.1 test=0.1)",
    )
    split.add_argument("--seed", type=int, default=1, help="the same seed gives the same split (default: 1)")
    split.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write the table to")

    does = "Count images and labels, and find missing, broken and doubled images, also between data sets."
    told = "tell what data sets hold and what is wrong with them"
    check = _add_verb(actions, "check", told, does, run="data:run_check")
    check.add_argument("addresses", nargs="+", metavar="ADDRESS", help=ADDRESS_HELP)
    depth = check.add_mutually_exclusive_group()
    depth.add_argument("--fast", action="store_true", help="labels only; open no image")
    depth.add_argument("--decode", action="store_true", help="decode every image, which finds all that is damaged")
    check.add_argument("--plot", type=Path, metavar="FILE", help="draw an overview to a .png or .svg file")
    check.add_argument("--json", action="store_true", help=_EVERYTHING)


def _read_part(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FRACTION, such as train=0.8") from None


def _add_evaluate(verbs: Verbs) -> None:
    does = "Measure mAP with its interval, CP CR CF1 OP OR OF1 and top-3 for image, patch and TDE logits."
    what = (
        f"a run, a checkpoint, {_NAMED}, a file of scores, or of tags that predict --out wrote; then the address of "
        "the images, a table or a folder of them, which scores with a target do not need"
    )
    evaluate = _add_verb(verbs, "evaluate", "measure a model, or a file of scores", does, torchrun=True, what=what)
    _add_weights_options(evaluate)
    measures = evaluate.add_argument_group("what is measured")
    default = "by default fitted where there are such, else fixed:0.5"
    measures.add_argument("--policy", help=f"{POLICY_HELP}; {default}")
    _add_definitions(measures)
    measures.add_argument("--resamples", type=int, default=1000, metavar="N", help="for intervals; 0 for none (1000)")
    measures.add_argument("--baseline", type=Path, metavar="SCORES", help="compare with these, image by image")
    patches = evaluate.add_argument_group("PAT-I around an ordinary model")
    patches.add_argument("--patch-inference", action="store_true", help="add the patches' logits, without training")
    patches.add_argument("--lam", type=float, help="weight of the patches (1); a file of scores takes another, too")
    patches.add_argument("--temperature", type=float, help="of the patch weights (1); scores: if patches were kept")
    patches.add_argument("--grid", type=int, help="patches per side (2)")
    patches.add_argument("--native", type=int, metavar="SIZE", help="cut patches from images of so many pixels a side")
    scoring = evaluate.add_argument_group("scoring")
    told = "judge a closer look at whole images, at so many pixels a side, in place of their patches (PAT-T)"
    scoring.add_argument("--closer", type=int, metavar="PIXELS", help=told)
    scoring.add_argument("--batch-size", type=int, metavar="N", help="images at once, over all processes (128)")
    scoring.add_argument("--workers", type=int, metavar="N", help="processes that decode; one per core by default")
    scoring.add_argument("--on-error", choices=["error", "skip"], help="what a broken image does (error)")
    scoring.add_argument("--keep-patches", action="store_true", help="save logits and weights of each patch too")
    out = evaluate.add_argument_group("output")
    out.add_argument("--save", type=Path, metavar="FILE", help="write the scores (.parquet)")
    out.add_argument("--per-label", action="store_true", help="show a row per label")
    out.add_argument("--json", action="store_true", help=_EVERYTHING)


def _add_definitions(parser: "argparse._ActionsContainer") -> None:
    """Add the options that say how measures are defined."""
    _add_definition(parser)
    told = "what a label that is given to no image does in CP: counts 0, or is left out (zero)"
    parser.add_argument("--empty", choices=["zero", "skip"], default="zero", help=told)


def _add_definition(parser: "argparse._ActionsContainer") -> None:
    told = "of average precision (step)"
    parser.add_argument("--definition", choices=["step", "envelope"], default="step", help=told)


def _add_export(verbs: Verbs) -> None:
    does = (
        "Write a model as one file that takes images of any size and gives probabilities and patch "
        "weights; it is compared with torch before it is kept."
    )
    export = _add_verb(verbs, "export", "write a model as one file that runs without pivotpatch", does)
    told = "a run, a checkpoint, or a model by name: tagger, hub:, timm:, transformers:"
    export.add_argument("what", metavar="WHAT", help=told)
    export.add_argument(
        "--format",
        choices=("onnx", "looks"),
        default="onnx",
        help="onnx: one ONNX file for any program (default); looks: one for pivotpatch without torch, with every "
        "effort, as the bundled tagger",
    )
    export.add_argument("--out", type=Path, metavar="FILE", help="default: the name of WHAT with .onnx")
    export.add_argument("--half", action="store_true", help="keep the weights in half precision")


def _add_predict(verbs: Verbs) -> None:
    does = "Tag images. With --out any number of them: Ctrl-C keeps what is done, the same command goes on."
    predict = _add_verb(verbs, "predict", "tag images", does, torchrun=True)
    assert predict.epilog is not None
    predict.epilog += " --out FILE"
    predict.add_argument(
        "words",
        nargs="*",
        metavar="PATH",
        help="images, folders of them, patterns such as 'photos/**/*.jpg', or - for a list of files on stdin; "
        "with --out also .txt lists, .parquet tables, .tar shards and addresses such as s3://bucket/photos",
    )
    _add_model_options(predict)
    predict.add_argument("--batch-size", type=int, metavar="N", help=f"images at once (8, with --out {BULK_BATCH})")
    predict.add_argument("--on-error", choices=["skip", "error"], default="skip", help="of unreadable images (skip)")
    _add_tag_options(predict)
    output = predict.add_argument_group("output")
    told = "write one JSON object per line; of --out and --write, a summary"
    output.add_argument("--json", action="store_true", help=told)
    output.add_argument(
        "--explain", type=Path, metavar="FILE.png", help="draw why, by patches; a folder for several images"
    )
    beside = predict.add_argument_group("tags beside the images")
    _add_write_option(beside)
    beside.add_argument("--skip-tagged", action="store_true", help="leave images alone that an earlier run has tagged")
    bulk = predict.add_argument_group("many images")
    bulk.add_argument("--out", type=Path, metavar="FILE", help="write the tags to a .parquet, .jsonl or .csv file")
    bulk.add_argument("--all-probs", action="store_true", help="write the probability of every label, too")
    told = "threads that decode, one per core by default; workers with --engine ray, as many as there is room for"
    bulk.add_argument("--workers", type=int, metavar="N", help=told)
    bulk.add_argument("--resume", action="store_true", help="go on with the images that unfinished work began with")
    told = "begin anew whatever is there; of --write, replace other captions"
    bulk.add_argument("--overwrite", action="store_true", help=told)
    cluster = predict.add_argument_group("on a cluster (docs/serve.md)")
    cluster.add_argument("--engine", choices=["ray"], help="share the work out by Ray; all machines must see the files")
    cluster.add_argument("--address", help="of a Ray cluster, or auto for this machine's; else Ray starts here for it")
    cluster.add_argument("--cpus-per-worker", type=float, metavar="N", help="cores that each gets (1)")
    cluster.add_argument("--gpus-per-worker", type=float, metavar="N", help="GPUs that each gets, such as 0.5 (0)")


def _add_watch(verbs: Verbs) -> None:
    does = (
        "Write tags beside the images of a folder and of all in it: those that have none yet, then those "
        "that arrive or change. Images are never touched. Ctrl-C ends it."
    )
    watch = _add_verb(verbs, "watch", "tag images as they arrive in a folder", does)
    watch.add_argument("folder", type=Path, metavar="DIR", help="the folder to watch")
    _add_model_options(watch)
    _add_tag_options(watch)
    beside = watch.add_argument_group("tags beside the images")
    _add_write_option(beside, " (xmp)")
    beside.add_argument("--overwrite", action="store_true", help="replace captions that say something else")
    beside.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks (5)")
    watch.set_defaults(on_error="skip")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add which model to ask, and how."""
    told = "a run, a checkpoint, an exported file, hub:NAME, transformers:WHAT or timm:WHAT (the bundled tagger)"
    parser.add_argument("--model", default="tagger", help=told)
    _add_weights_options(parser)
    told = "cpu, cuda or cuda:1; of ONNX files also openvino, coreml, directml (the fastest there is)"
    parser.add_argument("--device", help=told)
    told = "share of images that get a second look, from 0 to 1; 1: patches of all (the model's own; tagger: 0.6)"
    parser.add_argument("--effort", type=float, help=told)


def _add_weights_options(parser: argparse.ArgumentParser) -> None:
    """Add what a file of weights does not say of itself."""
    told = "of a file of weights or an ONNX graph: a recipe, or BACKBONE+HEAD@SIZE such as resnet101+query2label@448"
    parser.add_argument("--architecture", metavar="A", help=told)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="names of its labels: a line each, or a JSON list")


def _add_tag_options(parser: argparse.ArgumentParser) -> None:
    """Add which labels an image gets, and what they are called."""
    choice = parser.add_argument_group("which labels")
    told = (
        "thresholds of a tuned model: few wrong tags, the best F1, or few that are missing (its own choice; of the "
        "bundled tagger, precision)"
    )
    choice.add_argument("--prefer", choices=PREFERENCES, help=told)
    choice.add_argument("--threshold", type=float, metavar="P", help="for all labels (those fitted, else 0.5)")
    choice.add_argument("--top-k", type=int, metavar="K", help="the K most probable; with --threshold, K at most")
    told = "which of them become tags, and their names (docs/predict.md)"
    choice.add_argument("--tags", type=Path, metavar="FILE.toml", help=told)


def _add_write_option(group: "argparse._ArgumentGroup", told: str = "") -> None:
    """Add which files to write beside the images; `told` adds the default."""
    told = f"write each image's tags beside it: xmp for photo managers, txt (a caption), json; several as xmp,txt{told}"
    group.add_argument("--write", type=_read_kinds, action="extend", metavar="KIND", help=told)


def _read_kinds(text: str) -> list[str]:
    from pivotpatch.runtime.sidecars import KINDS

    kinds = text.lower().split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"invalid choice: {kind!r} (choose from {', '.join(KINDS)})")
    return kinds


def _add_recipes(verbs: Verbs) -> None:
    does = (
        "List the recipes for the rows of the paper's tables with the mAP that was published, in per cent."
        " With a name, print that recipe, to be changed and given to pivotpatch train as a file."
    )
    recipes = _add_verb(verbs, "recipes", "list the recipes of the paper's tables, or print one", does)
    recipes.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print; all are listed by default")
    recipes.add_argument("--json", action="store_true", help="write JSON; of one recipe all settings, defaults too")
    told = "scores of its test images beside the paper's row of a recipe"
    recipes.add_argument("--compare", type=Path, metavar="SCORES", help=told)
    told = "of CP to OF1 with --compare: fixed:P, top:K, prior:DATA (fixed:0.5; the paper names none)"
    recipes.add_argument("--policy", default="fixed:0.5", metavar="RULE", help=told)


def _add_report(verbs: Verbs) -> None:
    does = (
        "Write one HTML file that opens offline: mAP with its interval, a table of the labels, the "
        "pairs of labels that mislead the model, with images, case studies, likely label errors and calibration."
    )
    what = (
        f"a run, a checkpoint, {_NAMED}, or scores (.parquet, .csv); then the address of the images, a table or a "
        "folder of them; without it a run is judged on its validation images, and scores have no images"
    )
    told = "write one HTML file with all that there is to know of a model"
    report = _add_verb(verbs, "report", told, does, what=what)
    report.add_argument("--baseline", metavar="WHAT", help="compare with this, of any of these kinds")
    report.add_argument("--policy", help=f"{POLICY_HELP}; by default each model's own thresholds, else fixed:0.5")
    _add_definitions(report)
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    report.add_argument("--images", type=int, default=60, metavar="N", help="images to show at most, up to 200 (60)")
    report.add_argument("--on-error", choices=["error", "skip"], help="what a broken image does (error)")


def _add_review(verbs: Verbs) -> None:
    does = (
        "Look at images and their tags on a web page: accept, remove, add, by keyboard or touch; the least certain and "
        "the likeliest label errors first. Every answer is on the disk before the next image; Ctrl-C ends it, the same "
        "command goes on. The table that comes of it is read by train, tune and evaluate; labels that nobody looked at "
        "stay unknown."
    )
    review = _add_verb(verbs, "review", "correct tags on a web page, the most doubtful images first", does)
    review.epilog = "Then: pivotpatch train tagger photos.csv --corrections review.csv"
    told = (
        "a folder of images, a table of tags that predict --out wrote, a table or address of images with labels to "
        "check, or a run, whose held-out images are taken"
    )
    review.add_argument("source", metavar="SOURCE", help=told)
    told = "the table of answers (review.csv, near the images)"
    review.add_argument("--out", type=Path, metavar="FILE.csv", help=told)
    review.add_argument("--model", help="a run, a checkpoint, an exported file, hub:NAME (the run's own, or tagger)")
    review.add_argument("--device", help=_GPU)
    told = "review these alone, also new ones: cat,dog or a file of names (the table's, or the model's)"
    review.add_argument("--labels", metavar="NAMES", help=told)
    told = "doubt: what a look is worth most; random: a sample to evaluate on; source: as they come (doubt)"
    review.add_argument("--order", choices=["doubt", "random", "source"], default="doubt", help=told)
    _add_address_options(review, port=7861)
    review.add_argument("--no-browser", action="store_true", help="print the address, open nothing")


def _add_teach(verbs: Verbs) -> None:
    does = (
        "Make a checkpoint that knows one label more, from about 20 images that show it. Nothing is trained: all other "
        "labels stay exactly as they are."
    )
    teach = _add_verb(verbs, "teach", "add a label from a few images of it", does)
    teach.add_argument("label", metavar="LABEL", help='its name, such as "my mug"')
    teach.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders and patterns of images that show it")
    teach.add_argument("--model", default="tagger", help="a run or a checkpoint (the bundled tagger)")
    teach.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new checkpoint")
    told = (
        "images without it, such as the same places when it is away; a model that does not see as the bundled tagger "
        "does needs 20 or more, the more ordinary the better"
    )
    teach.add_argument("--without", nargs="+", default=[], metavar="IMAGES", help=told)
    told = "of images that show it, where the model will be used (0.02)"
    teach.add_argument("--share", type=float, metavar="S", help=told)
    teach.add_argument("--again", action="store_true", help="make a label that the model knows anew, from these alone")
    teach.add_argument("--json", action="store_true", help="write what came of it as JSON")


def _add_train(verbs: Verbs) -> None:
    does = "Train a model. Ctrl-C finishes the step and saves; --resume goes on as if nothing had happened."
    train = _add_verb(verbs, "train", "train a model, or go on with a run", does, torchrun=True)
    train.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a recipe (see pivotpatch recipes) or a .toml file; an address of images or a file with their list; "
        "and changes such as train.epochs=3, the last word wins",
    )
    told = "a table whose known labels win over those of the images (review)"
    train.add_argument("--corrections", metavar="FILE", help=told)
    place = train.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/ and the recipe)")
    place.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in this folder")
    told = "train everything, also where the heads alone would be trained: without a GPU, from a trained model"
    train.add_argument("--full", action="store_true", help=told)
    only = train.add_mutually_exclusive_group()
    only.add_argument("--show-config", action="store_true", help="print the whole configuration as TOML and stop")
    told = "build everything, train one batch, tell time and memory, write nothing"
    only.add_argument("--dry-run", action="store_true", help=told)
    train.add_argument("--json", action="store_true", help="write the result as JSON")


def _add_tune(verbs: Verbs) -> None:
    does = (
        "Fit lam and temperature, then the calibration of probabilities, then a threshold per label, and "
        "when the image is enough (predict --effort), on images that the model was not trained on; judge each out of "
        "fold and store all in the checkpoint."
    )
    what = (
        "a run, a checkpoint, or with --out hub:owner/name; then the address of validation images, a table or a "
        "folder of them, by default those that the run held out"
    )
    told = "fit lam, calibration and thresholds on validation images"
    tune = _add_verb(verbs, "tune", told, does, torchrun=True, what=what)
    told = "what the model says of them: evaluate --save FILE --keep-patches"
    tune.add_argument("--scores", type=Path, metavar="FILE", help=told)
    told = "lam and temperature: keep them; auto fits them, and keeps them where the gain is within noise"
    tune.add_argument("--mixing", choices=["auto", "keep"], default="auto", help=told)
    kinds, told = ["auto", "none", "temperature", "platt", "platt_per_label"], "auto: the least log loss out of fold"
    tune.add_argument("--calibration", choices=kinds, default="auto", help=told)
    told = (
        "what predict decides by where nothing is preferred: for each label f1, precision:0.9, recall:0.8 or cost:1:5 "
        "of mistakes; or one threshold for all, precision, balance or recall, which are always fitted for predict "
        "--prefer (f1)"
    )
    tune.add_argument("--thresholds", default="f1", metavar="GOAL", help=told)
    tune.add_argument(
        "--closer",
        type=int,
        metavar="PIXELS",
        help="efforts between 0 and 1 look at the whole image again, at so many pixels a side, not at its patches: "
        "about 1.5 times those of the image cost less and keep most; by default as the checkpoint has it, 0 for "
        "patches",
    )
    told = "what predict takes where none is asked for, from 0 to 1 (as the checkpoint has it, else 1)"
    tune.add_argument("--effort", type=float, help=told)
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="write a new checkpoint and leave the old one alone")
    tune.add_argument("--plot", type=Path, metavar="FOLDER", help="draw reliability, mAP against lam and against cost")
    tune.add_argument("--json", action="store_true", help=_EVERYTHING)


_VERBS = {
    "app": _add_app,
    "audit": _add_audit,
    "data": _add_data,
    "evaluate": _add_evaluate,
    "export": _add_export,
    "predict": _add_predict,
    "recipes": _add_recipes,
    "report": _add_report,
    "review": _add_review,
    "teach": _add_teach,
    "train": _add_train,
    "tune": _add_tune,
    "watch": _add_watch,
}
VERBS = tuple(_VERBS)
