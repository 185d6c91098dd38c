"""What `predict` and `watch` share: which model, which labels by which names, and tags in files beside images."""

import argparse
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.sources import add_weights_options, open_given
from pivotpatch.errors import InputError
from pivotpatch.runtime.checks import PREFERENCES

if TYPE_CHECKING:
    from pivotpatch.runtime.prediction import Prediction, Tag
    from pivotpatch.runtime.predictor import Predictor
    from pivotpatch.runtime.sidecars import Kind

# What no other image would mend.
_DISK = {errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add which model to ask, and how."""
    parser.add_argument(
        "--model",
        default="tagger",
        help="a run, a checkpoint, an exported file, hub:NAME, transformers:WHAT or timm:WHAT (the bundled tagger)",
    )
    add_weights_options(parser)
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:1; of ONNX files also openvino, coreml, directml (the fastest there is)"
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=1.0,
        help="share of images that get a second look, from 0 to 1 (1: all, at patches)",
    )


def add_tag_options(parser: argparse.ArgumentParser) -> None:
    """Add which labels an image gets, and what they are called."""
    choice = parser.add_argument_group("which labels")
    choice.add_argument(
        "--prefer",
        choices=PREFERENCES,
        help="thresholds of a tuned model: few wrong tags, the best F1, or few that are missing (its own choice; of "
        "the bundled tagger, precision)",
    )
    choice.add_argument("--threshold", type=float, metavar="P", help="above which a label is given; the fitted ones")
    choice.add_argument("--top-k", type=int, metavar="K", help="the K most probable; with --threshold, K at most")
    choice.add_argument(
        "--tags", type=Path, metavar="FILE.toml", help="which of them become tags, and their names (docs/photos.md)"
    )


def add_write_option(group: "argparse._ArgumentGroup") -> None:
    """Add which files to write beside the images."""
    group.add_argument(
        "--write",
        type=_read_kinds,
        action="extend",
        metavar="KIND",
        help="write each image's tags beside it: xmp for photo managers, txt (a caption), json; several as xmp,txt",
    )


def _read_kinds(text: str) -> list[str]:
    from pivotpatch.runtime.sidecars import KINDS

    kinds = text.lower().split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"invalid choice: {kind!r} (choose from {', '.join(KINDS)})")
    return kinds


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    from pivotpatch.runtime.checks import check_effort, check_model, check_rule

    check_rule(args.threshold, args.top_k)
    check_effort(args.effort, "--effort")
    if args.prefer is not None and (args.threshold is not None or args.top_k is not None):
        other = "--top-k" if args.threshold is None else "--threshold"
        raise InputError("--prefer", f"{other} decides without the fitted thresholds", "leave out one of them")
    check_model(args.model)
    if args.tags is not None and not args.tags.is_file():
        raise InputError(str(args.tags), "there is no such file", "give a TOML file; docs/photos.md says what is in it")


def open_predictor(args: argparse.Namespace, *, device: str | None = None) -> "Predictor":
    """The model that the options name; `device` where they name none."""
    from pivotpatch.runtime.predictor import Predictor

    model = args.model
    if args.architecture is not None or args.labels is not None:
        model = open_given(args.model, architecture=args.architecture, labels=args.labels)
    return Predictor.load(model, device=args.device or device, effort=args.effort, prefer=args.prefer)


class Naming:
    """Which labels an image gets, and what they are called.

    Attributes:
        rule: which labels.
        rules: which of them become tags, by which names; None for all, as they are.
    """

    def __init__(self, args: argparse.Namespace, labels: Sequence[str]) -> None:
        from pivotpatch.runtime.prediction import TagRule

        self.rule, self.rules = TagRule(args.threshold, args.top_k), None
        if args.tags is not None:
            from pivotpatch.runtime.tag_names import TagRules

            self.rules = TagRules.read(args.tags, labels)

    def choose(self, prediction: "Prediction") -> "list[Tag]":
        """The tags of an image by their names, the most probable first, then those that every image gets."""
        from pivotpatch.runtime.prediction import Tag

        tags = self.rule.choose(prediction)
        if self.rules is None:
            return list(tags)
        known = {tag.label: tag for tag in tags}
        named = [known[label]._replace(label=name) for name, label in self.rules.name(known).items()]
        return [*named, *(Tag(name, prob=1.0, threshold=0.0, image_prob=1.0) for name in self.rules.added)]


class Sidecars:
    """Writes tags beside images and counts what came of it.

    Attributes:
        tagged: images whose tags were written.
        failed: images that could not be read.
        written: files that changed.
        unchanged: files that said so before.
        refused: files that were not written.
    """

    def __init__(self, args: argparse.Namespace, naming: Naming) -> None:
        self._naming = naming
        self._kinds: list[Kind] = list(dict.fromkeys(args.write))
        self._overwrite, self._stop = args.overwrite, args.on_error == "error"
        self._captions: dict[Path, str] = {}  # whose each is
        self.tagged = self.failed = self.written = self.unchanged = self.refused = 0

    def are_there(self, image: Path) -> bool:
        """Whether an image has been tagged before, in every kind of file."""
        from pivotpatch.runtime.sidecars import is_tagged

        return all(is_tagged(image, kind) for kind in self._kinds)

    def take(self, prediction: "Prediction | InputError") -> str | None:
        """Write the tags of an image and say them in a line; None, and a word on stderr, where it was not read."""
        from pivotpatch.cli.telling import tell

        if isinstance(prediction, InputError):
            tell(f"not read: {prediction}")
            self.failed += 1
            return None
        tags = self._naming.choose(prediction)
        self._write(Path(str(prediction.picture)), tags)
        self.tagged += 1
        return f"{prediction.picture}: {', '.join(tag.label for tag in tags) or 'no tag'}"

    def _write(self, image: Path, tags: "Sequence[Tag]") -> None:
        """Write an image's tags; what is wrong with one file is told, and ends the work only where it must."""
        from pivotpatch.cli.telling import tell
        from pivotpatch.runtime.sidecars import write_sidecar

        for kind in self._kinds:
            try:
                if kind == "txt":
                    self._claim_caption(image)
                changed = write_sidecar(image, [(tag.label, tag.prob) for tag in tags], kind, overwrite=self._overwrite)
            except InputError as error:
                if self._stop or getattr(error.__cause__, "errno", None) in _DISK:
                    raise
                tell(f"not written: {error}")
                self.refused += 1
            else:
                self.written += changed
                self.unchanged += not changed

    def _claim_caption(self, image: Path) -> None:
        """Refuse the second of two images that would share a caption, as cat.jpg and cat.png."""
        caption = image.with_suffix(".txt")
        owner = self._captions.setdefault(caption, image.name)
        if owner != image.name:
            wrong = f"is the caption of {owner} and cannot be that of {image.name} too"
            raise InputError(str(caption), wrong, "rename one of the images")

    def describe(self, *, skipped: int = 0) -> str:
        """What came of it, in a line, with the images that were left alone."""
        said = f"wrote {self.written:,} sidecar{'s' * (self.written != 1)}, {self.unchanged:,} unchanged"
        said += f", {skipped:,} image{'s' * (skipped != 1)} tagged before" * (skipped > 0)
        said += f", {self.refused:,} not written" * (self.refused > 0)
        return f"{said}, {self.failed:,} could not be read"
