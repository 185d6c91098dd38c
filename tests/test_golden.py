"""What users rely on stays: old files open, verbs say what they said, public names take what they took."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from golden_verbs import GOLDEN, IMAGES, KEPT, SHOWN, VERBS, describe_api, inside, read_blocks, say, show

from pivotpatch.cli.main import main

# What depends on the machine and the hour, and what training does to numbers with another version of torch.
VOLATILE = re.compile(r"seconds|per_second|device|memory|GB|settings.root")
TRAINED = re.compile(r"train resume.*(mAP|loss|image|patch|tde)")
LONGER = {"recipes"}  # lists that may grow
NUMBER = re.compile(r"(?<!\w)[-+]?\d[\d.,]*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("golden") / "kept"
    shutil.copytree(KEPT, copy)
    return copy


@pytest.mark.parametrize("name", VERBS)
def test_verbs_say_what_they_said(name: str, folder: Path) -> None:
    said = json.loads((GOLDEN / "said.json").read_text("utf-8"))
    with inside(folder):
        found = say(*VERBS[name])
    if name in LONGER:
        found = [one for one in found if one["name"] in {other["name"] for other in said[name]}]
    assert_same(found, said[name], name)


@pytest.mark.parametrize("name", SHOWN)
def test_verbs_show_people_what_they_showed(name: str, folder: Path) -> None:
    """The same words and, but for the last digits, the same numbers in their places."""
    golden = read_blocks(GOLDEN / "shown.txt")[" ".join(VERBS[name])]
    with inside(folder):
        found = show(*VERBS[name])
    if name in LONGER:
        known = [line.split()[0] for line in golden.splitlines()]
        found = "\n".join(line for line in found.splitlines() if line.split()[0] in known)
    assert NUMBER.sub("#", found) == NUMBER.sub("#", golden)
    for one, other in zip(NUMBER.findall(found), NUMBER.findall(golden), strict=True):
        values = [float(each.rstrip(".,").replace(",", "")) for each in (one, other)]
        digits = len(other.rstrip(".,").partition(".")[2])
        assert values[0] == pytest.approx(values[1], rel=0.01, abs=1.1 * 10**-digits)


def assert_same(found: Any, golden: Any, place: str) -> None:
    """Equal but for the last digits of numbers; what a machine or an hour decides has the same kind."""
    assert type(found) is type(golden), place
    if isinstance(golden, dict):
        assert list(golden) == [key for key in found if key in golden], place  # there may be more, in any place
        for key, value in golden.items():
            assert_same(found[key], value, f"{place}.{key}")
    elif isinstance(golden, list):
        assert len(found) == len(golden), place
        for number, (one, other) in enumerate(zip(found, golden, strict=True)):
            assert_same(one, other, f"{place}[{number}]")
    elif VOLATILE.search(place) or TRAINED.match(place):
        return
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=1e-3, abs=1e-4), place
    else:
        assert found == golden, place


def test_public_names_take_what_they_took() -> None:
    golden, found = json.loads((GOLDEN / "api.json").read_text("utf-8")), describe_api()
    for name, stated in golden.items():
        assert_kept(found[name], stated, name)


def assert_kept(found: Any, golden: Any, place: str) -> None:
    """Whatever was there is there; a new parameter must be one that nobody has to give."""
    if isinstance(golden, list):
        assert set(golden) <= set(found), place
        return
    if isinstance(golden, str):
        assert found == golden, place
        return
    for name, value in golden.items():
        assert name in found, f"{place}.{name}"
        assert_kept(found[name], value, f"{place}.{name}")
    new = [name for name in found if name not in golden and isinstance(found[name], str)]
    assert all("default" in found[name] or "variadic" in found[name] for name in new), f"{place}: {new}"


def test_a_score_file_has_the_columns_that_it_had(folder: Path) -> None:
    with inside(folder):
        say("evaluate", "run", IMAGES, "--save", "new.parquet", "--keep-patches")
    old, new = (pq.read_schema(folder / name) for name in ("scores.parquet", "new.parquet"))
    assert old.names == [name for name in new.names if name in old.names]
    assert [new.field(name).type for name in old.names] == old.types


CODES = {
    0: ["predict images/0.png --model run", "--version", "train --help"],
    2: ["", "predikt", "predict --nothing", "audit"],
}


@pytest.mark.parametrize(("code", "words"), [(code, words) for code, each in CODES.items() for words in each])
def test_exit_codes(code: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with inside(folder):
        try:
            status: int | str | None = main(words.split())
        except SystemExit as left:
            status = left.code
    told = capsys.readouterr()
    assert status == code, told.err
    assert (told.out == "") == (code > 0)
