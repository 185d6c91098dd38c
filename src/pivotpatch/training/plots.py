"""Curves of training: the loss and the validation mAP over the epochs, of one run or of several side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pivotpatch.inference.plots import RUNS

LogEntries = Sequence[Mapping[str, Any]]
"""The lines of a run's log.jsonl."""

# Line styles tell the kinds of logits apart where colours already tell runs apart.
_STYLES = {"tde": "-", "patch": "--", "image": ":"}


def plot_curves(logs: Mapping[str, LogEntries]) -> Figure:
    """Draw the loss (left) and the validation mAP of each kind of logits (right).

    Args:
        logs: the log of each run, by a name for the legend; the model first, then its baseline, so that both have the
            colours of all figures.
    """
    figure = Figure(figsize=(9.0, 3.6), dpi=150, layout="constrained")
    losses, scores = figure.subplots(1, 2)
    for number, (name, log) in enumerate(logs.items()):
        colour = RUNS[number % len(RUNS)]
        _draw_losses(losses, log, name=name, colour=colour)
        _draw_scores(scores, log, name=name, colour=colour)
    losses.set(xlabel="epoch", ylabel="loss a picture")
    scores.set(xlabel="epoch", ylabel="validation mAP (%)")
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return figure


def _draw_losses(axes: Axes, log: LogEntries, *, name: str, colour: str) -> None:
    parts = [key for entry in log for key in entry if key.startswith("loss_")]
    entries = [entry for entry in log if "loss" in entry]
    for part in dict.fromkeys(parts):
        kind = part.removeprefix("loss_")
        axes.plot(
            [entry["epoch"] for entry in entries],
            [entry[part] for entry in entries],
            _STYLES.get(kind, "-."),
            color=colour,
            label=_name(name, kind),
        )


def _draw_scores(axes: Axes, log: LogEntries, *, name: str, colour: str) -> None:
    entries = [entry for entry in log if "loss" not in entry]
    for kind, style in _STYLES.items():
        points = [(entry["epoch"], 100 * entry[f"val_mAP_{kind}"]) for entry in entries if f"val_mAP_{kind}" in entry]
        if points:
            epochs, values = zip(*points, strict=True)
            axes.plot(epochs, values, style, color=colour, marker=".", label=_name(name, kind))


def _name(run: str, kind: str) -> str:
    return f"{run}, {kind}" if run else kind
