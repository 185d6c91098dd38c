"""What a package shows to others, imported when it is first used: `pivotpatch --help` must not wait for torch."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from pivotpatch.errors import explain_missing


def find_homes(file: str) -> dict[str, str]:
    """The module of each name that a package shows, as its `__init__` imports them for type checkers.

    So they stand there once; the lines are those of `import name as name`, which a checker takes for a name that is
    meant for others.
    """
    found = re.findall(r"from (pivotpatch\.[\w.]+) import (\w+) as \2", Path(file).read_text("utf-8"))
    return {name: home for home, name in found}


def make_face(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package, by its name and by what `find_homes` says of its file."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{package}.{name}: {explain_missing(error)}", name=error.name) from None

    return get
