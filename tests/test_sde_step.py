"""One SDE step of qwen_image.py: golden numbers and densities: python -m pytest tests/test_sde_step.py"""

import pytest
import torch
from tiny_inputs import randn
from torch.distributions import Normal

from qwen_image import SDE_TYPES, sde_step_with_logprob

GOLDEN_STEPS = [
    ("sde", 0.7, 1.0, 0.929, 2.627053188, [0.7195, -1.581, 0.4485, 0.04675], [-0.60335606, -0.59598186]),
    (
        "sde", 0.7, 0.57, 0.455, 0.805937270,
        [0.86288924, -2.01212849, 0.61041337, -0.05273081], [0.22300866, 0.27328958],
    ),
    (
        "cps", 0.7, 1.0, 0.929, 0.827745061,
        [0.45725717, -1.05651435, 0.31737859, -0.01881071], [-0.37439606, -0.08025756],
    ),
    (
        "dance", 0.3, 0.57, 0.455, 0.101734950,
        [0.93146908, -2.10074605, 0.61436447, 0.00992237], [-0.84221336, 0.99331969],
    ),
]  # fmt: skip


def sde_step(latents, v, sigma, sigma_next, sigma_max, **options):
    sigmas = (torch.full((len(latents),), value, dtype=torch.float64) for value in (sigma, sigma_next))
    sigma_max = torch.full((len(latents),), sigma_max, dtype=torch.float64)
    return sde_step_with_logprob(v, latents, *sigmas, sigma_max=sigma_max, **options)


@pytest.mark.parametrize(("sde_type", "noise_level", "sigma", "sigma_next", "std", "mean", "log_prob"), GOLDEN_STEPS)
def test_sde_step_golden(sde_type, noise_level, sigma, sigma_next, std, mean, log_prob):
    x, v, x_next = (
        torch.tensor(values, dtype=torch.float64)
        for values in ([[[1, -2]], [[0.5, 0.25]]], [[[0.5, 1]], [[-1, 2]]], [[[0.9, -1.8]], [[0.7, 0.1]]])
    )
    options = {"noise_level": noise_level, "sde_type": sde_type, "prev_sample": x_next}
    prev_sample, got_log_prob, got_mean, got_std, sqrt_dt = sde_step(x, v, sigma, sigma_next, 0.929, **options)
    assert torch.equal(prev_sample, x_next)
    assert got_std.tolist() == pytest.approx([std] * 2, abs=1e-9)
    assert got_mean.flatten().tolist() == pytest.approx(mean, abs=1e-8)
    assert got_log_prob.tolist() == pytest.approx(log_prob, abs=1e-8)
    assert sqrt_dt.tolist() == pytest.approx([(sigma - sigma_next) ** 0.5] * 2)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 3)])
@pytest.mark.parametrize(("prev_sample", "log_prob"), [(0.88875, 0.589029), (1.0, 0.462738)])
def test_log_prob_is_a_mean_over_elements(shape, prev_sample, log_prob):
    x = torch.ones(shape, dtype=torch.float64)
    options = {"noise_level": 0.7, "sde_type": "sde", "prev_sample": x * prev_sample}
    _, got, mean, std_dev_t, sqrt_dt = sde_step(x, x * 0.5, 0.5, 0.4, 0.9, **options)
    assert mean.flatten().tolist() == pytest.approx([0.88875] * x.numel(), abs=1e-9)
    assert (std_dev_t * sqrt_dt).item() == pytest.approx(0.2213594, abs=1e-7)
    assert got.item() == pytest.approx(log_prob, abs=1e-6)


def test_std_at_the_first_step():
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    *_, std_dev_t, sqrt_dt = sde_step(x, x, 1.0, 0.9, 0.9, noise_level=0.7, sde_type="sde", prev_sample=x)
    assert std_dev_t.item() == pytest.approx(2.213594, abs=1e-6)
    assert (std_dev_t * sqrt_dt).item() == pytest.approx(0.7, abs=1e-9)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_the_last_step_is_finite(sde_type):
    x = randn(0, 2, 3, 4)
    outputs = sde_step(x, x, 0.02, 0.0, 0.9, noise_level=0.7, sde_type=sde_type, noise=x)
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.5, 0.4)])
def test_sampled_step_has_the_stated_mean_std_and_density(sde_type, sigma, sigma_next):
    x, v, noise = (randn(seed, 2, 3, 4).double() for seed in range(3))
    options = {"noise_level": 0.7, "sde_type": sde_type, "noise": noise}
    prev_sample, log_prob, mean, std_dev_t, sqrt_dt = sde_step(x, v, sigma, sigma_next, 0.9, **options)
    std = (std_dev_t * sqrt_dt if sde_type == "sde" else std_dev_t).view(-1, 1, 1)
    torch.testing.assert_close(prev_sample - mean, std * noise)
    density = -((prev_sample - mean) ** 2) if sde_type == "cps" else Normal(mean, std).log_prob(prev_sample)
    torch.testing.assert_close(log_prob, density.mean(dim=(1, 2)))


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_rows_of_different_sigmas_are_independent(sde_type):
    x, v, noise = (randn(seed, 3, 2, 4) for seed in range(3))
    sigma, sigma_next, sigma_max = torch.tensor([[1.0, 0.5, 0.9], [0.9, 0.2, 0.7], [0.9, 0.9, 0.9]])

    def step(rows):
        return sde_step_with_logprob(
            v[rows], x[rows], sigma[rows], sigma_next[rows],
            sigma_max=sigma_max[rows], noise_level=0.7, sde_type=sde_type, noise=noise[rows],
        )  # fmt: skip

    for whole, *rows in zip(step([0, 1, 2]), step([0]), step([1]), step([2]), strict=True):
        torch.testing.assert_close(whole, torch.cat(rows))


def test_bf16_inputs_are_computed_in_fp32():
    x = randn(0, 2, 3, 4).bfloat16()
    outputs = sde_step(x, x, 0.5, 0.4, 0.9, noise_level=0.7, sde_type="sde", prev_sample=x)
    assert [output.dtype for output in outputs[1:]] == [torch.float32] * 4
    expected = sde_step(x.float(), x.float(), 0.5, 0.4, 0.9, noise_level=0.7, sde_type="sde", prev_sample=x.float())
    assert torch.equal(outputs[1], expected[1])


def test_unknown_sde_type():
    x = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match="'ode' is unknown: choose from sde, cps, dance"):
        sde_step(x, x, 0.5, 0.4, 0.9, noise_level=0.7, sde_type="ode", prev_sample=x)
