"""Tests of rewards.py: golden advantages, JPEG rewards, and that no failing reward passes for a number.

python -m pytest tests/test_rewards.py
"""

import numpy as np
import pytest
import torch

from rewards import (
    REWARDS,
    constant_groups,
    group_advantages,
    jpeg_compressibility,
    jpeg_incompressibility,
    load_reward,
    score_images,
    to_pil,
)

REWARD_ROWS = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def advantages(rewards, groups, *, global_std):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), global_std=global_std)


# ----- Advantages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("global_std", "value"), [(True, 1.154434), (False, 0.999800)])
@pytest.mark.parametrize("ids", [(0, 1), (7, 3), (-1, 10**12)])
def test_advantages_golden(global_std, value, ids):
    groups = [ids[0]] * 4 + [ids[1]] * 4
    expected = [0, 0, 0, 0, -value, value, -value, value]
    got = advantages(REWARD_ROWS, groups, global_std=global_std)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, -2.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_without_spread_gets_exactly_zero(global_std, reward, size):
    got = advantages([reward] * size + [0.0, 1.0], [0] * size + [1, 1], global_std=global_std)
    assert got[:size].tolist() == [0.0] * size
    assert got[size:].abs().min() > 0
    assert advantages([reward] * size, [0] * size, global_std=global_std).tolist() == [0.0] * size


@pytest.mark.parametrize("global_std", [True, False])
def test_advantages_do_not_depend_on_the_order_of_rows(global_std):
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.randn(12, generator=generator), torch.arange(12) // 4
    expected = group_advantages(rewards, groups, global_std=global_std)
    for _ in range(5):
        order = torch.randperm(12, generator=generator)
        got = group_advantages(rewards[order], groups[order], global_std=global_std)
        torch.testing.assert_close(got, expected[order], rtol=0, atol=1e-6)


def test_with_group_std_other_groups_do_not_matter():
    own = [0.0, 0.5, 2.0]
    first, second = (advantages(own + other, [0, 0, 0, 1, 1], global_std=False)[:3] for other in ([1, 2], [90, -7]))
    assert torch.equal(first, second)
    first, second = (advantages(own + other, [0, 0, 0, 1, 1], global_std=True)[:3] for other in ([1, 2], [90, -7]))
    assert (first - second).abs().max() > 0.1


def test_constant_groups():
    rewards, groups = torch.tensor([0.1, 5.0, 0.1, 6.0, -3.0]), torch.tensor([0, 1, 0, 1, 2])
    assert constant_groups(rewards, groups).tolist() == [True, False, True]


# ----- JPEG --------------------------------------------------------------------------------------------------------


def noisy_images(amplitudes):
    noise = torch.rand(len(amplitudes), 3, 48, 32, generator=torch.Generator().manual_seed(0)) - 0.5
    return 0.5 + noise * torch.tensor(amplitudes).view(-1, 1, 1, 1)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_jpeg_sizes_grow_with_noise_and_keep_the_images_order(order):
    images = noisy_images([0.0, 0.1, 0.3, 1.0])[order]
    sizes = jpeg_incompressibility(images, ["a"] * 4, [{}] * 4)
    assert np.argsort(np.argsort(sizes)).tolist() == order
    assert jpeg_compressibility(images, ["a"] * 4, [{}] * 4) == [-size for size in sizes]
    assert 0.2 < min(sizes) < max(sizes) < 48 * 32 * 3 / 1000


def test_to_pil_keeps_pixels_sides_and_channels():
    image = torch.zeros(3, 2, 5)
    image[0, 0, 4], image[1, 1, 0], image[2, 1, 1] = 1.0, 100.4 / 255, 1.5
    picture = to_pil(image)
    assert picture.size == (5, 2)
    assert [picture.getpixel(place) for place in [(4, 0), (0, 1), (1, 1)]] == [(255, 0, 0), (0, 100, 0), (0, 0, 255)]


# ----- Scoring -----------------------------------------------------------------------------------------------------


