"""What patches are worth on real pictures: the ASL baseline, PAT-I on it, and PAT-T, through the project's own loop.

Made for a sample of MS-COCO at 256 x 256 pixels (16,000 to train on, 5,000 to test) and the weights of a ResNet-50 in
its first layout, but any data set with the splits train and test will do. Each finished run is a JSON file; run it
again and only what is missing is trained. Settings are chosen with --select, which holds a tenth of train out and never
opens the test pictures.

    python benchmarks/coco256.py --data table:coco256 --weights resnet50.safetensors --runs 224-asl 224-pat --seeds 1 2
    python benchmarks/coco256.py --table
"""

import argparse
import json
import shutil
import statistics
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "coco256"
LAMS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
CHUNK = 256  # views at once around a baseline: some look at 14 windows of each

COMMON = [
    "data.hold=device",
    "model.backbone=resnet50",
    "model.pretrained=false",
    "model.backbone_options={stride_in_conv1=true}",
    "train.batch_size=64",
    "evaluation.batch_size=256",
    "output.log_every=50",
    "output.save_every=1000000",
    "output.trackers=[]",
    "precision.compile=true",
    "augment.randaugment=published",  # as in the paper's recipes; their average without a warm-up needs longer runs
]
SIZES = {
    "496": ["model.image_size=496", "train.epochs=15"],
    "480": ["model.image_size=480", "train.epochs=15"],
    "448": ["model.image_size=448", "train.epochs=15"],
    "416": ["model.image_size=416", "train.epochs=15"],
    "352": ["model.image_size=352", "train.epochs=15"],
    "320": ["model.image_size=320", "train.epochs=15"],
    "272": ["model.image_size=272", "train.epochs=15"],
    "260": ["model.image_size=260", "train.epochs=15"],
    "256": ["model.image_size=256", "train.epochs=15"],
    "240": ["model.image_size=240", "train.epochs=15"],
    "224": ["model.image_size=224", "train.epochs=15"],
    "208": ["model.image_size=208", "train.epochs=15"],
    "160": ["model.image_size=160", "train.epochs=15"],
    "128": ["model.image_size=128", "train.epochs=12"],
}
ASL = ["task.kind=image"]
PAT = ["task.kind=patch"]
NATIVE = [*PAT, "task.source_size=256"]
SVM = ["model.head=svm", "model.frozen=true", "loss.name=squared_hinge", "optimiser.weight_decay=1e-3"]
METHODS = {
    "asl": ASL,
    "pat": PAT,
    "native": NATIVE,
    "q2l_asl": [*ASL, "model.head=query2label"],
    "q2l_pat": [*PAT, "model.head=query2label"],
    "mldec_asl": [*ASL, "model.head=ml_decoder"],
    "mldec_pat": [*PAT, "model.head=ml_decoder"],
    "mldec_native": [*NATIVE, "model.head=ml_decoder"],
    "max_asl": [*ASL, "model.head=max"],
    "max_pat": [*PAT, "model.head=max"],
    "splice_asl": [*ASL, "mix.share=0.25"],  # a step costs 1.25 passes: +12 is the cost of 15 epochs without
    "splicecl_asl": [*ASL, "mix.share=0.25", "mix.consistent=true"],
    "mcar_asl": ["task.kind=crops"],
    "hcp_asl": ["task.kind=windows"],
    "cpsd_asl": [*ASL, "distil.groups=5"],  # its seconds are the student's; ten teachers come before
    "svm": [*ASL, *SVM],
    "svm_pat": [*PAT, *SVM],
    "region": [*PAT, "task.regions=true"],
    "region_csra": [*PAT, "task.regions=true", "model.head=csra"],
    # Queries attend once to the whole map and once to each region, by the same keys; +deep decodes regions further.
    "region_mldec": [*PAT, "task.regions=true", "model.head=ml_decoder", "model.head_options={deep_regions=false}"],
}
# The other systems, see docs/peers.md: csra_asl, csra_pat, csra_native and so on.
PEERS = ("csra", "mlgcn", "addgcn", "ssgrl", "mscma", "ida", "ctran", "kssnet", "cnnrnn", "rdal", "rarl", "fevlv")
NAMES = {"mlgcn": "ml_gcn", "addgcn": "add_gcn", "mscma": "ms_cma", "ctran": "c_tran", "cnnrnn": "cnn_rnn"}
NAMES |= {"fevlv": "fev_lv"}
for peer in PEERS:
    METHODS[f"{peer}_asl"] = [*ASL, f"model.head={NAMES.get(peer, peer)}"]
    METHODS[f"{peer}_pat"] = [*PAT, f"model.head={NAMES.get(peer, peer)}"]
    METHODS[f"{peer}_native"] = [*NATIVE, f"model.head={NAMES.get(peer, peer)}"]
