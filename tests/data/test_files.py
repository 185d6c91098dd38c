import json
import os
from pathlib import Path

import pytest

from pivotpatch.data.files import check_name, find_images, read_json, read_text, resolve_inside
from pivotpatch.errors import InputError


def test_json_comes_back_as_written_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    content = {"naïve": [1, 2.5, None, "Straße"]}
    for encoding in ("utf-8", "utf-8-sig"):
        path = tmp_path / f"{encoding}.json"
        path.write_text(json.dumps(content, ensure_ascii=False), encoding=encoding)
        assert read_json(path) == content


def test_convert_replaces_each_object_innermost_first(tmp_path: Path) -> None:
    def refuse(item: dict[str, object]) -> object:
        raise InputError("row 3", f"{item} is odd", "even it out")

    path = tmp_path / "a.json"
    path.write_text('{"a": {"b": {}}}')
    assert read_json(path, convert=lambda item: [item]) == [{"a": [{"b": [{}]}]}]
    with pytest.raises(InputError, match="^row 3: {} is odd; even it out$"):
        read_json(path, convert=refuse)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\n", "the file is empty"),
        (b'{"a":\n tree}', r"not valid JSON \(line 2, column 2: Expecting value"),
        (b'{"a": [1, "b', r"a\.json: the JSON is cut short \(line 1, column 11: Unterminated.*download the file again"),
        ('{"a":\n "café"}'.encode("latin-1"), r"line 2 is not UTF-8 \(byte 0xe9 at position 11\); save"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": 1' + b"0" * 5000 + b"}", r"not valid JSON \(Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damaged_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json(path)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.json: there is no such file"):
        read_text(tmp_path / "gone.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path)


@pytest.mark.parametrize("name", ["sub/a.jpg", "sub/../a.jpg", "..a.jpg", "a..b/c", "c:d.jpg", "/data/set/a.jpg"])
def test_names_inside_the_root_pass(name: str) -> None:
    resolve_inside(Path("/data/set"), name, where="row 3")


@pytest.mark.parametrize("root", ["/data/set", "set", "."])
@pytest.mark.parametrize("name", ["../a.jpg", "sub/../../a.jpg", "/etc/passwd", "/data/settled/a.jpg", ".."])
def test_names_that_leave_the_root_are_refused_unless_allowed(root: str, name: str) -> None:
    with pytest.raises(InputError, match=r"row 3: '.+' lies outside .*; correct the path or set allow_escape=true"):
        resolve_inside(Path(root), name, where="row 3")
    resolve_inside(Path(root), name, where="row 3", allow_escape=True)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "evil\x1b[2J", "nul\0", "half\ud800"])
def test_unprintable_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"row 3: the name .* is blank or holds control characters"):
        check_name(name, where="row 3")


@pytest.mark.parametrize("name", ["hot dog", "piñata, 大きい №1 & 'co'", "سگ‌ها", "👩‍🚒"])
def test_odd_but_printable_names_pass(name: str) -> None:
    check_name(name, where="row 3")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    names = "b.jpg", "a.PNG", "notes.txt", "deep/c.webp", "deep/er/d.tif", ".hidden/e.jpg", "deep/.f.jpg", "[x].jpg"
    for name in names:
        path = Path("photos") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def test_folders_are_walked_in_order_and_files_taken_as_they_are(here: Path) -> None:
    inside = ["[x].jpg", "a.PNG", "b.jpg", "deep/c.webp", "deep/er/d.tif"]
    expected = [f"photos/{name}" for name in inside]
    assert list(find_images(["photos/"])) == list(find_images(["."])) == expected
    assert list(find_images([str(here / "photos")])) == [str(here / path) for path in expected]
    words = ["photos/b.jpg", "photos/notes.txt", "photos/deep", "photos/b.jpg"]
    assert list(find_images(words)) == [*words[:2], "photos/deep/c.webp", "photos/deep/er/d.tif", "photos/b.jpg"]


def test_patterns_match_images_alone(here: Path) -> None:
    assert list(find_images(["photos/*"])) == ["photos/[x].jpg", "photos/a.PNG", "photos/b.jpg"]
    assert list(find_images(["photos/**/*.[tw]*"])) == ["photos/deep/c.webp", "photos/deep/er/d.tif"]
    assert list(find_images(["photos/[x].jpg"])) == ["photos/[x].jpg"]  # a file that is there is no pattern


def test_lines_are_files_in_their_order(here: Path) -> None:
    far = "file://far.example/a.jpg"  # one of many lines, which fails when it is read
    lines = ["z.jpg\n", "\n", "photos/b.jpg\r\n", " a b.png\n", "file:///a%20b.jpg\n", far]
    expected = ["photos/a.PNG", "z.jpg", "photos/b.jpg", " a b.png", "/a b.jpg", far]
    assert list(find_images(["photos/a.PNG", "-"], lines=lines)) == expected


def test_addresses_of_local_files_are_paths(here: Path) -> None:
    odd = here / "photos" / "a #1?100% *.jpg"
    odd.touch()
    words = [odd.as_uri(), f"file://localhost{here}/photos/deep", f"FILE://{here}/photos/a #1?100%25%20*.jpg"]
    expected = [str(odd), str(here / "photos/deep/c.webp"), str(here / "photos/deep/er/d.tif"), str(odd)]
    assert list(find_images(words)) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["photos/b.jpg", "nowhere.jpg"], "nowhere.jpg: there is no such file or folder; check the path"),
        (["https://example.org/*.jpg"], r"https://example.org/\*.jpg: is not on this machine; download it and give"),
        (["file:///nowhere/%2A.jpg"], r"file:///nowhere/%2A.jpg: there is no such file or folder; check the path"),
        (["photos/*.txt"], r"photos/\*.txt: there is no image in it; known kinds: .jpg"),
        (["empty"], "empty: there is no image in it"),
    ],
)
def test_what_names_no_image_is_refused(words: list[str], message: str, here: Path) -> None:
    Path("empty").mkdir()
    with pytest.raises(InputError, match=message):
        list(find_images(words))


def test_a_missing_word_is_found_before_the_first_image(here: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        find_images(["photos", "nowhere"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_named(here: Path) -> None:
    Path("photos/deep").chmod(0)
    try:
        with pytest.raises(InputError, match="photos/deep: cannot be read .*; check its rights"):
            list(find_images(["photos"]))
    finally:
        Path("photos/deep").chmod(0o755)
