r"""Make the files of the bundled tagger from a tuned checkpoint, and statistics of ordinary images for `teach`.

    python benchmarks/coco256.py --data table:coco --weights lite0.safetensors --checkpoints checkpoints \
        --runs 224-native+flip+overlap+lite0+lr3+closer352 \
        --set train.epochs=6 evaluation.every=2 precision.compile=false data.val_fraction=0.05
    python benchmarks/make_tagger.py --split table:coco@train 0.05 --images heldout
    pivotpatch tune CHECKPOINT table:heldout/images.csv --mixing keep --thresholds precision --effort 0.6 --out tuned
    python benchmarks/make_tagger.py tuned --images heldout --out src/pivotpatch/tagger

The first of its two commands writes the images that the training held out. README.md, the card, is written by hand.
"""

import argparse
import csv
import json
from hashlib import sha256
from pathlib import Path

from rich.progress import Progress

from pivotpatch.writing import replacing

ORDINARY = 1000  # images that `teach` compares with
SMALL = 1024  # bytes; less than that stays in the graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a tuned one")
    parser.add_argument(
        "--split", nargs=2, metavar=("ADDRESS", "SHARE"), help="what was trained on, and held out of it"
    )
    parser.add_argument("--images", type=Path, required=True, help="folder of the images that were held out")
    parser.add_argument("--out", type=Path, help="folder of the tagger")
    args = parser.parse_args()
    if args.split:
        address, share = args.split
        write_held_out(address, share, args.images)
    if args.checkpoint:
        make(args.checkpoint, args.images, args.out)


def write_held_out(address: str, share: str, folder: Path) -> None:
    """Write the images that `data.val_fraction` holds out, as files and a table of their labels."""
    from pivotpatch.training.config import load_config
    from pivotpatch.training.images import open_training_records

    held = open_training_records(load_config(None, [f"data.train={address}", f"data.val_fraction={share}"])).val
    assert held is not None
    folder.mkdir()
    with (folder / "images.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "labels"])
        for row, target in enumerate(held.target()):
            source = held.images.source(held.place(row))
            assert isinstance(source, bytes)
            (folder / f"{row:05d}.jpg").write_bytes(source)
            names = [name for name, value in zip(held.labels.names, target.tolist(), strict=True) if value == 1]
            table.writerow([f"{row:05d}.jpg", "|".join(names)])


def make(checkpoint: str, images: Path, folder: Path) -> None:
    """Write checkpoint and graph in half precision, and the statistics of the first held-out images."""
    from pivotpatch import PatchClassifier, load_checkpoint, save_checkpoint
    from pivotpatch.export import export_onnx
    from pivotpatch.inference.embedding import embed_files
    from pivotpatch.tuning.teach import FILE, Background

    save_checkpoint(load_checkpoint(checkpoint), folder, overwrite=True, half=True)
    model = load_checkpoint(folder)  # as users have it, in half precision
    assert isinstance(model, PatchClassifier)
    print(export_onnx(model, folder / "tagger.onnx", half=True, looks=True))
    share_weights(folder / "tagger.onnx", folder / "model.safetensors")
    paths = [str(path) for path in sorted(images.glob("*.jpg"))[:ORDINARY]]
    with Progress() as progress:
        task = progress.add_task("embed", total=len(paths))
        seen = embed_files(model, paths, progress=lambda done: progress.update(task, completed=done))
    Background.measure(seen.embeddings).save(folder / FILE, model)


def share_weights(graph: Path, weights: Path) -> None:
    """Let a graph take from a safetensors file beside it what both hold: each weight is in the package once.

    The file's digest goes into the graph, whose own says then which model it is.
    """
    import onnx
    from onnx import numpy_helper

    raw, model = weights.read_bytes(), onnx.load(graph)
    begin = 8 + int.from_bytes(raw[:8], "little")
    places = [told["data_offsets"] for name, told in json.loads(raw[8:begin]).items() if name != "__metadata__"]
    held = {raw[begin + first : begin + last]: begin + first for first, last in places}
    for weight in model.graph.initializer:
        content = numpy_helper.to_array(weight).tobytes()
        if len(content) >= SMALL and content in held:
            weight.ClearField("raw_data")
            weight.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", weights.name), ("offset", held[content]), ("length", len(content))):
                weight.external_data.add(key=key, value=str(value))
    model.metadata_props.add(key="weights", value=sha256(raw).hexdigest())
    with replacing(graph) as written:
        written.write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main()
