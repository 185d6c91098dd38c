"""Files in the naming of the published repositories give the logits that those networks, written anew, give."""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from made_networks import make_graph, make_pictures
from reference import published
from reference.published import State
from torch import Tensor, nn

from pivotpatch import MultiLabelClassifier, PatchClassifier, save_checkpoint
from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError
from pivotpatch.models import ForeignClassifier, open_model, open_weights
from pivotpatch.models.classifier import Architecture
from pivotpatch.models.foreign import wrap_session
from pivotpatch.training.config import load_config
from pivotpatch.training.model import make_model, settle_model

LABELS = ["cat", "dog", "cow", "elk", "cup"]


def linear_head(state: State, x: Tensor, *, name: str, outputs: tuple[str, ...] = ("",)) -> list[Tensor]:
    return [published.linear(state, f"{name}{output}", x.mean((2, 3)), len(LABELS)) for output in outputs]


def ml_decoder(state: State, x: Tensor) -> list[Tensor]:
    return [published.ml_decoder(state, x, len(LABELS), groups=3, width=16, name="head.decoder")]


RESNET = partial(published.resnet, layers=(2, 2, 2, 2))
TRESNET = partial(published.tresnet, layers=(3, 4, 11, 3), planes=16, second=False)
TRESNET2 = partial(published.tresnet, layers=(3, 4, 23, 3), planes=8, second=True)
SWIN = partial(published.swin, embed=24, depths=(2, 2, 6, 2), heads=(3, 6, 12, 24), window=2)
CVT = partial(published.cvt, embed=(8, 16, 32), depths=(1, 2, 3), heads=(1, 2, 4))
NARROW, NARROWER = {"width_factor": 0.25}, {"width_factor": 0.125}
SMALL = Architecture("swin_tiny_patch4_window7_224", "query2label", 64, {"embed_dim": 24, "window_size": 2})
THREE = partial(linear_head, name="head.fc", outputs=(".fc1", ".fc2", ".fc3"))
QUERY2LABEL = partial(published.query2label, labels=len(LABELS), outputs=("fc",))
QUERY2LABEL3 = partial(published.query2label, labels=len(LABELS), outputs=("fc.fc1", "fc.fc2", "fc.fc3"))
WITHIN, BODY = "backbone.0.", "backbone.0.body."
Case = tuple[Architecture, Callable[..., Tensor], str, Callable[..., list[Tensor]]]
CASES: dict[str, Case] = {
    "MLC-PAT ResNet": (Architecture("resnet26"), RESNET, "", partial(THREE, name="fc")),
    "MLC-PAT TResNet": (Architecture("tresnet_v2_l", "linear", None, NARROWER), TRESNET2, "", THREE),
    "MLC-PAT Q2L-TResNet": (Architecture("tresnet_m", "query2label", None, NARROW), TRESNET, BODY, QUERY2LABEL3),
    "query2labels ResNet": (Architecture("resnet26", "query2label"), RESNET, BODY, QUERY2LABEL),
    "query2labels Swin": (SMALL, SWIN, WITHIN, QUERY2LABEL),
    "query2labels CvT": (Architecture("test_cvt", "query2label"), CVT, WITHIN, QUERY2LABEL),
    "ML-Decoder": (Architecture("tresnet_v2_l", "ml_decoder", None, NARROWER), TRESNET2, "", ml_decoder),
    "ASL": (Architecture("tresnet_m", "linear", None, NARROW), TRESNET, "", partial(linear_head, name="head.fc")),
}


