"""Any timm model, or CvT, as images in, feature map out; and what it wants done to an image first."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import resolve_data_config
from timm.layers import DropPath
from timm.models import get_pretrained_cfg, model_entrypoint
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2 import functional as transforms

from pivotpatch.core.patches import check_images, resize_images
from pivotpatch.errors import InputError, choose_one_of, explaining, import_extra, quote
from pivotpatch.runtime.decoding import decode_image

BackboneOption = str | int | float | bool | None
CVTS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float, int]] = {
    "cvt_w24": ((192, 768, 1024), (2, 2, 20), (3, 12, 16), 0.3, 384),
    "test_cvt": ((8, 16, 32), (1, 2, 3), (1, 2, 4), 0.1, 64),
}
"""Widths, depths and attention heads of the stages, share of dropped paths, rows and columns of the images."""
# Arguments that `Backbone` sets itself, that read files or fetch, or that change what goes in.
_REFUSED = {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "num_classes"}
_REFUSED |= {"features_only", "in_chans", "scriptable", "exportable", "no_jit"}
_NAMES = (  # of the authors, and of transformers
    (r"^stage(\d)\.", r"body.encoder.stages.\1."),
    (r"\.patch_embed\.proj\.", ".embedding.convolution_embeddings.projection."),
    (r"\.patch_embed\.norm\.", ".embedding.convolution_embeddings.normalization."),
    (r"\.blocks\.", ".layers."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.attn\.(conv_)?proj_", r".attention.attention.\1projection_"),
    (r"\.conv_projection_([qkv])\.", r".convolution_projection_\1.convolution_projection."),
    (r"_projection\.conv\.", "_projection.convolution."),
    (r"_projection\.bn\.", "_projection.normalization."),
    (r"projection_q\b", "projection_query"),
    (r"projection_k\b", "projection_key"),
    (r"projection_v\b", "projection_value"),
)


@dataclass(frozen=True)
class Preprocessing:
    """Resize to a square, scale to [0, 1], subtract the mean, divide by the standard deviation.

    Multi-label work squashes images to the square: a crop could lose the object a label is about.
    """

    image_size: int  # rows and columns the model sees
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # one value per channel
    std: tuple[float, ...] = (0.229, 0.224, 0.225)  # one value per channel
    interpolation: str = "bilinear"  # or "bicubic", always anti-aliased; of the whole image, patches are bilinear

    def __call__(self, picture: Image.Image | Tensor) -> Tensor:
        """Prepare an image.

        Args:
            picture: a PIL image, read as files are, or pixels (C,H,W) or (B,C,H,W), uint8 or floats in [0, 1].

        Returns:
            Floats (C,S,S) or (B,C,S,S) with S = image_size.
        """
        pixels: Tensor = (
            torch.from_numpy(decode_image(picture)).permute(2, 0, 1) if isinstance(picture, Image.Image) else picture
        )
        known = pixels.dtype == torch.uint8 or pixels.is_floating_point()
        if pixels.ndim not in (3, 4) or pixels.shape[-3] != len(self.mean) or not known:
            wrong = f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}"
            raise InputError("Preprocessing", wrong, "give (3, H, W) or a batch of such, uint8 or floats in [0, 1]")
        # Not torchvision's resize: its version and the CPU decide whether that rounds bytes as our loader and views do.
        batch, size = pixels if pixels.ndim == 4 else pixels[None], (self.image_size, self.image_size)
        resized = resize_images(batch, size, interpolation=self.interpolation).view(*pixels.shape[:-2], *size)
        scaled = transforms.to_dtype(resized, torch.float32, scale=True)
        return transforms.normalize(scaled, list(self.mean), list(self.std))


class Backbone(nn.Module):
    """A timm model without its classifier.

    Attributes:
        features: D of the feature map it gives.
        preprocessing: what timm states for it, but bilinear, as our loader and views train it.
    """

    def __init__(
        self,
        name: str,
        *,
        image_size: int | None = None,
        options: Mapping[str, BackboneOption] | None = None,
        pretrained: bool = False,
    ) -> None:
        """Build a backbone.

        Args:
            name: a timm model, with its weights' tag after a dot where `pretrained` needs one, or one of `CVTS`.
            image_size: rows and columns of the images; the model's own by default. Models of
                convolutions take any other size too.
            options: further arguments of timm's constructor, such as `drop_path_rate`, and two of our own:
                `stride_in_conv1` makes a ResNet of bottleneck blocks stride in their first convolution, as its
                first version did, where timm's does in the second. Weights are right for one of the two only.
                `two_stages` puts the map of the stage before the last one under the last, enlarged to its places.
            pretrained: fetch timm's weights from the hub.
        """
        super().__init__()
        where, stated = f"backbone {name!r}", get_config(name)
        arguments = dict(options or {})
        refused = sorted(_REFUSED & arguments.keys())
        if refused:
            raise InputError(where, f"option {refused[0]!r} is not yours to set", "leave it out")
        negative = [name for name, value in arguments.items() if isinstance(value, int | float) and value < 0]
        if negative:  # timm builds what then cannot be run
            raise InputError(where, f"option {negative[0]!r} is {arguments[negative[0]]}", "give a number from 0 on")
        stride_in_conv1 = arguments.pop("stride_in_conv1", False)
        self.two_stages = bool(arguments.pop("two_stages", False))
        self.network: Any
        self.fixed_size: int | None = None
        flexible = arguments.get("dynamic_img_size") or arguments.get("strict_img_size") is False
        local = "check the connection, or give a local file: model.weights=FILE, in Python weights="
        with (
            explaining(where, f"cannot be built with {quote(arguments)}", "change what it does not take"),
            explaining(where, "its weights cannot be fetched", local, of=OSError),  # by the hub's client
        ):
            if stated.get("fixed_input_size") and not flexible:
                if image_size is not None:
                    arguments.setdefault("img_size", image_size)
                self.fixed_size = int(arguments.get("img_size") or stated["input_size"][-1])
            if name in CVTS:
                self.network = Cvt(name, **arguments)
            else:
                self.network = timm.create_model(name, pretrained=pretrained, num_classes=0, **arguments)
        if stride_in_conv1:
            _move_strides(self.network, name)
        self.features: int = self.network.num_features
        if self.two_stages:
            with explaining(where, "two_stages is set, and its stages cannot be told", "leave the option out"):
                self.features += self.network.feature_info[-2]["num_chs"]
        prepare = read_preprocessing(self.network.pretrained_cfg, image_size=image_size)
        self.preprocessing: Preprocessing = replace(prepare, interpolation="bilinear")

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (B,D,h,w) of images (B,C,H,W)."""
        check_images(images, "backbone")
        if not images.is_floating_point():
            raise InputError("backbone", f"images are {images.dtype}", "preprocess them first")
        if self.fixed_size is not None and images.shape[-2:] != (self.fixed_size, self.fixed_size):
            todo = f"resize them to {self.fixed_size}, or build the model with another image_size"
            raise InputError("backbone", f"images are {images.shape[2]} x {images.shape[3]} pixels", todo)
        if self.two_stages:
            last, (before,) = self.network.forward_intermediates(images, indices=[-2])
            return torch.cat([before, functional.interpolate(last, size=before.shape[-2:])], dim=1)
        features = self.network.forward_features(images)
        if not isinstance(features, Tensor):
            raise InputError("backbone", f"it gives a {type(features).__name__}, no map", "choose another backbone")
        if features.ndim == 4:
            return features.permute(0, 3, 1, 2) if getattr(self.network, "output_fmt", "NCHW") == "NHWC" else features
        return self._map_of_tokens(features, images)

    def _map_of_tokens(self, tokens: Tensor, images: Tensor) -> Tensor:
        """Lay a transformer's tokens (B,N,D) out as the map (B,D,h,w) they came from."""
        tokens = tokens[:, getattr(self.network, "num_prefix_tokens", 0) :]
        measure = getattr(getattr(self.network, "patch_embed", None), "dynamic_feat_size", None)
        if measure is not None:
            height, width = measure(tuple(images.shape[-2:]))
        else:
            height = width = int(tokens.shape[1] ** 0.5)
        if tokens.shape[1] == height * width + 1:  # a class token that the model does not declare
            tokens = tokens[:, 1:]
        assert height * width == tokens.shape[1], f"{tokens.shape[1]} tokens form no map"
        return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, height, width)


