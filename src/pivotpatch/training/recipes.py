"""The recipes that come with the package: one TOML file for each row of the paper's tables that trains a model."""

import re
from dataclasses import dataclass
from pathlib import Path

from pivotpatch.errors import InputError, choose_one_of

_FOLDER = Path(__file__).parents[1] / "recipes"
# What the first two lines of a recipe say, as comments.
_COMMENTS = re.compile(r"# (?P<title>.+)\n# published mAP: (?P<published>none|\d+\.\d) \((?P<source>.+)\)\n")


@dataclass(frozen=True)
class Recipe:
    """A recipe and what was published for it.

    Attributes:
        name: what `find_recipe` knows it by.
        path: its file.
        title: what it trains, in one line.
        published: mAP in per cent; None where the paper has none.
        source: the table and row of the figure, or why there is none.
    """

    name: str
    path: Path
    title: str
    published: float | None
    source: str


def list_recipes() -> list[Recipe]:
    """All recipes of the package, by name."""
    return [_read_comments(path) for path in sorted(_FOLDER.glob("*.toml"))]


def find_recipe(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: of a recipe of the package, or the path of a `.toml` file, which need not exist.
    """
    if name.endswith(".toml"):
        return Path(name)
    known = {path.stem: path for path in _FOLDER.glob("*.toml")}
    if name not in known:
        raise InputError(f"recipe {name!r}", "there is none of that name", choose_one_of(name, known))
    return known[name]


def _read_comments(path: Path) -> Recipe:
    comments = _COMMENTS.match(path.read_text("utf-8"))
    assert comments is not None, path  # the tests read every one
    figure = comments["published"]
    return Recipe(path.stem, path, comments["title"], None if figure == "none" else float(figure), comments["source"])
