"""Trained models at work, with torch.

`patch_inference` is PAT-I around anything that gives logits. `engine` answers a `Predictor`'s question with torch.
`embedding` is what a backbone makes of images. `scoring` scores a data set, `scores` is what comes of it and
`score_file` the same as a file.
"""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.inference.engine import TorchEngine as TorchEngine
    from pivotpatch.inference.patch_inference import PatchInference as PatchInference
    from pivotpatch.inference.score_file import read_scores as read_scores
    from pivotpatch.inference.score_file import write_scores as write_scores
    from pivotpatch.inference.scores import Scores as Scores
    from pivotpatch.inference.scoring import score_images as score_images
    from pivotpatch.inference.scoring import score_pictures as score_pictures

__getattr__ = make_face(
    __name__,
    {
        "engine": "TorchEngine",
        "patch_inference": "PatchInference",
        "score_file": "read_scores write_scores",
        "scores": "Scores",
        "scoring": "score_images score_pictures",
    },
)
