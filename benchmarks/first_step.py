"""Which rate suits a head? How far the first step of the common recipe's rate moves the logits of a batch, by head.

One step of AdamW on the head alone, on images of train, without augmentation; no model is judged.

    python benchmarks/first_step.py --data table:coco256 --weights resnet50.safetensors
"""

import argparse
from pathlib import Path

import torch
from coco256 import CHANGES, COMMON, METHODS, SIZES
from recording import describe_machine, write_json

from pivotpatch.data.address import open_records
from pivotpatch.data.loading import hold_images
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.views import make_views
from pivotpatch.training.config import load_config
from pivotpatch.training.model import make_model
from pivotpatch.training.task import make_loss

RESULT = Path(__file__).parent / "results" / "first_step.json"
PLAIN = ("", "max_", "csra_", "mlgcn_", "addgcn_", "ssgrl_", "mscma_", "ida_", "ctran_", "fevlv_", "mldec_")
RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="address without its split")
    parser.add_argument("--weights", type=Path, required=True, help="weights of the backbone")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--runs", nargs="+", default=[f"{head}asl" for head in PLAIN], help="of coco256.py, plain ones")
    parser.add_argument("--commit", default="", help="of the code, for the record")
    args = parser.parse_args()
    found = {}
    for run in args.runs:
        found[run] = measure(run, args)
        print(f"{run:12} {'  '.join(f'{name} {value:.3g}' for name, value in found[run].items())}")
    about = {"images": args.images, "rate": RATE, "commit": args.commit}
    write_json(RESULT, {**describe_machine(torch.device("cpu")), **about, "runs": found})


def measure(run: str, args: argparse.Namespace) -> dict[str, float]:
    """Mean size of a new head's logits, how far one step moves them on average, and the loss per image before it."""
    records = open_records(f"{args.data}@train")
    changes = [*COMMON, *SIZES["224"], *METHODS[run], *CHANGES["drawn"], f"model.weights={args.weights}"]
    config = load_config(None, changes)
    torch.manual_seed(0)
    model = make_model(config, records.labels.names).eval()
    assert isinstance(model, MultiLabelClassifier)
    chosen = records[: args.images]
    target = chosen.target()
    with torch.no_grad():
        features = model.backbone(make_views(model, hold_images(chosen, size=(224, 224)).images).image)
    optimiser = torch.optim.AdamW(model.head.parameters(), RATE)
    before = model.head(features)
    loss = make_loss(config.loss)(before, target)
    loss.backward()
    optimiser.step()
    with torch.no_grad():
        moved = (model.head(features) - before).abs().mean()
    return {"logit": before.abs().mean().item(), "moved": moved.item(), "loss": loss.item() / len(target)}


if __name__ == "__main__":
    main()
