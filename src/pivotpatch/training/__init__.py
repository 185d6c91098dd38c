"""Training: a schema, tasks that are model and loss in one, and one loop.

`load_config` reads what to train, `fit` trains it in a new folder, `resume` goes on with a folder.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pivotpatch.training.config import RunConfig, find_recipe, list_recipes, load_config
    from pivotpatch.training.loop import FitResult, fit, resume

# Imported when first used: a configuration must not wait for torch.
_HOMES = {"FitResult": "loop", "fit": "loop", "resume": "loop"} | dict.fromkeys(
    ("RunConfig", "find_recipe", "list_recipes", "load_config"), "config"
)

__all__ = ["FitResult", "RunConfig", "find_recipe", "fit", "list_recipes", "load_config", "resume"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
