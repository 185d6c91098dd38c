import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from made_networks import ask as answers
from made_networks import make_pictures
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers.utils import logging

from pivotpatch import InputError, Predictor
from pivotpatch.cli.sources import score_source
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.patches import resize_images
from pivotpatch.data.address import open_records
from pivotpatch.models.foreign import load_timm, load_transformers
from pivotpatch.training.config import load_config

LABELS = ("cat", "cup", "person")
SIDE = 32
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NORMS: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}
Damage = Callable[[Path], object]


def make_vit(kind: Any = "multi_label_classification") -> Any:
    """A small transformer of transformers with drawn weights."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    names = dict(enumerate(LABELS))
    config = transformers.ViTConfig(**sizes, image_size=SIDE, patch_size=8, id2label=names, problem_type=kind)
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # else all answers are near 0.5
    return model


def make_processor(**options: Any) -> Any:
    return transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}, **NORMS, **options)


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    make_vit().save_pretrained(tmp_path / "vit")
    make_processor().save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.fixture
def resnet(tmp_path: Path) -> Path:
    """A folder as timm writes it for the hub."""
    save_for_hf(make_resnet(), str(tmp_path / "resnet"), model_config={"label_names": LABELS}, safe_serialization=True)
    return tmp_path / "resnet"


def make_resnet(**stated: Any) -> Any:
    torch.manual_seed(0)
    overlay = {"input_size": (3, SIDE, SIDE), "mean": MEAN, "std": STD, **stated}
    model = timm.create_model("test_resnet", num_classes=3, pretrained_cfg_overlay=overlay).eval()
    with torch.no_grad():
        nn.init.normal_(model.fc.weight)
    return model


def ask(network: Any, views: Tensor) -> Tensor:
    """Logits (B,L) of views (B,3,S,S) uint8, by hand: prepared by the processor of transformers, one by one."""
    processor = make_processor()
    pictures = [Image.fromarray(view.permute(1, 2, 0).numpy()) for view in views]
    pixels = torch.cat([processor(images=picture, return_tensors="pt")["pixel_values"] for picture in pictures])
    with torch.inference_mode():
        output = network(pixels)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def edit(name: str = "config.json", within: str | None = None, **changes: Any) -> Damage:
    """Another value in a JSON file; None takes it away."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        part = content[within] if within else content
        part.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del part[key]
        (folder / name).write_text(json.dumps(content))

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.fixture(params=["transformers", "timm"])
def case(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Any], Path]:
    """A network, what opens it, and its folder."""
    if request.param == "timm":
        return make_resnet(), load_timm, request.getfixturevalue("resnet")
    return make_vit(), load_transformers, request.getfixturevalue("vit")