# The recipe whose settings `own` takes in the place of the common ones, by system; sizes and epochs stay.
OWN = {peer: f"coco-resnet101-{NAMES.get(peer, peer)}" for peer in ("csra", "mlgcn", "mscma", "ida", "mcar")}
OWN |= {"ctran": "coco-resnet101_576-c_tran", "splicecl": "coco-resnet101-splicemix"}
OWN |= {"max": OWN["mlgcn"]}  # the baseline of graph papers
OWN |= {"addgcn": "voc2007-resnet101_576-add_gcn", "ssgrl": "voc2007-resnet101_576-ssgrl"}
# What might lift a method further, one change at a time or together: native+flip+lr2.
CHANGES = {
    "temp0.5": ["task.temperature=0.5"],
    "temp2": ["task.temperature=2"],
    "overlap": ["task.overlap=0.25"],
    "half": ["task.overlap=0.5"],
    "deep": ["model.head_options={deep_regions=true}"],
    "two_stages": ["model.backbone_options={stride_in_conv1=true, two_stages=true}"],
    "taught": [],  # of a model of regions, by --teacher
    "started": [],  # after taught: with the weights of --teacher, its heads too, in the place of --weights
    "grid3": ["task.grid=3"],
    "grid7": ["task.grid=7"],
    "small64": ["task.patch_size=64"],
    "small112": ["task.patch_size=112"],
    "small128": ["task.patch_size=128"],
    "small160": ["task.patch_size=160"],
    "closer320": ["task.closer_size=320"],
    "closer352": ["task.closer_size=352"],
    "drawn": ["model.first_logits=published"],  # weights of a new head at random, as in all runs up to eb38c45
    "flip": ["augment.flip=0.5"],
    "weak": ["augment.cutout=0.25", "augment.operations=1"],
    "torchvision": ["augment.randaugment=torchvision"],
    "strong": ["augment.randaugment=torchvision", "augment.magnitude=15"],
    "plain": ["augment.cutout=0", "augment.operations=0"],
    "noema": ["ema.decay=0"],
    "lr0.3": ["optimiser.lr=3e-5"],
    "lr2": ["optimiser.lr=2e-4"],
    "lr3": ["optimiser.lr=3e-4"],
    "lr5": ["optimiser.lr=5e-4"],
    # Another rate for the head alone: ten times the backbone's, as CSRA and ML-GCN have it, or a smaller one,
    # for the first step of some heads moves logits hundreds of times further than the plain head's (first_step.py).
    "head10": ["optimiser.lr=1e-3", "optimiser.backbone_share=0.1"],
    "head0.1": ["optimiser.lr=1e-5", "optimiser.backbone_share=10"],
    "head0.01": ["optimiser.lr=1e-6", "optimiser.backbone_share=100"],
    "head0.003": ["optimiser.lr=3e-7", "optimiser.backbone_share=333.3"],
    "wd": ["optimiser.weight_decay=1e-2"],
    "focus": ["loss.detach_focus=false"],
    "clip10": ["optimiser.clip_norm=10"],
    "bce": ["loss.name=binary_cross_entropy"],
    "b64": ["train.batch_size=64"],  # after own, whose steps of 16 images leave a GPU idle at 224 pixels; rates stay
    "5": ["train.epochs=5"],
    "10": ["train.epochs=10"],
    "groups2": ["distil.groups=2"],
    "12": ["train.epochs=12"],
    "30": ["train.epochs=30"],
    "75": ["train.epochs=75"],  # a plain model by as much training as a PAT-T of 15 epochs
    "rewritten": [],  # by the code that rewrites a network's slow parts, as every run is now: a name for the comparison
    # Other backbones, by --weights of their own.
    "lite0": ["model.backbone=tf_efficientnet_lite0", "model.backbone_options={}"],
    "lite1": ["model.backbone=tf_efficientnet_lite1", "model.backbone_options={}"],
    "lite2": ["model.backbone=tf_efficientnet_lite2", "model.backbone_options={}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="address without its split")
    parser.add_argument("--weights", type=Path, help="weights of the backbone")
    parser.add_argument(
        "--runs", nargs="+", default=[], metavar="SIZE-METHOD[+CHANGE]", help="such as 224-pat or 224-csra_asl+own"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--select", action="store_true", help="judge on a tenth of train instead of on test")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further changes, for a trial")
    parser.add_argument("--teacher", help="checkpoint of a PAT-T on the same data, for +taught")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--scores", type=Path, help="folder to write the scores of each run to, of test and held out")
    parser.add_argument("--checkpoints", type=Path, help="folder to keep the trained networks in")
    parser.add_argument(
        "--shared", action="store_true", help="other runs share the device, so speeds are not a run's own"
    )
    parser.add_argument("--commit", default="", help="of the code, for the record")
    parser.add_argument("--table", action="store_true", help="print the table of all results")
    parser.add_argument("--curves", type=Path, help="draw the logs of --runs, of the first of --seeds, to this picture")
    args = parser.parse_args()
    if args.curves is not None:
        draw_curves(args)
        return
    for run in args.runs:
        for seed in args.seeds:
            train(run, seed, args)
    if args.table:
        print_table(args.results)


def find_result(name: str, seed: int, args: argparse.Namespace) -> Path:
    """The file of a run's result."""
    found: Path = args.results / f"{'select' if args.select else 'test'}-{name}-seed{seed}.json"
    return found


def draw_curves(args: argparse.Namespace) -> None:
    """Draw what was logged of runs that are done."""
    from pivotpatch.training.plots import plot_curves

    paths = {name: find_result(name, args.seeds[0], args) for name in args.runs}
    logs = {name: json.loads(path.read_text("utf-8"))["log"] for name, path in paths.items()}
    plot_curves(logs).savefig(args.curves)


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    """Train one run, judge it, and write its result."""
    import torch

    from pivotpatch.training.config import load_config
    from pivotpatch.training.loop import fit

    path = find_result(name, seed, args)
    if path.exists():
        return
    size, _, rest = name.partition("-")
    method, *extra = rest.split("+")
    data = [f"data.train={args.data}@train", f"data.val_fraction={0.1 if args.select else 0}"]
    wanted = [change for each in extra for change in (list_own(method) if each == "own" else CHANGES[each])]
    wanted += [f'distil.teachers=["{args.teacher}"]'] if "taught" in extra else []
    changes = [*COMMON, *SIZES[size], *METHODS[method], *wanted, f"train.seed={seed}", *args.set]
    weights = Path(args.teacher) / "model.safetensors" if "started" in extra else args.weights
    config = load_config(None, [*data, f"model.weights={weights}", *changes])
    folder = Path(tempfile.mkdtemp())
    try:
        result = fit(config, folder / "run", report=lambda entry: print(name, seed, json.dumps(entry), flush=True))
        if result.stopped_by is not None:
            raise SystemExit(128 + result.stopped_by)
        found, pairs = judge(folder / "run" / "best", args, size=int(size), stem=path.stem)
        if args.checkpoints:
            shutil.copytree(folder / "run" / "best", args.checkpoints / path.stem)
        log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    finally:
        shutil.rmtree(folder)
    kept = ("steps", "seconds", "pictures_per_second", "peak_memory_GB")
    content = {
        "run": name,
        "seed": seed,
        "judged_on": "a tenth of train" if args.select else "test",
        "mAP": found,
        "pairs": pairs,
        **{key: result.metrics[key] for key in kept if key in result.metrics},
        "changes": changes,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "shared_device": args.shared,
        "commit": args.commit,
        "log": log,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n", "utf-8")
    print(name, seed, json.dumps({"mAP": found, "seconds": content["seconds"]}), flush=True)


def list_own(method: str) -> list[str]:
    """The settings of a system's recipe: first logits, loss, optimiser, schedule, average, augmentation, batch size."""
    from pivotpatch.training.config import find_recipe

    stated = tomllib.loads(find_recipe(OWN[method.partition("_")[0]]).read_text("utf-8"))
    changes = [f"train.batch_size={stated['train']['batch_size']}"] if "batch_size" in stated.get("train", {}) else []
    changes += [f"model.first_logits={stated['model'].get('first_logits', 'auto')}"]
    for section in ("loss", "optimiser", "schedule", "ema", "augment"):
        changes += [f"{section}.{key}={json.dumps(value)}" for key, value in stated.get(section, {}).items()]
    return changes


def judge(
    checkpoint: Path, args: argparse.Namespace, *, size: int, stem: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """MAP (step-wise) of each kind of logits, and of TDE logits at several lam; for a baseline PAT-I's too.

    And of most of them, how many pairs of labels co-occur, and the means of their conditional FPRs and TPRs.
    """
    from accelerate import Accelerator

    from pivotpatch import load_checkpoint
    from pivotpatch.audit import rate_pairs
    from pivotpatch.core.metrics import average_precision
    from pivotpatch.data.address import open_records
    from pivotpatch.inference.score_file import write_scores
    from pivotpatch.training.config import load_config
    from pivotpatch.training.images import open_training_records

    accelerator = Accelerator()
    model = load_checkpoint(checkpoint).to(accelerator.device)
    part = "val" if args.select else "test"
    records = {part: open_records(f"{args.data}@test").keep_labels(model.labels)}  # data.labels may have left some out
    if args.select:
        held_out = open_training_records(load_config(None, [f"data.train={args.data}@train"])).val
        assert held_out is not None
        records = {part: held_out, **({"test": records[part]} if args.scores else {})}
    found: dict[str, float] = {}
    pairs: dict[str, dict[str, float]] = {}
    for prefix, (network, pixels) in list_judged(model, size).items():
        for name, each in records.items():
            given = score(network, each, pixels=pixels, accelerator=accelerator)
            if args.scores:
                args.scores.mkdir(parents=True, exist_ok=True)
                write_scores(given, args.scores / f"{stem}-{prefix.replace(' ', '_')}{name}.parquet")
                if prefix == "PAT-I ":  # the baseline itself
                    alone = given.only("image")
                    write_scores(alone, args.scores / f"{stem}-plain_{name}.parquet")
            if name != part:  # test scores of a network that is still being chosen are written, not looked at
                continue
            image, patch, target = given.get("image"), given.get("patch"), given.target
            found["image"] = 100 * average_precision(image, target).mean
            found[f"{prefix}patch"] = 100 * average_precision(patch, target).mean
            for lam in LAMS:
                found[f"{prefix}tde lam {lam:g}"] = 100 * average_precision(image + lam * patch, target).mean
            for key, each in {
                "image": given.only("image"),
                f"{prefix}tde lam 0.5": given.remix(lam=0.5).only("tde"),
                f"{prefix}tde lam 1": given.remix(lam=1).only("tde"),
            }.items():
                rates = rate_pairs(each)
                means = {"FPR": 100 * float(rates.fpr.nanmean()), "TPR": 100 * float(rates.tpr.nanmean())}
                pairs[key] = {"pairs": len(rates), **means}
    return found, pairs


def list_judged(model: Any, size: int) -> dict[str, tuple[Any, int]]:
    """What is judged of a trained network: by the prefix of its names, what is asked, and the side of its pictures."""
    from pivotpatch import PatchInference
    from pivotpatch.models.patch_classifier import PatchClassifier

    if isinstance(model, PatchClassifier):
        return {"": (model, model.picture_size)}
    judged = {"PAT-I ": (PatchInference(model, chunk_size=CHUNK), size)}
    if size < 256:  # a larger input is enlarged itself: there is no more detail to cut patches from
        judged["PAT-I native "] = (PatchInference(model, chunk_size=CHUNK), 256)
    return judged


def score(network: Any, records: Any, *, pixels: int, accelerator: Any) -> Any:
    """Scores of all pictures, their patches beside them."""
    import torch

    from pivotpatch.data.loading import hold_images, make_loader
    from pivotpatch.inference.scoring import score_pictures

    held = hold_images(records, size=(pixels, pixels), device=accelerator.device)
    loader = make_loader(records, size=(pixels, pixels), batch_size=256, held=held)
    return score_pictures(network, loader, accelerator=accelerator, dtype=torch.bfloat16, keep_patches=True)


def print_table(folder: Path) -> None:
    """Mean and spread over the seeds, for each run; of pairs of labels, the mean over what was audited."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        groups[content["judged_on"], content["run"]].append(content)
    for (judged_on, run), results in groups.items():
        timed = [result for result in results if "seconds" in result]
        cost = ""
        if timed:
            seconds = statistics.mean(result["seconds"] for result in timed)
            speed = statistics.mean(result["pictures_per_second"] for result in timed)
            shared = ", device shared with other runs" if any(result.get("shared_device") for result in timed) else ""
            cost = f", {seconds:.0f} s, {speed:.0f} pictures/s{shared}"
        print(f"{run} on {judged_on}: {len(results)} seeds{cost}")
        for key in results[0]["mAP"]:
            values = [result["mAP"][key] for result in results if key in result["mAP"]]
            spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
            pairs = [result["pairs"][key] for result in results if key in result.get("pairs", ())]
            rates = ", ".join(
                f"{name} {statistics.mean(each[name] for each in pairs):.1f}" for name in ("FPR", "TPR") if pairs
            )
            print(f"    {key:24s} {statistics.mean(values):.2f}{spread}{rates and f'; of pairs {rates}'}")


if __name__ == "__main__":
    main()
