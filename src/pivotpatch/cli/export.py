"""`pivotpatch export`: a trained model as one file that runs without pivotpatch, or with it but without torch."""

import argparse
from pathlib import Path

from pivotpatch.errors import InputError, import_extra
from pivotpatch.runtime.checks import EXPORTED, is_named
from pivotpatch.writing import check_place


def run_export(args: argparse.Namespace) -> int:
    """Write the file and say how close it comes to torch; what cannot be meant is refused before anything is loaded."""
    place = Path(args.what.partition(":")[2] if is_named(args.what) else args.what).resolve()
    out: Path = args.out or Path(f"{place.name.partition('@')[0]}{EXPORTED}")
    check_place(out, (EXPORTED,), "an ONNX file")
    if args.what.lower().endswith(EXPORTED) and Path(args.what).is_file():
        raise InputError(args.what, "is exported already", "give the run or the checkpoint that it comes from")
    import_extra("torch", "onnx")
    from pivotpatch.export import export_onnx
    from pivotpatch.inference.engine import open_engine

    engine = open_engine(args.what, device="cpu", effort=1, fold=False)
    written = export_onnx(engine.model, out, half=args.half, looks=args.format == "looks")
    print(f"wrote {out}, {written.size / 1e6:.2f} MB; differs from torch by {written.difference:.1e} at most")
    if engine.adaptive is not None and args.format == "onnx":
        print("it looks at the patches of every image; --format looks knows other efforts")
    return 0
