import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotpatch import errors
from pivotpatch.errors import InputError, choose_one_of, shorten

ANY_TEXT = st.text(st.characters(), max_size=50).map(lambda text: text * 40) | st.text(st.characters())


def test_a_long_list_is_cut() -> None:
    advice = choose_one_of("n7x", [f"n{i}" for i in range(30)])
    assert advice.startswith("did you mean 'n7'? known: n0, n1")
    assert advice.endswith("... (30 in all)")
    assert choose_one_of("zzz", ["a"]) == "known: a"


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_any_error_is_one_line_that_can_be_printed(where: str, wrong: str, todo: str) -> None:
    error = InputError(where, wrong, todo)
    assert len(str(error)) < 1000
    assert len(str(error).splitlines()) == 1
    assert all(ord(char) >= 32 for char in str(error))
    str(error).encode()  # no half of a pair
    assert str(InputError(*error.parts)) == str(error) == str(pickle.loads(pickle.dumps(error)))


@given(ANY_TEXT, st.lists(ANY_TEXT, max_size=30))
def test_advice_is_short_whatever_the_names_are(name: str, known: list[str]) -> None:
    for text in (choose_one_of(name, known), shorten(known)):
        assert len(text) <= 480
        assert len(f".{text}.".splitlines()) == 1


def test_a_path_stays_whole_and_a_longer_one_keeps_both_ends() -> None:
    path = "/" + "a" * 199
    assert str(InputError(path, "is gone", "check it")) == f"{path}: is gone; check it"
    longer = str(InputError("/folder/" + "a" * 5000 + "/photo.jpg", "is gone", "check it"))
    assert re.fullmatch(r"/folder/a+ \.\.\. a+/photo\.jpg: is gone; check it", longer)


def test_a_copy_inside_another_project_is_no_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    for folder, expected in (("vendor", "pip install 'pivotpatch[app]'"), ("src", f"pip install -e '{tmp_path}[app]'")):
        monkeypatch.setattr(errors, "__file__", str(tmp_path / folder / "pivotpatch" / "errors.py"))
        assert errors.install_hint("app") == expected
