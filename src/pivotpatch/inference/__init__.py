"""Trained models at work.

`patch_inference` is PAT-I around anything that gives logits. `predictor` and `prediction` turn images into tags and ask
an `engine` (torch) or an `exported` file (ONNX); `bulk` tags millions.
`scoring` scores a data set, `scores` is what comes of it and `score_file` the same as a file; `plots` draws why.
"""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.inference.engine import Answer as Answer
    from pivotpatch.inference.engine import Engine as Engine
    from pivotpatch.inference.engine import TorchEngine as TorchEngine
    from pivotpatch.inference.patch_inference import PatchInference as PatchInference
    from pivotpatch.inference.score_file import read_scores as read_scores
    from pivotpatch.inference.score_file import write_scores as write_scores
    from pivotpatch.inference.scores import Scores as Scores
    from pivotpatch.inference.scoring import score_images as score_images
    from pivotpatch.inference.scoring import score_pictures as score_pictures
    from pivotpatch.runtime.bulk import tag_pictures as tag_pictures
    from pivotpatch.runtime.engine import open_onnx as OnnxEngine
    from pivotpatch.runtime.prediction import Prediction as Prediction
    from pivotpatch.runtime.prediction import Tag as Tag
    from pivotpatch.runtime.prediction import TagRule as TagRule
    from pivotpatch.runtime.predictor import Predictor as Predictor

__getattr__ = make_face(
    __name__,
    {
        "bulk": "tag_pictures",
        "engine": "Answer Engine TorchEngine",
        "exported": "OnnxEngine",
        "patch_inference": "PatchInference",
        "prediction": "Prediction Tag TagRule",
        "predictor": "Predictor",
        "score_file": "read_scores write_scores",
        "scores": "Scores",
        "scoring": "score_images score_pictures",
    },
)
