"""`pivotpatch export`: a trained network as one file that runs without pivotpatch, or as a checkpoint to give away."""

import argparse
from pathlib import Path

from pivotpatch.errors import InputError

SUFFIXES = {"onnx": ".onnx", "package": ".pt2", "checkpoint": ""}


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    export = verbs.add_parser(
        "export",
        help="write a network as one file that runs without pivotpatch",
        description="Write a network as one file that takes pictures of any size and gives probabilities and patch "
        "weights; it is compared with torch before it is kept.",
    )
    export.add_argument(
        "what", metavar="WHAT", help="a run, a checkpoint, or a network by name: tagger, hub:, timm:, transformers:"
    )
    export.add_argument(
        "--format",
        choices=tuple(SUFFIXES),
        default="onnx",
        help="onnx: one ONNX file (default); package: compiled by AOTInductor for the CPU of this machine, for torch; "
        "checkpoint: a folder for pivotpatch, such as a run's best network alone",
    )
    export.add_argument("--out", type=Path, metavar="FILE", help="default: the name of WHAT with .onnx or .pt2")
    export.add_argument("--half", action="store_true", help="keep the weights in half precision, not in a package")
    export.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    """Write the file and say how close it comes to torch."""
    out = _check_options(args)
    from pivotpatch.inference.engine import TorchEngine
    from pivotpatch.inference.predictor import Predictor

    engine = Predictor.load(args.what, device="cpu", fold=False).engine
    if not isinstance(engine, TorchEngine):
        raise InputError(args.what, "is exported already", "give the run or the checkpoint that it comes from")
    if args.format == "onnx":
        from pivotpatch.export.onnx import export_onnx

        written = export_onnx(engine.model, out, half=args.half)
    elif args.format == "checkpoint":
        from pivotpatch.export.checkpoint import export_checkpoint
        from pivotpatch.models.classifier import Classifier

        if not isinstance(engine.model, Classifier):
            raise InputError(args.what, "is a model around which PAT-I is made", "save that model as its library does")
        written = export_checkpoint(engine.model, out, half=args.half)
    else:
        from pivotpatch.export.package import export_package

        written = export_package(engine.model, out)
    print(f"wrote {out}, {written.size / 1e6:.2f} MB; differs from torch by {written.difference:.1e} at most")
    if args.format != "checkpoint" and engine.adaptive is not None:
        print("it looks at the patches of every picture: efforts between 0 and 1 stay with the checkpoint")
    return 0


def _check_options(args: argparse.Namespace) -> Path:
    """The file to write; what cannot be meant is refused before anything is loaded."""
    from pivotpatch.models.named import shorten_name

    suffix = SUFFIXES[args.format]
    if args.format == "checkpoint":
        if args.out is None:
            raise InputError("--out", "there is no name for the folder", "give one")
        return Path(args.out)
    out: Path = args.out or Path(shorten_name(str(args.what)) + suffix)
    if args.half and args.format == "package":
        raise InputError("--half", "a package keeps float32", "leave it out, or choose --format onnx")
    if out.suffix.lower() != suffix or out.is_dir():
        raise InputError(str(out), f"is no name for a file of format {args.format}", f"end it in {suffix}")
    if not out.absolute().parent.is_dir():
        raise InputError(str(out), f"there is no folder {out.parent}", "make it first")
    return out
