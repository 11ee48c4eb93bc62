"""glyph_match on pictures drawn by Pillow: right, wrong, partly right, empty and noisy ones."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rewards import GLYPH_LAYOUT, GLYPH_MATCH_RIGHT, GLYPHS, draw_ink, glyph_correlations, glyph_match

TEXTS = ["7", "Q", "I", "7K", "OQ", "MW", "A1B", "WWW", "0O8"]


def picture(text: str, *, scale=1.0, shift=(0, 0), ink=(0.0, 0.0, 0.0)) -> Tensor:
    mask = torch.from_numpy(np.array(draw_ink(text, GLYPH_LAYOUT[len(text)], (64, 64), scale, shift))) / 255
    return 1 - mask[None] * (1 - torch.tensor(ink)[:, None, None])


def reward(images: list[Tensor] | Tensor, texts: list[str]) -> Tensor:
    images = images if isinstance(images, Tensor) else torch.stack(images)
    return glyph_match(images, [f'the text "{text}"' for text in texts], [{} for _ in texts])


@pytest.mark.parametrize(
    "jitter", [{}, {"scale": 0.95, "shift": (-2, 1.5)}, {"scale": 1.05, "shift": (1.3, -2)}, {"ink": (0.1, 0.2, 0.7)}]
)
def test_right_text_is_right_wherever_it_stands(jitter):
    rewards = reward([picture(text, **jitter) for text in TEXTS], TEXTS)
    assert rewards.shape == (len(TEXTS),)
    assert rewards.max() <= 1
    assert rewards.min() > GLYPH_MATCH_RIGHT


def test_wrong_text_is_near_0():
    assert reward([picture("7K"), picture("A1B"), picture("X")], ["B4", "7K2", "M"]).max() < 0.05


def test_text_of_another_length_is_wrong():
    assert reward([picture("7"), picture("7KX"), picture("7K")], ["7K", "7K", "7"]).max() < 0.1


@pytest.mark.parametrize(
    ("drawn", "wanted", "share"), [("7K", "7X", 1 / 2), ("A1B", "A1X", 2 / 3), ("A1B", "XYB", 1 / 3)]
)
def test_partly_right_text_gets_its_share_and_is_not_right(drawn, wanted, share):
    (value,) = reward([picture(drawn)], [wanted])
    assert value == pytest.approx(share, abs=0.05)
    assert value < GLYPH_MATCH_RIGHT


def test_reward_rises_with_legibility():
    sharp, noise = picture("7K"), torch.rand((3, 64, 64), generator=torch.Generator().manual_seed(0))
    values = reward([(1 - part) * noise + part * sharp for part in (0.0, 0.3, 0.4, 0.5, 1.0)], ["7K"] * 5)
    assert values.diff().min() >= 0
    assert values.diff().max() > 0.1
    assert values[-1] > 0.95


def test_empty_and_noisy_pictures_are_0():
    noise = torch.rand((3, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    for images in (noise * 0, noise * 0 + 0.5, noise * 0 + 1, noise, 1 - noise / 10):
        assert reward(images, ["7", "7K", "7KX"]).max() < 0.01


def test_order_of_images_and_other_sizes():
    images = torch.stack([picture("7K"), picture("B4"), picture("A1B")])
    large = images.repeat_interleave(4, -1).repeat_interleave(4, -2)
    for batch in (images, large):
        right = reward(batch, ["7K", "B4", "A1B"])
        assert right.min() > GLYPH_MATCH_RIGHT
        torch.testing.assert_close(reward(batch.flip(0), ["A1B", "B4", "7K"]), right.flip(0))
        assert reward(batch.flip(0), ["7K", "B4", "A1B"]).tolist() == pytest.approx([0, right[1].item(), 0], abs=0.05)


def test_threshold_agrees_with_reading_each_character():
    generator = np.random.default_rng(0)
    for length in (1, 2, 3):
        for _ in range(40):
            drawn, wanted = ("".join(generator.choice(list(GLYPHS), length)) for _ in range(2))
            wanted = drawn if generator.random() < 0.5 else wanted
            image = picture(drawn, shift=tuple(generator.uniform(-2, 2, 2)))
            read = "".join(GLYPHS[index] for index in glyph_correlations(1 - image.amin(0), length).argmax(1))
            assert read == drawn
            assert (reward([image], [wanted])[0] > GLYPH_MATCH_RIGHT) == (read == wanted)


@pytest.mark.parametrize("prompt", ["the text 7K", 'the text ""', 'the text "7k"', 'the text "ABCD"'])
def test_prompt_without_a_readable_text_is_refused(prompt):
    with pytest.raises(ValueError, match="quotes") as error:
        glyph_match(torch.ones(2, 3, 64, 64), ['the text "7K"', prompt], [{}, {}])
    assert prompt in str(error.value)
