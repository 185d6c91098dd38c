"""What a frozen backbone makes of images: computed once, kept on the disk, and shipped to the loop in their place."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pivotpatch.data.loading import Batch, Failure, OnError, hold_images
from pivotpatch.data.records import RecordSet
from pivotpatch.inference.embedding import AT_ONCE, quicken_model
from pivotpatch.models.checkpoint import read_description
from pivotpatch.models.classifier import Embeddings, MultiLabelClassifier, SharedClassifier
from pivotpatch.models.open import find_bundled
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.task import Task
from pivotpatch.tuning.teach import find_background, name_views
from pivotpatch.writing import explain_disk_faults, hide

FOLDER = ".features"
"""Beside the folders of runs, which share it."""
_VERSION = 2  # of what is kept


@dataclass(eq=False)
class Features(Dataset[Batch]):
    """Features of N images: R rows of D numbers, of the image, its patches, a closer look and the patches of that."""

    records: RecordSet
    kept: Tensor = field(default_factory=lambda: torch.empty(0))  # (N,R,D) float16, once `Embedder.fill` was asked
    failures: dict[int, Failure] = field(default_factory=dict)  # images that could not be read, by their index

    def __getitem__(self, chosen: list[int]) -> Batch:
        """A batch of features (B,R,D) in the place of images."""
        read = np.array([index for index in chosen if index not in self.failures], dtype=np.int64)
        indices = torch.from_numpy(read)
        failures = tuple(self.failures[index] for index in chosen if index in self.failures)
        return Batch(self.kept[indices], self.records.target(read), indices, failures)

    def select(self, rows: NDArray[np.int64]) -> "Features":
        """The images that `rows` names."""
        failures = {row: self.failures[index] for row, index in enumerate(rows.tolist()) if index in self.failures}
        return Features(self.records.select(rows), self.kept[torch.from_numpy(rows)], failures)


class Ordinary(NamedTuple):
    """Images of nothing in particular: whoever collects images of their labels has few without any of these."""

    seen: Embeddings  # of N images
    absent: Tensor  # (L,) 0 for labels that none of them is taken to show, NaN where nobody knows
    share: float  # how many of them a batch has besides, for each of its own images

    def draw(self, places: Tensor, numbers: Tensor) -> Embeddings | None:
        """Those that belong to some images of a batch; None where there are none.

        Args:
            places: (K,) of these images in the batch; whoever has the others has the other ordinary images.
            numbers: (B,) whole ones that were drawn for the batch.
        """
        along = torch.stack([places, places + 1]).double() * self.share
        rows = numbers[places[along[0].floor() < along[1].floor()]] % len(self.seen.image)
        image, patches = self.seen.image, self.seen.patches
        return Embeddings(image[rows], None if patches is None else patches[rows]) if len(rows) else None


def find_ordinary(model: SharedClassifier, records: RecordSet, *, share: float) -> Ordinary | None:
    """The ordinary images that ship with the tagger, where they teach a model anything; else None.

    They do where it has the tagger's backbone and labels that the tagger does not have. Of the tagger's own, which many
    of these images show, nothing is said. Training images without any label count towards the share.
    """
    tagger, lacking = find_bundled("tagger"), share - (records.target() == 0).all(dim=1).float().mean().item()
    background = find_background(model) if isinstance(model, MultiLabelClassifier | PatchClassifier) else None
    if background is None or tagger is None or lacking <= 0:
        return None
    known = set(read_description(tagger).labels)
    absent = torch.tensor([torch.nan if label in known else 0.0 for label in model.labels])
    if not absent.isfinite().any():
        return None
    device, seen = next(model.parameters()).device, background.restore()
    patches = None if seen.patches is None else seen.patches.to(device)
    return Ordinary(Embeddings(seen.image.to(device), patches), absent.to(device), lacking)


def read_features(kept: Tensor, model: SharedClassifier) -> Embeddings:
    """Embeddings of B images, from their features (B,R,D)."""
    rows = kept.float()
    if not isinstance(model, PatchClassifier):
        return Embeddings(rows[:, 0])
    looks = rows.chunk(2 if model.closer_size else 1, dim=1)
    return Embeddings(*(part for look in looks for part in (look[:, 0], look[:, 1:])))


@dataclass
class Embedder:
    """Computes features and keeps them, a file per image, named by all that decides what is in it.

    So nothing that is stale can be taken for what is wanted: another image, backbone or patching has another name.
    Files are written whole; those that are there say what is left to do.
    """

    task: Task  # makes the views; its model's backbone makes the features
    folder: Path | None  # where they are kept; None keeps them in memory alone
    accelerator: Accelerator
    dtype: torch.dtype  # of autocast
    on_error: OnError = "error"

    def __post_init__(self) -> None:
        model = self.task.model
        assert isinstance(model, SharedClassifier)
        self.model, device = model, self.accelerator.device
        self._quick = quicken_model(model, device=device, dtype=self.dtype)
        # Weights tell neither strides nor activations.
        built = model.architecture.backbone, sorted(model.architecture.backbone_options.items())
        also = (model.closer_size, isinstance(model, PatchClassifier) and model.regions, str(self.dtype))
        self._own = repr((_VERSION, name_views(model), *built, model.preprocessing, *also)).encode()

    def find_shape(self, features: Features) -> tuple[int, int, int]:
        """N, R and D of what `fill` gives."""
        views = 1 + self.model.patching.count if isinstance(self.model, PatchClassifier) else 1
        return len(features.records), views * (2 if self.model.closer_size else 1), self.model.backbone.features

    def fill(self, sets: Sequence[Features], progress: Callable[[str, int, int | None], None]) -> None:
        """Give sets their features; each process computes its share of what is not there and reads the others'."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        if self.folder is not None:
            with explain_disk_faults(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
        total, done = sum(len(each.records) for each in sets), 0
        for each in sets:
            count = len(each.records)
            each.kept = torch.zeros(self.find_shape(each), dtype=torch.float16)
            names = [self._name(each.records, index) for index in range(count)]
            # Blocks are the same whatever is there already: on a CPU the rounding depends on who is in a batch.
            blocks = [list(range(start, min(start + AT_ONCE, count))) for start in range(0, count, AT_ONCE)]
            left = [block for block in blocks if not all(self._read(each, names, index) for index in block)]
            done += count - sum(map(len, left))
            progress("features", done, total)
            for block in left:
                if block[0] // AT_ONCE % world == rank:
                    self._compute(each, names, block)
                done += len(block)
                progress("features", done, total)
            self.accelerator.wait_for_everyone()
            for block in left:
                if block[0] // AT_ONCE % world != rank:
                    unread = [index for index in block if not self._read(each, names, index)]
                    if unread:  # nor could the other process read them, as will be found again
                        self._compute(each, names, unread)

    def _compute(self, features: Features, names: list[str], chunk: list[int]) -> None:
        """Compute and keep the features of some images."""
        side = self.model.picture_size
        held = hold_images(features.records.select(np.array(chunk)), size=(side, side), on_error=self.on_error)
        for row, failure in held.failures.items():
            features.failures[chunk[row]] = failure
        read = [row for row in range(len(chunk)) if row not in held.failures]
        if not read:
            return
        found = self.embed(held.images[read].to(self.accelerator.device)).half().cpu()
        for row, value in zip(read, found, strict=True):
            features.kept[chunk[row]] = value
            if self.folder is not None:
                path = self.folder / names[chunk[row]]
                written = hide(path)  # nobody else has this name: another run may be writing the same file
                with explain_disk_faults(path):
                    try:
                        np.save(written, value.numpy(), allow_pickle=False)
                        written.replace(path)
                    finally:
                        written.unlink(missing_ok=True)

    def embed(self, images: Tensor) -> Tensor:
        """Features (B,R,D) of images (B,3,h,w) uint8 from the loader."""
        autocast = torch.autocast(images.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with torch.inference_mode(), autocast:
            views = self.task.make_views(images)
            seen = self._quick.embed_views(views.image, views.patches, views.closer)
        parts = [seen.image[:, None], seen.patches, None if seen.closer is None else seen.closer[:, None], seen[3]]
        return torch.cat([part for part in parts if part is not None], dim=1)

    def _name(self, records: RecordSet, index: int) -> str:
        """The file of an image's features: by what is in its own file and what is made of it."""
        content, source = sha256(self._own), records.source_at(index)
        if isinstance(source, Path):
            with suppress(OSError):  # said when it is decoded
                content.update(source.read_bytes())
        else:
            content.update(source if isinstance(source, bytes) else source.tobytes() + repr(source.shape).encode())
        return f"{content.hexdigest()[:32]}.npy"

    def _read(self, features: Features, names: list[str], index: int) -> bool:
        """Whether the features of an image are there; they are taken."""
        if self.folder is None:
            return False
        try:
            found = np.load(self.folder / names[index], allow_pickle=False)
        except (OSError, ValueError, EOFError):  # not there, or cut short when the power went
            return False
        if found.shape != tuple(features.kept.shape[1:]) or found.dtype != np.float16:
            return False
        features.kept[index] = torch.from_numpy(found)
        return True
