"""The one error of the package and the sentence it speaks."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """What a caller can mend: `<where>: <what is wrong, with the value>; <what to do>`."""

    def __init__(self, where: str, wrong: str, todo: str) -> None:
        super().__init__(f"{where}: {wrong}; {todo}")
        self.parts = where, wrong, todo

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, str, str]]:
        return type(self), self.parts  # so that it survives the way out of a worker process


def choose_one_of(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: the nearest known one first, then the list where it is short.

    >>> choose_one_of("rest101", ["resnet101", "vit"])
    "did you mean 'resnet101'? known: resnet101, vit"
    """
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
    return f"{hint}known: {shown}"


def shorten(names: Iterable[str], *, limit: int = 3) -> str:
    """A few names for a one-line message.

    >>> shorten(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
