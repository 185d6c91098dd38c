import math

import pytest
import torch
from torch import nn

from pivotpatch.core.errors import InputError
from pivotpatch.models.heads import (
    AttentionLayer,
    GroupProjection,
    LinearHead,
    MaxHead,
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


def test_max_head_takes_the_largest_value_of_each_feature() -> None:
    head = make_head("max", features=6, labels=3)
    features = torch.randn(2, 6, 4, 5)
    assert isinstance(head, MaxHead)
    assert isinstance(head.project, nn.Linear)
    largest = features.flatten(2).max(2).values
    torch.testing.assert_close(head(features), largest @ head.project.weight.t() + head.project.bias)


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


def copy_weights(layer: AttentionLayer, reference: nn.Module) -> None:
    """Give a layer of torch's own the weights of ours."""
    names = {
        "self_attention": "self_attn",
        "self_norm": "norm1",
        "image_attention": "multihead_attn",
        "image_norm": "norm2",
        "feedforward.0": "linear1",
        "feedforward.3": "linear2",
        "feedforward_norm": "norm3" if hasattr(layer, "image_attention") else "norm2",
    }
    state = {}
    for key, value in layer.state_dict().items():
        part = next(name for name in names if key.startswith(f"{name}."))
        state[names[part] + key.removeprefix(part)] = value
    reference.load_state_dict(state)


def test_encoder_layer_is_torchs_with_positions_on_queries_and_keys() -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(16, 4, feedforward=32, dropout=0.1, attend_image=False).eval()
    reference = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    copy_weights(layer, reference)
    tokens, positions = torch.randn(2, 5, 16), torch.randn(5, 16)
    torch.testing.assert_close(layer(tokens, positions=torch.zeros(5, 16)), reference(tokens))
    placed = tokens + positions
    found = reference.self_attn(placed, placed, tokens)[0]
    normed = reference.norm1(tokens + found)
    expected = reference.norm2(normed + reference.linear2(torch.relu(reference.linear1(normed))))
    torch.testing.assert_close(layer(tokens, positions=positions), expected)


def test_decoder_layer_is_torchs_with_positions_on_keys() -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(16, 4, feedforward=32, dropout=0.1, attend_image=True).eval()
    reference = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
    copy_weights(layer, reference)
    labels, image, positions = torch.randn(2, 3, 16), torch.randn(2, 5, 16), torch.randn(5, 16)
    torch.testing.assert_close(layer(labels, positions=torch.zeros(5, 16), image=image), reference(labels, image))
    labels_seen = reference.norm1(labels + reference.self_attn(labels, labels, labels)[0])
    found = reference.multihead_attn(labels_seen, image + positions, image)[0]
    normed = reference.norm2(labels_seen + found)
    expected = reference.norm3(normed + reference.linear2(torch.relu(reference.linear1(normed))))
    torch.testing.assert_close(layer(labels, positions=positions, image=image), expected)


def test_query2label_is_its_layers_in_order() -> None:
    torch.manual_seed(0)
    head = Query2LabelHead(6, 3, width=16, feedforward=32).eval()
    features = torch.rand(2, 6, 4, 5)
    positions = encode_positions(4, 5, width=16)
    image = head.enter(features).flatten(2).transpose(1, 2)
    image = head.encoder[0](image, positions=positions)
    labels = head.queries.expand(2, -1, -1)
    for layer in head.decoder:
        labels = layer(labels, positions=positions, image=image)
    torch.testing.assert_close(head(features), head.project(labels))
    assert not torch.allclose(head(features), head(features.flip(3)), atol=1e-4)  # places matter


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (14, 14)])
def test_decoder_heads_take_any_map(size: tuple[int, int]) -> None:
    for head in (Query2LabelHead(6, 3, width=16, feedforward=32), MLDecoderHead(6, 3, width=16)):
        assert head(torch.rand(2, 6, *size)).shape == (2, 3)


def test_positions_are_sines_of_the_relative_place() -> None:
    code = encode_positions(4, 5, width=8)
    for row in range(4):
        for column in range(5):
            expected = []
            for place in ((row + 1) / 4, (column + 1) / 5):
                angles = [2 * math.pi * place, 2 * math.pi * place / 100]  # frequencies 10000^-0 and 10000^-(1/2)
                expected += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            torch.testing.assert_close(code[row * 5 + column], torch.tensor(expected))


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


def test_ml_decoder_is_cross_attention_of_fixed_queries() -> None:
    torch.manual_seed(0)
    head = MLDecoderHead(6, 5, groups=2, width=16).eval()
    features = torch.randn(1, 6, 2, 3)
    image = torch.relu(head.enter(features.flatten(2).transpose(1, 2)))
    layer = head.decoder
    assert (layer.multihead_attn.num_heads, layer.linear1.out_features) == (8, 2048)
    queries = layer.norm1(2 * head.queries)[:, None]
    memory = image.transpose(0, 1)
    normed = layer.norm2(queries + layer.multihead_attn(queries, memory, memory)[0])
    decoded = layer.norm3(normed + layer.linear2(torch.relu(layer.linear1(normed))))
    torch.testing.assert_close(head(features), head.project(decoded.transpose(0, 1)))


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
