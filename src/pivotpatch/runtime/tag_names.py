"""Which of a model's labels become tags, and what they are called: the rules of a TOML file (docs/predict.md)."""

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pivotpatch.errors import InputError, check_known, explaining, quote
from pivotpatch.runtime.prediction import Tag

_FOLDER = Path(__file__).parent / "languages"
LANGUAGES: tuple[str, ...] = ("de", "es", "fr", "zh")
"""Languages with names for the 80 labels of MS-COCO."""


def _are_names(values: object) -> bool:
    return isinstance(values, Collection) and all(isinstance(each, str) and each.strip(" |") for each in values)


_LIST = (lambda value: isinstance(value, list) and _are_names(value)), 'give a list of names, such as ["cat"]'
# What each key of the file may be, and what to do where it is something else.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "allow": _LIST,
    "deny": _LIST,
    "always": _LIST,
    "rename": (
        lambda value: isinstance(value, dict) and _are_names(value.values()),
        'give names by label, such as { cat = "kitty" }',
    ),
    "language": (LANGUAGES.__contains__, f"give one of {', '.join(LANGUAGES)}"),
    "at_most": (lambda value: type(value) is int and value > 0, "give 1 or more"),
}


@dataclass(frozen=True)
class TagRules:
    """Which labels become tags; without any rule all do, as they are.

    Attributes:
        allow: the only labels to give; None for all.
        deny: labels not to give.
        rename: what labels are called; `|` separates the parts of a hierarchy.
        language: one of `LANGUAGES`, for labels without a name of their own; what it has no name for stays as it is.
        at_most: tags per image, those of `always` not counted.
        always: added to every image, in this order.
    """

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    at_most: int | None = None
    always: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, labels: Iterable[str]) -> "TagRules":
        """The rules of a TOML file, for a model that knows these labels."""
        where, names = str(path), set(labels)
        damaged = explaining(where, "is not valid TOML", "correct it there", of=(ValueError, RecursionError))
        with damaged, explaining(where, "cannot be read", "give a TOML file", of=OSError):
            said = tomllib.loads(path.read_text("utf-8-sig"))  # some editors put a mark before it
        for key, value in said.items():
            check_known(key, _VALUES, where=where, what="key")
            is_valid, todo = _VALUES[key]
            if not is_valid(value):
                wrong = f"unknown language {quote(value)}" if key == "language" else f"{key} is {quote(value)}"
                raise InputError(where, wrong, todo)
            for label in value if key in ("allow", "deny", "rename") else ():
                check_known(label, names, where=f"{where}: {key}", what="label")
        read: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in said.items()}
        return cls(**read)

    def apply(self, tags: Iterable[Tag]) -> list[Tag]:
        """The tags of one image, the most probable first, by their new names; of two of the same name, the first.

        >>> rules = TagRules(deny=("person",), language="de", at_most=1, always=("Urlaub",))
        >>> tags = rules.apply([Tag("person", 0.9, 0.5, 0.9), Tag("dog", 0.8, 0.5, 0.8), Tag("cat", 0.7, 0.5, 0.7)])
        >>> [(tag.label, tag.prob) for tag in tags]
        [('Hund', 0.8), ('Urlaub', 1.0)]
        """
        given: dict[str, Tag] = {}
        for tag in tags:
            name = self.call(tag.label)
            is_wanted = tag.label not in self.deny and (self.allow is None or tag.label in self.allow)
            if is_wanted and name not in self.always:
                given.setdefault(name, tag._replace(label=name))
        added = (Tag(name, prob=1.0, threshold=0.0, image_prob=1.0) for name in self.added)
        return [*[*given.values()][: self.at_most], *added]

    def call(self, label: str) -> str:
        """What a label is called."""
        return self._names.get(label, label)

    @property
    def added(self) -> tuple[str, ...]:
        """What every image gets, each name once."""
        return tuple(dict.fromkeys(self.always))

    @cached_property
    def _names(self) -> dict[str, str]:
        return {**(read_language(self.language) if self.language else {}), **self.rename}


def read_language(language: str) -> dict[str, str]:
    """The names of the 80 labels of MS-COCO in one of `LANGUAGES`.

    >>> read_language("fr")["mouse"], len(read_language("zh"))
    ("souris d'ordinateur", 80)
    """
    return tomllib.loads((_FOLDER / f"{language}.toml").read_text("utf-8"))