def test_the_answer_is_that_of_the_model_called_by_hand(
    case: tuple[Any, Callable[..., Any], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    network, opening, folder = case
    before = torch.random.get_rng_state(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    plain, patched = (Predictor.load(opening(folder), device="cpu", effort=effort).engine for effort in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), *capfd.readouterr()) == (*before[1:], "", "")
    assert (plain.labels, plain.thresholds, plain.picture_size, plain.grid) == (LABELS, None, SIDE, 0)
    assert (patched.labels, patched.thresholds, patched.picture_size, patched.grid) == (LABELS, None, 2 * SIDE, 2)
    pictures = make_pictures(4, 2 * SIDE, 2 * SIDE)
    small = resize_images(pictures, (SIDE, SIDE))
    image = ask(network, small)
    assert image.sigmoid().std(dim=0).max() > 0.03  # pictures differ, so agreement means something
    torch.testing.assert_close(answers(plain, small).probs, image.sigmoid(), atol=1e-5, rtol=0)
    assert answers(plain, small).patch_probs is None
    answer = answers(patched, pictures)
    quarters = [pictures[:, :, top : top + SIDE, left : left + SIDE] for top in (0, SIDE) for left in (0, SIDE)]
    patches = torch.stack([ask(network, quarter) for quarter in quarters], dim=1)
    out = combine_logits(image, patches)
    expected = out.probs, image.sigmoid(), out.pooled_logits.sigmoid(), out.weights
    torch.testing.assert_close(tuple(answer), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("stated", "other"), [("bilinear", "bicubic"), ("bicubic", "bilinear")])
def test_a_file_is_resized_as_the_model_states(stated: str, other: str, tmp_path: Path) -> None:
    """By each way of asking, as torch does it."""
    network, files = make_resnet(interpolation=stated), [tmp_path / f"{place}.png" for place in range(3)]
    save_for_hf(network, str(tmp_path / "model"), model_config={"label_names": LABELS}, safe_serialization=True)
    for file, picture in zip(files, make_pictures(3, 90, 70), strict=True):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file)
    (tmp_path / "photos.csv").write_text("image,labels\n" + "".join(map("{}.png,{}\n".format, range(3), LABELS)))

    model = load_timm(tmp_path / "model")
    assert model.preprocessing.interpolation == stated
    pictures = [pil_to_tensor(Image.open(file)) for file in files]

    def answer(interpolation: str, *, source: int) -> Tensor:
        prepare = replace(model.preprocessing, interpolation=interpolation)
        # Not torchvision's resize, which rounds bytes otherwise on some CPUs.
        sources = F.interpolate(torch.stack(pictures), size=(source, source), mode=interpolation, antialias=True)
        return torch.stack([model(prepare(each)[None])[0] for each in sources]).sigmoid()

    def check(probs: Any, *, source: int) -> None:
        expected, otherwise = answer(stated, source=source), answer(other, source=source)
        assert (torch.as_tensor(probs) - expected).abs().max() < 0.1 * (otherwise - expected).abs().max()

    torch.testing.assert_close(
        answer(stated, source=SIDE), model(torch.stack([*map(model.preprocessing, pictures)])).sigmoid()
    )
    for given in (files, pictures):
        check(np.stack([found.probs for found in Predictor.load(model, device="cpu", effort=0)(given)]), source=SIDE)
    records, config = open_records(f"table:{tmp_path / 'photos.csv'}"), load_config(None, ["data.workers=0"])
    for size in (SIDE, 2 * SIDE):
        told = score_source(model, records, config=config, size=size, keep_patches=False, progress=lambda *_: None)
        check(told.scores.get("image").sigmoid(), source=size)
    patched = Predictor.load(model, device="cpu")  # cuts patches from images of twice the size
    check(np.stack([found.image_probs for found in patched(files)]), source=2 * SIDE)


@pytest.mark.parametrize(
    ("processor", "std", "interpolation"),
    [
        (transformers.ConvNextImageProcessor(size={"shortest_edge": SIDE}, crop_pct=0.5, resample=3, **NORMS), 1, 3),
        (make_processor(do_normalize=False), 0, 2),
        (make_processor(rescale_factor=1 / 127.5), 0.5, 2),
    ],
    ids=["crop", "plain", "scale"],
)
def test_what_a_processor_does_is_read(processor: Any, std: float, interpolation: int, vit: Path) -> None:
    processor.save_pretrained(vit)
    found = load_transformers(vit).preprocessing
    assert (found.image_size, found.interpolation) == (SIDE, {2: "bilinear", 3: "bicubic"}[interpolation])
    assert found.std == pytest.approx([value * std or 1.0 for value in STD], abs=2e-6)
    picture = Image.new("RGB", (SIDE, SIDE), (10, 100, 250))
    expected = processor(images=picture, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(found(picture), expected, atol=1e-3, rtol=0)


def drop_weights(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["classifier.bias"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_code(folder: Path) -> None:
    torch.save({"weight": print}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(problem_type="single_label_classification"), "problem_type is 'single_label_classification'"),
        (drop_weights, "1 of its weights are missing or of another shape, such as classifier.bias"),
        (pickle_weights, "or no weights as safetensors; others can run code"),
        (write("model.safetensors", b"cut"), "model.safetensors: cannot be read .*copy it again"),
        (lambda f: (f / "config.json").unlink(), "holds no config.json"),
        (edit(model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"}), "custom code which must be executed"),
        (
            lambda f: transformers.MobileViTImageProcessor(
                size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
            ).save_pretrained(f),  # turns RGB into BGR
            "its processor does .*do_flip_channel_order.*; in Python, open it with preprocessing=Preprocessing",
        ),
        (edit("preprocessor_config.json", size={"height": SIDE, "width": 48}), "its processor does .* 'width': 48}"),
        (edit(hidden_size=10**9), "config.json: 'hidden_size': 1000000000 is too large a number"),
        (edit(image_size=1 << 17), "describes a far larger model than its weights are of"),
    ],
)
def test_a_model_of_transformers_that_will_not_do_is_refused(damage: Damage, message: str, vit: Path) -> None:
    damage(vit)
    with pytest.raises(InputError, match=message):
        load_transformers(vit)


def test_the_user_may_know_better_than_the_configuration(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_vit(None).save_pretrained(vit)
    assert load_transformers(vit, multi_label=True, labels=["a", "b", "c"]).labels == ("a", "b", "c")
    for labels, message in ((["a", "b"], "and there are 2 labels"), (["a", "b", "a"], "are not different names")):
        with pytest.raises(InputError, match=message):
            load_transformers(vit, multi_label=True, labels=labels)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"transformers: is not installed; pip install .*transformers"):
        load_transformers(vit)


def test_labels_are_put_into_the_order_of_the_logits(vit: Path, resnet: Path) -> None:
    edit(id2label={"2": "c", "0": "a", "1": "b"})(vit)
    edit(label_names={"2": "c", "0": "a", "1": "b"})(resnet)
    assert load_transformers(vit).labels == load_timm(resnet).labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(label_names=None), r"states no label_names"),
        (edit(label_names=["cat", "cup"]), "of one image, and there are 2 labels"),
        (edit(num_classes=4), "fc.bias is .3,. instead of .4,."),
        (write("config.json", b"[]"), "timm cannot open it"),
        (pickle_code, "pytorch_model.bin: cannot be read as plain tensors"),
        (write("model.safetensors", b"cut"), "model.safetensors: cannot be read"),
        (edit(model_args={"layers": [10**5, 1, 1, 1]}), "describes a far larger model than its weights are of"),
        (edit(model_args={"stem_width": 10**9}), "'model_args': 'stem_width': 1000000000 is too large a number"),
        (edit(within="pretrained_cfg", input_size=[3, 32, 48]), "it sees 3 channels of 32 x 48 pixels"),
        (edit(within="pretrained_cfg", mean=[0.5, 0.5, float("nan")]), "preprocessing: mean"),
    ],
)
def test_a_timm_model_that_will_not_do_is_refused(damage: Damage, message: str, resnet: Path) -> None:
    damage(resnet)
    with pytest.raises(InputError, match=message):
        load_timm(resnet)


def test_weights_in_their_authors_names_are_converted_and_the_built_size_counts(tmp_path: Path) -> None:
    model, folder = timm.create_model("test_vit", num_classes=2, img_size=48).eval(), tmp_path / "m"
    save_for_hf(model, str(folder), model_args={"img_size": 48})  # as a torch file
    images = torch.rand(1, 3, 48, 48)
    assert torch.equal(load_timm(folder, labels=["a", "b"])(images), model(images))
    save_for_hf(model, str(folder), model_args={"img_size": 48}, safe_serialization=True)
    state = load_file(folder / "model.safetensors")
    save_file({f"visual.trunk.{key}": value.half() for key, value in state.items()}, folder / "model.safetensors")
    loaded = load_timm(folder, labels=["a", "b"])
    assert loaded.picture_size == 48
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded(images), model(images), atol=0.02, rtol=0)
