"""`pivotpatch export`: a trained model as one file that runs without pivotpatch, or as a checkpoint to give away."""

import argparse
from pathlib import Path

from pivotpatch.errors import InputError, import_extra
from pivotpatch.runtime.checks import EXPORTED, is_named


def run_export(args: argparse.Namespace) -> int:
    """Write the file and say how close it comes to torch."""
    out = _find_place(args)
    if args.what.lower().endswith(EXPORTED) and Path(args.what).is_file():
        raise InputError(args.what, "is exported already", "give the run or the checkpoint that it comes from")
    if args.format != "checkpoint":
        import_extra("torch", "onnx")
    from pivotpatch.inference.engine import open_engine

    engine = open_engine(args.what, device="cpu", effort=1, fold=False)
    if args.format != "checkpoint":
        from pivotpatch.export import export_onnx

        written = export_onnx(engine.model, out, half=args.half, looks=args.format == "looks")
        print(f"wrote {out}, {written.size / 1e6:.2f} MB; differs from torch by {written.difference:.1e} at most")
        if engine.adaptive is not None and args.format == "onnx":
            print("it looks at the patches of every image; --format looks knows other efforts")
    else:
        from pivotpatch.models.checkpoint import WEIGHTS, save_checkpoint
        from pivotpatch.models.classifier import Classifier

        if not isinstance(engine.model, Classifier):
            raise InputError(args.what, "is a model around which PAT-I is made", "save that model as its library does")
        save_checkpoint(engine.model, out, half=args.half)
        print(f"wrote {out}, {(out / WEIGHTS).stat().st_size / 1e6:.2f} MB")
    return 0


def _find_place(args: argparse.Namespace) -> Path:
    """The file or folder to write; what cannot be meant is refused before anything is loaded."""
    if args.format == "checkpoint":
        if args.out is None:
            raise InputError("--out", "there is no name for the folder", "give one")
        return Path(args.out)
    place = Path(args.what.partition(":")[2] if is_named(args.what) else args.what).resolve()
    out: Path = args.out or Path(f"{place.name.partition('@')[0]}.onnx")
    if out.suffix.lower() != ".onnx" or out.is_dir() or not out.absolute().parent.is_dir():
        todo = "give one that ends in .onnx, in a folder that is there"
        raise InputError(str(out), "is no name for an ONNX file", todo)
    return out
