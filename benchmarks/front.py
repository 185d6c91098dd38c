"""mAP against what an image costs at inference: is a model with patches better than a plain one of equal cost?

    python benchmarks/front.py --time cpu      # ONNX Runtime, two threads: results/front_cpu.json
    python benchmarks/front.py --time cpu --add  # only models of one look that are not in that file yet
    python benchmarks/front.py --time cuda     # batches of 512 on one GPU: results/front_cuda.json
    python benchmarks/front.py                 # the table, and docs/images/front.png

mAP comes from the runs of `coco256.py` (test images, mean of the seeds); nothing is trained here. A cost
is the time of an image beside that of a plain pass at 224 pixels in the same run; all models take turns and the median
counts. Weights are drawn, for they do not change the time. Regions of a feature map cost what their plain model costs,
but for 0.4 % more arithmetic; with ML-Decoder they are timed. In the table, * is for models that were trained with
torchvision's RandAugment only, and + for those whose head was only trained as drawn (`+drawn`).
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from coco256 import NAMES, PEERS

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "front.png"
LABELS = tuple(f"label {number}" for number in range(80))
HEADS = {"asl": "linear", "max_asl": "max", "mldec_asl": "ml_decoder", "q2l_asl": "query2label"}
CURVES = {"asl": "plain", "max_asl": "max pooling", "mldec_asl": "ML-Decoder", "q2l_asl": "Query2Label"}
HEADS |= {f"{peer}_asl": NAMES.get(peer, peer) for peer in PEERS}
CURVES |= {f"{peer}_asl": NAMES.get(peer, peer) for peer in PEERS} | {"csra_asl": "CSRA"}
PATCHES = {"pat": "PAT-T", "native": "PAT-T, native"}
PATCHES |= {method.replace("_asl", "_pat"): f"{name}, PAT-T" for method, name in CURVES.items() if "_" in method}
PATCHES |= {method.replace("_pat", "_native"): f"{name}, native" for method, name in PATCHES.items() if "_" in method}
# Systems that are no heads, by the runs that count: how they look at an image, "" as a plain model does.
LOOKS = {("mcar_asl", "flip"): ("mcar", "crops"), ("hcp_asl", "flip", "5"): ("hcp", "windows")}
LOOKS |= {("cpsd_asl", "flip", "groups2", "10"): ("cpsd", "")}
OTHERS = {NAMES.get(peer, peer) for peer in PEERS} | {"max pooling"} | {name for name, _ in LOOKS.values()}
LOWEST = 60  # mAP of another system that is drawn
STYLES = {
    "plain": "o-",
    "CSRA": "p-",
    "ML-Decoder": "s-",
    "ML-Decoder, taught": "*-",
    "regions": "^-",
    "PAT-I": "v--",
    "PAT-T, native": "D--",
    "ML-Decoder, PAT-T, native": "P--",
}


class Cost(NamedTuple):
    """What decides how long an image takes."""

    head: str
    size: int
    patches: bool
    regions: int = 0  # per side
    look: str = ""  # or "crops", "windows"

    def __str__(self) -> str:
        more = f" + {self.regions} x {self.regions} regions" if self.regions else self.look and f" + {self.look}"
        return f"{self.head} {self.size}{' + patches' if self.patches else more}"


class Point(NamedTuple):
    """A model on the front."""

    curve: str
    size: int
    cost: Cost
    mean: float
    seeds: int
    marks: str  # what sets its training apart, see above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", choices=["cpu", "cuda"], help="time every cost that a result needs on this device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--add", action="store_true", help="time only models of one look that were not timed before")
    parser.add_argument("--sizes", type=int, nargs="*", help="time these inputs alone, for a trial")
    parser.add_argument("--commit", default="", help="of the code, for the record")
    args = parser.parse_args()
    points = list(read_points())
    if args.time:
        wanted = {point.cost for point in points if not args.sizes or point.size in args.sizes}
        known = json.loads(find_times(args.time).read_text("utf-8")) if args.add else {"costs": {}}
        if args.add:
            wanted = {cost for cost in wanted if not cost.patches and str(cost) not in known["costs"]}
        time_costs(wanted, known, args)
    else:
        show(points)


def read_points() -> Iterator[Point]:
    """All models that were judged on the test images, of several trainings of one the one with the fewest marks."""
    found: dict[tuple[str, int, Cost], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for folder, star in (("coco256_torchvision", " *"), ("coco256", "")):
        for path in sorted((RESULTS / folder).glob("test-*.json")):
            run = json.loads(path.read_text("utf-8"))
            name, _, rest = run["run"].partition("-")
            method, *changes = rest.split("+")
            size, given = int(name), run["mAP"]
            marks = star
            if changes[-1:] == ["drawn"]:
                marks += " +"
                changes.pop()
            if changes == ["flip"] and method in HEADS:
                found[CURVES[method], size, Cost(HEADS[method], size, False)][marks].append(given["image"])
                native = "PAT-I native tde lam 0.5"
                value = given.get(native, given["PAT-I tde lam 0.5"])
                called = "PAT-I" if method == "asl" else f"{CURVES[method]}, PAT-I"
                found[called, size, Cost(HEADS[method], size, True)][marks].append(value)
            elif (method, *changes) in LOOKS:
                curve, look = LOOKS[method, *changes]
                found[curve, size, Cost("linear", size, False, look=look)][marks].append(given["image"])
            elif changes == ["flip"] and method in PATCHES:
                cost = Cost(HEADS[f"{method.partition('_')[0]}_asl"] if "_" in method else "linear", size, True)
                found[PATCHES[method], size, cost][marks].append(given["tde lam 1"])
            elif changes == ["flip", "grid7"] and method == "region":
                found["regions", size, Cost("linear", size, False)][marks].append(given["tde lam 1"])
            elif method == "region_mldec" and changes in (["flip"], ["flip", "grid3"], ["flip", "taught"]):
                grid = 3 if "grid3" in changes else 2
                curve = "ML-Decoder, taught" if "taught" in changes else f"ML-Decoder, {grid} x {grid} regions"
                cost = Cost("ml_decoder", size, False, grid)
                found[curve, size, cost][marks].append(given["tde lam 1"])
    for (curve, size, cost), by_kind in found.items():
        marks = min(by_kind, key=lambda marks: ("+" in marks, "*" in marks))
        yield Point(curve, size, cost, statistics.mean(by_kind[marks]), len(by_kind[marks]), marks)


def find_times(device: str) -> Path:
    """The file of what was timed on a device."""
    return RESULTS / f"front_{device}.json"


def time_costs(costs: set[Cost], known: dict[str, Any], args: argparse.Namespace) -> None:
    """Time each cost, and count the arithmetic of its pass; what is known already stays as it is."""
    import numpy as np
    import torch
    from recording import describe_machine, measure, write_json

    from pivotpatch.export import export_onnx
    from pivotpatch.inference.engine import open_engine
    from pivotpatch.runtime import engine as runtime

    torch.set_num_threads(args.threads)
    device, batch = torch.device(args.time), 512 if args.time == "cuda" else 4
    costs |= {Cost("linear", 224, False)}
    ways, flops = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for cost in sorted(costs):
            model = build(cost)
            flops[cost] = count_flops(model, cost)
            if args.time == "cuda":
                asked: Any = open_engine(model, device=device, effort=1)
            else:
                path = Path(folder, f"{cost}.onnx")
                export_onnx(model, path)
                asked = runtime.open_onnx(path, device="cpu", effort=1)
            pixels = np.random.default_rng(0).integers(256, size=(batch, cost.size, cost.size, 3), dtype=np.uint8)
            ways[str(cost)] = partial(asked.ask, pixels)
            print(f"{cost} is ready", flush=True)
        seconds = measure(ways, rounds=args.rounds)
    base = Cost("linear", 224, False)
    about = {**describe_machine(device), "threads": args.threads, "batch": batch, "commit": args.commit, **known}
    rows = {
        str(cost): {
            "ms": 1000 * seconds[str(cost)] / batch,
            "cost": seconds[str(cost)] / seconds[str(base)],
            "flops": flops[cost] / flops[base],
        }
        for cost in sorted(costs)
    }
    for name, row in rows.items():
        print(f"{name:28}{row['ms']:9.2f} ms{row['cost']:8.2f} passes{row['flops']:8.2f} by arithmetic")
        if args.add:  # the machine may have been slower than it was for the others: only ratios can be compared
            del row["ms"]
    write_json(find_times(args.time), {**about, "costs": {**rows, **known["costs"]}})


def build(cost: Cost, backbone: str = "resnet50") -> Any:
    """A model of such a cost, with drawn weights."""
    from pivotpatch.models.classifier import Architecture, MultiLabelClassifier
    from pivotpatch.models.patch_classifier import PatchClassifier
    from pivotpatch.peers.hcp import HCPClassifier
    from pivotpatch.peers.mcar import MCARClassifier
    from pivotpatch.runtime.values import Patching

    if cost.regions:
        shallow = Architecture(backbone, cost.head, cost.size, head_options={"deep_regions": False})
        return PatchClassifier(shallow, LABELS, patching=Patching(cost.regions), regions=True).eval()
    kinds: dict[str, Any] = {"crops": MCARClassifier, "windows": HCPClassifier, "": MultiLabelClassifier}
    kind = PatchClassifier if cost.patches else kinds[cost.look]
    return kind(backbone, LABELS, head=cost.head, image_size=cost.size).eval()


def count_flops(model: Any, cost: Cost) -> int:
    """Operations of one image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(1, 3, cost.size, cost.size))
    return int(counter.get_total_flops())


