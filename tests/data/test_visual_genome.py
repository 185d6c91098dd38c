import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet
from pivotpatch.data.visual_genome import build_label_map, read_named_images, read_visual_genome
from pivotpatch.errors import InputError

Image = dict[str, Any]


def make_image(image_id: int, *objects: tuple[str, str | None]) -> Image:
    """An image of release 1.4 whose objects have one name and one synset or none."""
    listed = [
        {"synsets": [synset] if synset else [], "object_id": 1000 * image_id + i, "names": [name], "x": 421}
        for i, (name, synset) in enumerate(objects)
    ]
    return {"image_id": image_id, "objects": listed, "image_url": f"https://example.org/VG_100K/{image_id}.jpg"}


def write(root: Path, images: object) -> Path:
    for folder in ("VG_100K", "VG_100K_2"):
        (root / folder).mkdir(exist_ok=True)
    path = root / "objects.json"
    path.write_text(json.dumps(images))
    return path


def labels_by_name(records: RecordSet) -> dict[str, set[str]]:
    return {record.name: {records.labels.names[i] for i in record.positive} for record in records}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten images with clock and tree, in no order of ids, the last with nothing named."""
    ids = [2417997, 3, 713, 5, 1592, 1, 107902, 2, 61512]
    images = [make_image(i, ("Clock ", "clock.n.01"), ("tree" if i % 2 else "sidewalk", None)) for i in ids]
    write(tmp_path, [*images, make_image(4)])
    return tmp_path


def test_a_given_map_decides_labels_and_their_order(root: Path) -> None:
    # A name under two labels goes to the later.
    forms = {"path": ["sidewalk", "tree"], "plant": ["tree"], "zoo": [], "timepiece": ["CLOCK", "watch"]}
    (root / "map.json").write_text(json.dumps(forms))
    records = open_records(f"vg:{root}?label_map=map.json")
    assert records.labels.names == ("path", "plant", "zoo", "timepiece")
    assert labels_by_name(records) == {
        f"VG_100K/{i}.jpg": set() if i == 4 else {"timepiece", "plant" if i % 2 else "path"}
        for i in [1, 2, 3, 4, 5, 713, 1592, 61512, 107902, 2417997]
    }


def test_images_are_looked_up_in_both_folders(root: Path) -> None:
    for image_id in (1, 3):
        (root / f"VG_100K_2/{image_id}.jpg").touch()
    records = read_visual_genome(str(root), None, min_images=1)
    folders = [record.name.partition("/")[0] for record in records]
    assert folders[:4] == ["VG_100K_2", "VG_100K", "VG_100K_2", "VG_100K"]
    assert records[0].image == root / "VG_100K_2/1.jpg"
    for folder in ("VG_100K", "VG_100K_2"):
        (root / folder).rename(root / f"{folder}_moved")
    with pytest.raises(InputError, match="there is neither VG_100K nor VG_100K_2; unpack the images there"):
        read_visual_genome(str(root), None, min_images=1)


BIKES = [
    [("bike", "bicycle.n.01"), ("bicycle", "bicycle.n.01"), ("motorbike", "minibike.n.01")],
    [("bike", "bicycle.n.01"), ("bikes", None), ("cycle", "bicycle.n.01")],
    [("bike", "minibike.n.01"), ("cycle", "cycle.n.01")],
]
CASES: list[tuple[Any, list[list[str]]]] = [  # names and synsets of each image's objects, the names of each label
    ([[("tree", "tree.n.01")], [("trees", "tree.n.01"), ("tree", None)]], [["tree", "trees"]]),
    ([[("blind", "blind_person.n.01")], [("blinds", "window_blind.n.01")]], [["blind"], ["blinds"]]),
    ([[("glass", None), ("glasses", None)]], [["glass"], ["glasses"]]),  # nothing says that they are one
    # Two of three bikes are bicycles; cycles are half and half, which decides nothing.
    (BIKES, [["bike", "bicycle"], ["cycle"], ["bikes"], ["motorbike"]]),
    ([[(name, None)] for name in ("t-shirt", "T  Shirt", "tshirt", "T-Shirt", "shirt", "t-shirt.")],
     [["t-shirt", "t shirt", "tshirt"], ["shirt"]]),
    ([[(name, None) for name in ("№ 1", "café, bar", "大きい木", "---", "a/b")]],
     [["---"], ["a/b"], ["café, bar"], ["№ 1"], ["大きい木"]]),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "expected"), CASES)
def test_own_map_merges_what_means_the_same(tmp_path: Path, shown: Any, expected: list[list[str]]) -> None:
    path = write(tmp_path, [make_image(number, *objects) for number, objects in enumerate(shown)])
    forms = build_label_map(read_named_images(path), min_images=1)
    assert forms == {names[0]: names for names in expected}
    assert list(forms) == [names[0] for names in expected]


def test_own_map_agrees_with_counting_by_hand(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    words = [f"{word}{end}" for word in ("tree", "car", "dog", "lamp post", "zebra") for end in ("", "s")]
    shown = [sorted({words[i] for i in generator.integers(len(words), size=3)}) for _ in range(60)]
    write(
        tmp_path, [make_image(i, *((word, word.removesuffix("s")) for word in names)) for i, names in enumerate(shown)]
    )
    records = read_visual_genome(str(tmp_path), None, min_images=20, num_labels=4)
    singular = [{word.removesuffix("s") for word in names} for names in shown]
    counts = {word: sum(word in names for names in singular) for word in set().union(*singular)}
    largest = sorted((word for word in counts if counts[word] >= 20), key=lambda word: (-counts[word], word))[:4]
    assert [name.removesuffix("s") for name in records.labels.names] == largest
    found = [{name.removesuffix("s") for name in names} for names in labels_by_name(records).values()]
    assert found == [names & set(largest) for names in singular]


def test_release_1_0_is_read(tmp_path: Path) -> None:
    thing = {"id": 5, "x": 1, "y": 2, "w": 3, "h": 4, "names": ["clock"]}
    write(tmp_path, [{"id": 12, "objects": [thing]}, {"id": 9, "objects": [thing]}])
    records = read_visual_genome(str(tmp_path), None, min_images=2)
    assert labels_by_name(records) == {"VG_100K/9.jpg": {"clock"}, "VG_100K/12.jpg": {"clock"}}


BROKEN: list[object] = [
    [],
    {"images": []},
    [{"image_id": 1}],
    [{"image_id": 5, "objects": [{"names": [1]}]}],
]


@pytest.mark.parametrize("images", [*BROKEN, [make_image(5), make_image(3), make_image(5)]])
def test_damaged_content_is_refused(tmp_path: Path, images: object) -> None:
    write(tmp_path, images)
    message = "not a list of images with their objects, names" if images in BROKEN else "image 5 stands twice; remove"
    with pytest.raises(InputError, match=rf"objects\.json: {message}"):
        read_visual_genome(str(tmp_path), None)


@pytest.mark.parametrize(("address", "message"), [
    ("vg:{root}@train?protocol=published", "needs its label map; give label_map=FILE"),
    ("vg:{root}@val", r"there is no split 'val'; known: test, train$"),
    ("vg:{root}", "no label has min_images=500 among 10 images; lower min_images"),
    ("vg:{root}?num_labels=-1", "option num_labels: value '-1': Input should be greater"),
    ("vg:{root}?label_map=list.json", r"list\.json: does not give each label a list of names \(.*dict"),
    ("vg:{root}?label_map=words.json", r"words\.json: does not give .*tree Input should be a valid list"),
])  # fmt: skip
def test_wrong_requests_are_refused(root: Path, address: str, message: str) -> None:
    (root / "list.json").write_text("[]")
    (root / "words.json").write_text('{"tree": "tree"}')
    with pytest.raises(InputError, match=message):
        open_records(address.format(root=root))


MAP = {"pole": ["pole", "post"], "dog": ["dog", "puppy"], "street light": ["street light"], "Cat": ["Cat"]}
NAMES = [
    "Pole.", "tall wooden pole", "tall street pole", "Dark  DOG", "puppy", "street light", "white street light", "cat",
    "dark", "post .", "", "black dog.", "small", "zebra",
]  # fmt: skip


def test_the_published_labels_and_split_written_out_once_more(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    content = []
    for image_id in generator.permutation(np.arange(5, 205)).tolist():
        names = generator.choice(NAMES, size=(generator.integers(0, 4), 2)).tolist()
        content.append({"image_id": image_id, "objects": [{"names": pair, "synsets": []} for pair in names]})
    write(tmp_path, content)
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    label_at = {name: place for place, names in enumerate(MAP.values()) for name in names}
    expected = {}
    for image in sorted(content, key=lambda each: each["image_id"]):
        found = set()
        for item in image["objects"]:
            words = item["names"][0].lower().strip()
            words = words[:-1].strip() if words.endswith(".") else words
            parts = words.split()
            if len(parts) > 1 and {*parts[:-1]} <= {"tall", "wooden", "dark", "white", "black", "small"}:
                words = parts[-1]
            if words in label_at:
                found.add(label_at[words])
        if found:
            expected[f"VG_100K/{image['image_id']}.jpg"] = found
    order = np.random.RandomState(1).permutation(len(expected))
    held = round(0.3 * len(expected))
    parts = {"train": np.sort(order[:-held]), "test": np.sort(order[-held:])}
    for split, rows in parts.items():
        records = open_records(f"vg:{tmp_path}@{split}?protocol=published&label_map=map.json")
        assert records.labels.names == tuple(MAP)
        read = {record.name: set(record.positive) for record in records}
        names = [list(expected)[row] for row in rows]
        assert [Path(name).name for name in read] == [Path(name).name for name in names]
        assert list(read.values()) == [expected[name] for name in names]