def score(reward, name="mine"):
    return score_images(
        {name: reward}, torch.zeros(3, 3, 8, 8), ["a", "b", "c"], [{"n": 0}, {"n": 1}, {"n": 2}], [7, 8, 9]
    )


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_scores_are_plain_numbers_in_order(kind):
    got = score(lambda images, prompts, metadata: kind([10.0 + row["n"] for row in metadata]))
    assert got == {"mine": [10.0, 11.0, 12.0]}
    assert all(type(value) is float for value in got["mine"])


def test_every_reward_scores_the_same_inputs():
    seen = []
    functions = {name: lambda *inputs, v=value: seen.append(inputs) or [v] * 2 for name, value in [("x", 1), ("y", 2)]}
    images = noisy_images([0.5, 1.0])
    assert score_images(functions, images, ["a", "b"], [{}, {}], [0, 1]) == {"x": [1, 1], "y": [2, 2]}
    assert [inputs[1] for inputs in seen] == [["a", "b"]] * 2
    assert all(torch.equal(inputs[0], images) for inputs in seen)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
@pytest.mark.parametrize("row", [0, 2])
def test_a_value_that_is_no_finite_number_is_refused(bad, row):
    values = [1.0, 2.0, 3.0]
    values[row] = bad
    with pytest.raises(ValueError, match=rf"reward mine is {bad} for sample {7 + row} \('{'abc'[row]}'\)") as error:
        score(lambda *_: values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "count"),
    [(None, "None"), ([], "0 values"), ([1.0, 2.0], "2 values"), ([1.0] * 4, "4 values"), (torch.ones(2), "2 values")],
)
def test_a_wrong_count_is_refused(values, count):
    with pytest.raises(ValueError, match=f"reward mine on samples 7 to 9 returned {count} for 3 images"):
        score(lambda *_: values)


def test_a_raising_reward_is_named():
    def reward(images, prompts, metadata):
        raise KeyError("answer")

    with pytest.raises(ValueError, match="reward mine on samples 7 to 9 raised KeyError: 'answer'") as error:
        score(reward)
    assert isinstance(error.value.__cause__, KeyError)


def test_the_failing_one_of_two_rewards_is_named():
    with pytest.raises(ValueError, match="reward bad is nan for sample 1"):
        score_images(
            {"good": lambda *_: [1, 2], "bad": lambda *_: [1, float("nan")]},
            torch.zeros(2, 3, 8, 8),
            ["a", "b"],
            [{}, {}],
            [0, 1],
        )


# ----- Loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility"])
def test_a_known_reward_is_loaded_by_name(name):
    assert load_reward(name).score is REWARDS[name]
    assert load_reward(name).score.__name__ == name


@pytest.mark.parametrize(("function", "value"), [("first", 1.0), ("second", 2.0)])
def test_a_reward_is_loaded_from_a_file(tmp_path, function, value):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def first(images, *_):\n    return [1.0] * len(images)\n\n\ndef second(*_):\n    return [2.0] * 3\n"
    )
    assert score(load_reward(f"{path}:{function}").score) == {"mine": [value] * 3}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beauty", "reward 'beauty' is unknown: choose from .*jpeg_incompressibility.*, or module"),
        ("{folder}/my_reward.py", "is unknown: choose from .*jpeg_compressibility"),
        ("{folder}/missing.py:first", "there is no file {folder}/missing.py"),
        ("{folder}/my_reward.py:third", "{folder}/my_reward.py defines no function third"),
        ("{folder}/my_reward.py:NUMBER", "{folder}/my_reward.py defines no function NUMBER"),
    ],
)
def test_a_reward_that_does_not_exist_is_refused(tmp_path, name, message):
    (tmp_path / "my_reward.py").write_text("NUMBER = 3\n\n\ndef first(*_):\n    return [1.0]\n")
    with pytest.raises(ValueError, match=message.format(folder=tmp_path)) as error:
        load_reward(name.format(folder=tmp_path))
    assert "\n" not in str(error.value)
