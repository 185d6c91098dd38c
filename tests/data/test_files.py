import json
from pathlib import Path

import pytest

from pivotpatch.data.files import check_name, read_json, read_text, resolve_inside
from pivotpatch.errors import InputError


def test_json_comes_back_as_written_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    content = {"naïve": [1, 2.5, None, "Straße"]}
    for encoding in ("utf-8", "utf-8-sig"):
        path = tmp_path / f"{encoding}.json"
        path.write_text(json.dumps(content, ensure_ascii=False), encoding=encoding)
        assert read_json(path) == content


def test_convert_replaces_each_object_innermost_first(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": {"b": {}}}')
    assert read_json(path, convert=lambda item: [item]) == [{"a": [{"b": [{}]}]}]


def test_what_convert_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    def refuse(item: dict[str, object]) -> object:
        raise InputError("row 3", f"{item} is odd", "even it out")

    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="^row 3: {} is odd; even it out$"):
        read_json(path, convert=refuse)


@pytest.mark.parametrize("length", range(1, len('{"a": [1, "b"], "c": {}}')))
def test_every_truncation_is_refused_with_its_place(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, "b"], "c": {}}'[:length])
    with pytest.raises(InputError, match=r"a\.json: the JSON is cut short \(line 1, column \d+: .*download it again"):
        read_json(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b'{"a":\n tree}', r"not valid JSON \(line 2, column 2"),
        (b'{"a": 1}\n{"a": 2}', r"not valid JSON \(line 2, column 1: Extra data"),
        ('{"a":\n "café"}'.encode("latin-1"), r"line 2 is not UTF-8 \(byte 0xe9 at position 11\); save the file as"),
        ('{"a": 1}'.encode("utf-16"), r"line 1 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": 1' + b"0" * 5000 + b"}", r"a\.json: a number has thousands of digits; correct it there"),
    ],
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


@pytest.mark.parametrize(
    "name", ["a.jpg", "sub/a.jpg", "sub/../a.jpg", "..a.jpg", "a..b/c", "c:d.jpg", "/data/set/a.jpg"]
)
def test_names_inside_the_root_pass(name: str) -> None:
    resolve_inside(Path("/data/set"), name, where="row 3")


@pytest.mark.parametrize("root", ["/data/set", "set", "."])
@pytest.mark.parametrize("name", ["../a.jpg", "sub/../../a.jpg", "/etc/passwd", "/data/settled/a.jpg", ".."])
def test_names_that_leave_the_root_are_refused_unless_allowed(root: str, name: str) -> None:
    with pytest.raises(InputError, match=r"row 3: '.+' lies outside .*; correct the path or set allow_escape=true"):
        resolve_inside(Path(root), name, where="row 3")
    resolve_inside(Path(root), name, where="row 3", allow_escape=True)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "tab\there", "nul\0", "half\ud800"])
def test_unprintable_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"row 3: the name .* is blank or holds control characters"):
        check_name(name, where="row 3")


@pytest.mark.parametrize("name", ["hot dog", "piñata, 大きい №1 & 'co'", "سگ‌ها", "👩‍🚒"])
def test_odd_but_printable_names_pass(name: str) -> None:
    check_name(name, where="row 3")
