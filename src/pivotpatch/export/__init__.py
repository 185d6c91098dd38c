"""Trained models as one ONNX file that runs without this package, or as a checkpoint of half the bytes."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.export.checkpoint import export_checkpoint as export_checkpoint
    from pivotpatch.export.onnx import export_onnx as export_onnx

__getattr__ = make_face(
    __name__,
    {
        "checkpoint": "export_checkpoint",
        "onnx": "export_onnx",
    },
)