def show(points: list[Point]) -> None:
    """Print the table and draw the figure, from what was timed before."""
    from matplotlib.figure import Figure

    timed = {
        name: json.loads(path.read_text("utf-8")) for name in ("cpu", "cuda") if (path := find_times(name)).exists()
    }
    print(f"| model | input | mAP | seeds | {' | '.join(f'cost, {name}' for name in timed)} | arithmetic |")
    print("|---" * (5 + len(timed)) + "|")
    for point in sorted(points, key=lambda point: (point.curve, point.size)):
        found = [each["costs"].get(str(point.cost)) for each in timed.values()]
        cells = ["" if each is None else f"{each['cost']:.2f}" for each in found]
        flops = next((f"{each['flops']:.2f}" for each in found if each is not None), "")
        row = (f"{point.curve}{point.marks}", str(point.size), f"{point.mean:.1f}", str(point.seeds), *cells, flops)
        print(f"| {' | '.join(row)} |")
    if not timed:
        return
    figure = Figure(figsize=(5.5 * len(timed), 5), layout="constrained")
    for axes, each in zip(figure.subplots(1, len(timed), squeeze=False)[0], timed.values(), strict=True):
        costs = {name: row["cost"] for name, row in each["costs"].items()}
        for number, (curve, style) in enumerate(STYLES.items()):
            chosen = sorted((point for point in points if point.curve == curve), key=lambda point: point.size)
            places = [(costs[str(point.cost)], point) for point in chosen if str(point.cost) in costs]
            if not places:
                continue
            x, y = [cost for cost, _ in places], [point.mean for _, point in places]
            axes.plot(x, y, style, color=f"C{number}", label=curve, markersize=5)
            for cost, point in places:
                axes.annotate(
                    str(point.size), (cost, point.mean), fontsize=6, xytext=(3, -7), textcoords="offset points"
                )
        for point in points:
            if point.curve in OTHERS and str(point.cost) in costs and point.mean > LOWEST:
                place = costs[str(point.cost)], point.mean
                axes.plot(*place, "x", color="grey", markersize=5)
                left = place[0] < 1.1  # sizes of the curves stand on the right
                axes.annotate(
                    point.curve,
                    place,
                    fontsize=6,
                    xytext=(-4 if left else 3, -2 if left else -7),
                    textcoords="offset points",
                    ha="right" if left else "left",
                    color="grey",
                )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        threads = f", {each['threads']} threads" if each["device"].startswith("CPU") else ""
        axes.set_xlabel(f"time of an image ({each['device'].split(',')[0]}{threads}), plain at 224 = 1")
        axes.set_ylabel("mAP, 5,000 test images (%)")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    main()
