"""Files beside images: what is written, what is left alone, and what exiftool makes of it."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pivotpatch.errors import InputError
from pivotpatch.runtime.sidecars import KINDS, Kind, find_sidecar, is_tagged, write_sidecar
from pivotpatch.runtime.xmp import EMPTY, read_record

TAGS = [("cat", 0.91234567), ("hot dog", 0.5), ("Öl, <süß> & 猫", 0.25)]
LABELS = tuple(label for label, _ in TAGS)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (8, 6), "red").save(path)
    return path


def read_labels(image: Path, kind: Kind) -> tuple[str, ...]:
    """What lies beside an image and is ours."""
    content = find_sidecar(image, kind).read_bytes()
    if kind == "json":
        return tuple(tag["label"] for tag in json.loads(content)["tags"])
    record = read_record(content, where="") if kind == "xmp" else None
    return record.tags if record else tuple(filter(None, content.decode().strip().split(", ")))


def age(path: Path) -> int:
    """Make a file look old, to see whether it is written to."""
    os.utime(path, ns=(10**18, 10**18))
    return path.stat().st_ino


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_and_written_once(image: Path, kind: Kind) -> None:
    before = image.read_bytes()
    assert not is_tagged(image, kind)
    assert write_sidecar(image, TAGS, kind)
    path = find_sidecar(image, kind)
    assert path.name == {"xmp": "photo.jpg.xmp", "txt": "photo.txt", "json": "photo.jpg.json"}[kind]
    inode = age(path)
    assert not write_sidecar(image, TAGS, kind)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (10**18, inode)
    assert read_labels(image, kind) == (LABELS if kind != "txt" else ("cat", "hot dog", "Öl", "<süß> & 猫"))
    assert is_tagged(image, kind)
    assert image.read_bytes() == before
    assert sorted(found.name for found in image.parent.iterdir()) == sorted({image.name, path.name})
    bare = image.with_name("bare.png")  # in which nothing was found
    assert write_sidecar(bare, [], kind)
    assert (read_labels(bare, kind), is_tagged(bare, kind), write_sidecar(bare, [], kind)) == ((), True, False)


def test_a_caption_is_one_line_and_json_has_its_probabilities(image: Path) -> None:
    write_sidecar(image, [("animals|cat", 0.5), ("zoo|cat", 0.5), ("two\nlines", 0.3)], "txt")
    assert (image.parent / "photo.txt").read_bytes() == b"cat, two lines\n"
    write_sidecar(image, TAGS[:1], "json")
    said = json.loads((image.parent / "photo.jpg.json").read_text("utf-8"))
    assert said == {"image": "photo.jpg", "tags": [{"label": "cat", "prob": 0.912346}]}
    assert write_sidecar(image, TAGS[1:2], "json")  # our own is brought up to date
    assert read_labels(image, "json") == ("hot dog",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [f"{'a' * 251}.jpg", "a\0b.jpg"], ids=["long", "odd"])
def test_a_name_that_no_sidecar_can_have_is_told(tmp_path: Path, name: str, kind: Kind) -> None:
    image = tmp_path / name
    assert not is_tagged(image, kind)
    if "\0" not in name:
        with pytest.raises(InputError, match="name too long"):
            write_sidecar(image, TAGS, kind)


@pytest.mark.parametrize(
    ("kind", "theirs"), [("txt", "a cat on a mat"), ("json", '{"image": "cat.jpg", "tags": ["cat"]}'), ("json", "[")]
)
def test_what_somebody_else_wrote_is_not_overwritten_unasked(image: Path, kind: Kind, theirs: str) -> None:
    path = find_sidecar(image, kind)
    path.write_text(theirs, "utf-8")
    with pytest.raises(InputError, match="is there already"):
        write_sidecar(image, TAGS, kind)
    assert path.read_text("utf-8") == theirs
    assert write_sidecar(image, TAGS, kind, overwrite=True)
    assert is_tagged(image, kind)


@pytest.mark.parametrize("name", ["photo.jpg.xmp", "photo.xmp"])
def test_a_malformed_sidecar_is_an_error_and_stays(image: Path, name: str) -> None:
    path = image.parent / name
    path.write_bytes(EMPTY[:90])
    with pytest.raises(InputError, match=f"{name}: is not valid XML"):
        write_sidecar(image, TAGS, "xmp", overwrite=True)
    assert not is_tagged(image, "xmp")
    assert path.read_bytes() == EMPTY[:90]
    assert sorted(found.name for found in image.parent.iterdir()) == sorted(["photo.jpg", name])


def test_a_sidecar_by_adobes_name_is_used_by_one_image_only(image: Path) -> None:
    short = image.parent / "photo.xmp"
    short.write_bytes(EMPTY)
    other = image.with_suffix(".png")
    shutil.copy(image, other)
    for _ in range(2):
        write_sidecar(image, [("cat", 0.9)], "xmp")
        write_sidecar(other, [("dog", 0.9)], "xmp")
        assert (read_labels(image, "xmp"), read_labels(other, "xmp")) == (("cat",), ("dog",))
    assert (find_sidecar(image, "xmp"), find_sidecar(other, "xmp").name) == (short, "photo.png.xmp")
    (image.parent / "photo.jpg.xmp").write_bytes(EMPTY)  # the longer name says more
    assert find_sidecar(image, "xmp").name == "photo.jpg.xmp"


@pytest.mark.parametrize("kind", KINDS)
def test_links_are_not_followed(image: Path, tmp_path_factory: pytest.TempPathFactory, kind: Kind) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "precious"
    elsewhere.write_bytes(EMPTY)
    path = find_sidecar(image, kind)
    path.symlink_to(elsewhere)
    with pytest.raises(InputError, match="is a link"):
        write_sidecar(image, TAGS, kind, overwrite=True)
    path.unlink()
    path.with_name(f"{path.name}.tmp").symlink_to(elsewhere)
    assert write_sidecar(image, TAGS, kind)
    image.with_suffix(".xmp").symlink_to(elsewhere)
    assert write_sidecar(image, [], "xmp")
    assert elsewhere.read_bytes() == EMPTY


@pytest.mark.parametrize(("name", "kind"), [("photo.txt", "txt"), ("photo.xmp", "xmp"), ("photo.json", "json")])
def test_an_image_is_never_written_over(tmp_path: Path, name: str, kind: Kind) -> None:
    image = tmp_path / name
    Image.new("RGB", (4, 4)).save(image, format="png")
    before = image.read_bytes()
    if kind == "txt":
        with pytest.raises(InputError, match="is the image itself"):
            write_sidecar(image, TAGS, kind, overwrite=True)
    else:
        assert write_sidecar(image, TAGS, kind)
        assert find_sidecar(image, kind) == tmp_path / f"{name}.{kind}"
    assert image.read_bytes() == before


def run_exiftool(*words: str | Path) -> str:
    tool = shutil.which("exiftool")
    if tool is None:
        pytest.skip("exiftool is not installed")
    return subprocess.run([tool, *map(str, words)], capture_output=True, text=True, check=True, encoding="utf-8").stdout


def ask_exiftool(path: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(run_exiftool("-j", "-G1", "-struct", path))[0]
    return said


@pytest.mark.slow
def test_exiftool_and_we_write_to_the_same_sidecar(image: Path) -> None:
    path = image.parent / "photo.jpg.xmp"
    run_exiftool("-q", "-XMP-dc:Subject=mine", "-XMP-dc:Subject=cat", "-XMP-dc:Title=A <title>", "-XMP:Rating=3", path)
    write_sidecar(image, TAGS, "xmp")
    said = ask_exiftool(path)
    assert said["XMP-dc:Subject"] == ["mine", "cat", *LABELS[1:]]
    assert said["XMP-lr:HierarchicalSubject"] == list(LABELS[1:])
    assert (said["XMP-dc:Title"], said["XMP-xmp:Rating"]) == ("A <title>", 3)
    run_exiftool("-q", "-overwrite_original", "-XMP:Rating=5", "-XMP-dc:Subject+=later", path)  # it writes all anew
    assert not write_sidecar(image, TAGS, "xmp")
    assert read_record(path.read_bytes(), where="") == (LABELS[1:], ".jpg")
    write_sidecar(image, [("dog", 0.9)], "xmp")
    said = ask_exiftool(path)
    assert sorted(said["XMP-dc:Subject"]) == ["cat", "dog", "later", "mine"]
    assert said["XMP-xmp:Rating"] == 5
    assert run_exiftool("-validate", "-s3", path).strip() == "OK"


@pytest.mark.slow
def test_the_line_of_the_docs_brings_tags_into_images(image: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "predict.md").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("exiftool "))
    words = [word.strip("'") for word in line.partition("#")[0].split()[1:]]
    assert words.pop() == "photos/"
    run_exiftool("-q", "-overwrite_original", "-XMP-dc:Subject=mine", image)
    write_sidecar(image, TAGS[:2], "xmp")
    for _ in range(2):
        run_exiftool(*words, image.parent)
        said = ask_exiftool(image)
        assert said["XMP-dc:Subject"] == ["mine", "cat", "hot dog"]
        assert said["XMP-lr:HierarchicalSubject"] == ["cat", "hot dog"]
