"""What a package shows to others, imported when it is first used: `pivotpatch --help` must not wait for torch.

Names are listed as data: a face that read its own source would fail where only compiled files are shipped.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

from pivotpatch.errors import explain_missing


def make_face(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`.

    Args:
        package: its name.
        homes: the names that it shows, separated by spaces, by the module that each lies in.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{home_of[name]}"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{package}.{name}: {explain_missing(error)}", name=error.name) from None

    return get
