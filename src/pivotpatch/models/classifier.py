"""Multi-label classifiers: a backbone and a head, or a model for each label; PAT-T's is in `patch_classifier`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self
from zlib import crc32

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn

from pivotpatch import __version__
from pivotpatch.errors import InputError, quote
from pivotpatch.models.backbone import Backbone, BackboneOption, Preprocessing
from pivotpatch.models.checkpoint import (
    CARD,
    DESCRIPTION,
    WEIGHTS,
    Description,
    read_description,
    save_checkpoint,
    write_checkpoint,
)
from pivotpatch.models.heads import HeadOption, PerLabel, make_head, project_embedding
from pivotpatch.models.hub import Card, explaining_hub, fetch_folder, write_card
from pivotpatch.models.weights import Allowance, load_exactly, read_labels, read_weights, rename_published
from pivotpatch.runtime.values import Adaptive, Calibration, Patching

OWN_HEAD = "its own"
"""The head of a whole model of another library."""
_PER_LABEL: PerLabel = {
    **dict.fromkeys(("queries", "project.weight", "project.bias", "projection.weight", "projection.bias"), (0,)),
    "words.vectors": (0,),
    "graph.edges": (0, 1),
}


@dataclass(frozen=True)
class Architecture:
    """What must be known to build a model again before its weights are loaded."""

    backbone: str  # a timm model's name
    head: str = "linear"  # one of `HEAD_NAMES`, such as "linear" or "csra"
    image_size: int | None = None  # rows and columns of the images; the backbone's own where None
    backbone_options: Mapping[str, BackboneOption] = field(default_factory=dict)  # the `options` of `Backbone`
    head_options: Mapping[str, HeadOption] = field(default_factory=dict)  # keyword arguments of the head's class


class Embeddings(NamedTuple):
    """What a model's last steps turn into logits: all that a frozen backbone has to say of some images."""

    image: Tensor  # (B,...) of the whole images; what follows B depends on the head, (B,D) for linear and max heads
    patches: Tensor | None = None  # (B,P,...) of their patches; None where the model has none
    closer: Tensor | None = None  # (B,...) of the larger images; None where there was no closer look
    closer_patches: Tensor | None = None  # (B,P,...) of patches of their feature maps, likewise


