"""Which of a model's labels become tags, and what they are called: the rules of a TOML file (docs/photos.md)."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pivotpatch.errors import InputError, choose_one_of, quote, quote_fault

_FOLDER = Path(__file__).parent / "languages"
LANGUAGES: tuple[str, ...] = ("de", "es", "fr", "zh")
"""Languages with names for the 80 labels of MS-COCO."""


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
        """The rules of a TOML file.

        Args:
            path: the file.
            labels: all that the model knows.
        """
        said = _read_toml(path)
        where, known = str(path), [each.name for each in fields(cls)]
        for key in sorted(said.keys() - set(known)):
            raise InputError(where, f"unknown key {quote(key)}", choose_one_of(key, known))
        for key in ("allow", "deny", "always"):
            value = said.get(key, [])
            if not isinstance(value, list) or not all(_is_name(each) for each in value):
                raise InputError(where, f"{key} is {quote(value)}", f'give a list of names, such as {key} = ["cat"]')
        rename = said.get("rename", {})
        if not isinstance(rename, dict) or not all(map(_is_name, rename.values())):
            raise InputError(where, f"rename is {quote(rename)}", 'give names by label, such as { cat = "kitty" }')
        at_most = said.get("at_most")
        if at_most is not None and (not isinstance(at_most, int) or isinstance(at_most, bool) or at_most < 1):
            raise InputError(where, f"at_most is {quote(at_most)}", "give 1 or more")
        language = said.get("language")
        if language is not None and language not in LANGUAGES:
            raise InputError(where, f"unknown language {quote(language)}", choose_one_of(str(language), LANGUAGES))
        names = set(labels)
        for key, value in said.items():
            for label in value if key in ("allow", "deny", "rename") else ():
                if label not in names:
                    raise InputError(where, f"{key}: unknown label {quote(label)}", choose_one_of(label, names))
        lists = {key: tuple(said[key]) for key in ("allow", "deny", "always") if key in said}
        return cls(**lists, rename=rename, language=language, at_most=at_most)

    def apply(self, tags: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
        """The tags of one image by their new names, the most probable first; of two of the same name, the first.

        >>> rules = TagRules(deny=("person",), language="de", at_most=1, always=("Urlaub",))
        >>> rules.apply([("cat", 0.7), ("person", 0.9), ("dog", 0.8)])
        [('Hund', 0.8), ('Urlaub', 1.0)]
        """
        probs = dict(tags)
        named = self.name(sorted(probs, key=lambda label: -probs[label]))
        return [*((name, probs[label]) for name, label in named.items()), *((name, 1.0) for name in self.added)]

    def name(self, labels: Iterable[str]) -> dict[str, str]:
        """Which of an image's labels, the most probable first, become tags: new names, and the label of each.

        >>> TagRules(deny=("person",), language="fr").name(["dog", "person"])
        {'chien': 'dog'}
        """
        given: dict[str, str] = {}
        for label in labels:
            name = self.call(label)
            if label not in self.deny and (self.allow is None or label in self.allow) and name not in self.always:
                given.setdefault(name, label)
        return dict([*given.items()][: self.at_most])

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


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip(" |"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # some editors put a mark before it
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "give a TOML file") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or nested too deeply
        raise InputError(str(path), f"is not valid TOML ({quote_fault(error)})", "correct it there") from None
