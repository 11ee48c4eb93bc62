"""FlowGRPO's losses by their closed forms: python -m pytest tests/test_flowgrpo_losses.py"""

import pytest
import torch

import train_flowgrpo


def test_guard_loss_has_the_papers_closed_form():
    """exp(mean((mu - mu_old) eps)) with eps = (x' - mu_old) / S, and the loss divided by -dt."""
    generator = torch.Generator().manual_seed(0)
    mean, old_mean, sample = torch.randn(3, 2, 1, 5, 4, generator=generator, dtype=torch.float64)
    mean = old_mean + 0.1 * mean
    std_dev_t, sqrt_dt = torch.tensor([[0.8], [1.5]]).double(), torch.tensor([[0.3], [0.25]]).double()
    noise_std = (std_dev_t * sqrt_dt)[..., None, None]
    log_probs, old_log_probs = (
        torch.distributions.Normal(m, noise_std).log_prob(sample).mean(dim=(-2, -1)) for m in (mean, old_mean)
    )
    advantages = torch.tensor([[1.0], [-2.0]]).double()
    losses, ratio = train_flowgrpo.guard_loss(
        log_probs, old_log_probs, advantages, mean, old_mean, std_dev_t, sqrt_dt, clip_range=10.0, adv_clip_max=5.0
    )
    expected = torch.exp(((mean - old_mean) * (sample - old_mean) / noise_std).mean(dim=(-2, -1)))
    torch.testing.assert_close(ratio, expected)
    torch.testing.assert_close(losses, -advantages * expected / sqrt_dt**2)


# Advantage, log-ratio, distance of the means in noise_std / 1000 -> loss, dropped. exp(.01) = 1.010050167084168 and
# exp(-.01) = .990049833749168; the KL of a distance d is (d / 1000)^2 / 2: 5e-7 for 1, 1e-5 for sqrt(20).
DPPO_GOLDEN = [
    (2.0, 0.01, 1.0, -2.020100334168336, False),  # near enough
    (2.0, 0.01, 5.0, 0.0, True),  # far, and further away
    (2.0, -0.01, 5.0, -1.980099667498336, False),  # far, and on its way back
    (-2.0, -0.01, 5.0, 0.0, True),
    (-2.0, 0.01, 5.0, 2.020100334168336, False),
    (2.0, 0.0, 5.0, -2.0, False),  # a ratio of 1 has no direction
    (9.0, -0.01, 5.0, -4.95024916874584, False),  # the advantage is cut to 5
    (0.0, 0.01, 5.0, 0.0, False),
    (2.0, 0.01, 4.4722, 0.0, True),  # sqrt(20) = 4.47213595...
    (2.0, 0.01, 4.4721, -2.020100334168336, False),
]


def test_dppo_loss_golden():
    advantages, log_ratio, distance, expected = (
        torch.tensor([row[i] for row in DPPO_GOLDEN], dtype=torch.float64)[:, None] for i in range(4)
    )
    noise_std = torch.linspace(0.2, 2, len(DPPO_GOLDEN), dtype=torch.float64)[:, None]
    old_mean = torch.randn(len(DPPO_GOLDEN), 1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = old_mean + (distance / 1000 * noise_std)[..., None, None] * torch.tensor([1.0, -1.0, 1.0, -1.0])
    log_probs = log_ratio.clone().requires_grad_()
    losses, ratio, got = train_flowgrpo.dppo_loss(
        log_probs,
        torch.zeros_like(log_ratio),
        advantages,
        mean,
        old_mean,
        noise_std,
        kl_threshold=1e-5,
        adv_clip_max=5.0,
    )
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(ratio, log_ratio.exp())
    assert got[:, 0].tolist() == [row[4] for row in DPPO_GOLDEN]
    losses.sum().backward()
    assert torch.equal(log_probs.grad, losses.detach())  # d exp(x) = exp(x), and nothing of what is dropped


def test_kl_golden():
    mean, reference = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[0.0, 0.0]]]])
    assert train_flowgrpo.kl_to_reference(mean, reference, torch.tensor([[0.5]])).item() == pytest.approx(2.5 / 0.5)
