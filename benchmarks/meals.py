"""Images that are not MS-COCO's: do patches help a frozen backbone that has never seen these labels, or do pixels?

    git clone https://github.com/thearonn/02456_DEEP_LEARNING_RECOGNIZING_FOOD_IN_IMAGES meals
    python benchmarks/meals.py meals/VOC2007        # about an hour on two cores; again goes on

Ten labels, the names of the boxes; of images that are the same byte for byte one is kept; a fifth is drawn for test.
Training images are the first, second and third hundred, and so on. A plain model has the tagger's backbone, a new
head and a larger input.
"""

import csv
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch
from recording import describe_machine, write_json

from pivotpatch.models import MultiLabelClassifier, PatchClassifier
from pivotpatch.models.open import open_model

RESULT = Path(__file__).parent / "results" / "meals.json"
PARTS = {f"{count}-{draw}": (count, draw) for count in (100, 300, 1000) for draw in (1, 2, 3)}
SIZES = 224, 320, 448


def make_tables(folder: Path) -> int:
    """Write test.csv, all.csv and three tables each of 100, 300 and 1,000 images; how many images there are."""
    found: dict[str, tuple[str, str]] = {}  # by content
    for path in sorted((folder / "Annotations").glob("*.xml")):
        image = folder / "JPEGImages" / f"{path.stem}.jpg"
        if image.is_file():
            names = {(each.text or "").strip() for each in ET.parse(path).iterfind("object/name")}
            row = f"JPEGImages/{image.name}", "|".join(sorted(names))
            found.setdefault(sha256(image.read_bytes()).hexdigest(), row)
    rows = list(found.values())
    random.Random(0).shuffle(rows)
    test, train = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    parts = {part: train[(draw - 1) * count : draw * count] for part, (count, draw) in PARTS.items()}
    for name, part in {"test": test, "all": train, **parts}.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "labels"), *part])
    return len(rows)


def make_plain(size: int, folder: Path) -> Path:
    """A checkpoint of a plain model with the tagger's backbone and input pixels of this size."""
    tagger, out = open_model("tagger"), folder / f"plain{size}"
    if not out.is_dir():
        assert isinstance(tagger, PatchClassifier)
        model = MultiLabelClassifier(replace(tagger.architecture, image_size=size), tagger.labels, pretrained=False)
        model.backbone.load_state_dict(tagger.backbone.state_dict())
        model.save_pretrained(out)
    return out.resolve()


def judge(folder: Path, kind: str, part: str, *changes: str) -> dict[str, Any]:
    """Train on a part and score the test images, unless that is done; mAP of each kind of logits, in percent."""
    run, scored = f"runs/{kind}-{part}", folder / f"{kind}-{part}.json"
    if not scored.is_file():
        shutil.rmtree(folder / run, ignore_errors=True)  # one that was cut off
        call = [sys.executable, "-m", "pivotpatch"]
        subprocess.run([*call, "train", "tagger", f"{part}.csv", "--out", run, *changes], cwd=folder, check=True)
        words = ["evaluate", run, "test.csv", "--json"]
        scored.write_text(subprocess.run([*call, *words], cwd=folder, check=True, text=True, stdout=-1).stdout)
    said = json.loads(scored.read_text())
    intervals = {name: each["interval"] for name, each in said["kinds"].items()}
    if said["gain"] is not None:
        intervals["gain"] = said["gain"]["interval"]  # of tde over image, by the same resampled images
    found = {name: {key: round(100 * at, 2) for key, at in each.items()} for name, each in intervals.items()}
    return {"kind": kind, "train": part, "mAP": found}


def main() -> None:
    """Make the tables, train on each, and write what the test images say."""
    folder = Path(sys.argv[1])
    images = make_tables(folder)
    rows = [judge(folder, "recipe", part) for part in (*PARTS, "all")]
    for part in list(PARTS)[-3:]:
        rows.append(judge(folder, "patches", part, "frozen.ordinary=0"))
        for size in SIZES:
            start = f"model.start_from={make_plain(size, folder)}"
            rows.append(judge(folder, f"plain{size}", part, start, "task.kind=image", "frozen.ordinary=0"))
    write_json(RESULT, {"machine": describe_machine(torch.device("cpu")), "images": images, "rows": rows})
    for row in rows:
        print(row["kind"], row["train"], row["mAP"])


if __name__ == "__main__":
    main()
