from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pivotpatch.data.address import READERS, Address, open_records, parse_address, read_address

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
signs = st.text(st.sampled_from("@?%&=/+: a3F"), max_size=8)
parts = texts | signs


@given(
    scheme=st.sampled_from(sorted(READERS)),
    location=parts,
    split=st.none() | parts.filter(bool),
    options=st.dictionaries(parts.filter(bool), parts, max_size=3),
)
def test_what_is_written_is_read(scheme: str, location: str, split: str | None, options: dict[str, str]) -> None:
    address = Address(scheme, location, split, options)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(("text", "location", "split", "options"), [
    ("table:/me@home/t.csv", "/me@home/t.csv", None, {}),  # an @ of a folder
    ("table:/me@home/t.csv@train", "/me@home/t.csv", "train", {}),
    ("table:q%3F.csv@a%2Fb", "q?.csv", "a/b", {}),
    ("table:t.csv?delimiter=%26&labels=a=b&names=", "t.csv", None, {"delimiter": "&", "labels": "a=b", "names": ""}),
    ("table:t.csv?root=/me@home/x?y", "t.csv", None, {"root": "/me@home/x?y"}),
])  # fmt: skip
def test_signs_in_names(text: str, location: str, split: str | None, options: dict[str, str]) -> None:
    assert parse_address(text) == Address("table", location, split, options)
    readable = "table:/café me@home/my photos.csv@train?delimiter=|&root=/a b"
    assert str(parse_address(readable)) == readable


def test_a_table_or_folder_needs_no_scheme(here: Path) -> None:
    Path("a?b.csv").write_text("image,labels\na.png,cat\nb.png,dog\n")
    assert open_records("a?b.csv").name == "table:a%3Fb.csv"
    Path("shown/cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save("shown/cat/a.png")
    assert open_records("shown").name == "folder:shown"
    assert open_records("shown?missing=empty").name == "folder:shown?missing=empty"
    assert [read_address(word) for word in ("photos", "x" * 300)] == [None, None]
