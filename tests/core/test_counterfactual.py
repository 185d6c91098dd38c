import pytest
import torch
from reference import pat
from torch import Tensor

from pivotpatch.core.counterfactual import combine_logits, patch_weights, pool_patches, tde_logits
from pivotpatch.errors import InputError


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("own_weights", [False, True])
def test_agrees_with_the_equations_written_with_loops(temperature: float, lam: float, own_weights: bool) -> None:
    image, patches, weights = draw(3, 5), draw(3, 4, 5), draw(4, 3, 5).transpose(0, 1)
    out = combine_logits(
        image, patches, weight_logits=weights if own_weights else None, lam=lam, temperature=temperature
    )
    used = weights if own_weights else patches
    for b in range(3):
        for k in range(5):
            expected = pat.tde(
                image[b, k].item(),
                patches[b, :, k].tolist(),
                weight_logits=used[b, :, k].tolist(),
                lam=lam,
                temperature=temperature,
            )
            assert out.tde_logits[b, k].item() == pytest.approx(expected, abs=1e-12)
            assert out.weights[b, :, k].tolist() == pytest.approx(pat.weights(used[b, :, k].tolist(), temperature))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_temperature_near_zero_gives_the_strongest_patch(temperature: float, dtype: torch.dtype) -> None:
    patches = draw(2, 4, 3).to(dtype).requires_grad_()
    out = combine_logits(torch.zeros(2, 3, dtype=dtype), patches, temperature=temperature)
    torch.testing.assert_close(out.pooled_logits, patches.amax(1), check_dtype=False)
    (gradient,) = torch.autograd.grad(out.pooled_logits.sum(), patches)
    assert torch.isfinite(gradient).all()


def test_the_normalised_form_keeps_ranking_and_the_decision_at_one_half_and_is_that_of_probs() -> None:
    image, pooled = draw(50, 1), draw(1, 50).t()
    plain = tde_logits(image, pooled, lam=0.5)
    scaled = tde_logits(image, pooled, lam=0.5, normalised=True)
    torch.testing.assert_close(scaled * 1.5, plain)
    assert torch.equal(plain.argsort(0), scaled.argsort(0))
    assert torch.equal(plain.sigmoid() > 0.5, scaled.sigmoid() > 0.5)
    normalised, raw = (combine_logits(draw(2, 3), draw(2, 4, 3), lam=3.0, normalised=n) for n in (True, False))
    torch.testing.assert_close(normalised.probs, torch.sigmoid(normalised.tde_logits / 4))
    torch.testing.assert_close(raw.probs, torch.sigmoid(raw.tde_logits))
    assert torch.equal(raw.tde_logits, normalised.tde_logits)


def test_gradients_are_right() -> None:
    def run(image: Tensor, patches: Tensor, weights: Tensor) -> Tensor:
        return combine_logits(image, patches, weight_logits=weights, lam=0.8, temperature=0.5).tde_logits

    shapes = ((2, 3), (2, 4, 3), (2, 4, 3))
    assert torch.autograd.gradcheck(run, [draw(*shape).requires_grad_() for shape in shapes])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_and_whole_numbers_are_raised_to_float32(dtype: torch.dtype) -> None:
    image, patches = draw(2, 3).to(dtype), draw(2, 4, 3).to(dtype)
    out = combine_logits(image, patches)
    assert out.tde_logits.dtype == out.weights.dtype == out.probs.dtype == torch.float32
    torch.testing.assert_close(out.tde_logits, combine_logits(image.float(), patches.float()).tde_logits)


def test_bad_input_is_named() -> None:
    for value in (-1.0, float("nan")):
        with pytest.raises(InputError, match=f"temperature is {value}"):
            patch_weights(torch.zeros(1, 2, 3), temperature=value)
        with pytest.raises(InputError, match=f"lam is {value}"):
            tde_logits(torch.zeros(1, 2), torch.zeros(1, 2), lam=value)
    with pytest.raises(InputError, match=r"got weight_logits \(2, 3\); give tensors weight_logits \(B, P, L\)"):
        patch_weights(torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"got image_logits \(2, 3\), patch_logits \(2, 4, 5\); give"):
        combine_logits(torch.zeros(2, 3), torch.zeros(2, 4, 5))
    with pytest.raises(InputError, match="combine_logits: there are no patches; give one or more"):
        combine_logits(torch.zeros(2, 3), torch.zeros(2, 0, 3))


def test_an_infinite_logit_is_not_lost_for_its_weight_is_0() -> None:
    out = combine_logits(torch.zeros(1, 1), torch.tensor([[[-torch.inf], [1.0]]]))
    assert out.weights.flatten().tolist() == [0, 1]
    assert out.tde_logits.isnan().all()  # by which scoring and prediction know that the model is damaged


def test_the_papers_defaults_and_shapes_that_would_broadcast() -> None:
    p, q = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(patch_weights(q), q.softmax(1))
    torch.testing.assert_close(tde_logits(p, q[:, 0]), p + q[:, 0])
    with pytest.raises(InputError, match=r"pool_patches: got patch_logits \(2, 4, 3\), weights \(2, 4, 1\)"):
        pool_patches(q, q[..., :1])
    with pytest.raises(InputError, match=r"tde_logits: got image_logits \(2, 3\), pooled_logits \(1, 3\)"):
        tde_logits(p, p[:1])
