"""The model card of a checkpoint: what the network knows of itself, and what its maker adds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from huggingface_hub import ModelCardData

from pivotpatch import __version__
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier


@dataclass(frozen=True)
class Card:
    """What a network cannot know of itself.

    Attributes:
        license: as the hub calls it, such as "apache-2.0"; none is stated by default.
        text: in Markdown: what it was trained on, what it is good for, where it fails.
        metrics: how good it is, such as {"mAP on the test pictures": 81.2}.
    """

    license: str | None = None
    text: str = ""
    metrics: Mapping[str, float | str] = field(default_factory=dict)


def write_card(model: Classifier, card: Card, *, title: str, address: str) -> str:
    """The text of a README.md as the Hugging Face hub reads it.

    Args:
        model: the network.
        card: what to say besides.
        title: of the page.
        address: what `Predictor.load` opens the network by.
    """
    header = ModelCardData(
        library_name="pivotpatch",
        pipeline_tag="image-classification",
        tags=["multi-label", "pivotpatch"],
        license=card.license,
    )
    use = ("from pivotpatch import Predictor", f"predictor = Predictor.load({json.dumps(address)})")
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {_one_line(title)}",
        f"A network of pivotpatch {__version__} that says which of "
        f"{len(model.labels)} labels a picture has; any number of them may hold.",
        card.text.strip(),
        "\n".join(("```python", *use, 'print(predictor("photo.jpg").tags)', "```")),
        _tabulate("Results", card.metrics) if card.metrics else "",
        _tabulate("Network", _describe(model)),
        # On one line that begins with a bracket no label can end the block.
        f"## Labels\n\n```json\n{json.dumps(model.labels, ensure_ascii=False)}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _describe(model: Classifier) -> dict[str, str]:
    """One line a fact."""
    built, seen = model.architecture, model.preprocessing
    facts = {
        "kind": type(model).__name__,
        "backbone": f"timm's {built.backbone}",
        "head": built.head,
        "preprocessing": f"RGB from 0 to 1, stretched to {seen.image_size} x {seen.image_size} pixels, "
        f"mean {list(seen.mean)}, standard deviation {list(seen.std)}",
    }
    if isinstance(model, PatchClassifier):
        source = "the resized image" if model.source_size is None else f"the picture at {model.source_size} pixels"
        seen_at = model.patch_size or seen.image_size
        overlap = f", overlapping by {model.overlap:g} of their side" if model.overlap else ""
        facts["patches"] = f"{model.grid} x {model.grid}{overlap}, cut from {source}, seen at {seen_at} pixels"
        facts["lam"], facts["temperature"] = (
            f"{value:g}" if isinstance(value, float | int) else "fitted, one a label"
            for value in (model.lam, model.temperature)
        )
    facts["thresholds"] = "not fitted, 0.5 for all" if model.thresholds is None else "fitted, one a label"
    fitted = model.calibration
    facts["calibration"] = "not fitted" if fitted is None else f"{fitted.method}, of the {fitted.kind} logits"
    if isinstance(model, PatchClassifier):
        closer = None if model.closer_size is None else f"closer, at {model.closer_size} pixels"
        look = f"between 0 and 1 the second look is {closer or 'at the patches'}"
        facts["effort"] = "not fitted, 0 or 1" if model.adaptive is None else look
    return facts


def _tabulate(title: str, facts: Mapping[str, float | str]) -> str:
    rows = (f"| {_one_line(name)} | {_one_line(f'{value}')} |" for name, value in facts.items())
    return "\n".join((f"## {title}", "", "| | |", "|---|---|", *rows))


def _one_line(text: str) -> str:
    """Text that ends no row and no cell."""
    return " ".join(text.split()).replace("|", "\\|")