# The map of that ResNet is 2,048 wide, and so are the weights of its decoder.
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name == "query2labels ResNet" else name for name in CASES]
)
def test_published_weights_give_the_published_logits(case: str, tmp_path: Path) -> None:
    built, body, prefix, head = CASES[case]
    state, image = State(), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def ask(image: Tensor) -> list[Tensor]:
        return head(state, body(state, image, prefix=prefix))

    several = len(ask(image)) == 3
    torch.save({"state_dict_ema": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "w.pth")
    model = open_weights(tmp_path / "w.pth", built, labels=LABELS)
    assert type(model) is (PatchClassifier if several else MultiLabelClassifier)
    with torch.inference_mode():
        found, expected = model(image), published.pat(ask, image) if several else ask(image)[0]
    logits = found.tde_logits if several else found
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))
    if case in ("MLC-PAT ResNet", "ML-Decoder"):  # the same through model.weights=FILE, where options are stated
        options = {"groups": 3, "width": 16} if built.head == "ml_decoder" else {}
        again = type(model)(
            Architecture(built.backbone, built.head, None, built.backbone_options, options),
            LABELS,
            weights=tmp_path / "w.pth",
        )
        assert again.left_out is None
        torch.testing.assert_close(again.state_dict(), model.state_dict())


def make_timm(labels: int = len(LABELS)) -> Any:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=labels).eval()
    nn.init.normal_(network.fc.weight)
    return network


def test_a_checkpoint_may_hold_what_training_scripts_leave_in_it(tmp_path: Path) -> None:
    """The command line, precisions and an optimiser are read past; the labels that ASL's files name are taken."""
    network, images = make_timm(), torch.rand(2, 3, 64, 64)
    content = {
        "model": network.state_dict(),
        "idx_to_class": {str(i): LABELS[i] for i in reversed(range(len(LABELS)))},
        "best_mAP": np.float64(86.6),
    }
    content |= {"args": argparse.Namespace(lr=1e-4), "AP": np.arange(5.0), "epoch": 3}
    torch.save(content, tmp_path / "w.pth")
    for architecture, kind in (("test_resnet+linear@64", MultiLabelClassifier), ("test_resnet@64", ForeignClassifier)):
        model = open_weights(tmp_path / "w.pth", architecture)
        assert (type(model), model.labels, model.picture_size) == (kind, tuple(LABELS), 64)
        with torch.inference_mode():
            torch.testing.assert_close(model(images), network(images))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(make_timm().state_dict(), path)
    for architecture, labels, message in (
        ("test_resnet+linear", None, "w.pth: it does not name its labels; give them: --labels FILE"),
        ("resnet18+linear", LABELS, r"w.pth: weights do not fit the model: \d+ missing .*instead of"),
        ("test_resnet+query2label", LABELS, "missing .*head.queries"),
        ("test_resnet", LABELS[1:], "1 misshapen|2 misshapen"),
        ("test_resnet@big", LABELS, "is not like BACKBONE[+]HEAD@SIZE"),
        ("rest18", LABELS, "timm has no model 'rest18'"),
    ):
        with pytest.raises(InputError, match=message):
            open_weights(path, architecture, labels=labels)
    exported = path.rename(path.with_suffix(".onnx"))
    with pytest.raises(InputError, match=r"w\.onnx: is an ONNX file.*to judge it, give evaluate what predict --out"):
        open_model(exported)


def test_training_takes_a_head_only_where_it_fits(tmp_path: Path) -> None:
    """PAT-T begins with one projection three times; a head of other labels is left out, and that is told."""
    network = make_timm()
    torch.save(network.state_dict(), tmp_path / "w.pth")
    model = PatchClassifier("test_resnet", LABELS, weights=tmp_path / "w.pth")
    assert all(part.training for part in model.modules())
    for projection in (model.head.project, model.patch_projection, model.weight_projection):
        assert isinstance(projection, nn.Linear)
        torch.testing.assert_close(projection.weight, network.fc.weight)
    dropping = Architecture("test_resnet", backbone_options={"drop_rate": 0.5})
    assert MultiLabelClassifier(dropping, LABELS, weights=tmp_path / "w.pth").left_out is None
    for labels, head, why in ((LABELS[1:], "linear", "5 labels, not of 4"), (LABELS, "ml_decoder", "another kind")):
        left = MultiLabelClassifier("test_resnet", labels, head=head, weights=tmp_path / "w.pth").left_out
        assert left is not None
        assert re.search(f"w.pth: its head is of {why}; this one starts anew", left)
    save_checkpoint(model, tmp_path / "ours")
    torch.save({"model": network.state_dict(), "idx_to_class": dict(enumerate(LABELS))}, tmp_path / "named.pth")
    for file in (tmp_path / "ours" / "model.safetensors", tmp_path / "named.pth"):
        assert PatchClassifier("test_resnet", LABELS, weights=file).left_out is None
        left = PatchClassifier("test_resnet", LABELS[::-1], weights=file).left_out  # rows of other labels, as many
        assert left is not None
        assert "its head is of other labels, or in another order" in left
    other = PatchClassifier("test_resnet", LABELS, head="max", weights=tmp_path / "ours" / "model.safetensors")
    assert str(other.left_out).endswith("its head is of another kind; this one starts anew")


