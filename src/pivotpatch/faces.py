"""What a package shows to others, imported when it is first used: `pivotpatch --help` must not wait for torch."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from pivotpatch.errors import explain_missing


def list_face(file: str) -> dict[str, str]:
    """The names that a package's `__init__` imports for type checkers alone, and the module that each lies in."""
    source = Path(file).read_text("utf-8")
    return {name: home for home, name in re.findall(r"^    from (\S+) import (\w+) as \2$", source, re.MULTILINE)}


def make_face(package: str, file: str) -> Callable[[str], object]:
    """The `__getattr__` of a package, whose `__init__` is in `file`, for the names of `list_face`."""
    homes = list_face(file)

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{package}.{name}: {explain_missing(error)}", name=error.name) from None

    return get
