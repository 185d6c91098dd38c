"""Any timm model as images in, feature map out."""

import sys
from collections.abc import Mapping
from typing import Any

import timm
from timm.models import get_pretrained_cfg, model_entrypoint
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from pivotpatch.core.patches import check_images
from pivotpatch.errors import InputError, choose_one_of, quote, quote_fault
from pivotpatch.models.cvt import CVTS, Cvt, describe_cvt
from pivotpatch.models.limits import check_numbers
from pivotpatch.models.preprocessing import Preprocessing, read_preprocessing

BackboneOption = str | int | float | bool | None


class Backbone(nn.Module):
    """A timm model without its classifier.

    Attributes:
        features: D of the feature map it gives.
        preprocessing: what timm states for it.
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
            options: further arguments of timm's constructor, such as `drop_path_rate`, and one of our own:
                `stride_in_conv1` makes a ResNet of bottleneck blocks stride in their first convolution, as its
                first version did, where timm's does in the second. Weights are right for one of the two only.
            pretrained: fetch timm's weights from the hub.
        """
        super().__init__()
        check_backbone(name)
        arguments = dict(options or {})
        _check_options(arguments, name)
        stride_in_conv1 = arguments.pop("stride_in_conv1", False)
        self.network: Any
        self.fixed_size: int | None = None
        flexible = arguments.get("dynamic_img_size") or arguments.get("strict_img_size") is False
        try:
            stated = get_config(name)
            if stated.get("fixed_input_size") and not flexible:
                if image_size is not None:
                    arguments.setdefault("img_size", image_size)
                self.fixed_size = int(arguments.get("img_size") or stated["input_size"][-1])
            if name in CVTS:
                self.network = Cvt(name, **arguments)
            else:
                self.network = timm.create_model(name, pretrained=pretrained, num_classes=0, **arguments)
        except OSError as error:  # what the hub's client raises for want of a connection and of a cached copy
            raise InputError(
                f"backbone {name!r}",
                f"its weights cannot be fetched ({type(error).__name__})",
                "check the connection, or give a local file: model.weights=FILE, in Python weights=",
            ) from error
        except InputError:
            raise
        except Exception as error:  # options of a wrong kind break it in as many ways as timm has models
            wrong = f"cannot be built with {quote(arguments)}: {quote_fault(error)}"
            raise InputError(f"backbone {name!r}", wrong, "change what it does not take") from error
        if stride_in_conv1:
            _move_strides(self.network, name)
        self.features: int = self.network.num_features
        self.preprocessing: Preprocessing = read_preprocessing(self.network.pretrained_cfg, image_size=image_size)

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (B,D,h,w) of images (B,C,H,W)."""
        check_images(images, "backbone")
        if images.shape[1] != 3:
            raise InputError("backbone", f"images have {images.shape[1]} channels", "give RGB, (B, 3, H, W)")
        if not images.is_floating_point():
            raise InputError("backbone", f"images are {images.dtype}", "preprocess them first")
        if self.fixed_size is not None and images.shape[-2:] != (self.fixed_size, self.fixed_size):
            todo = f"resize them to {self.fixed_size}, or build the model with another image_size"
            raise InputError("backbone", f"images are {images.shape[2]} x {images.shape[3]} pixels", todo)
        features: Tensor = self.network.forward_features(images)
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


def check_backbone(name: str) -> None:
    """Refuse a model, or a tag of its weights, that timm does not know."""
    model, _, tag = name.partition(".")
    if name not in CVTS and not timm.is_model(model):
        known = [*timm.list_models(), *CVTS]
        raise InputError("backbone", f"timm has no model {name!r}", choose_one_of(model, known))
    tagged = timm.list_pretrained(f"{model}.*")
    if tag and name not in tagged:
        raise InputError("backbone", f"timm has no weights {name!r}", choose_one_of(name, tagged))


def get_config(name: str) -> dict[str, Any]:
    """What timm states of a model that `check_backbone` knows: size, normalisation, name of the classifier."""
    if name in CVTS:
        return describe_cvt(name)
    stated = get_pretrained_cfg(name)
    assert stated is not None
    return dict(stated.to_dict())


def _check_options(options: Mapping[str, BackboneOption], name: str) -> None:
    """Refuse arguments that this class sets itself, that read files or fetch, or that change what goes in."""
    taken = {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "num_classes"}
    taken |= {"features_only", "in_chans", "scriptable", "exportable", "no_jit"}
    refused = sorted(taken & set(options))
    if refused:
        raise InputError(f"backbone {name!r}", f"option {refused[0]!r} is not yours to set", "leave it out")
    check_numbers(options, f"backbone {name!r}")


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