def get_config(name: str) -> dict[str, Any]:
    """What timm states of a model: size, normalisation, name of the classifier; an unknown one is refused."""
    model, _, tag = name.partition(".")
    if name not in CVTS and not timm.is_model(model):
        known = [*timm.list_models(), *CVTS]
        raise InputError("backbone", f"timm has no model {name!r}", choose_one_of(model, known))
    tagged = timm.list_pretrained(f"{model}.*")
    if tag and name not in tagged:
        raise InputError("backbone", f"timm has no weights {name!r}", choose_one_of(name, tagged))
    if name in CVTS:
        return describe_cvt(name)
    stated = get_pretrained_cfg(name)
    assert stated is not None
    return dict(stated.to_dict())


def _move_strides(network: nn.Module, name: str) -> None:
    """Move each block's stride from its second convolution to its first; no parameter changes."""
    blocks = [
        module for module in network.modules() if isinstance(module, Bottleneck) and module.conv2.stride != (1, 1)
    ]
    if not isinstance(network, ResNet) or not blocks:
        wrong = "stride_in_conv1 is set, and it has no bottleneck block that strides in its second convolution"
        raise InputError(f"backbone {name!r}", wrong, "leave the option out or choose a ResNet such as 'resnet50'")
    for block in blocks:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride


