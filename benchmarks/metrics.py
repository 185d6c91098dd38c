"""Average precision beside scikit-learn's loop and torchmetrics, in one run: `python benchmarks/metrics.py`."""

import argparse
import platform

import sklearn
import torch
import torchmetrics
from recording import measure
from sklearn.metrics import average_precision_score
from torch import Tensor
from torchmetrics.functional.classification import multilabel_average_precision

from pivotpatch.core.metrics import average_precision

SIZES = {"COCO val2014": (40_137, 80, 2.9), "VG-256 test": (32_475, 256, 7.0)}


def draw_scores(images: int, labels: int, *, mean_labels: float) -> tuple[Tensor, Tensor]:
    """Scores (N,L) of a fair model and targets with a long tail of rare labels."""
    generator = torch.Generator().manual_seed(0)
    share = 1 / (1 + torch.arange(labels))
    prior = (share / share.sum() * mean_labels).clamp(0.002, 0.6)
    target = (torch.rand(images, labels, generator=generator) < prior).float()
    logits = torch.randn(images, labels, generator=generator) + 2.5 * target - 2
    return torch.sigmoid(logits), target


def loop_scikit_learn(scores: Tensor, target: Tensor) -> list[float]:
    truth, values = target.numpy(), scores.numpy()
    return [float(average_precision_score(truth[:, k], values[:, k])) for k in range(values.shape[1])]


def call_torchmetrics(scores: Tensor, target: Tensor) -> list[float]:
    result = multilabel_average_precision(scores, target.long(), num_labels=scores.shape[1], average="none")
    return [float(value) for value in result]


def call_pivotpatch(scores: Tensor, target: Tensor) -> list[float]:
    return [value for value in average_precision(scores, target).per_label if value is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, scikit-learn {sklearn.__version__}, torchmetrics {torchmetrics.__version__}"
    )
    print(
        f"{'scores':34}{'pivotpatch':>12}{'scikit-learn':>14}{'torchmetrics':>14}{'ratio':>8}{'largest difference':>21}"
    )
    for name, (images, labels, mean_labels) in SIZES.items():
        scores, target = draw_scores(images, labels, mean_labels=mean_labels)
        ours, theirs = call_pivotpatch(scores, target), loop_scikit_learn(scores, target)
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        seconds = measure(
            {
                "pivotpatch": lambda s=scores, t=target: call_pivotpatch(s, t),  # type: ignore[misc]
                "scikit-learn": lambda s=scores, t=target: loop_scikit_learn(s, t),  # type: ignore[misc]
                "torchmetrics": lambda s=scores, t=target: call_torchmetrics(s, t),  # type: ignore[misc]
            },
            rounds=args.rounds,
        )
        ratio = min(seconds["scikit-learn"], seconds["torchmetrics"]) / seconds["pivotpatch"]
        row = "".join(
            f"{seconds[key]:>{w}.3f}s" for key, w in (("pivotpatch", 11), ("scikit-learn", 13), ("torchmetrics", 13))
        )
        print(f"{f'{name}, {images:,} x {labels}':34}{row}{ratio:>7.1f}x{difference:>21.1e}")


if __name__ == "__main__":
    main()
