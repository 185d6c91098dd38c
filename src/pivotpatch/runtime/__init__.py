"""Tags without torch: decode, ask an ONNX file, decide, write; numpy, Pillow and onnxruntime alone."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.runtime.bulk import tag_pictures as tag_pictures
    from pivotpatch.runtime.decoding import decode_image as decode_image
    from pivotpatch.runtime.engine import Answer as Answer
    from pivotpatch.runtime.engine import Engine as Engine
    from pivotpatch.runtime.engine import open_onnx as open_onnx
    from pivotpatch.runtime.files import find_images as find_images
    from pivotpatch.runtime.prediction import Prediction as Prediction
    from pivotpatch.runtime.prediction import Tag as Tag
    from pivotpatch.runtime.prediction import TagRule as TagRule
    from pivotpatch.runtime.predictor import Predictor as Predictor
    from pivotpatch.runtime.sidecars import write_sidecar as write_sidecar
    from pivotpatch.runtime.tag_names import TagRules as TagRules
    from pivotpatch.runtime.values import Adaptive as Adaptive
    from pivotpatch.runtime.values import Calibration as Calibration
    from pivotpatch.runtime.values import PatchBox as PatchBox
    from pivotpatch.runtime.values import Patching as Patching
    from pivotpatch.runtime.values import patch_boxes as patch_boxes

__getattr__ = make_face(
    __name__,
    {
        "bulk": "tag_pictures",
        "decoding": "decode_image",
        "engine": "Answer Engine open_onnx",
        "files": "find_images",
        "prediction": "Prediction Tag TagRule",
        "predictor": "Predictor",
        "sidecars": "write_sidecar",
        "tag_names": "TagRules",
        "values": "Adaptive Calibration PatchBox Patching patch_boxes",
    },
)
