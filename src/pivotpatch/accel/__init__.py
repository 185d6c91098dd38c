"""GPU craft behind two doors: `quicken_training(model)` and `quicken_inference(backbone, ...)`."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.accel.inference import quicken_inference as quicken_inference
    from pivotpatch.accel.rewrites import quicken_training as quicken_training

__getattr__ = make_face(
    __name__,
    {
        "inference": "quicken_inference",
        "rewrites": "quicken_training",
    },
)
