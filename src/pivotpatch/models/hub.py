"""The Hugging Face hub: model cards, fetching a model's files by its name, and sending a model there."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from pivotpatch import __version__
from pivotpatch.errors import InputError, explaining
from pivotpatch.models.checkpoint import CARD, DESCRIPTION, WEIGHTS, describe_model

# The client reports a broken connection in the words of its HTTP library, which differs from version to version; what
# it says of answers inherits from the same base. ValueError is its opinion of a name or card.
_FAULTS: tuple[type[Exception], ...] = (ValueError, OSError, HfHubHTTPError.__mro__[1])
_LOG_IN = "if it is private, set HF_TOKEN or run `hf auth login`"


@dataclass(frozen=True)
class Card:
    """What a model cannot know of itself."""

    license: str | None = None  # as the hub calls it, such as "apache-2.0"; none is stated by default
    text: str = ""  # in Markdown: what it was trained on, what it is good for, where it fails
    # How good it is, such as {"mAP on the test images": 81.2}.
    metrics: Mapping[str, float | str] = field(default_factory=dict)


def write_card(model: nn.Module, card: Card, *, title: str, address: str) -> str:
    """The text of a README.md as the Hugging Face hub reads it; `address` is what `Predictor.load` opens it by."""
    told = describe_model(model)
    facts = {name: told[name] for name in ("kind", "architecture", "preprocessing", "patching")}
    facts["fitted"] = [name for name in ("thresholds", "calibration", "adaptive") if told[name] is not None]
    header = ModelCardData(
        library_name="pivotpatch",
        pipeline_tag="image-classification",
        tags=["multi-label", "pivotpatch"],
        license=card.license,
    )
    rows = [f"| {_one_line(name)} | {_one_line(f'{value}')} |" for name, value in card.metrics.items()]
    use = ("from pivotpatch import Predictor", f"predictor = Predictor.load({json.dumps(address)})")
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {_one_line(title)}",
        f"A model of pivotpatch {__version__} that says which of "
        f"{len(told['labels'])} labels an image has; any number of them may hold.",
        card.text.strip(),
        "\n".join(("```python", *use, 'print(predictor("photo.jpg").tags)', "```")),
        "\n".join(("## Results", "", "| | |", "|---|---|", *rows)) if rows else "",
        f"## Model\n\n```json\n{json.dumps(facts, indent=2)}\n```",
        # On one line that begins with a bracket no label can end the block.
        f"## Labels\n\n```json\n{json.dumps(told['labels'], ensure_ascii=False)}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _one_line(text: str) -> str:
    """Text that ends no row and no cell."""
    return " ".join(text.split()).replace("|", "\\|")


def fetch_folder(
    name_or_folder: str | os.PathLike[str],
    *,
    needed: str = DESCRIPTION,
    also: Sequence[str] = (WEIGHTS, CARD),
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """The folder of a model: a local one, or a copy of some files of one commit that the hub has under a name.

    Args:
        name_or_folder: a folder, else `owner/name`.
        needed: the file that tells what kind of model it is, by default of a checkpoint of ours.
        also: names or patterns of the other files, fetched where they are there.
        revision: a branch, tag or commit of the hub's; the newest by default.
        token: of the hub's, for what is not public; the one that the client has stored by default.
    """
    name = os.fspath(name_or_folder)
    if Path(name).is_dir():
        if revision is not None:
            raise InputError(name, f"revision {revision!r} is given for a folder", "leave it out")
        return Path(name)
    where = name if revision is None else f"{name}@{revision}"
    if name.count("/") != 1:  # old names have no owner, but most words without are mistyped folders
        raise InputError(where, "is no folder that is there, and no owner/name on the hub", "check what you gave")
    with explaining_hub(where):
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=[needed, *also],
            token=token,
            library_name="pivotpatch",
            library_version=__version__,
        )
    if not (Path(folder) / needed).is_file():
        raise InputError(where, f"holds no {needed}, so it is another kind of model", "check the name")
    return Path(folder)


@contextmanager
def explaining_hub(name: str) -> Iterator[None]:
    """Turn what the hub and its client say into one line."""
    away = "is no folder that is there, and the hub cannot be reached"
    with (
        explaining(name, "the hub cannot be used", f"check the name; {_LOG_IN}", of=_FAULTS),
        explaining(name, away, "check the name", of=LocalEntryNotFoundError),
        explaining(name, "is no owner/name on the hub", "check what you gave", of=HFValidationError),
    ):
        yield
