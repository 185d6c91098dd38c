import pytest
import torch
from reference import losses as oracle
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.losses import (
    AsymmetricLoss,
    BinaryCrossEntropyLoss,
    Loss,
    Reduction,
    asymmetric_loss,
    binary_cross_entropy,
    patch_loss,
)
from pivotpatch.errors import InputError

NAN = float("nan")


def draw_logits() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3


def draw_target() -> Tensor:
    return (torch.rand(6, 5, generator=torch.Generator().manual_seed(4)) < 0.4).double()


@pytest.mark.parametrize(
    ("gamma_neg", "gamma_pos", "clip"), [(4, 0, 0.05), (2, 1, 0), (0.5, 0.5, 0.2), (0, 0, 0), (0, 0, 0.05)]
)
@pytest.mark.parametrize("soft", [False, True])
def test_asymmetric_loss_agrees_with_its_formula(gamma_neg: float, gamma_pos: float, clip: float, soft: bool) -> None:
    logits = draw_logits()
    target = draw_target() * 0.7 + 0.1 if soft else draw_target()
    loss = asymmetric_loss(logits, target, gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip, reduction="none")
    options = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
    pairs = zip(logits.flatten().tolist(), target.flatten().tolist(), strict=True)
    expected = [oracle.asymmetric(logit, known, **options) for logit, known in pairs]
    assert loss.flatten().tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cross_entropy_agrees_with_torch(reduction: Reduction) -> None:
    logits, target = draw_logits(), draw_target()
    expected = F.binary_cross_entropy_with_logits(logits, target, reduction=reduction)
    torch.testing.assert_close(binary_cross_entropy(logits, target, reduction=reduction), expected)


@pytest.mark.parametrize(("gamma_neg", "gamma_pos", "clip"), [(4, 0, 0.05), (4, 1, 0), (0.5, 0.5, 0.05)])
def test_gradients_are_right(gamma_neg: float, gamma_pos: float, clip: float) -> None:
    logits, target = draw_logits().requires_grad_(), draw_target()

    def run(x: Tensor) -> Tensor:
        return asymmetric_loss(x, target, gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip)

    assert torch.autograd.gradcheck(run, logits)
    assert torch.autograd.gradcheck(lambda x: binary_cross_entropy(x, target), logits)


def test_detached_focus_scales_the_gradient_of_cross_entropy() -> None:
    """With the focusing factor constant, the gradient is that factor times BCE's."""
    logits, target = draw_logits().requires_grad_(), torch.ones(6, 5, dtype=torch.float64)
    options = {"gamma_neg": 3, "clip": 0, "detach_focus": True}
    (gradient,) = torch.autograd.grad(asymmetric_loss(logits, 1 - target, **options), logits)  # type: ignore[arg-type]
    (plain,) = torch.autograd.grad(binary_cross_entropy(logits, 1 - target), logits)
    torch.testing.assert_close(gradient, plain * torch.sigmoid(logits.detach()) ** 3)
    (gradient,) = torch.autograd.grad(asymmetric_loss(logits, target, gamma_pos=2, detach_focus=True), logits)
    (plain,) = torch.autograd.grad(binary_cross_entropy(logits, target), logits)
    torch.testing.assert_close(gradient, plain * torch.sigmoid(-logits.detach()) ** 2)
    (full,) = torch.autograd.grad(asymmetric_loss(logits, target, gamma_pos=2), logits)
    assert not torch.allclose(full, gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss",
    [
        AsymmetricLoss(),
        AsymmetricLoss(clip=1e-8),
        AsymmetricLoss(clip=0),
        AsymmetricLoss(gamma_neg=0.5, gamma_pos=0.5),
        BinaryCrossEntropyLoss(),
    ],
)
def test_extreme_logits_stay_finite(dtype: torch.dtype, loss: nn.Module) -> None:
    logits = torch.tensor([[100.0, -100.0, 0.0]] * 2, dtype=dtype, requires_grad=True)
    value = loss(logits, torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    value.backward()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(value)
    assert value > 99  # the two confident mistakes are not lost
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.dtype == dtype


def test_half_precision_and_autocast_are_computed_in_float32() -> None:
    logits = draw_logits().half()
    expected = asymmetric_loss(logits.float(), draw_target().float())
    torch.testing.assert_close(asymmetric_loss(logits, draw_target()), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(asymmetric_loss(logits.float(), draw_target()), expected)


@pytest.mark.parametrize("loss", [asymmetric_loss, binary_cross_entropy])
def test_unknown_labels_contribute_nothing(loss) -> None:  # type: ignore[no-untyped-def]
    logits, target = draw_logits().requires_grad_(), draw_target()
    target[0, :3] = NAN
    target[4] = NAN
    known = ~torch.isnan(target)
    each = loss(draw_logits(), draw_target(), reduction="none")
    torch.testing.assert_close(loss(logits, target), each[known].sum())
    torch.testing.assert_close(loss(logits, target, reduction="mean"), each[known].mean())
    assert (loss(logits, target, reduction="none")[~known] == 0).all()
    (gradient,) = torch.autograd.grad(loss(logits, target), logits)
    assert (gradient[~known] == 0).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("loss", [asymmetric_loss, binary_cross_entropy, AsymmetricLoss(reduction="mean")])
def test_patch_loss_is_equation_5(loss: Loss) -> None:
    p, q, w = (draw_logits().requires_grad_(), *(torch.randn(6, 4, 5).double().requires_grad_() for _ in range(2)))
    target = draw_target()
    cost = patch_loss(combine_logits(p, q, weight_logits=w, lam=0.3), target, loss=loss)
    pooled = (torch.softmax(w, dim=1) * q).sum(1)
    expected = loss(p, target) + loss(pooled, target)
    torch.testing.assert_close(cost, expected)
    gradients = (torch.autograd.grad(value, (p, q, w)) for value in (cost, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.abs().sum() > 0  # the weight head is not detached


def test_bad_input_is_named() -> None:
    good = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"asymmetric_loss: got logits \(2, 3\), target \(2, 4\)"):
        asymmetric_loss(good, torch.zeros(2, 4))
    with pytest.raises(InputError, match="binary_cross_entropy: logits are torch.int64"):
        binary_cross_entropy(good.long(), good)
    with pytest.raises(InputError, match="gamma_neg is -1, gamma_pos 0.0 and clip 0.05"):
        asymmetric_loss(good, good, gamma_neg=-1)
    with pytest.raises(InputError, match="unknown reduction 'average'; .*known: mean, none, sum"):
        AsymmetricLoss(reduction="average")  # type: ignore[arg-type]


def test_modules_do_what_their_functions_do() -> None:
    logits, target = torch.randn(6, 5, requires_grad=True), (torch.rand(6, 5) < 0.4).float()
    for reduction in ("sum", "mean", "none"):
        found = BinaryCrossEntropyLoss(reduction=reduction)(logits, target)
        assert torch.equal(found, binary_cross_entropy(logits, target, reduction=reduction))
    ours, theirs = (
        torch.autograd.grad(loss(logits, target), logits)[0] for loss in (AsymmetricLoss(), asymmetric_loss)
    )
    assert torch.equal(ours, theirs)
    with pytest.raises(InputError, match="give gammas of 0 or more"):
        asymmetric_loss(logits, target, clip=1.0)