def convert_names(state: dict[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Weights under timm's names, where timm knows those of the model's authors; else as they are."""
    try:
        if isinstance(network, Cvt):
            converted = network.convert(state)
        else:
            module = sys.modules[model_entrypoint(network.pretrained_cfg["architecture"]).__module__]
            converted = getattr(module, "checkpoint_filter_fn", lambda state, _: state)(dict(state), network)
    except Exception:  # written for certain files only; what does not fit is named when it is loaded
        converted = state
    # Layers such as InPlaceABN do not count batches, and nothing reads the count.
    counts = {key: value for key, value in network.state_dict().items() if key.endswith("num_batches_tracked")}
    return counts | converted


def read_preprocessing(config: Mapping[str, Any], *, image_size: int | None = None) -> Preprocessing:
    """The preprocessing that timm states in a model's `pretrained_cfg`, at its own size or another."""
    stated = resolve_data_config(pretrained_cfg=dict(config))
    return Preprocessing(
        image_size=image_size or stated["input_size"][-1],
        mean=tuple(stated["mean"]),
        std=tuple(stated["std"]),
        interpolation=stated["interpolation"] if stated["interpolation"] in ("bilinear", "bicubic") else "bicubic",
    )


class Cvt(nn.Module):
    """Images (B,3,H,W) in, feature map (B,D,h,w) out, with the attributes that a timm model has.

    The network is transformers', as published where that differs: a faster GELU, a share of dropped paths that rises
    with the depth, and each residual dropped on its own. The last norm stands on the map, as in Query2Label.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        library = import_extra("transformers")
        gelu = import_extra("transformers.activations").ACT2FN["quick_gelu"]
        widths, depths, heads, drop, _ = CVTS[name]
        self.body: Any = library.CvtModel(library.CvtConfig(embed_dim=widths, depth=depths, num_heads=heads))
        self.norm = nn.LayerNorm(widths[-1])
        self.num_features = widths[-1]
        self.pretrained_cfg = describe_cvt(name)
        stages = self.body.encoder.stages
        for stage in stages:
            for place, layer in enumerate(stage.layers):
                rate = drop * place / max(len(stage.layers) - 1, 1) if stage is stages[-1] else 0.0
                layer.intermediate.activation = gelu
                layer.drop_path = nn.Identity()
                layer.attention.output.dropout, layer.output.dropout = DropPath(rate), DropPath(rate)

    def forward_features(self, images: Tensor) -> Tensor:
        """Feature map (B,D,h,w) of images (B,3,H,W)."""
        features = self.body(images).last_hidden_state
        return self.norm(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights under our names, from those of the authors."""
        renamed = {}
        for name, value in state.items():
            for pattern, ours in _NAMES:
                name = re.sub(pattern, ours, name)
            renamed[name] = value
        return renamed


def describe_cvt(name: str) -> dict[str, Any]:
    """What timm states of its models as `pretrained_cfg`."""
    sizes = {"input_size": (3, CVTS[name][-1], CVTS[name][-1]), "interpolation": "bilinear"}
    colours = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    return {"architecture": name, "classifier": "head", **sizes, **colours}
