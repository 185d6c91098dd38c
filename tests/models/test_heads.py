import pytest
import torch
from torch import nn

from pivotpatch.core.errors import InputError
from pivotpatch.models.heads import (
    GroupProjection,
    LinearHead,
    MLDecoderHead,
    Query2LabelHead,
    encode_positions,
    make_head,
)


def test_linear_head_is_pooling_and_a_linear_layer() -> None:
    head = LinearHead(6, 3)
    features = torch.rand(2, 6, 4, 5)
    assert isinstance(head.project, nn.Linear)
    pooled = features.flatten(2).mean(2)
    torch.testing.assert_close(head(features), pooled @ head.project.weight.t() + head.project.bias)


@pytest.mark.parametrize(("labels", "queries"), [(5, 5), (5, 2), (7, 3), (4, 1), (100, 30)])
def test_group_projection_is_one_dot_product_a_label(labels: int, queries: int) -> None:
    projection = GroupProjection(labels, queries=queries, width=8)
    nn.init.normal_(projection.bias)
    embedding = torch.randn(2, queries, 8)
    share = -(-labels // queries)
    logits = projection(embedding)
    assert logits.shape == (2, labels)
    for k in range(labels):
        group, place = divmod(k, share)
        expected = embedding[:, group] @ projection.weight[group, :, place] + projection.bias[k]
        torch.testing.assert_close(logits[:, k], expected)


def test_query2label_has_the_published_shape_by_default() -> None:
    with torch.device("meta"):
        head = Query2LabelHead(64, 80)
    assert (len(head.encoder), len(head.decoder)) == (1, 2)
    assert [m.num_heads for m in head.modules() if isinstance(m, nn.MultiheadAttention)] == [4] * 5
    assert max(m.out_features for m in head.modules() if isinstance(m, nn.Linear)) == 8192
    assert head.queries.shape == (80, 2048)


def test_query2label_sees_positions() -> None:
    """The same values at other places give other logits: attention alone would not notice."""
    torch.manual_seed(0)
    head = Query2LabelHead(6, 3, width=16, feedforward=32).eval()
    features = torch.rand(1, 6, 4, 4)
    assert not torch.allclose(head(features), head(features.flip(3)), atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (14, 14)])
def test_decoder_heads_take_any_map(size: tuple[int, int]) -> None:
    for head in (Query2LabelHead(6, 3, width=16, feedforward=32), MLDecoderHead(6, 3, width=16)):
        assert head(torch.rand(2, 6, *size)).shape == (2, 3)


def test_positions_are_distinct_and_size_independent() -> None:
    code = encode_positions(5, 6, width=32)
    distances = torch.cdist(code, code) + 10 * torch.eye(30)
    assert distances.min() > 0.05
    # The relative middle has one code, whatever the size of the map.
    torch.testing.assert_close(encode_positions(2, 2, width=32)[0], encode_positions(4, 4, width=32)[5])


def test_ml_decoder_groups_labels() -> None:
    head = MLDecoderHead(6, 250, groups=40, width=16)
    assert head.queries.shape == (40, 16)
    assert not any(name == "queries" for name, _ in head.named_parameters())  # fixed, as published
    assert "queries" in head.state_dict()
    assert head(torch.rand(2, 6, 3, 3)).shape == (2, 250)
    assert MLDecoderHead(6, 250, width=16).groups == 100
    assert MLDecoderHead(6, 7, width=16).groups == 7


def test_images_of_a_batch_do_not_mix() -> None:
    features = torch.rand(3, 6, 4, 4)
    for head in (LinearHead(6, 3), Query2LabelHead(6, 3, width=16, feedforward=32), MLDecoderHead(6, 3, width=16)):
        head.eval()
        torch.testing.assert_close(head(features)[1:2], head(features[1:2]))


def test_bad_choices_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown head 'query2lable'; did you mean 'query2label'\?"):
        make_head("query2lable", features=4, labels=2)
    with pytest.raises(InputError, match=r"unknown option 'feed_forward'; did you mean 'feedforward'\?"):
        make_head("query2label", features=4, labels=2, options={"feed_forward": 4})
    with pytest.raises(InputError, match="head 'linear': unknown option 'width'; this head has no options"):
        make_head("linear", features=4, labels=2, options={"width": 4})
    with pytest.raises(InputError, match="Query2Label: width 30 with 4 attention heads; give a multiple"):
        make_head("query2label", features=4, labels=2, options={"width": 30})
    with pytest.raises(InputError, match="ML-Decoder: 0 groups of width 16; give 1 group or more"):
        make_head("ml_decoder", features=4, labels=2, options={"groups": 0, "width": 16})
