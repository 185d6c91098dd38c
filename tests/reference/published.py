"""The published networks, slowly, from their facts: forward passes over weights under the authors' names.

A `State` draws each weight when it is first asked for, so that one pass makes a whole checkpoint.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


class State(dict[str, Tensor]):
    """Weights by name; `state(name, shape)` draws one that is not there yet."""

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self:
            generator = torch.Generator().manual_seed(len(self))
            drawn = torch.randn(shape, generator=generator)
            if len(shape) > 1:
                drawn /= math.sqrt(math.prod(shape[1:]))
            elif name.endswith("running_var"):
                drawn = drawn.abs() + 0.5
            self[name] = drawn if len(shape) > 1 or name.endswith(("var", "weight")) else drawn / 10
        assert self[name].shape == shape, name
        return self[name]


def convolve(state: State, name: str, x: Tensor, width: int, size: int, *, stride: int = 1, groups: int = 1) -> Tensor:
    weight = state(f"{name}.weight", width, x.shape[1] // groups, size, size)
    return F.conv2d(x, weight, stride=stride, padding=size // 2, groups=groups)


def batch_norm(state: State, name: str, x: Tensor, *, positive: bool = False) -> Tensor:
    """Batch norm in evaluation; InPlaceABN takes a weight's absolute value and adds 1e-5."""
    mean, var, weight, bias = (
        state(f"{name}.{part}", x.shape[1])[:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * (weight.abs() + 1e-5 if positive else weight) + bias


def resnet(state: State, x: Tensor, *, layers: tuple[int, ...], prefix: str = "") -> Tensor:
    """Feature map of a ResNet of bottleneck blocks, stride in the second convolution, torchvision's names."""
    x = batch_norm(state, f"{prefix}bn1", convolve(state, f"{prefix}conv1", x, 64, 7, stride=2)).relu()
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, depth in enumerate(layers):
        for block in range(depth):
            name, width = f"{prefix}layer{stage + 1}.{block}.", 64 * 2**stage
            stride = 2 if stage and not block else 1
            y = batch_norm(state, f"{name}bn1", convolve(state, f"{name}conv1", x, width, 1)).relu()
            y = batch_norm(state, f"{name}bn2", convolve(state, f"{name}conv2", y, width, 3, stride=stride)).relu()
            y = batch_norm(state, f"{name}bn3", convolve(state, f"{name}conv3", y, 4 * width, 1))
            if not block:
                x = convolve(state, f"{name}downsample.0", x, 4 * width, 1, stride=stride)
                x = batch_norm(state, f"{name}downsample.1", x)
            x = (x + y).relu()
    return x


def tresnet(state: State, x: Tensor, *, layers: tuple[int, ...], planes: int, second: bool, prefix: str = "") -> Tensor:
    """Feature map of a TResNet; the `second` version has bottleneck blocks in all stages."""
    count, _, height, width = x.shape
    x = x.reshape(count, 3, height // 4, 4, width // 4, 4).permute(0, 3, 5, 1, 2, 4).reshape(count, 48, height // 4, -1)

    def step(name: str, x: Tensor, width: int, size: int, slope: float | None, *, blur: bool = False) -> Tensor:
        inner = f"{name}.0" if blur else name
        y = batch_norm(state, f"{inner}.1", convolve(state, f"{inner}.0", x, width, size), positive=True)
        y = y if slope is None else F.leaky_relu(y, slope)
        if blur:
            kernel = torch.tensor([1.0, 2, 1])[:, None] * torch.tensor([1.0, 2, 1]) / 16
            padded = F.pad(y, (1, 1, 1, 1), "reflect")
            y = F.conv2d(padded, kernel.expand(width, 1, 3, 3), stride=2, groups=width)
        return y

    x = step(f"{prefix}body.conv1", x, planes, 3, 1e-2)
    for stage, depth in enumerate(layers):
        wide = planes * 2**stage
        bottleneck = second or stage > 1
        out = 4 * wide if bottleneck else wide
        for block in range(depth):
            name, stride = f"{prefix}body.layer{stage + 1}.{block}.", stage > 0 and block == 0
            if bottleneck:
                y = step(f"{name}conv1", x, wide, 1, 1e-3)
                y = step(f"{name}conv2", y, wide, 3, 1e-3, blur=stride)
            else:
                y = step(f"{name}conv1", x, wide, 3, 1e-3, blur=stride)
                y = step(f"{name}conv2", y, wide, 3, None)
            if stage < 3:
                few = max(out // 8 if bottleneck else out // 4, 64)
                mean = y.mean((2, 3), keepdim=True)
                mean = F.conv2d(mean, state(f"{name}se.fc1.weight", few, wide, 1, 1), state(f"{name}se.fc1.bias", few))
                mean = mean.relu()
                mean = F.conv2d(mean, state(f"{name}se.fc2.weight", wide, few, 1, 1), state(f"{name}se.fc2.bias", wide))
                y = y * mean.sigmoid()
            if bottleneck:
                y = step(f"{name}conv3", y, out, 1, None)
            if block == 0 and (stride or x.shape[1] != out):
                pooled = F.avg_pool2d(x, 2, 2) if stride else x
                x = step(f"{name}downsample.{int(stride)}", pooled, out, 1, None)
            x = (x + y).relu()
    return x


def linear(state: State, name: str, x: Tensor, width: int, *, bias: bool = True) -> Tensor:
    y = x @ state(f"{name}.weight", width, x.shape[-1]).T
    return y + state(f"{name}.bias", width) if bias else y


def layer_norm(state: State, name: str, x: Tensor) -> Tensor:
    width = x.shape[-1]
    return F.layer_norm(x, (width,), state(f"{name}.weight", width), state(f"{name}.bias", width))


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, biases: list[Tensor | float]) -> Tensor:
    """Attention, a head after the other, each with its bias; q (N,D), k and v (M,D)."""
    share, found = q.shape[1] // len(biases), []
    for head, bias in enumerate(biases):
        own = slice(head * share, (head + 1) * share)
        found.append((q[:, own] @ k[:, own].T * scale + bias).softmax(1) @ v[:, own])
    return torch.cat(found, 1)


def swin(
    state: State, x: Tensor, *, embed: int, depths: tuple[int, ...], heads: tuple[int, ...], window: int, prefix: str
) -> Tensor:
    """Feature map of a Swin transformer: attention within windows, which every second block moves by half."""
    weight, bias = (
        state(f"{prefix}patch_embed.proj.weight", embed, 3, 4, 4),
        state(f"{prefix}patch_embed.proj.bias", embed),
    )
    x = F.conv2d(x, weight, bias, stride=4).permute(0, 2, 3, 1)
    x = layer_norm(state, f"{prefix}patch_embed.norm", x)
    for stage, depth in enumerate(depths):
        for block in range(depth):
            name = f"{prefix}layers.{stage}.blocks.{block}."
            shift = window // 2 if block % 2 and x.shape[1] > window else 0
            moved = layer_norm(state, f"{name}norm1", x).roll((-shift, -shift), (1, 2))
            found = torch.stack([_attend_windows(state, name, one, heads[stage], window, shift) for one in moved])
            x = x + found.roll((shift, shift), (1, 2))
            inner = F.gelu(linear(state, f"{name}mlp.fc1", layer_norm(state, f"{name}norm2", x), 4 * x.shape[-1]))
            x = x + linear(state, f"{name}mlp.fc2", inner, x.shape[-1])
        if stage + 1 < len(depths):
            name = f"{prefix}layers.{stage}.downsample."
            parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
            merged = layer_norm(state, f"{name}norm", torch.cat(parts, -1))
            x = linear(state, f"{name}reduction", merged, 2 * x.shape[-1], bias=False)
    return layer_norm(state, f"{prefix}norm", x).permute(0, 3, 1, 2)


def _attend_windows(state: State, name: str, x: Tensor, heads: int, window: int, shift: int) -> Tensor:
    side, width = x.shape[0], x.shape[-1]
    table = state(f"{name}attn.relative_position_bias_table", (2 * window - 1) ** 2, heads)
    state(f"{name}attn.relative_position_index", window**2, window**2)  # a buffer of theirs, which nobody reads
    places = [(row, column) for row in range(window) for column in range(window)]
    out = torch.zeros_like(x)
    for top in range(0, side, window):
        for left in range(0, side, window):
            part = x[top : top + window, left : left + window].reshape(-1, width)
            qkv = linear(state, f"{name}attn.qkv", part, 3 * width)
            # Places that the move brought together from two ends of the image do not see each other.
            ends = [(top + r >= side - shift, left + c >= side - shift) if shift else () for r, c in places]
            biases = torch.zeros(heads, window**2, window**2)
            for i, (r, c) in enumerate(places):
                for j, (s, d) in enumerate(places):
                    apart = 0 if ends[i] == ends[j] else -100
                    biases[:, i, j] = table[(r - s + window - 1) * (2 * window - 1) + c - d + window - 1] + apart
            found = attend(*qkv.split(width, 1), scale=(width // heads) ** -0.5, biases=[*biases])
            joined = linear(state, f"{name}attn.proj", found, width)
            out[top : top + window, left : left + window] = joined.reshape(window, window, width)
    return out


def cvt(
    state: State, x: Tensor, *, embed: tuple[int, ...], depths: tuple[int, ...], heads: tuple[int, ...], prefix: str
) -> Tensor:
    """Feature map of a CvT: convolutions make queries, keys and values; the last stage has a token of its own."""
    for stage, (width, depth) in enumerate(zip(embed, depths, strict=True)):
        name, (size, stride, padding) = f"{prefix}stage{stage}.", (3, 2, 1) if stage else (7, 4, 2)
        weight = state(f"{name}patch_embed.proj.weight", width, x.shape[1], size, size)
        x = F.conv2d(x, weight, state(f"{name}patch_embed.proj.bias", width), stride=stride, padding=padding)
        count, _, rows, columns = x.shape
        tokens = layer_norm(state, f"{name}patch_embed.norm", x.flatten(2).transpose(1, 2))
        last = stage == len(embed) - 1
        if last:
            tokens = torch.cat([state(f"{name}cls_token", 1, 1, width).expand(count, -1, -1), tokens], 1)
        for block in range(depth):
            at = f"{name}blocks.{block}."
            tokens = tokens + _attend_cvt(state, at, tokens, heads[stage], (rows, columns), token=last)
            inner = linear(state, f"{at}mlp.fc1", layer_norm(state, f"{at}norm2", tokens), 4 * width)
            tokens = tokens + linear(state, f"{at}mlp.fc2", inner * (1.702 * inner).sigmoid(), width)
        x = tokens[:, int(last) :].transpose(1, 2).reshape(count, width, rows, columns)
    return layer_norm(state, f"{prefix}norm", x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _attend_cvt(state: State, at: str, tokens: Tensor, heads: int, size: tuple[int, int], *, token: bool) -> Tensor:
    normed, width = layer_norm(state, f"{at}norm1", tokens), tokens.shape[-1]
    image = normed[:, int(token) :].transpose(1, 2).reshape(len(tokens), width, *size)
    parts = []
    for kind in "qkv":
        name = f"{at}attn.conv_proj_{kind}."
        made = convolve(state, f"{name}conv", image, width, 3, stride=1 if kind == "q" else 2, groups=width)
        made = batch_norm(state, f"{name}bn", made).flatten(2).transpose(1, 2)
        made = torch.cat([normed[:, : int(token)], made], 1)
        parts.append(linear(state, f"{at}attn.proj_{kind}", made, width))
    found = torch.stack([attend(*qkv, scale=width**-0.5, biases=[0.0] * heads) for qkv in zip(*parts, strict=True)])
    return linear(state, f"{at}attn.proj", found, width)


def attend_with(state: State, name: str, queries: Tensor, keys: Tensor, values: Tensor, *, heads: int) -> Tensor:
    """What queries (N,W) find among keys and values (M,W); one matrix holds the weights of all three."""
    width = queries.shape[1]
    weight, bias = state(f"{name}.in_proj_weight", 3 * width, width), state(f"{name}.in_proj_bias", 3 * width)
    q, k, v = (
        given @ weight[at * width :][:width].T + bias[at * width :][:width]
        for at, given in enumerate((queries, keys, values))
    )
    found = attend(q, k, v, scale=(width // heads) ** -0.5, biases=[0.0] * heads)
    return linear(state, f"{name}.out_proj", found, width)


def feed(state: State, at: str, x: Tensor, inner: int) -> Tensor:
    return linear(state, f"{at}linear2", linear(state, f"{at}linear1", x, inner).relu(), x.shape[-1])


def encode_place(row: float, column: float, width: int) -> Tensor:
    """The code of a place: sine and cosine in turns, the row first."""
    code = []
    for place in (row, column):
        for step in range(width // 4):
            angle = 2 * math.pi * place / 10000 ** (step / (width // 4))
            code += [math.sin(angle), math.cos(angle)]
    return torch.tensor(code)


def query2label(
    state: State, features: Tensor, labels: int, *, outputs: tuple[str, ...], self_attention: bool = False
) -> list[Tensor]:
    """Logits (B,L) of each of Query2Label's outputs: one layer of an encoder, two of a decoder, 4 heads."""
    width, (rows, columns), inner, logits = features.shape[1], features.shape[2:], 24, []
    places = [((row + 1) / rows, (column + 1) / columns) for row in range(rows) for column in range(columns)]
    codes = torch.stack([encode_place(*place, width) for place in places])
    queries = state("query_embed.weight", labels, width)
    for one in features:
        image, at = one.flatten(1).T, "transformer.encoder.layers.0."
        found = attend_with(state, f"{at}self_attn", image + codes, image + codes, image, heads=4)
        image = layer_norm(state, f"{at}norm1", image + found)
        image = layer_norm(state, f"{at}norm2", image + feed(state, at, image, inner))
        tokens = torch.zeros_like(queries)
        for layer in (0, 1):
            at = f"transformer.decoder.layers.{layer}."
            if self_attention:
                found = attend_with(state, f"{at}self_attn", tokens + queries, tokens + queries, tokens, heads=4)
                tokens = layer_norm(state, f"{at}norm1", tokens + found)
            found = attend_with(state, f"{at}multihead_attn", tokens + queries, image + codes, image, heads=4)
            tokens = layer_norm(state, f"{at}norm2", tokens + found)
            tokens = layer_norm(state, f"{at}norm3", tokens + feed(state, at, tokens, inner))
        tokens = layer_norm(state, "transformer.decoder.norm", tokens)
        weights = [(state(f"{name}.W", 1, labels, width)[0], state(f"{name}.b", 1, labels)[0]) for name in outputs]
        logits.append(torch.stack([(tokens * weight).sum(1) + bias for weight, bias in weights]))
    return [*torch.stack(logits, 1)]


def ml_decoder(state: State, features: Tensor, labels: int, *, groups: int, width: int, name: str) -> Tensor:
    """Logits (B,L) of ML-Decoder: queries are doubled and normed, attend to the image with 8 heads, and are fed on."""
    image = linear(state, f"{name}.embed_standart", features.flatten(2).transpose(1, 2), width).relu()
    at, per, logits = f"{name}.layers.0.", -(-labels // groups), []
    queries = layer_norm(state, f"{at}norm1", 2 * state(f"{name}.query_embed.weight", groups, width))
    pooling = state(f"{name}.duplicate_pooling", groups, width, per)
    last = state(f"{name}.duplicate_pooling_bias", labels)
    for one in image:
        found = attend_with(state, f"{at}multihead_attn", queries, one, one, heads=8)
        x = layer_norm(state, f"{at}norm2", queries + found)
        x = layer_norm(state, f"{at}norm3", x + feed(state, at, x, 2048))
        logits.append(torch.stack([x[i // per] @ pooling[i // per, :, i % per] + last[i] for i in range(labels)]))
    return torch.stack(logits)


def pat(outputs: Callable[[Tensor], list[Tensor]], image: Tensor) -> Tensor:
    """MLC-PAT's p + q: outputs of image, weights and patches; four quarters, resized to the whole image's size."""
    half, total = image.shape[-1] // 2, outputs(image)[0]
    quarters = [image[..., top : top + half, left : left + half] for top in (0, half) for left in (0, half)]
    whole = tuple(image.shape[2:])
    seen = [outputs(F.interpolate(part, size=whole, mode="bilinear", align_corners=False)) for part in quarters]
    weights = torch.stack([logits[1] for logits in seen]).softmax(0)
    return total + (weights * torch.stack([logits[2] for logits in seen])).sum(0)
