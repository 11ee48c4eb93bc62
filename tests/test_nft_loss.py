"""DiffusionNFT: golden numbers of the loss, schedules, drawn timesteps: python -m pytest tests/test_nft_loss.py"""

import pytest
import torch

import train_nft


@pytest.mark.parametrize(
    ("reward_prob", "gradient"), [(0, (6, 0)), (0.25, (3, 0)), (0.5, (0, 0)), (0.75, (-3, 0)), (1, (-6, 0))]
)
def test_loss_golden(reward_prob, gradient):
    x0, noise = torch.tensor([[[0.2, -0.3]]], dtype=torch.float64), torch.tensor([[[0.5, 0.1]]], dtype=torch.float64)
    t = torch.full((1, 1, 1), 0.6, dtype=torch.float64)
    velocity = torch.tensor([[[0.1, 0.4]]], dtype=torch.float64, requires_grad=True)
    probability = torch.tensor([reward_prob], dtype=torch.float64)
    xt = (1 - t) * x0 + t * noise
    loss = train_nft.nft_loss(
        velocity, velocity.detach(), x0, xt, t, probability, nft_beta=1.0, adv_clip_max=5.0
    ).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.6, abs=1e-9)
    assert velocity.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-9)


def test_gradient_is_2r_minus_1_times_that_of_a_sure_sample():
    torch.manual_seed(0)
    x0, noise, old = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    t = torch.tensor([0.3, 0.8], dtype=torch.float64).view(2, 1, 1)
    gradients, values = [], []
    for probability in (1.0, 0.5, 0.2):
        velocity = old.clone().requires_grad_(True)
        loss = train_nft.nft_loss(
            velocity,
            old,
            x0,
            (1 - t) * x0 + t * noise,
            t,
            torch.full((2,), probability),
            nft_beta=0.1,
            adv_clip_max=5.0,
        ).mean()
        values.append(loss.item())
        gradients.append(torch.autograd.grad(loss, velocity)[0])
    assert values == pytest.approx([values[0]] * 3)
    torch.testing.assert_close(gradients[1], torch.zeros_like(gradients[1]), atol=1e-9, rtol=0)
    torch.testing.assert_close(gradients[2], -0.6 * gradients[0])


def test_a_higher_reward_pulls_the_velocity_towards_the_sample():
    """A step against the gradient brings the predicted x0 nearer for r = 1 and further for r = 0."""
    torch.manual_seed(0)
    x0, noise, old = torch.randn(3, 1, 5, 4)
    t = torch.full((1, 1, 1), 0.5)
    xt = (1 - t) * x0 + t * noise
    distances = []
    for probability in (0.0, 1.0):
        velocity = old.clone().requires_grad_(True)
        options = {"nft_beta": 0.5, "adv_clip_max": 5.0}
        train_nft.nft_loss(velocity, old, x0, xt, t, torch.tensor([probability]), **options).sum().backward()
        moved = velocity.detach() - 0.01 * velocity.grad
        distances.append((xt - t * moved - x0).norm() - (xt - t * old - x0).norm())
    assert distances[0] > 0 > distances[1]


@pytest.mark.parametrize(
    ("adv_mode", "expected"),
    [
        ("all", [0, 0, 0.5, 0.75, 1, 1]),
        ("positive_only", [0.5, 0.5, 0.5, 0.75, 1, 1]),
        ("negative_only", [0, 0, 0.5, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6, 0.6]),
    ],
)
def test_reward_probability(adv_mode, expected):
    advantages = torch.tensor([-10, -5, 0, 2.5, 5, 10])
    probability = train_nft.reward_probability(advantages, adv_mode=adv_mode, adv_clip_max=5.0)
    assert probability.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("copy", 1000, 0),
        ("linear_to_0_5", 0, 0),
        ("linear_to_0_5", 100, 0.1),
        ("linear_to_0_5", 900, 0.5),
        ("delayed_linear_to_0_999", 74, 0),
        ("delayed_linear_to_0_999", 75, 0),
        ("delayed_linear_to_0_999", 85, 0.075),
        ("delayed_linear_to_0_999", 9999, 0.999),
        ("10:0.5:0.7", 11, 0.5),
        ("10:0.5:0.7", 12, 0.7),
    ],
)
def test_decay_schedules(name, steps, expected):
    assert train_nft.old_policy_decay(train_nft.parse_old_policy_decay(name), steps) == pytest.approx(expected)


def test_train_timesteps():
    sigmas = torch.linspace(1, 0, 11)
    args = train_nft.parse_args(["--timestep_fraction", "0.5"])
    drawn = train_nft.draw_train_timesteps(args, sigmas, [3, 4, 5], (0, 1, 0))
    assert drawn.shape == (3, 5)
    assert all(
        len(set(row.tolist())) == 5 and set(row.tolist()) <= set((sigmas[:-1] * 1000).tolist()) for row in drawn
    )
    assert len({tuple(row.tolist()) for row in drawn}) == 3  # every sample has its own order
    alone = train_nft.draw_train_timesteps(args, sigmas, [4], (0, 1, 0))
    assert torch.equal(alone[0], drawn[1])  # whatever batch it is in
    assert not torch.equal(train_nft.draw_train_timesteps(args, sigmas, [4], (0, 2, 0))[0], drawn[1])
    whole = train_nft.draw_train_timesteps(train_nft.parse_args([]), sigmas, [0], (0, 0, 0))
    assert sorted(whole[0].tolist()) == sorted((sigmas[:-1] * 1000).tolist())
    for kind in ("uniform", "logit_normal"):
        args = train_nft.parse_args(["--train_timesteps", kind])
        drawn = train_nft.draw_train_timesteps(args, sigmas, range(200), (0, 0, 0))
        assert 0 < drawn.min() < drawn.max() < 1000
        inner = ((drawn > 250) & (drawn < 750)).float().mean().item()
        assert inner == pytest.approx({"uniform": 0.5, "logit_normal": 0.728}[kind], abs=0.04)
