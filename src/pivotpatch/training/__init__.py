"""Training: a schema, tasks that are model and loss in one, and one loop.

`load_config` reads what to train, `fit` trains it in a new folder, `resume` goes on with a folder.
"""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.training.config import RunConfig as RunConfig
    from pivotpatch.training.config import find_recipe as find_recipe
    from pivotpatch.training.config import list_recipes as list_recipes
    from pivotpatch.training.config import load_config as load_config
    from pivotpatch.training.loop import FitResult as FitResult
    from pivotpatch.training.loop import fit as fit
    from pivotpatch.training.loop import resume as resume

__getattr__ = make_face(
    __name__,
    {
        "config": "RunConfig find_recipe list_recipes load_config",
        "loop": "FitResult fit resume",
    },
)