class Classifier(nn.Module):
    """What every kind of model knows: what it is made of, its labels, and what it wants to see.

    Attributes:
        architecture: what it was built from.
        labels: names of the L labels, in the order of the logits.
        preprocessing: what must be done to images first.
        thresholds: probabilities above which each label is given, where they were fitted.
        preferences: other thresholds, by what a user may prefer ("precision", "balance", "recall"), where they were
            fitted; forgotten with `thresholds`.
        calibration: of those probabilities, where one was fitted.
        adaptive: when one look is enough, where that was fitted.
        patching: see `PatchClassifier`; None for all others.
        origin: the folder or name that it was opened by, for messages; None for one that was made here.
        left_out: why the head of the `weights` that it was built with could not be taken; None where it was.
    """

    preprocessing: Preprocessing
    patching: Patching | None = None
    origin: str | None = None
    left_out: str | None = None

    def __init__(
        self,
        backbone: str | Architecture,
        labels: Sequence[str],
        *,
        head: str = "linear",
        image_size: int | None = None,
        pretrained: bool = False,
        weights: str | Path | None = None,
    ) -> None:
        """Build a model.

        Args:
            backbone: a timm model's name, or a whole `Architecture`, which then says head and size.
            labels: names of the L labels.
            head: "linear", "max", "query2label", "ml_decoder", or another system by its name, see docs/peers.md.
            image_size: rows and columns of the images; the backbone's own by default.
            pretrained: fetch timm's weights for the backbone from the hub.
            weights: a local file instead, .safetensors or a torch file without pickled code: all weights of the
                backbone, and the head's, which are taken where they fit these labels. Names are ours, timm's, or those
                of the published repositories, see `rename_published`.
        """
        super().__init__()
        names = tuple(labels) if isinstance(labels, Iterable) and not isinstance(labels, str) else ()
        if not names or len(set(names)) != len(names) or not all(isinstance(name, str) and name for name in names):
            wrong = f"{quote(labels)} are not different names"
            raise InputError("labels", wrong, "give a list of one name per label")
        if isinstance(backbone, Architecture) and (head != "linear" or image_size is not None):
            wrong = f"an Architecture is given, and head {head!r} and image_size {image_size} besides"
            raise InputError(type(self).__name__, wrong, "say them in the Architecture")
        self.architecture = backbone if isinstance(backbone, Architecture) else Architecture(backbone, head, image_size)
        size = self.architecture.image_size
        if size is not None and not (isinstance(size, int) and size >= 1):
            raise InputError(type(self).__name__, f"image_size is {size!r}", "give a whole number of pixels per side")
        self.labels = names
        self.thresholds = None
        self.calibration: Calibration | None = None
        self.adaptive: Adaptive | None = None
        self._build(pretrained=pretrained and weights is None, weights=None if weights is None else Path(weights))

    def _build(self, *, pretrained: bool, weights: Path | None) -> None:
        """Make the parts of the architecture for the labels, and `preprocessing`."""

    @property
    def thresholds(self) -> tuple[float, ...] | None:
        """Probabilities above which each label is given, where they were fitted; any L numbers can be assigned."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, values: Sequence[float] | Tensor | None) -> None:
        numbers = None if values is None else tuple(map(float, values))
        if numbers is not None and (len(numbers) != len(self.labels) or not all(0 <= each <= 1 for each in numbers)):
            todo = f"give {len(self.labels)} numbers from 0 to 1, one per label"
            raise InputError("thresholds", f"they are {quote(values)}", todo)
        self._thresholds: tuple[float, ...] | None = numbers
        self.preferences: dict[str, tuple[float, ...]] = {}

    def find_calibration(self, *, closer_size: int | None) -> Calibration | None:
        """The calibration of what is decided on; a closer look at the size that it was fitted to may have its own.

        Args:
            closer_size: of a closer look in the place of the patches; None where there was none.
        """
        if self.adaptive is None or closer_size is None or closer_size != self.closer_size:
            return self.calibration
        return self.adaptive.again or self.calibration

    @property
    def closer_size(self) -> int | None:
        """Rows and columns of a closer look at the whole image; None for a model that takes none."""
        return None if self.patching is None else self.patching.closer_size

    @property
    def called(self) -> str:
        """What messages call it."""
        return self.origin or f"the {type(self).__name__}"

    @property
    def picture_size(self) -> int:
        """Rows and columns of the images that a loader is to give."""
        return self.preprocessing.image_size

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> Self:
        """Open a checkpoint of this kind, in evaluation mode, on the CPU; `open_model` opens every kind.

        Of the hub only model.json, model.safetensors and README.md are fetched, once; nothing that they hold is run.

        Args:
            name_or_folder: a folder, else `owner/name` on the Hugging Face hub.
            revision: a branch, tag or commit of the hub's; the newest by default.
            token: of the hub's, for what is not public; the one that its client has stored by default.
        """
        folder = fetch_folder(name_or_folder, revision=revision, token=token)
        described = read_description(folder)
        if described.kind != cls.__name__:
            todo = f"open it with {described.kind}.from_pretrained"
            raise InputError(str(name_or_folder), f"holds a {described.kind}, no {cls.__name__}", todo)
        model = cls.build_described(described, folder)
        model.origin = os.fspath(name_or_folder)
        return model

    @classmethod
    def build_described(cls, described: Description, folder: Path) -> Self:
        """The model of this kind that a checkpoint's model.json describes, with the weights of its folder."""
        where = str(folder / DESCRIPTION)
        cut = described.patching
        given: dict[str, Any] = {}
        if cut is not None:
            given = {"patching": cut.build(), "patch_only": cut.patch_only, "regions": cut.regions}
        allowance = Allowance([folder / WEIGHTS], where=where)
        try:
            with torch.random.fork_rng(devices=[]), allowance:  # the weights drawn here are replaced at once
                model = cls(Architecture(**described.architecture.model_dump()), described.labels, **given)
            model.preprocessing = described.preprocessing.build()
            model.thresholds = described.thresholds
            model.preferences = {name: tuple(values) for name, values in described.preferences.items()}
            model.calibration, model.adaptive = described.calibration, described.adaptive
        except InputError as error:
            part, wrong, todo = error.parts
            raise error if part == where else InputError(where, f"{part}: {wrong}", todo) from None
        load_exactly(model, read_weights(folder / WEIGHTS), where=str(folder / WEIGHTS))
        model.origin = str(folder)
        return model.eval()

    def save_pretrained(self, folder: str | Path, *, card: Card | None = None, overwrite: bool = False) -> None:
        """Write a checkpoint folder with a model card, README.md, which says what the model knows of itself.

        Args:
            folder: where to; it must not exist unless `overwrite`.
            card: what to say besides.
            overwrite: replace the checkpoint that is there, see `save_checkpoint`; its card too where `card` is given.
        """
        folder = Path(folder)
        keep = card is None and overwrite and (folder / CARD).is_file()
        name = folder.resolve().name
        text = None if keep else write_card(self, card or Card(), title=name, address=name)
        save_checkpoint(self, folder, overwrite=overwrite, card=text)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        message: str = "Upload the model",
        card: Card | None = None,
    ) -> str:
        """Send the model and its model card to the Hugging Face hub; the address of its page.

        Args:
            repo_id: `owner/name`; made if it is not there.
            private: whether a new one is for its owner only.
            token: that may write; the one that the hub's client has stored by default.
            message: what the hub notes beside the change.
            card: what to say besides; a card that the hub has already is replaced only where this is given.
        """
        api = HfApi(token=token, library_name="pivotpatch", library_version=__version__)
        with TemporaryDirectory() as scratch, explaining_hub(repo_id):
            write_checkpoint(self, Path(scratch))
            place = api.create_repo(repo_id, private=private, exist_ok=True)
            if card is not None or not api.file_exists(place.repo_id, CARD):
                text = write_card(self, card or Card(), title=place.repo_name, address=f"hub:{place.repo_id}")
                (Path(scratch) / CARD).write_text(text, "utf-8")
            api.upload_folder(repo_id=place.repo_id, folder_path=scratch, commit_message=message)
        return str(place)


