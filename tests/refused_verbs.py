"""Commands that are refused: a folder in which each makes its mistake, and the one line that answers it."""

import json
import os
import re
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import timm
import torch
from golden_verbs import GOLDEN
from made_scores import make_scores
from timm.models import save_for_hf
from verb import LABELS, SIZE, make_model, save, write_images, write_run

from pivotpatch.cli.main import main
from pivotpatch.inference.score_file import write_scores
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier

REFUSED = GOLDEN / "refused.txt"
PACKAGE = Path(__file__).parents[1] / "src" / "pivotpatch"
TEXTS = {
    "cow.csv": "image,labels\nval0.png,cow\nval1.png,\n",
    "dog.csv": "image,labels\nval0.png,dog\nval1.png,\n",
    "few.csv": "image,cat,dog,fish\nval0.png,0,1,0\nval1.png,1,0,0\n",
    "none.csv": "image,cat,dog,fish\nval0.png,0,0,0\n",
    "theirs.csv": "image,cat\n",
    "tags.csv": "picture,labels,probs\na.png,cat,0.9,1\n",
    "tags.csv.summary.json": "{}",
    "own.csv": "what was there stays",
    "short.csv": "picture,cat,dog,fish\nval0.png,1,2,3\n",
    "scores.csv": "picture,cow,target:cow\na,1,1\nb,2,0\n",
    "three.csv": "picture,a,target:a\nx,1,1\ny,-1,0\nz,2,1\n",
    "deny.toml": 'deny = ["kat"]',
    "epoch.toml": "[train]\nepoch = 3\n",
    "mine.toml": f'[model]\nbackbone = "test_resnet"\nimage_size = {SIZE}\n[task]\nkind = "image"\n',
    "two.json": json.dumps(["cat", "cup"]),
}


def make_place() -> None:
    """Images, models, runs and scores here, each as a verb left it."""
    for name, text in TEXTS.items():
        Path(name).write_text(text)
    write_images("train", 20)
    write_images("val", 8, seed=1)
    Path("photos").mkdir()
    for name in ("cat.jpg", "coffee.jpg"):
        shutil.copy(PACKAGE / "app" / "page" / name, "photos")
    for name, images, count in (("mugs", "val", 3), ("others", "train", 20)):
        Path(name).mkdir()
        for place in range(count):
            shutil.copy(f"{images}{place}.png", f"{name}/{place}.png")
    for name, kind in (("model", PatchClassifier), ("plain", MultiLabelClassifier)):
        save(name, kind)
    shutil.copytree("plain", "plain.old")
    Path("taken.parquet").mkdir()
    for name, labels in (("flexible", LABELS), ("narrow", LABELS[:1])):
        save_checkpoint(PatchClassifier("test_resnet", labels, image_size=SIZE), name)
    write_run("run", make_model(), "data.val_fraction=0.4")
    write_run("whole", make_model(), "data.val_fraction=0")
    write_run("lacking", make_model(), "data.val=dog.csv")
    write_run("overlapping", make_model(), "data.val=train.csv")
    write_run("ordinary", make_model(MultiLabelClassifier), "data.val_fraction=0.4")
    scores = make_scores(LABELS, count=12)
    write_scores(scores, "pat.parquet")
    write_scores(scores.only("image"), "asl.parquet")
    network = timm.create_model("test_resnet", num_classes=3, pretrained_cfg_overlay={"input_size": (3, SIZE, SIZE)})
    save_for_hf(network, "theirs", model_config={"label_names": LABELS}, safe_serialization=True)
    torch.save(network.state_dict(), "w.pth")


def refuse(command: str) -> str:
    """The line that answers a command, without this folder, the package's, and lists of what is known, which grow."""
    words, told, said = shlex.split(command), StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(told), redirect_stdout(said):
        while "=" in words[0]:  # a variable, as in a shell
            patch.setenv(*words.pop(0).split("=", 1))
        status = main(words)
    line = told.getvalue().splitlines()[-1]
    assert (status, said.getvalue()) == (1, ""), command
    assert line.startswith("pivotpatch: ")
    line = re.sub(f"{Path.cwd()}/|{PACKAGE}/", "", line.removeprefix("pivotpatch: "))
    return re.split(r" known(?: kinds)?: ", line)[0]


def take_state() -> dict[str, int]:
    """When each file here changed for the last time."""
    paths = (Path(folder) / name for folder, _, names in os.walk(".") for name in names)
    return {str(path): path.stat().st_mtime_ns for path in paths}
