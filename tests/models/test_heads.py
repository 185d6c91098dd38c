from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from reference.published import State, query2label
from safetensors.torch import save_file
from torch import nn

from pivotpatch.errors import InputError
from pivotpatch.models.heads import (
    HeadOption,
    MLDecoderHead,
    Query2LabelHead,
    make_head,
)
from pivotpatch.models.weights import rename_published
from pivotpatch.runtime.values import patch_boxes
from pivotpatch.training.config import load_config
from pivotpatch.training.model import make_model


@pytest.mark.parametrize("name", ["linear", "max"])
def test_plain_heads_are_pooling_and_a_linear_layer(name: str) -> None:
    head, features = make_head(name, features=6, labels=3), torch.rand(2, 6, 4, 5)
    assert isinstance(head.project, nn.Linear)
    places = features.flatten(2)
    pooled = places.mean(2) if name == "linear" else places.max(2).values
    torch.testing.assert_close(head(features), pooled @ head.project.weight.t() + head.project.bias)


@pytest.mark.parametrize(("width", "millions"), [(2048, 151.4), (2432, 191.0)])
def test_query2label_has_the_published_shape_by_default(width: int, millions: float) -> None:
    with torch.device("meta"):
        head = Query2LabelHead(width, 80)
    assert sum(weights.numel() for weights in head.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert (len(head.encoder), len(head.decoder)) == (1, 2)
    assert [m.num_heads for m in head.modules() if isinstance(m, nn.MultiheadAttention)] == [4] * 3


def test_query2label_may_let_its_labels_attend_to_each_other() -> None:
    """As in the published code; test_published.py has the head without it, which is what was published."""
    state, features = State(), torch.randn(2, 16, 2, 3)
    (expected,) = query2label(state, features, 3, outputs=("fc",), self_attention=True)
    head = Query2LabelHead(16, 3, feedforward=24, self_attention=True).eval()
    named = rename_published(state, timm.create_model("test_resnet"))  # without a projection, as the width is the map's
    head.load_state_dict(
        {name.removeprefix("head."): value for name, value in named.items() if name.startswith("head.")}
    )
    torch.testing.assert_close(head(features), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(head(features), head(features.flip(3)), atol=1e-4)  # places matter


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("query2lable", {}, "unknown head 'query2lable'; did you mean 'query2label'"),
        ("query2label", {"feed_forward": 4}, "head 'query2label': cannot be built with .*argument 'feed_forward'"),
        ("query2label", {"width": 30}, "Query2Label: width 30 with 4 attention heads; give a multiple"),
        ("ml_decoder", {"groups": 0}, "head 'ml_decoder': cannot be built with"),
        ("csra", {"heads": 3}, "CSRA: heads is 3; give one of 1, 2, 4, 6, 8"),
        ("ida", {"samples": 3}, "IDA: 16 channels and 3 samples"),
        ("rarl", {"steps": 0}, "head 'rarl': steps is 0; give 1 or more"),
        ("kssnet", {"own": -0.5}, "head 'kssnet': own is -0.5; give 0 or more"),
        ("c_tran", {"attention_heads": 3}, "head 'c_tran': cannot be built with .*divisible by num_heads"),
    ],
)
def test_bad_choices_are_named(name: str, options: dict[str, HeadOption], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_head(name, features=16, labels=3, options=options)


@pytest.mark.parametrize("name", ["linear", "max", "query2label", "ml_decoder"])
def test_the_embedding_of_a_region_is_that_of_the_map_cut_to_it(name: str) -> None:
    options: dict[str, HeadOption] = {"width": 16} if name in ("query2label", "ml_decoder") else {}
    head, features = make_head(name, features=6, labels=3, options=options).eval(), torch.randn(2, 6, 5, 4)
    boxes = patch_boxes(5, 4, grid=2, overlap=0.5)  # 4 x 3 places each, which overlap
    whole, parts = head.embed_regions(features, boxes)
    torch.testing.assert_close(whole, head.embed(features))
    for part, box in zip(parts.unbind(1), boxes, strict=True):
        torch.testing.assert_close(part, head.embed(features[:, :, box.top : box.bottom, box.left : box.right]))


def test_shallow_regions_end_before_the_feed_forward_part() -> None:
    deep, features = MLDecoderHead(6, 3, width=16).eval(), torch.randn(2, 6, 4, 4)
    shallow = MLDecoderHead(6, 3, width=16, deep_regions=False).eval()
    shallow.load_state_dict(deep.state_dict())
    boxes = patch_boxes(4, 4, grid=2)
    (whole, parts), (other, early) = (head.embed_regions(features, boxes) for head in (deep, shallow))
    torch.testing.assert_close(other, whole)
    layer = deep.decoder
    fed = early + layer.linear2(layer.linear1(early).relu())
    torch.testing.assert_close(layer.norm3(fed), parts)


@pytest.mark.parametrize("name", ["linear", "max", "ml_gcn", "add_gcn", "csra"])
def test_a_run_may_begin_with_no_opinion_and_learns_from_there(name: str, tmp_path: Path) -> None:
    built = ["model.backbone=test_resnet", "model.pretrained=false", "model.image_size=32", f"model.head={name}"]
    drawn: Any = make_model(load_config(None, built), ("a", "b", "c"))  # whose backbone is new
    assert drawn.architecture.head_options == {}
    model: Any = make_model(load_config(None, [*built, "model.first_logits=small"]), ("a", "b", "c"))
    images = torch.rand(2, 3, 32, 32)
    logits = model(images)
    sizes = torch.stack([logits.image_logits, logits.pooled_logits]).abs()
    if name == "csra":  # whose filters have a length
        assert 0 < sizes.max() < 1
    else:
        assert not sizes.any()
        torch.testing.assert_close(logits.weights, torch.full_like(logits.weights, 0.25))
    optimiser, before = torch.optim.SGD(model.parameters(), lr=1e-3), deepcopy(model.backbone.state_dict())
    for _ in range(2):  # the first step reaches the last step alone, the second all that lies before it
        logits = model(images)
        optimiser.zero_grad()
        (logits.image_logits - 1).square().add((logits.pooled_logits - 1).square()).sum().backward()
        optimiser.step()
    assert any(not torch.equal(before[n], w) for n, w in model.backbone.named_parameters())
    assert model(images).image_logits.any()
    save_file(drawn.backbone.network.state_dict(), tmp_path / "learned.safetensors")
    config = load_config(None, [*built, f"model.weights={tmp_path / 'learned.safetensors'}"])
    assert make_model(config, ("a", "b", "c")).architecture == model.architecture
    published = config.model_copy(update={"model": config.model.model_copy(update={"first_logits": "published"})})
    assert make_model(published, ("a", "b", "c")).architecture == drawn.architecture