class SharedClassifier(Classifier):
    """A model whose labels share one backbone and one head."""

    projections: tuple[str, ...] = ()
    """Last steps beside the head's own."""
    embed_views: Callable[..., Embeddings]
    """Embeddings of views that were made before; see the kinds of model."""
    project_embeddings: Callable[..., Any]
    """What the last steps make of embeddings."""

    def _build(self, *, pretrained: bool, weights: Path | None) -> None:
        chosen = self.architecture
        seen, given = chosen.image_size, chosen.backbone_options
        self.backbone = Backbone(chosen.backbone, image_size=seen, options=given, pretrained=pretrained)
        features, count = self.backbone.features, len(self.labels)
        self.head = make_head(chosen.head, features=features, labels=count, options=chosen.head_options)
        self.head.connect(self.backbone.network)
        for name in self.projections:
            self.add_module(name, self.head.make_projection())
        self.preprocessing = self.backbone.preprocessing
        if weights is not None:
            self._take_weights(weights)

    def embed_images(self, images: Tensor) -> Tensor:
        """Embedding (B,...) of preprocessed images (B,C,H,W), see `Head.embed`."""
        return self.head.embed(self.backbone(images))

    def _take_weights(self, path: Path) -> None:
        """Load a file's backbone, which must fit, and its head where that fits."""
        state = rename_published(read_weights(path), self.backbone.network)
        own = "head.project."
        for part in [name.removeprefix(own) for name in state if name.startswith(own)]:
            for name in self.projections:  # PAT-T begins as PAT-I of a model with one projection
                state.setdefault(f"{name}.{part}", state[own + part])
        if not self.projections:
            state = {name: value for name, value in state.items() if not name.startswith(("patch_", "weight_"))}
        inner = "backbone.network."
        body = {name.removeprefix(inner): value for name, value in state.items() if name.startswith(inner)}
        load_exactly(self.backbone.network, body, where=str(path))
        described = describe_weights(path)
        labels = read_labels(path) if described is None else described.labels
        same = described is None or described.architecture.head == self.architecture.head
        if described is not None:  # of what colours they were trained on
            seen = described.preprocessing.build()
            self.preprocessing = replace(seen, image_size=self.preprocessing.image_size)
        if labels is not None and tuple(labels) != self.labels and len(labels) == len(self.labels):
            self.left_out = f"{path}: its head is of other labels, or in another order; this one starts anew"
        elif same and {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in self.state_dict().items()}:
            self.load_state_dict(state)
        elif len(state) > len(body):
            bias = state.get("head.project.bias")
            count = len(labels if labels is not None else self.labels if bias is None else bias)
            why = "another kind" if count == len(self.labels) else f"{count} labels, not of {len(self.labels)}"
            self.left_out = f"{path}: its head is of {why}; this one starts anew"


