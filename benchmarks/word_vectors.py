"""How much do word vectors matter? ML-GCN's classifiers on features of a backbone that stays as it is.

Vectors of a file beside random ones, those of the file given to wrong labels, and a linear layer; AdamW, mAP on test
images. Images are looked at once, without augmentation, and max-pooled as ML-GCN does.

    python benchmarks/word_vectors.py --data table:coco256 --weights resnet50.safetensors --vectors glove.6B.300d.txt
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from coco256 import COMMON, SIZES
from recording import describe_machine, write_json
from torch import Tensor, nn

from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import hold_images
from pivotpatch.data.records import RecordSet
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.views import make_views
from pivotpatch.peers.label_priors import read_vectors
from pivotpatch.peers.ml_gcn import MLGCNHead
from pivotpatch.training.config import load_config
from pivotpatch.training.model import make_model

RESULT = Path(__file__).parent / "results" / "word_vectors.json"
KINDS = ("linear", "random", "given", "shuffled")
STEP = 100  # images that pass the backbone at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="address without its split")
    parser.add_argument("--weights", type=Path, required=True, help="weights of the backbone")
    parser.add_argument("--vectors", type=Path, required=True, help="text file of word vectors of 300 numbers")
    parser.add_argument("--images", type=int, nargs=2, default=[3000, 1500], help="of train and test")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--commit", default="", help="of the code, for the record")
    args = parser.parse_args()
    torch.set_num_threads(2)
    splits = {name: embed(args, name, count) for name, count in zip(("train", "test"), args.images, strict=True)}
    labels = open_records(f"{args.data}@train").labels.names
    vectors = read_vectors(args.vectors, labels)
    found: dict[str, list[float]] = {}
    for kind in KINDS:
        found[kind] = [train(kind, seed, vectors, splits, epochs=args.epochs) for seed in args.seeds]
        print(f"{kind:10} {statistics.mean(found[kind]):.2f}  {' '.join(f'{each:.2f}' for each in found[kind])}")
    about = {"images": args.images, "epochs": args.epochs, "seeds": args.seeds, "commit": args.commit}
    write_json(RESULT, {**describe_machine(torch.device("cpu")), **about, "mAP": found})


def embed(args: argparse.Namespace, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Max-pooled features (N,D) of the first images of a split, and their target (N,L)."""
    records = open_records(f"{args.data}@{split}")[:count]
    changes = [*COMMON, *SIZES["224"], "task.kind=image", f"model.weights={args.weights}"]
    model = make_model(load_config(None, changes), records.labels.names).eval()
    assert isinstance(model, MultiLabelClassifier)
    return pool_features(model, records, torch.amax), records.target()


def pool_features(model: MultiLabelClassifier, records: RecordSet, pool: Callable[..., Tensor]) -> Tensor:
    """Features (N,D) of images that are looked at once, without augmentation."""
    size, parts = model.preprocessing.image_size, []
    for start in range(0, len(records), STEP):
        images = hold_images(records[start : start + STEP], size=(size, size)).images
        with torch.inference_mode():
            parts.append(pool(model.backbone(make_views(model, images).image), dim=(2, 3)))
        print(f"{records.name}: {min(start + STEP, len(records)):,} of {len(records):,}", end="\r", flush=True)
    return torch.cat(parts).clone()


def train(kind: str, seed: int, vectors: Tensor, splits: dict[str, tuple[Tensor, Tensor]], *, epochs: int) -> float:
    """MAP in per cent of one head."""
    torch.manual_seed(seed)
    (features, target), (others, truth) = splits["train"], splits["test"]
    head: nn.Module = nn.Linear(features.shape[1], target.shape[1])
    if kind != "linear":
        graph: Any = MLGCNHead(features.shape[1], target.shape[1]).project
        graph.graph.learn_counts(target.T @ target)
        drawn, order = vectors.std() * torch.randn_like(vectors), torch.randperm(len(vectors))
        graph.words.take({"random": drawn, "given": vectors, "shuffled": vectors[order]}[kind])
        head = graph
    fit_head(head, features, target, epochs=epochs, clip=10)
    return judge_head(head, others, truth)


def fit_head(
    head: nn.Module, features: Tensor, target: Tensor, *, epochs: int, decay: float = 0.01, clip: float = math.inf
) -> None:
    """Train a head on features (N,D) and their target (N,L), with 64 images a step."""
    optimiser = torch.optim.AdamW(head.parameters(), 1e-3, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, total_iters=epochs)
    for _ in range(epochs):
        for chosen in torch.randperm(len(features)).split(64):
            loss = nn.functional.binary_cross_entropy_with_logits(head(features[chosen]), target[chosen])
            optimiser.zero_grad()
            (loss * target.shape[1]).backward()
            nn.utils.clip_grad_norm_(head.parameters(), clip)
            optimiser.step()
        schedule.step()


@torch.no_grad()
def judge_head(head: nn.Module, features: Tensor, target: Tensor) -> float:
    """MAP in per cent."""
    return 100 * average_precision(head(features), target).mean


if __name__ == "__main__":
    main()
