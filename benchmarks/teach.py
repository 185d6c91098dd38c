"""What a label is worth that was taught from 5, 20 or 100 images, and what it does to the other labels.

Labels should be new to the model: give one that was trained without them. The bundled tagger was trained with all of
MS-COCO's, so that what it reaches here is the most that can be hoped for; a backbone that was trained on ImageNet alone
shows the least. Embeddings are kept in --cache: 5,000 images take minutes on a CPU, all else seconds.

    python benchmarks/teach.py --model tagger --images table:pool.parquet --test table:coco256@test --labels held.json \
        --cache cache --out benchmarks/results/teach_tagger.json
    python benchmarks/teach.py --model tagger --images table:pool.parquet --cache cache --write-background b.safetensors
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.data.records import RecordSet
from pivotpatch.inference.embedding import AT_ONCE, quicken_model
from pivotpatch.models.classifier import Embeddings
from pivotpatch.models.open import open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_views
from pivotpatch.tuning.teach import Background, add_label, teach

COUNTS = (5, 20, 100)
DRAWS = 3
TOLD = ("AP", "precision", "precision_told", "precision_kept", "recall", "recall_told", "recall_covered")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tagger")
    parser.add_argument("--images", required=True, help="address of images that the model has never seen")
    parser.add_argument("--count", type=int, help="of which only the first so many")
    parser.add_argument("--background", type=int, default=1000, help="the first so many are ordinary images")
    parser.add_argument("--test", help="address of images to judge by")
    parser.add_argument("--first", type=int, help="of which only the first so many")
    parser.add_argument("--labels", type=Path, help="JSON list of the labels to teach")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--note", default="", help="what to know about the model, for the record")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write-background", type=Path, metavar="FILE", help="write the background of `teach`")
    args = parser.parse_args()
    model = open_model(args.model)
    assert isinstance(model, PatchClassifier)
    images = take_first(open_records(args.images), args.count)
    seen = embed(model, images, args.cache / f"{Path(args.model).name}-images.npy")
    usual = choose(seen, np.arange(args.background))
    if args.write_background:
        Background.measure(usual).save(args.write_background, model)
        return
    tests = take_first(open_records(args.test), args.first)
    shown = embed(model, tests, args.cache / f"{Path(args.model).name}-test.npy")
    found = measure(model, (images, seen), (tests, shown), Background.measure(usual), args)
    text = json.dumps(found, indent=1)
    print(text if args.out is None else {key: value for key, value in found.items() if key != "rows"})
    if args.out is not None:
        args.out.write_text(text + "\n", "utf-8")


def take_first(records: RecordSet, count: int | None) -> RecordSet:
    """The first images of a set, or all of them."""
    return records if count is None else records[:count]


def embed(model: PatchClassifier, records: RecordSet, path: Path) -> Tensor:
    """Embeddings (N,1+P,D) of images and their patches, from the cache where they are there."""
    if path.exists():
        return torch.from_numpy(np.load(path)[: len(records)]).float()
    size, found = (model.picture_size, model.picture_size), []
    quick = quicken_model(model, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        for batch in make_loader(records, size=size, batch_size=AT_ONCE, every_batch=True):
            views = make_views(quick, batch.images)
            seen = quick.embed_views(views.image, views.patches)
            assert seen.patches is not None
            found.append(torch.cat([seen.image[:, None], seen.patches], dim=1).half())
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, torch.cat(found).numpy())
    return torch.cat(found).float()


def choose(seen: Tensor, rows: np.ndarray) -> Embeddings:
    """Some images' embeddings, from those of all (N,1+P,D)."""
    return Embeddings(seen[rows, 0], seen[rows, 1:])


def measure(
    model: PatchClassifier,
    images: tuple[RecordSet, Tensor],
    tests: tuple[RecordSet, Tensor],
    background: Background,
    args: argparse.Namespace,
) -> dict[str, object]:
    """Average precision, precision and recall of each label by number of images, and mAP of the others."""
    (records, seen), (judged, shown) = images, tests
    names = json.loads(args.labels.read_text("utf-8"))
    truth, given = judged.target(), records.target().numpy()
    result: dict[str, object] = {"model": args.model, "note": args.note, "test_images": len(judged), "draws": DRAWS}
    rows: list[dict[str, float | str]] = []
    for count in COUNTS:
        for draw in range(DRAWS):
            for name in names:
                target = truth[:, judged.labels.index(name)]
                have = np.flatnonzero(given[:, records.labels.index(name)] == 1)
                have = have[have >= args.background]
                generator = np.random.default_rng([draw, count, names.index(name)])
                chosen = generator.choice(have, min(count, len(have)), replace=False)
                lesson = teach(model, "new", choose(seen, chosen), background=background)
                taught = add_label(model, lesson)
                assert isinstance(taught, PatchClassifier)
                with torch.inference_mode():
                    out = taught.project_embeddings(Embeddings(shown[:, 0], shown[:, 1:]))
                logits = out.tde_logits[:, -1]
                decided = (logits / (1 + model.patching.lam)).sigmoid() > lesson.threshold
                recall = decided[target == 1].double().mean().item()
                alarms = decided[target == 0].double().mean().item()
                expected = lesson.share * recall + (1 - lesson.share) * alarms
                precision = (
                    lesson.share * recall / expected if expected else 0.0
                )  # at the share that the lesson is told for
                rows.append(
                    {
                        "label": name,
                        "asked": count,
                        "images": len(chosen),
                        "draw": draw,
                        "AP": average_precision(logits[:, None], target[:, None]).mean,
                        "precision": precision,
                        "recall": recall,
                        "recall_told": lesson.recall.value,
                        "recall_covered": lesson.recall.low <= recall <= lesson.recall.high,
                        "precision_told": lesson.precision,
                        "precision_kept": precision >= lesson.precision,
                        "share_given": decided.float().mean().item(),
                    }
                )
    for count in COUNTS:
        here = [row for row in rows if row["asked"] == count]
        told: dict[str, object] = {"images": float(np.mean([float(row["images"]) for row in here]))}
        for key in TOLD:
            means = [np.mean([float(row[key]) for row in here if row["draw"] == draw]) for draw in range(DRAWS)]
            told[key] = {"mean": float(np.mean(means)), "low": float(min(means)), "high": float(max(means))}
        result[str(count)] = told
    with torch.inference_mode():
        before = model.project_embeddings(Embeddings(shown[:, 0], shown[:, 1:])).tde_logits
    common = [name for name in model.labels if name in judged.labels.names]
    own, theirs = ([each.index(name) for name in common] for each in (model.labels, list(judged.labels.names)))
    whole = [average_precision(part[:, own], truth[:, theirs]).mean for part in (before, out.tde_logits)]
    result["other_labels"] = {
        "mAP_before": whole[0],
        "mAP_after": whole[1],
        "largest_difference_of_logits": (out.tde_logits[:, :-1] - before).abs().max().item(),
    }
    known = [name for name in names if name in model.labels]
    if known:
        column = [model.labels.index(name) for name in known]
        places_of = [judged.labels.index(name) for name in known]
        result["full_training_AP"] = average_precision(before[:, column], truth[:, places_of]).mean
    result["rows"] = rows
    return result


if __name__ == "__main__":
    main()
