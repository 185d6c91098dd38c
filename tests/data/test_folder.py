import json
from pathlib import Path

import pytest
from PIL import Image
from written_tables import labels_of

from pivotpatch.data.address import open_records
from pivotpatch.data.folder import read_folder
from pivotpatch.errors import InputError


def add_image(path: Path, text: str | None = None) -> None:
    """Write an image, and a text file beside it if there is text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2)).save(path)
    if text is not None:
        path.with_suffix(".txt").write_text(text, encoding="utf-8")


def test_sidecars(tmp_path: Path) -> None:
    add_image(tmp_path / "a.jpg", "cat\ndog\n")
    add_image(tmp_path / "b.PNG", "dog, ?bird ,\r\ncafé au lait\n")
    add_image(tmp_path / "deep" / "c.tiff", "")
    add_image(tmp_path / ".hidden.jpg", "ghost")
    add_image(tmp_path / ".hidden" / "d.jpg", "ghost")
    (tmp_path / "README.txt").write_text("not a sidecar")
    (tmp_path / "names.txt").write_text("dogs\ncat\n")
    records = open_records(f"folder:{tmp_path}")
    assert records.labels.names == ("bird", "café au lait", "cat", "dog")
    assert labels_of(records) == {
        "a.jpg": ({"cat", "dog"}, set()),
        "b.PNG": ({"dog", "café au lait"}, {"bird"}),
        "deep/c.tiff": (set(), set()),
    }
    assert records[2].image == tmp_path / "deep" / "c.tiff"
    with pytest.raises(InputError, match=r"a\.jpg: unknown label 'dog'; did you mean 'dogs'\?"):
        read_folder(str(tmp_path), None, names="names.txt")
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.txt: not UTF-8 .*; save the file as UTF-8"):
        read_folder(str(tmp_path), None)


def test_images_without_a_sidecar(tmp_path: Path) -> None:
    add_image(tmp_path / "train" / "a.jpg", "cat")
    add_image(tmp_path / "train" / "b.jpg", "dog")
    add_image(tmp_path / "test" / "c.jpg")
    message = r"1 images have no text file beside them, e\.g\. test/c\.jpg; write test/c\.txt, or .*\?missing=empty"
    for split in (None, "test"):
        with pytest.raises(InputError, match=message):
            read_folder(str(tmp_path), split)
    assert labels_of(open_records(f"folder:{tmp_path}@test?missing=empty")) == {"test/c.jpg": (set(), set())}
    add_image(tmp_path / "trainval" / "d.jpg")
    assert len(read_folder(str(tmp_path), "train")) == 2  # whose images all have one


def test_label_folders(tmp_path: Path) -> None:
    add_image(tmp_path / "cats" / "1.jpg")
    add_image(tmp_path / "cats" / "siamese" / "2.jpg")
    add_image(tmp_path / "train" / "1.jpg")  # a label, for `cats` is no split
    (tmp_path / "notes").mkdir()
    assert labels_of(read_folder(str(tmp_path), None)) == {
        "cats/1.jpg": ({"cats"}, set()),
        "cats/siamese/2.jpg": ({"cats"}, set()),
        "train/1.jpg": ({"train"}, set()),
    }
    add_image(tmp_path / "loose.jpg")
    with pytest.raises(InputError, match=r"image loose\.jpg has no label; write a text file beside each"):
        read_folder(str(tmp_path), None)


def test_splits_share_their_labels(tmp_path: Path) -> None:
    for path in ("train/cats/1.jpg", "train/dogs/1.jpg", "train/dogs/2.jpg", "val/cats/1.jpg"):
        add_image(tmp_path / path)
    train, val = open_records(f"folder:{tmp_path}@train"), open_records(f"folder:{tmp_path}@val")
    assert train.labels.names == val.labels.names == ("cats", "dogs")
    assert [r.name for r in train] == ["train/cats/1.jpg", "train/dogs/1.jpg", "train/dogs/2.jpg"]
    assert val.name == f"folder:{tmp_path}@val"
    assert val.notes == ()
    assert read_folder(str(tmp_path), None).notes == (
        f"{tmp_path}: its splits are taken together (train, val); @train takes one",
    )
    assert labels_of(val) == {"val/cats/1.jpg": ({"cats"}, set())}
    with pytest.raises(InputError, match=r"there is no split 'vla'; did you mean 'val'\? known: train, val"):
        read_folder(str(tmp_path), "vla")
    with pytest.raises(InputError, match=r"there is no split 'test'; put its images into .*train/test"):
        read_folder(str(tmp_path / "train"), "test")


def test_metadata_beside_the_images(tmp_path: Path) -> None:
    for split, label in (("train", "cat"), ("test", "dog")):
        add_image(tmp_path / split / "1.png")
        line = {"file_name": "1.png", "labels": [label]}
        (tmp_path / split / "metadata.jsonl").write_text(json.dumps(line) + "\n")
    train, test = open_records(f"folder:{tmp_path}@train"), open_records(f"folder:{tmp_path}@test")
    assert train.labels.names == test.labels.names == ("cat", "dog")
    assert labels_of(test) == {"test/1.png": ({"dog"}, set())}
    assert isinstance(test[0].image, Path)
    assert test[0].image.is_file()
    assert len(read_folder(str(tmp_path), None)) == 2
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "train/1.png", "labels": ["cat"]}) + "\n")
    with pytest.raises(InputError, match=r"image 'train/1.png' stands on 2 rows"):
        read_folder(str(tmp_path), None)
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,labels\ntrain/1.png,cow\n")
    (tmp_path / "train" / "metadata.jsonl").unlink()
    (tmp_path / "test" / "metadata.jsonl").unlink()
    assert labels_of(read_folder(str(tmp_path), None)) == {"train/1.png": ({"cow"}, set())}


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no image in it; known kinds: \.jpg"):
        open_records(f"folder:{tmp_path}")
    with pytest.raises(InputError, match=r"none: there is no such folder; check the location"):
        read_folder(str(tmp_path / "none"), None)


def test_files_that_cannot_be_read_as_images_are_told(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for name in ("a.NEF", "b.nef", "c.mov"):
        (tmp_path / "cat" / name).touch()
    told = ["2 raw files were not read; export them as JPEG first", "1 video was not read; only images get tags"]
    with pytest.raises(InputError, match=", ".join(told)):
        read_folder(str(tmp_path), None)
    add_image(tmp_path / "cat" / "a.jpg")
    assert list(read_folder(str(tmp_path), None).notes) == told


def test_boxes_beside_images_are_no_labels_and_folders_in_label_folders_are_told(tmp_path: Path) -> None:
    add_image(tmp_path / "yolo" / "1.jpg", "0 0.5 0.5 0.2 0.25\n17 0.1 0.1 5e-05 0.2\n")
    add_image(tmp_path / "yolo" / "2.jpg", "")
    with pytest.raises(InputError, match="hold boxes as YOLO writes them, no labels; write the labels' names"):
        read_folder(str(tmp_path / "yolo"), None)
    for name in ("train/cat/1.jpg", "train/dog/2.jpg"):
        add_image(tmp_path / "deep" / "set" / name)
        add_image(tmp_path / "plain" / name)
    assert "folders of labels hold folders" in read_folder(str(tmp_path / "deep"), None).notes[0]
    assert read_folder(str(tmp_path / "plain"), None).notes == ()
