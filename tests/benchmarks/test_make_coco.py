"""The tables behind the figures, made from a small MS-COCO."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pivotpatch.data import open_records
from pivotpatch.runtime import decode_image

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from make_coco import make_tables

LABELS = ["person", "toothbrush", "bottle"]


def test_tables_hold_the_chosen_images_in_their_order_with_their_labels(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for split, numbers in {"train2014": [9, 30, 581929], "val2014": [42, 73]}.items():
        (tmp_path / split).mkdir()
        for number in numbers:
            pixels = np.full((60, 90, 3), number % 200, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / f"COCO_{split}_{number:012}.jpg")
        content = {
            "images": [{"id": number, "file_name": f"COCO_{split}_{number:012}.jpg"} for number in numbers],
            "categories": [{"id": place, "name": name} for place, name in enumerate(LABELS)],
            "annotations": [{"image_id": number, "category_id": number % 3} for number in numbers],
        }
        (tmp_path / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    out = tmp_path / "made"
    make_tables(str(tmp_path), {"train": [581929, 9], "test": [73]}, out)
    for address, numbers in {
        "coco256@train": [581929, 9],
        "coco256@test": [73],
        "coco_all@train": [9, 30, 581929],
        "coco_all@test": [73],
    }.items():
        records = open_records(f"table:{out}/{address}")
        assert list(records.labels.names) == LABELS
        assert [record.positive for record in records] == [(number % 3,) for number in numbers]
        for record, number in zip(records, numbers, strict=True):
            assert record.name.endswith(f"{number:012}.webp")
            pixels = decode_image(record.image)
            assert pixels.shape == (256, 256, 3)
            assert abs(pixels.astype(int) - number % 200).max() <= 2
    with pytest.raises(SystemExit, match="exists; remove it"):
        make_tables(str(tmp_path), {"train": [9], "test": [73]}, out)
    with pytest.raises(SystemExit, match="lacks 1 of 2 images, such as 8"):
        make_tables(str(tmp_path), {"train": [9, 8], "test": [73]}, tmp_path / "other")
