import os
import pickle
from pathlib import Path

import pytest

from pivotpatch.data.picture_paths import PathStore, find_pictures, write_paths
from pivotpatch.errors import InputError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "b.jpg",
        "a.PNG",
        "notes.txt",
        "deep/c.webp",
        "deep/er/d.tif",
        ".hidden/e.jpg",
        "deep/.f.jpg",
        "[x].jpg",
    ):
        path = Path("photos") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def test_folders_are_walked_in_order_and_files_taken_as_they_are(here: Path) -> None:
    inside = ["[x].jpg", "a.PNG", "b.jpg", "deep/c.webp", "deep/er/d.tif"]
    expected = [f"photos/{name}" for name in inside]
    assert list(find_pictures(["photos"])) == expected
    assert list(find_pictures(["photos/"])) == expected
    assert list(find_pictures(["."])) == expected
    assert list(find_pictures([str(here / "photos")])) == [str(here / path) for path in expected]
    words = ["photos/b.jpg", "photos/notes.txt", "photos/deep", "photos/b.jpg"]
    assert list(find_pictures(words)) == [*words[:2], "photos/deep/c.webp", "photos/deep/er/d.tif", "photos/b.jpg"]


def test_patterns_match_pictures_alone(here: Path) -> None:
    assert list(find_pictures(["photos/*"])) == ["photos/[x].jpg", "photos/a.PNG", "photos/b.jpg"]
    assert list(find_pictures(["photos/**/*.[tw]*"])) == ["photos/deep/c.webp", "photos/deep/er/d.tif"]
    assert list(find_pictures(["photos/[x].jpg"])) == ["photos/[x].jpg"]  # a file that is there is no pattern


def test_lines_are_files_in_their_order(here: Path) -> None:
    lines = ["z.jpg\n", "\n", "photos/b.jpg\r\n", " a b.png"]
    assert list(find_pictures(["photos/a.PNG", "-"], lines=lines)) == [
        "photos/a.PNG",
        "z.jpg",
        "photos/b.jpg",
        " a b.png",
    ]


def test_addresses_of_local_files_are_paths(here: Path) -> None:
    odd = here / "photos" / "a #1?100% *.jpg"
    odd.touch()
    words = [odd.as_uri(), f"file://localhost{here}/photos/deep", f"FILE://{here}/photos/a #1?100%25%20*.jpg"]
    expected = [str(odd), str(here / "photos/deep/c.webp"), str(here / "photos/deep/er/d.tif"), str(odd)]
    assert list(find_pictures(words)) == expected
    far = "file://far.example/a.jpg"  # one of many lines, which fails when it is read
    assert list(find_pictures(["-"], lines=[odd.as_uri() + "\n", far])) == [str(odd), far]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["photos/b.jpg", "nowhere.jpg"], "nowhere.jpg: there is no such file or folder; check the path"),
        (["https://example.org/*.jpg"], r"https://example.org/\*.jpg: is not on this machine; download it and give"),
        (["file://far.example/a.jpg"], "file://far.example/a.jpg: is not on this machine"),
        (["file:///nowhere/%2A.jpg"], r"file:///nowhere/%2A.jpg: there is no such file or folder; check the path"),
        (["photos/*.gif"], r"photos/\*.gif: there is no picture in it; known kinds: .jpg"),
        (["photos/*.txt"], "there is no picture in it"),
        (["empty"], "empty: there is no picture in it"),
    ],
)
def test_what_names_no_picture_is_refused(words: list[str], message: str, here: Path) -> None:
    Path("empty").mkdir()
    with pytest.raises(InputError, match=message):
        list(find_pictures(words))


def test_a_missing_word_is_found_before_the_first_picture(here: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        find_pictures(["photos", "nowhere"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_named(here: Path) -> None:
    Path("photos/deep").chmod(0)
    try:
        with pytest.raises(InputError, match="photos/deep: cannot be read .*; check its rights"):
            list(find_pictures(["photos"]))
    finally:
        Path("photos/deep").chmod(0o755)


def test_a_store_reads_any_stretch_of_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pivotpatch.data.picture_paths._BATCH", 3)
    paths = [f"{number}/ä {number}.jpg" for number in range(10)]
    listed = write_paths(iter(paths), tmp_path / "paths.arrow")
    assert listed.length == 10
    store = PathStore(tmp_path / "paths.arrow", Path("/root"), start=2, count=6)
    for read in (store, pickle.loads(pickle.dumps(store))):
        assert [read.name(index) for index in range(len(read))] == paths[2:8]
        assert read.source(5) == Path("/root") / paths[7]
    assert len(pickle.dumps(store)) < 500  # not the paths


def test_lists_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""], ["a"], []]
    digests = [write_paths(paths, tmp_path / "paths.arrow").digest for paths in lists]
    assert len(set(digests)) == len(lists)
    monkeypatch.setattr("pivotpatch.data.picture_paths._BATCH", 1)
    assert [write_paths(paths, tmp_path / "paths.arrow").digest for paths in lists] == digests


def test_a_name_that_is_not_utf_8_is_a_picture_that_cannot_be_read(tmp_path: Path) -> None:
    write_paths([os.fsdecode(b"caf\xe9.jpg")], tmp_path / "paths.arrow")
    store = PathStore(tmp_path / "paths.arrow", tmp_path)
    assert store.name(0) == "caf\N{REPLACEMENT CHARACTER}.jpg"
    with pytest.raises(InputError, match="caf.\\.jpg: its name is not UTF-8; rename it"):
        store.source(0)
