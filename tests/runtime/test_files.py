from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from pivotpatch.errors import InputError
from pivotpatch.runtime import files
from pivotpatch.runtime.files import describe_unread, find_images, read_json, read_text, resolve_inside
from pivotpatch.runtime.packed import find_sources


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\n", "the file is empty"),
        (b'{"a": [1, "b', r"a\.json: not valid JSON \(Unterminated.*download the file again"),
        ('{"a":\n "café"}'.encode("latin-1"), r"cannot be read \(.*can't decode byte 0xe9 in position 11.*; check"),
        (b"[" * 100_000, "not valid JSON .*recursion"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damaged_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path)


@pytest.mark.parametrize("root", ["/data/set", "set", "."])
def test_names_that_leave_the_root_are_refused(root: str) -> None:
    for name in ("../a.jpg", "sub/../../a.jpg", "/etc/passwd", "/data/settled/a.jpg", ".."):
        with pytest.raises(InputError, match=r"row 3: '.+' lies outside"):
            resolve_inside(Path(root), name, where="row 3")
    for name in ("sub/a.jpg", "sub/../a.jpg", "..a.jpg", "a..b/c", "c:d.jpg"):
        resolve_inside(Path(root), name, where="row 3")


@pytest.fixture
def here(here: Path) -> Path:
    names = "b.jpg", "a.PNG", "notes.txt", "deep/c.webp", "deep/er/d.tif", ".hidden/e.jpg", "deep/.f.jpg", "[x].jpg"
    for name in names:
        path = Path("photos") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return here


def test_folders_patterns_and_lines_name_images_in_order(here: Path) -> None:
    inside = ["[x].jpg", "a.PNG", "b.jpg", "deep/c.webp", "deep/er/d.tif"]
    expected = [f"photos/{name}" for name in inside]
    assert list(find_images(["photos/"])) == list(find_images(["."])) == expected
    assert list(find_images([str(here / "photos")])) == [str(here / path) for path in expected]
    Path("photos-2").mkdir()
    Path("photos-2/e.jpg").touch()
    words = ["photos/b.jpg", "photos/notes.txt", "photos/deep"]
    named = [*words[:2], "photos/deep/c.webp", "photos/deep/er/d.tif"]
    assert list(find_images(words)) == named
    again = ["photos/./b.jpg", str(here / "photos/deep"), "photos/deep/*.webp"]  # each image once
    assert list(find_images([*words, *again])) == named
    assert list(find_sources(["photos", *again])) == expected
    assert list(find_images(["photos-2", "photos"])) == ["photos-2/e.jpg", *expected]
    assert list(find_images(["photos/*"])) == ["photos/[x].jpg", "photos/a.PNG", "photos/b.jpg"]
    assert list(find_images(["photos/**/*.[tw]*"])) == ["photos/deep/c.webp", "photos/deep/er/d.tif"]
    assert list(find_images(["photos/[x].jpg"])) == ["photos/[x].jpg"]  # a file that is there is no pattern
    lines = ["z.jpg\n", "\n", "photos/b.jpg\r\n", " a b.png\n"]
    assert list(find_images(["photos/a.PNG", "-"], lines=lines)) == [
        "photos/a.PNG",
        "z.jpg",
        "photos/b.jpg",
        " a b.png",
    ]
    (here / "photos.CSV").touch()
    with pytest.raises(InputError, match="photos.CSV: is a table, not an image; give its images, or their folder"):
        find_images(["photos", "photos.CSV"])


@pytest.mark.parametrize("installed", [True, False])
def test_heic_files_are_images_with_the_extra(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.HEIC", "b.jpg", "c.MOV", ".hidden.heic"):
        (tmp_path / name).touch()
    monkeypatch.setattr(files, "find_spec", lambda name: object() if installed else None)
    known = (files.image_suffixes, files.unread_suffixes)
    for cached in known:
        monkeypatch.setattr(files, cached.__name__, cache(cached.__wrapped__))
    unread: Counter[str] = Counter()
    found = [Path(path).name for path in find_images([str(tmp_path)], unread=unread)]
    assert found == ["a.HEIC", "b.jpg"] if installed else ["b.jpg"]
    assert unread == ({".mov": 1} if installed else {".heic": 1, ".mov": 1})
    told = describe_unread(unread)
    assert told[-1] == "1 video was not read; only images get tags"
    assert installed or told[0].startswith("1 HEIC file was not read; pip install ")
    if not installed:
        with pytest.raises(InputError, match="there is no image in it that can be read; 1 HEIC file was not read; pip"):
            list(find_images([str(tmp_path / "*.HEIC")]))
