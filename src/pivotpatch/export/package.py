"""A network compiled for this kind of machine, as a package that torch loads without its Python code."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from pivotpatch.errors import InputError
from pivotpatch.export.graph import (
    TOLERANCE,
    Agreement,
    PictureGraph,
    check_difference,
    first_line,
    quiet,
    trace_pictures,
)
from pivotpatch.inference.exported import MEMBER, PackageEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier
from pivotpatch.writing import explain_disk_faults, replacing


def export_package(model: Classifier | PatchInference, path: str | Path) -> Agreement:
    """Compile a network with AOTInductor for the CPU and write the package, whole and checked or not at all.

    It takes and gives what the file of `export_onnx` does, and holds the same description as a file of its own. It runs
    on machines of the kind that it was compiled on, with the same release of torch; a C++ compiler is needed to
    write it, none to run it.

    Args:
        model: a network, or PAT-I around one; it is not changed.
        path: the file, which ends in .pt2; one that is there is replaced.
    """
    path = Path(path)
    _check_compiler()
    graph = PictureGraph(model)
    program = trace_pictures(graph)
    from torch._inductor import aoti_compile_and_package

    with TemporaryDirectory() as scratch:
        package = Path(scratch) / "network.pt2"  # torch reads no other ending
        try:
            with quiet():
                aoti_compile_and_package(program, package_path=str(package))
        except RuntimeError as error:
            wrong = f"torch cannot compile this network ({first_line(error)})"
            raise InputError("package", wrong, "check the C++ compiler, or export ONNX") from error
        with ZipFile(package, "a") as archive:
            top = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{top}/{MEMBER}", graph.description.model_dump_json())
        difference = check_difference(PackageEngine(package), graph, tolerance=TOLERANCE)
        with explain_disk_faults(path.absolute().parent), replacing(path) as written:
            shutil.copyfile(package, written)
        return Agreement(difference, path.stat().st_size)


def _check_compiler() -> None:
    """Say in one line that there is no compiler, before torch says it in a hundred."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        todo = "install g++, or name a compiler in the environment variable CXX, or export ONNX"
        raise InputError("package", "there is no C++ compiler", todo) from None