def describe_weights(path: Path) -> Description | None:
    """What the checkpoint is whose weights a file holds; None for other files."""
    ours = path.name == WEIGHTS and path.with_name(DESCRIPTION).is_file()
    return read_description(path.parent) if ours else None


class MultiLabelClassifier(SharedClassifier):
    """An ordinary multi-label model: images (B,C,H,W) in, logits (B,L) out.

    Example:
        model = MultiLabelClassifier("resnet101", ["cat", "dog"], pretrained=True)
        logits = model(model.preprocessing(image)[None])
    """

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,C,H,W)."""
        return self.project_embeddings(self.embed_views(images))

    def embed_views(self, images: Tensor, *_: Any) -> Embeddings:
        """Embeddings of preprocessed images (B,C,H,W); other views are not looked at."""
        return Embeddings(self.embed_images(images))

    def project_embeddings(self, embeddings: Embeddings) -> Tensor:
        """Logits (B,L) of embeddings."""
        return project_embedding(self.head.project, embeddings.image)


class IndependentClassifier(Classifier):
    """The paper's independent training (InT): a model for each label, so that none learns from co-occurrence.

    All start from the same backbone weights, where some are given, and share nothing afterwards.

    Attributes:
        members: L models of one label each, in the order of the labels.
    """

    def _build(self, *, pretrained: bool, weights: Path | None) -> None:
        members = [
            MultiLabelClassifier(self.architecture, [label], pretrained=pretrained, weights=weights)
            for label in self.labels
        ]
        self.members = nn.ModuleList(members)
        self.preprocessing, self.left_out = members[0].preprocessing, members[0].left_out

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,C,H,W)."""
        return torch.cat([member(images) for member in self.members], dim=1)


def load_relabelled(model: SharedClassifier, trained: SharedClassifier) -> tuple[str, ...]:
    """Give a model the weights of one of the same kind and architecture that has other labels.

    What belongs to a label goes to the label of the same name. Labels that `trained` does not know keep what they have,
    and so do those that another query of ML-Decoder serves, which looks for other things. Vectors of labels that are
    new are drawn by their names: every model begins with the same ones, so that two labels might come to share theirs.

    Returns:
        The labels that both know.
    """
    if model.labels == trained.labels:
        model.load_state_dict(trained.state_dict())
        return model.labels
    mine, theirs = ({name: place for place, name in enumerate(each.labels)} for each in (model, trained))
    shared = [name for name in mine if name in theirs]
    to, source = (torch.tensor([places[name] for name in shared]).long() for places in (mine, theirs))
    held, per_label = model.state_dict(), {**_PER_LABEL, **trained.head.per_label}
    for name, value in trained.state_dict().items():
        head = not name.startswith("backbone.")  # where a layer may have such a name, and as many channels as labels
        dims = next((dims for end, dims in per_label.items() if head and name.endswith(end)), ())
        if dims and value.ndim == 3 and len(value) == len(held[name]) != len(trained.labels):  # a query serves several
            (many, own), (old, new) = (each.shape[2] for each in (value, held[name])), (source, to)
            same = old // many == new // own
            old, new = old[same], new[same]
            held[name][new // own, :, new % own] = value[old // many, :, old % many]
            continue
        dims = dims if all(value.shape[dim] == len(trained.labels) for dim in dims) else ()
        shape = [len(model.labels) if dim in dims else size for dim, size in enumerate(value.shape)]
        if held[name].shape == tuple(shape):
            held[name][_choose(to, dims)] = value[_choose(source, dims)]
        if name.endswith(".vectors"):
            for place in set(range(len(model.labels))) - set(to.tolist()):
                generator = torch.Generator().manual_seed(crc32(model.labels[place].encode()))
                held[name][place] = value.std() * torch.randn(value.shape[1], generator=generator)
    return tuple(shared)


def _choose(places: Tensor, dims: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of these places in each of the first dimensions that `dims` names, and of all that is in the others."""
    assert dims == tuple(range(len(dims)))
    return (*(places.reshape(-1, *[1] * (len(dims) - 1 - dim)) for dim in dims), ...)
