"""What a name opens: a bundled model, a run, a checkpoint, a model on the hub, somebody's weights."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from pivotpatch.errors import InputError
from pivotpatch.models.backbone import get_config, read_preprocessing
from pivotpatch.models.checkpoint import DESCRIPTION, Kind, read_description
from pivotpatch.models.classifier import OWN_HEAD, Architecture, Classifier, MultiLabelClassifier
from pivotpatch.models.foreign import CONFIG, ForeignClassifier, OnnxNetwork, build_timm, load_timm, load_transformers
from pivotpatch.models.hub import fetch_folder
from pivotpatch.models.patch_classifier import PAPER, PatchClassifier
from pivotpatch.models.weights import load_exactly, read_head_options, read_labels, read_weights, rename_published
from pivotpatch.runtime.checks import BUNDLED, EXPORTED, check_model, is_named
from pivotpatch.runtime.values import Patching

# Modules of kinds of model; those of other systems are imported where a checkpoint needs one, as their heads are.
_HOMES: dict[Kind, str] = {
    "MultiLabelClassifier": "pivotpatch.models.classifier",
    "PatchClassifier": "pivotpatch.models.patch_classifier",
    "IndependentClassifier": "pivotpatch.models.classifier",
    "MCARClassifier": "pivotpatch.peers.mcar",
    "HCPClassifier": "pivotpatch.peers.hcp",
}
_RUN = ("config.toml", "best", "last")  # what a run's folder holds


def open_model(name: str | os.PathLike[str], *, labels: Sequence[str] | None = None) -> Classifier:
    """Open a model in evaluation mode, on the CPU.

    Args:
        name: a bundled model ("tagger"), the folder of a checkpoint, or of a run, whose best model is taken. "hub:",
            "timm:" or "transformers:" stand before a folder or before `owner/name` on the Hugging Face hub, behind
            which a revision may stand: "hub:owner/name@v2". The last two are other people's models, which become a
            `ForeignClassifier`; they may stay away before a folder.
        labels: names of the labels of somebody else's model, in place of its own.
    """
    name, folder = os.fspath(name), Path(name)
    if not is_named(name) and not (folder / DESCRIPTION).exists() and (folder / CONFIG).is_file():
        scheme = "timm" if b'"architecture"' in (folder / CONFIG).read_bytes() else "transformers"
        name = f"{scheme}:{name}"
    scheme, _, place = name.partition(":")
    place, _, tail = (place, "", "") if Path(place).exists() else place.partition("@")
    loaders: dict[str, Callable[..., Classifier]] = {"timm": load_timm, "transformers": load_transformers}
    if is_named(name) and scheme in loaders:
        return loaders[scheme](place, labels=labels, revision=tail or None)
    if labels is not None:
        todo = "leave them out, or name the --architecture of the file too"
        raise InputError(name, "labels are given for a model that should know them", todo)
    if not is_named(name):
        return load_checkpoint(find_checkpoint(name))
    model = load_checkpoint(fetch_folder(place, revision=tail or None))
    model.origin = name
    return model


def load_checkpoint(folder: str | Path) -> Classifier:
    """Build the model that a checkpoint folder describes, in evaluation mode, on the CPU, in float32.

    Args:
        folder: of the checkpoint, or the name of a bundled model.
    """
    folder = find_bundled(str(folder)) or Path(folder)
    described = read_description(folder)
    kind: type[Classifier] = getattr(import_module(_HOMES[described.kind]), described.kind)
    return kind.build_described(described, folder)


def find_bundled(name: str) -> Path | None:
    """The checkpoint folder of a bundled model; None where no model has the name.

    >>> find_bundled("tagger").name, find_bundled("runs/mine")
    ('tagger', None)
    """
    return Path(__file__).parents[1] / name if name in BUNDLED else None


def find_checkpoint(name: str | os.PathLike[str]) -> Path:
    """The checkpoint folder of a bundled model, or that a run or checkpoint folder holds."""
    path = find_bundled(os.fspath(name)) or Path(name)
    check_model(path)
    if path.is_file() and path.name.lower().endswith(EXPORTED):
        say = "to judge it, give evaluate what predict --out --all-probs writes with it"
        what = "give the run or checkpoint that it comes from, or --architecture of somebody's graph"
        raise InputError(str(path), "is an ONNX file, which only predict, watch, app and review open", f"{what}; {say}")
    if path.is_file():
        say = "say of what model: --architecture RECIPE or BACKBONE+HEAD, in Python open_weights"
        raise InputError(str(path), "is a file", f"{say}; or give the folder of a run or checkpoint")
    if (path / DESCRIPTION).exists() or not any((path / part).exists() for part in _RUN):
        return path
    if not (path / "best").is_dir():
        raise InputError(str(path), "the run has no best model yet", f"train on, or give {path / 'last'}")
    return path / "best"


def open_weights(
    path: str | os.PathLike[str],
    architecture: str | Architecture,
    *,
    labels: Sequence[str] | None = None,
    patching: Patching = PAPER,
    regions: bool = False,
    normalise: bool = True,
) -> Classifier:
    """Open a file of weights or an ONNX graph, in evaluation mode, on the CPU; all of it must fit.

    Weights of a whole model may have our names, timm's, or those of MLC-PAT, query2labels, ML-Decoder, ASL and TResNet.
    With three outputs they are a `PatchClassifier`, with timm's own classifier a `ForeignClassifier`. Options of a
    decoder head are read from the shapes. Nothing pickled is run.

    Args:
        path: .safetensors, .onnx, or any other name for a torch file.
        architecture: what it is of, such as "resnet101+query2label@448": BACKBONE+HEAD@SIZE. Without a head it is a
            whole timm model, or says what a graph wants done to images; without a size it is the backbone's own.
        labels: names of the L labels, in the order of the logits; those that the file holds by default.
        patching: of a `PatchClassifier`, how it cuts and mixes its patches.
        regions: of a `PatchClassifier`, whether its patches are regions of the feature map.
        normalise: subtract timm's mean and divide by its deviation.
    """
    path, where = Path(path), os.fspath(path)
    built = _read_architecture(architecture) if isinstance(architecture, str) else architecture
    exported = path.suffix.lower() == ".onnx"
    names = labels or (None if exported else read_labels(path))
    if names is None:
        raise InputError(where, "it does not name its labels", "give them: --labels FILE, in Python labels=[...]")
    model = _open_graph(path, built, names) if exported else _open_state(path, built, names, patching, regions=regions)
    if not normalise:
        model.preprocessing = replace(model.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    model.origin = where
    return model.eval()


def _open_state(
    path: Path, built: Architecture, labels: Sequence[str], patching: Patching, *, regions: bool
) -> Classifier:
    if built.head == OWN_HEAD:
        return build_timm(built.backbone, labels, path, image_size=built.image_size)
    state, where = read_weights(path), str(path)
    told = read_head_options(state) if built.head in ("query2label", "ml_decoder") else {}
    built = replace(built, head_options={**told, **built.head_options})
    several = any(name.endswith(("fc.fc2.weight", "fc.fc2.W", "patch_projection.weight")) for name in state)
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced at once
        model: MultiLabelClassifier | PatchClassifier
        if several:
            model = PatchClassifier(built, labels, patching=patching, regions=regions)
        else:
            model = MultiLabelClassifier(built, labels)
    named = rename_published(state, model.backbone.network)
    count = named.get("head.project.bias", torch.empty(len(labels))).shape[0]
    if count != len(labels):
        raise InputError(where, f"it has {count} labels, and {len(labels)} are named", "name its own, in its order")
    todo = "give its own architecture: a recipe, BACKBONE+HEAD, or BACKBONE alone with timm's own classifier"
    load_exactly(model, named, where=where, todo=todo)
    return model


def _open_graph(path: Path, built: Architecture, labels: Sequence[str]) -> Classifier:
    stated, network = get_config(built.backbone), OnnxNetwork(path)
    fixed = [side for side in network.shape[2:] if isinstance(side, int)]
    prepare = read_preprocessing(stated, image_size=built.image_size or next(iter(fixed), None))
    if any(side != prepare.image_size for side in fixed):
        wrong = f"it takes images of {network.shape[2]} x {network.shape[3]} pixels, not of {prepare.image_size}"
        raise InputError(str(path), wrong, "give that size behind the architecture, such as resnet101@448")
    return ForeignClassifier(network.eval(), labels, name=str(path), preprocessing=prepare)


def _read_architecture(text: str) -> Architecture:
    """BACKBONE+HEAD@SIZE, of which the last two may be missing."""
    names, at, size = text.partition("@")
    backbone, plus, head = names.partition("+")
    if (at and not size.isdecimal()) or (plus and not head):
        raise InputError(f"architecture {text!r}", "is not like BACKBONE+HEAD@SIZE", "write resnet101+linear@448")
    return Architecture(backbone, head or OWN_HEAD, int(size) if at else None)
