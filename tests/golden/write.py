"""Write the golden files with the code that is there; see README.md beside this file."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_verbs import GOLDEN, IMAGES, KEPT, SHOWN, VERBS, describe_api, inside, read_blocks, say, show
from refused_verbs import REFUSED, make_place, refuse

NAMES = ("square", "disc", "line")
MODEL = [
    "model.backbone=vit_tiny_patch16_224",
    "model.backbone_options={embed_dim=16, depth=1, num_heads=2, patch_size=8}",
    "model.pretrained=false",
    "model.image_size=32",
]
RUN = [
    *MODEL,
    "task.kind=patch",
    "data.val_fraction=0.25",
    "data.workers=0",
    "optimiser.lr=1e-2",
    "train.batch_size=8",
    "output.trackers=[]",
    "output.save_every=3",
    "output.log_every=2",
]


def write_images(folder: Path, count: int = 48) -> None:
    """Images of 32 x 32 pixels with up to three things in them, and a table of what they show."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    rows = []
    for place in range(count):
        image = Image.new("L", (32, 32), 20)
        draw = ImageDraw.Draw(image)
        shown = [name for name in NAMES if generator.random() < 0.5]
        for name in shown:
            x, y = generator.integers(2, 20, 2).tolist()
            box = (x, y, x + 9, y + 9)
            if name == "square":
                draw.rectangle(box, fill=230)
            elif name == "disc":
                draw.ellipse(box, fill=230)
            else:
                draw.line(box, fill=230)
        image.save(folder / f"{place}.png", optimize=True)
        rows.append(f"{place}.png,{'|'.join(shown)}\n")
    (folder / "labels.csv").write_text("image,labels\n" + "".join(rows))


def run(*words: str) -> None:
    """A verb, as a user runs it."""
    subprocess.run([sys.executable, "-m", "pivotpatch", *words], check=True)


def write_kept(folder: Path) -> None:
    write_images(folder / "images")
    with inside(folder):
        run("train", IMAGES, "--out", "run", "train.epochs=6", *RUN)
        run("tune", "run")
        run("evaluate", "run", IMAGES, "--save", "scores.parquet", "--keep-patches")
        run("train", IMAGES, "--out", "plain", "train.epochs=6", *RUN, "task.kind=image")
        run("evaluate", "plain", IMAGES, "--save", "baseline.parquet")
        Path("plain/best").rename("checkpoint")
        shutil.rmtree("plain")
        command = [sys.executable, "-m", "pivotpatch", "train", IMAGES, "--out", "stopped", "train.epochs=10", *RUN]
        process = subprocess.Popen(command)
        while not Path("stopped/last").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    for left in (*folder.rglob("curves.png"), *folder.rglob(".lock")):
        left.unlink()
    for path in folder.rglob("environment.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "platform": "Linux"}, indent=2) + "\n")


def write_said() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "kept"
        shutil.copytree(KEPT, copy)
        with inside(copy):
            said = {name: say(*words) for name, words in VERBS.items()}
    (GOLDEN / "said.json").write_text(json.dumps(said, indent=1) + "\n")


def write_shown() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(KEPT, Path(scratch) / "kept")
        with inside(Path(scratch) / "kept"):
            shown = [f"$ {' '.join(VERBS[name])}\n{show(*VERBS[name])}\n" for name in SHOWN]
    (GOLDEN / "shown.txt").write_text("\n".join(shown), "utf-8")


def write_api() -> None:
    (GOLDEN / "api.json").write_text(json.dumps(describe_api(), indent=1) + "\n")


def write_refused() -> None:
    """Ask each command that stands there once more; a new one is added as `$ command` with any line below it."""
    with tempfile.TemporaryDirectory() as scratch, inside(Path(scratch)):
        make_place()
        blocks = [f"$ {command}\n{refuse(command)}\n" for command in read_blocks(REFUSED)]
    REFUSED.write_text("\n".join(blocks), "utf-8")


if __name__ == "__main__":
    wanted = sys.argv[1:]
    if not wanted:
        sys.exit("say what to write: --said --shown --refused --api, or --kept, which should stay as old as it is")
    if "--kept" in wanted:
        shutil.rmtree(KEPT, ignore_errors=True)
        write_kept(KEPT)
    if "--said" in wanted:
        write_said()
    if "--shown" in wanted:
        write_shown()
    if "--refused" in wanted:
        write_refused()
    if "--api" in wanted:
        write_api()
