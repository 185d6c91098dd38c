"""Labels and splits of the paper's data sets, written out once more from its published protocol."""

import json
from pathlib import Path

import numpy as np
import pytest

from pivotpatch.data.address import open_records
from pivotpatch.data.visual_genome import clean_published
from pivotpatch.errors import InputError

MAP = {"pole": ["pole", "post"], "dog": ["dog", "puppy"], "street light": ["street light"], "Cat": ["Cat"]}
NAMES = [
    "Pole.", "tall wooden pole", "tall street pole", "Dark  DOG", "puppy", "street light", "white street light", "cat",
    "dark", "post .", "", "black dog.", "small", "zebra",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    content = []
    for image_id in generator.permutation(np.arange(5, 205)).tolist():
        names = generator.choice(NAMES, size=(generator.integers(0, 4), 2)).tolist()
        content.append({"image_id": image_id, "objects": [{"names": pair, "synsets": []} for pair in names]})
    (tmp_path / "objects.json").write_text(json.dumps(content))
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    (tmp_path / "VG_100K").mkdir()
    return tmp_path


def test_visual_genome_has_the_published_labels_and_split(folder: Path) -> None:
    label_at = {name: place for place, names in enumerate(MAP.values()) for name in names}
    expected = {}
    for image in sorted(json.loads((folder / "objects.json").read_text()), key=lambda each: each["image_id"]):
        found = set()
        for item in image["objects"]:
            words = item["names"][0].lower().strip()
            words = words[:-1].strip() if words.endswith(".") else words
            parts = words.split()
            if len(parts) > 1 and all(
                part in ("tall", "wooden", "dark", "white", "black", "small") for part in parts[:-1]
            ):
                words = parts[-1]
            if words in label_at:
                found.add(label_at[words])
        if found:
            expected[f"VG_100K/{image['image_id']}.jpg"] = found
    order = np.random.RandomState(1).permutation(len(expected))
    held = round(0.3 * len(expected))
    parts = {"train": np.sort(order[:-held]), "test": np.sort(order[-held:])}
    for split, rows in parts.items():
        records = open_records(f"vg:{folder}@{split}?protocol=published&label_map=map.json")
        assert records.labels.names == tuple(MAP)
        read = {record.name: set(record.positive) for record in records}
        names = [list(expected)[row] for row in rows]
        assert [Path(name).name for name in read] == [Path(name).name for name in names]
        assert list(read.values()) == [expected[name] for name in names]


def test_the_published_protocol_needs_its_map(folder: Path) -> None:
    with pytest.raises(InputError, match="needs its label map; give label_map=FILE"):
        open_records(f"vg:{folder}@train?protocol=published")
    assert clean_published("dark") == "dark"
    assert clean_published("") == ""
