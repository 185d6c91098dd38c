import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from hub_server import HubUser, serving_hub
from made_networks import make_pictures
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor, nn
from transformers.utils import logging

from pivotpatch import InputError, PatchInference, Predictor
from pivotpatch.core.patches import resize_images
from pivotpatch.inference.foreign import open_foreign, open_timm, open_transformers
from pivotpatch.inference.scoring import score_images
from pivotpatch.models.foreign import load_timm, load_transformers

LABELS = ("cat", "cup", "person")
SIDE = 32
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NORMS: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}


def make_vit(**options: Any) -> Any:
    """A small transformer of transformers with drawn weights."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=SIDE,
        patch_size=8,
        id2label=dict(enumerate(LABELS)),
        problem_type=options.pop("problem_type", "multi_label_classification"),
        **options,
    )
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


def make_resnet() -> Any:
    torch.manual_seed(0)
    overlay = {"input_size": (3, SIDE, SIDE), "mean": MEAN, "std": STD}
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


def edit_json(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture(params=["transformers", "timm"])
def case(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Any], Path]:
    """A network, what opens it, and its folder."""
    if request.param == "timm":
        return make_resnet(), open_timm, request.getfixturevalue("resnet")
    return make_vit(), open_transformers, request.getfixturevalue("vit")


def test_the_answer_is_that_of_the_model_called_by_hand(case: tuple[Any, Callable[..., Any], Path]) -> None:
    network, opening, folder = case
    engine = opening(folder, pat=False)
    assert (engine.labels, engine.thresholds, engine.picture_size, engine.grid) == (LABELS, None, SIDE, 0)
    pictures = make_pictures(5, SIDE, SIDE)
    answer = engine(pictures)
    expected = ask(network, pictures).sigmoid()
    assert expected.std(dim=0).max() > 0.03  # pictures differ, so agreement means something
    torch.testing.assert_close(answer.probs, expected, atol=1e-5, rtol=0)
    assert answer.patch_probs is None


def test_patches_are_cut_from_the_picture_at_twice_the_size(case: tuple[Any, Callable[..., Any], Path]) -> None:
    network, opening, folder = case
    engine = opening(folder)
    assert (engine.picture_size, engine.grid) == (2 * SIDE, 2)
    pictures = make_pictures(4, 2 * SIDE, 2 * SIDE)
    answer = engine(pictures)
    image = ask(network, resize_images(pictures, (SIDE, SIDE)))
    quarters = [pictures[:, :, top : top + SIDE, left : left + SIDE] for top in (0, SIDE) for left in (0, SIDE)]
    patches = torch.stack([ask(network, quarter) for quarter in quarters], dim=1)
    weights = patches.softmax(dim=1)
    pooled = (weights * patches).sum(dim=1)
    torch.testing.assert_close(answer.image_probs, image.sigmoid(), atol=1e-5, rtol=0)
    torch.testing.assert_close(answer.weights, weights, atol=1e-5, rtol=0)
    torch.testing.assert_close(answer.patch_probs, pooled.sigmoid(), atol=1e-5, rtol=0)
    torch.testing.assert_close(answer.probs, ((image + pooled) / 2).sigmoid(), atol=1e-5, rtol=0)


def test_a_predictor_opens_them_by_their_folders(vit: Path, resnet: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    for address in (f"transformers:{vit}", f"timm:{resnet}", f"timm:local-dir:{resnet}"):
        prediction = Predictor.load(address, device="cpu")(picture)
        assert prediction.labels == LABELS
        box = prediction.top(1)[0].box
        assert box is not None
        assert (box.right - box.left, box.bottom - box.top) == (60, 45)
        alone = Predictor.load(address, device="cpu", effort=0)(picture)
        assert alone.weights is None
        torch.testing.assert_close(alone.probs, prediction.image_probs, atol=0.05, rtol=0)  # resized in two steps
        with pytest.raises(InputError, match="effort: is 0.5, but PAT-I looks at the patches of all .*; give 1 or 0"):
            Predictor.load(address, device="cpu", effort=0.5)


def test_they_are_scored_like_our_own(vit: Path) -> None:
    model = load_transformers(vit)
    pictures = make_pictures(3, SIDE, SIDE)
    torch.testing.assert_close(score_images(model, pictures), ask(make_vit(), pictures), atol=1e-4, rtol=0)
    wrapped = score_images(PatchInference(model), pictures)
    assert not isinstance(wrapped, Tensor)
    with pytest.raises(InputError, match="cannot save a ForeignClassifier"):
        model.save_pretrained(vit.with_name("copy"))


def test_nothing_is_left_behind(vit: Path, resnet: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.random.get_rng_state(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    assert not load_transformers(vit).training
    assert not load_timm(resnet).training
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before[1:]
    assert capfd.readouterr() == ("", "")


def test_half_weights_run_in_float32(vit: Path, resnet: Path) -> None:
    pictures = make_pictures(2, SIDE, SIDE)
    for folder, opening in ((vit, open_transformers), (resnet, open_timm)):
        before = opening(folder, pat=False)(pictures).probs
        state = {
            key: value.half() if value.is_floating_point() else value
            for key, value in load_file(folder / "model.safetensors").items()
        }
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        if folder == vit:
            edit_json(vit, "config.json", lambda content: content.update(dtype="float16"))
        engine = opening(folder, pat=False)
        assert {value.dtype for value in engine.model.parameters()} == {torch.float32}
        torch.testing.assert_close(engine(pictures).probs, before, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("processor", "std", "interpolation"),
    [
        (
            transformers.ConvNextImageProcessor(size={"shortest_edge": SIDE}, crop_pct=0.5, resample=3, **NORMS),
            STD,
            "bicubic",
        ),
        (make_processor(do_normalize=False), (1.0,) * 3, "bilinear"),
        (make_processor(rescale_factor=1 / 127.5), tuple(value / 2 for value in STD), "bilinear"),
        (make_processor(resample=3), STD, "bicubic"),
    ],
    ids=["crop", "plain", "scale", "cubic"],
)
def test_what_a_processor_does_is_read(processor: Any, std: tuple[float, ...], interpolation: str, vit: Path) -> None:
    processor.save_pretrained(vit)
    found = load_transformers(vit).preprocessing
    assert (found.image_size, found.interpolation) == (SIDE, interpolation)
    assert found.std == pytest.approx(std, abs=2e-6)
    picture = Image.new("RGB", (SIDE, SIDE), (10, 100, 250))
    expected = processor(images=picture, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(found(picture), expected, atol=1e-3, rtol=0)


def drop_weights(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["classifier.bias"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: edit_json(f, "config.json", lambda c: c.update(problem_type="single_label_classification")),
            "problem_type is 'single_label_classification', so .* a single label; if it is multi-label all the same, "
            "write problem_type 'multi_label_classification' into its config.json, or in Python open_transformers",
        ),
        (drop_weights, "1 of its weights are missing or of another shape, such as classifier.bias; give a model that"),
        (pickle_weights, "or no weights as safetensors; others can run code .*; check the path, or save it again with"),
        (lambda f: (f / "model.safetensors").write_bytes(b"cut"), "model.safetensors: cannot be read .*copy it again"),
        (lambda f: (f / "config.json").unlink(), "holds no config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"its config.json is no JSON \(.+\); copy the model again"),
        (
            lambda f: edit_json(
                f, "config.json", lambda c: c.update(model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"})
            ),
            "transformers cannot open it .*custom code which must be executed",
        ),
        (
            lambda f: transformers.MobileViTImageProcessor(
                size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
            ).save_pretrained(f),  # turns RGB into BGR
            "its processor does .*do_flip_channel_order.*; in Python, open it with preprocessing=Preprocessing",
        ),
        (
            lambda f: edit_json(f, "config.json", lambda c: c.update(hidden_size=10**9)),
            "config.json: 'hidden_size': 1000000000 is too large a number; give 1,048,576 at most",
        ),
        (
            lambda f: edit_json(f, "config.json", lambda c: c.update(image_size=1 << 17)),
            "describes a far larger model than its weights are of; it is damaged, copy the model again",
        ),
        (lambda f: (f / "config.json").write_text("[" * 100_000), r"its config.json is no JSON \(.+\); copy the model"),
        (
            lambda f: edit_json(
                f, "preprocessor_config.json", lambda c: c.update(size={"height": 9999, "width": 9999})
            ),
            "preprocessor_config.json: 'size': 'height': 9999 is too large a number; give 4,096 at most",
        ),
        (
            lambda f: transformers.ViTImageProcessor(size={"height": SIDE, "width": 48}).save_pretrained(f),
            "its processor does .* to size {'height': 32, 'width': 48}",
        ),
    ],
)
def test_a_model_of_transformers_that_will_not_do_is_refused(
    damage: Callable[[Path], None], message: str, vit: Path
) -> None:
    damage(vit)
    with pytest.raises(InputError, match=message) as caught:
        load_transformers(vit)
    assert "\n" not in str(caught.value)


def test_the_user_may_know_better_than_the_configuration(vit: Path) -> None:
    make_vit(problem_type=None).save_pretrained(vit)
    assert load_transformers(vit, multi_label=True, labels=["a", "b", "c"]).labels == ("a", "b", "c")
    with pytest.raises(InputError, match=r"the model gives logits \(1, 3\) of one image, and there are 2 labels"):
        load_transformers(vit, multi_label=True, labels=["a", "b"])
    with pytest.raises(InputError, match="are not different names"):
        load_transformers(vit, multi_label=True, labels=["a", "b", "a"])


def test_labels_are_put_into_the_order_of_the_logits(vit: Path, resnet: Path) -> None:
    edit_json(vit, "config.json", lambda c: c.update(id2label={"2": "c", "0": "a", "1": "b"}))
    edit_json(resnet, "config.json", lambda c: c.update(label_names={"2": "c", "0": "a", "1": "b"}))
    assert load_transformers(vit).labels == load_timm(resnet).labels == ("a", "b", "c")
    edit_json(resnet, "config.json", lambda c: c.update(label_names={"3": "c", "0": "a", "1": "b"}))
    with pytest.raises(
        InputError, match="its labels are not numbered from 0 without a gap; name each logit in its config"
    ):
        load_timm(resnet)


def test_without_transformers_it_is_said_how_to_get_it(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"transformers: is not installed; pip install pivotpatch\[transformers\]"):
        load_transformers(vit)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: edit_json(f, "config.json", lambda c: c.pop("label_names")),
            r"states no label_names; name each logit in its config.json, or in Python .* labels=\[...\]",
        ),
        (
            lambda f: edit_json(f, "config.json", lambda c: c.update(label_names=["cat", "cup"])),
            r"logits \(1, 3\) of one image, and there are 2 labels; name each logit in its config.json, or in Python",
        ),
        (lambda f: edit_json(f, "config.json", lambda c: c.update(num_classes=4)), "fc.bias is .3,. instead of .4,."),
        (lambda f: edit_json(f, "config.json", lambda c: c.pop("architecture")), "timm cannot open it .*architecture"),
        (
            lambda f: edit_json(f, "config.json", lambda c: c["pretrained_cfg"].update(input_size=[3, 32, 48])),
            "it sees 3 channels of 32 x 48 pixels; give one for square RGB images",
        ),
        (pickle_weights, "no weights as safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"cut"), "model.safetensors: cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "timm cannot open it"),
        (lambda f: edit_json(f, "config.json", lambda c: c.update(architecture=5)), "timm cannot open it .*Attribute"),
        (lambda f: edit_json(f, "config.json", lambda c: c.update(model_args={"block": None})), "timm cannot open it"),
        (
            lambda f: edit_json(f, "config.json", lambda c: c.update(model_args={"layers": [10**5, 1, 1, 1]})),
            "describes a far larger model than its weights are of",
        ),
        (
            lambda f: edit_json(f, "config.json", lambda c: c.update(model_args={"stem_width": 10**9})),
            "config.json: 'model_args': 'stem_width': 1000000000 is too large a number",
        ),
        (
            lambda f: edit_json(f, "config.json", lambda c: c["pretrained_cfg"].update(input_size=[3, 9999, 9999])),
            "preprocessing.image_size is 9999; give a whole number of pixels a side, 4,096 at most",
        ),
        *(
            (
                lambda f, mean=mean: edit_json(f, "config.json", lambda c: c["pretrained_cfg"].update(mean=mean)),
                "preprocessing.mean is .*; give three numbers below",
            )
            for mean in ([0.5, 0.5], [0.5, 0.5, "x"], [0.5, 0.5, [0.5]], [0.5, 0.5, float("nan")], [0.5, 0.5, 1e38])
        ),
    ],
)
def test_a_timm_model_that_will_not_do_is_refused(damage: Callable[[Path], None], message: str, resnet: Path) -> None:
    damage(resnet)
    with pytest.raises(InputError, match=message) as caught:
        load_timm(resnet)
    assert "\n" not in str(caught.value)


def test_weights_in_their_authors_names_are_converted(tmp_path: Path) -> None:
    model, folder = timm.create_model("test_vit", num_classes=2).eval(), tmp_path / "m"
    save_for_hf(model, str(folder), safe_serialization=True)
    state = load_file(folder / "model.safetensors")
    save_file({f"visual.trunk.{key}": value for key, value in state.items()}, folder / "model.safetensors")
    loaded, images = load_timm(folder, labels=["a", "b"]), torch.rand(1, 3, 160, 160)
    assert torch.equal(loaded(images), model(images))


def test_the_size_that_a_timm_model_was_built_for_counts(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=2, img_size=48)
    folder = str(tmp_path / "m")
    save_for_hf(model, folder, model_args={"img_size": 48}, safe_serialization=True)
    assert load_timm(folder, labels=["a", "b"]).picture_size == 48


@pytest.fixture
def user(tmp_path: Path, vit: Path, resnet: Path) -> Iterator[tuple[HubUser, list[str]]]:
    """Somebody for whom both are on a hub, and what was fetched from there."""
    with serving_hub() as server:
        for folder in (vit, resnet):
            held = server.offer(f"me/{folder.name}", folder, revision="v1")
            held.revisions["v1"]["pytorch_model.bin"] = b"pickle"
            held.revisions["v1"]["mine.py"] = b"raise SystemExit"
        asking = HubUser(server, tmp_path / "cache")
        yield asking, server.fetched
        asking.close()


def test_they_are_opened_by_their_names_on_the_hub(user: tuple[HubUser, list[str]]) -> None:
    code = dedent("""
        from pivotpatch import Predictor
        for address in ("transformers:me/vit@v1", "timm:me/resnet@v1", "timm:hf_hub:me/resnet@v1", "timm:me/vit"):
            try:
                print(" ".join(Predictor.load(address, device="cpu").labels))
            except ValueError as error:
                print(error)
    """)
    asking, fetched = user
    *said, fault = asking.run(code)
    assert said == [" ".join(LABELS)] * 3
    assert fault == "timm:me/vit: holds no config.json, so it is another kind of model; check the name"
    assert set(fetched) == {
        *(f"me/vit/{name}" for name in ("config.json", "model.safetensors", "preprocessor_config.json")),
        *(f"me/resnet/{name}" for name in ("config.json", "model.safetensors")),
    }


@pytest.mark.parametrize("effort", [0, 1])
def test_one_that_gives_no_numbers_is_named(resnet: Path, effort: float) -> None:
    state = load_file(resnet / "model.safetensors")
    state["fc.weight"].fill_(3e38)
    save_file(state, resnet / "model.safetensors", metadata={"format": "pt"})
    predictor = Predictor.load(f"timm:{resnet}", device="cpu", effort=effort)
    with pytest.raises(InputError, match=f"^timm:{resnet}: it answers nan where a probability is due"):
        predictor(np.full((40, 40, 3), 99, np.uint8))


def test_patches_of_a_model_that_sees_much_are_too_many(resnet: Path) -> None:
    edit_json(resnet, "config.json", lambda c: c["pretrained_cfg"].update(input_size=[3, 1856, 1856]))
    model = load_timm(resnet)
    with pytest.raises(InputError, match=f"timm:{resnet}: an image and its 2 x 2 patches have 17 million pixels"):
        open_foreign(model)
