"""Draw docs/images/performance.png from the results of training.py, inference.py (on a GPU) and predict.py (on a CPU).

    python benchmarks/draw_performance.py

It draws what was measured before; it measures nothing.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pivotpatch.runtime.drawing import BASELINE, MODEL

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "performance.png"
FLOOR = "#CCCCCC"


def main() -> None:
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    training, inference, cpu = figure.subplots(1, 3)
    gpu = _read("training_gpu.json")
    backbones = gpu["backbones"]
    kinds = {"published": BASELINE, "ours": MODEL, "floor": FLOOR}
    pairs = [(backbone, way) for backbone in backbones for way in kinds if way in backbones[backbone]]
    speeds = {f"{backbone}, {way}": backbones[backbone][way]["samples_per_second"] for backbone, way in pairs}
    colours = dict(zip(speeds, (kinds[way] for _, way in pairs), strict=True))
    _draw(training, speeds, colours, title=f"training, {gpu['device']}\n448 pixels, samples/s")
    found = _read("inference_gpu.json")
    names = {"published": "published", "ours": "ours", "adaptive": f"effort {found['effort']}", "plain": "image alone"}
    pairs = [(backbone, way) for backbone in found["backbones"] for way in names]
    speeds = {f"{backbone}, {names[way]}": found["backbones"][backbone][way] for backbone, way in pairs}
    kinds = dict(zip(names, (BASELINE, MODEL, MODEL, FLOOR), strict=True))
    colours = dict(zip(speeds, (kinds[way] for _, way in pairs), strict=True))
    _draw(inference, speeds, colours, title=f"inference, {found['device']}\n448 pixels, pictures/s")
    found = _read("predict_cpu.json")
    speeds = {name: way["pictures a second"] for name, way in found["ways"].items() if way["passes"]}
    kinds = {"plain": FLOOR, "published": BASELINE}
    colours = {name: kinds.get(name, MODEL) for name in speeds}
    _draw(cpu, speeds, colours, title=f"the tagger, {found['machine']}\nfrom files, pictures/s")
    figure.savefig(PICTURE, dpi=110)


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return content


def _draw(axes: Axes, speeds: dict[str, float], colours: dict[str, str], *, title: str) -> None:
    bars = axes.barh(list(speeds), list(speeds.values()), color=[colours[name] for name in speeds])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_title(title, loc="left", fontsize=10)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    main()