@pytest.mark.parametrize("head", ["csra", "ml_gcn", "fev_lv"])
def test_pat_begins_as_the_whole_model_of_a_checkpoint(head: str, tmp_path: Path) -> None:
    """With its options and colours, which auto would take for those of a new head."""
    options = {"scale": 0.5} if head == "csra" else {}
    plain = MultiLabelClassifier(Architecture("test_resnet", head, 64, head_options=options), LABELS)
    plain.preprocessing = replace(plain.preprocessing, mean=(0.0,) * 3, std=(1.0,) * 3)
    save_checkpoint(plain.eval(), tmp_path / "ours")
    said = [f"model.weights={tmp_path / 'ours' / 'model.safetensors'}", "model.backbone=test_resnet"]
    config = load_config(None, [*said, f"model.head={head}", "model.image_size=64", "model.pretrained=false"])
    made: Any = make_model(config, tuple(LABELS)).eval()
    assert made.left_out is None
    assert made.preprocessing == plain.preprocessing
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(made(images).image_logits, plain(images))
        torch.testing.assert_close(
            made(images).patch_logits[:, 0], plain(resize_images(images[..., :32, :32], (64, 64)))
        )
    assert settle_model(config).model.head_options == options  # which config.toml tells


@pytest.mark.parametrize("count", [1, 4, 6])
def test_the_last_batch_for_a_graph_of_fixed_size_is_padded_and_the_padding_dropped(count: int) -> None:
    network, graph = make_graph(4, 24, 24)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    given: list[Any] = []

    def note(names: list[str], feed: dict[str, Any]) -> Any:
        given.append(feed["images"])
        return session.run(names, feed)

    noted = SimpleNamespace(run=note, get_inputs=session.get_inputs, get_outputs=session.get_outputs)
    images = torch.rand(count, 3, 24, 24)
    with torch.inference_mode():
        torch.testing.assert_close(wrap_session(noted)(images), network(images), rtol=1e-4, atol=1e-5)
    assert [len(part) for part in given] == [4] * -(-count // 4)
    assert not np.concatenate(given)[count:].any()  # rows of nothing, of which no answer comes back


@pytest.mark.parametrize(("batch", "sigmoid"), [("any", False), (1, True)])
def test_somebodys_onnx_graph_is_asked(batch: str | int, sigmoid: bool, tmp_path: Path) -> None:
    path = tmp_path / "theirs.onnx"
    network, graph = make_graph(batch, 64, 64, sigmoid=sigmoid)
    path.write_bytes(graph)
    model = open_weights(path, "test_resnet", labels=LABELS)
    images = model.preprocessing(make_pictures(3, 40, 50))
    with torch.inference_mode():
        torch.testing.assert_close(model(images), network(images), rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        assert model(1000 * images).isfinite().all()  # also where a sigmoid was rounded to 0 or 1
    with pytest.raises(InputError, match="it takes images of 64 x 64 pixels, not of 96"):
        open_weights(path, "test_resnet@96", labels=LABELS)
