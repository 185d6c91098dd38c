"""Trained models as one ONNX file that runs without this package."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.export.onnx import export_onnx as export_onnx

__getattr__ = make_face(
    __name__,
    {
        "onnx": "export_onnx",
    },
)
