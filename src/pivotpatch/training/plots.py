"""Curves of training: the loss and the validation mAP over the epochs, of one run or of several side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from pivotpatch.runtime.drawing import RUNS

LogEntries = Sequence[Mapping[str, Any]]
"""The lines of a run's log.jsonl."""

# Line styles tell the kinds of logits apart where colours already tell runs apart.
_STYLES = {"tde": "-", "patch": "--", "image": ":"}


def plot_curves(logs: Mapping[str, LogEntries]) -> Figure:
    """Draw the loss (left) and the validation mAP of each kind of logits (right) of runs, by names for the legend.

    The model comes first, then its baseline, so that both have the colours of all figures.
    """
    figure = Figure(figsize=(9.0, 3.6), dpi=150, layout="constrained")
    losses, scores = figure.subplots(1, 2)
    for number, (run, log) in enumerate(logs.items()):
        for axes, prefix, scale, marker in ((losses, "loss_", 1, ""), (scores, "val_mAP_", 100, ".")):
            kinds = dict.fromkeys(key.removeprefix(prefix) for entry in log for key in entry if key.startswith(prefix))
            for kind in kinds:
                points = [(each["epoch"], scale * each[prefix + kind]) for each in log if prefix + kind in each]
                axes.plot(
                    *zip(*points, strict=True),
                    linestyle=_STYLES.get(kind, "-."),
                    color=RUNS[number % len(RUNS)],
                    marker=marker,
                    label=f"{run}, {kind}" if run else kind,
                )
    losses.set(xlabel="epoch", ylabel="loss per image")
    scores.set(xlabel="epoch", ylabel="validation mAP (%)")
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return figure
