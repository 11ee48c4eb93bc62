"""Rewards of images and the advantages made of them.

A reward is a function (images, prompts, metadata) -> B numbers: images (B, 3, H, W) fp32 in [0, 1] on the CPU, prompts
a list of B strings, metadata a list of B dicts (what the prompt file holds besides the prompt). Add your own to
REWARDS, or name it `path/to/module.py:function`. Those that need a package, a model or a server are in
reward_models.py.
"""

import io
import re
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import interpolate, pad

from reward_models import LOADED_REWARDS, Reward, RewardFunction, load_function, quoted_text, to_pil

LARGEST = 1e30  # of a reward and of a weight: spreads are squares, which must stay numbers


def jpeg_incompressibility(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Kilobytes of the image as a JPEG of quality 95 (DDPO, arXiv 2305.13301): higher for busier images."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=95)
        sizes.append(buffer.tell() / 1000)
    return sizes


def jpeg_compressibility(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Minus the kilobytes of the image as a JPEG of quality 95: higher for smoother images."""
    return [-size for size in jpeg_incompressibility(images, prompts, metadata)]


# ----- The demo's reward -------------------------------------------------------------------------------------------

GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GLYPH_LAYOUT = {1: (58, 56, 1), 2: (33, 32, 1), 3: (22, 21, 1)}  # text length: pixels of font, cell width, stroke
GLYPH_SCALES = (0.94, 1.0, 1.06)  # font sizes that still count as well drawn
GLYPH_SHIFT = 3  # pixels by which a character may be off its place
GLYPH_MATCH_RIGHT = 0.7  # a picture with a higher reward shows the right text


@lru_cache
def glyph_font(size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)  # the font that ships inside Pillow


def draw_ink(text: str, layout: tuple[int, int, int], canvas: tuple[int, int], scale=1.0, shift=(0, 0)) -> Image.Image:
    """Draw `text` white on black, one cell a character, around the middle of a canvas (width, height)."""
    size, cell, stroke = layout
    image = Image.new("L", canvas, 0)
    font = glyph_font(size * scale)
    for index, character in enumerate(text):
        x = canvas[0] / 2 + (index - (len(text) - 1) / 2) * cell + shift[0]
        baseline = canvas[1] / 2 + 0.355 * size * scale + shift[1]  # capitals of this font are 0.71 of its size high
        ImageDraw.Draw(image).text((x, baseline), character, 255, font=font, anchor="ms", stroke_width=stroke)
    return image


@lru_cache
def glyph_templates(length: int) -> Tensor:
    """Every glyph at every scale as it looks in a text of `length` characters: (scales, 36, pixels), unit vectors."""
    layout = GLYPH_LAYOUT[length]
    canvas = (layout[1], 64 - 2 * GLYPH_SHIFT)
    drawings = [[np.array(draw_ink(glyph, layout, canvas, scale)) for glyph in GLYPHS] for scale in GLYPH_SCALES]
    templates = torch.from_numpy(np.array(drawings)).float().flatten(2)
    templates = templates - templates.mean(-1, keepdim=True)
    return templates / templates.norm(dim=-1, keepdim=True)


def glyph_correlations(ink: Tensor, length: int) -> Tensor:
    """Ink (64, 64) to its correlation with each glyph at each place, by the best shift and scale: (length, 36)."""
    cell = GLYPH_LAYOUT[length][1]
    padded = pad(ink, (GLYPH_SHIFT, GLYPH_SHIFT))
    correlations = []
    for index in range(length):
        left = round(32 + (index - length / 2) * cell)  # in the padded picture this is GLYPH_SHIFT left of the cell
        strip = padded[:, left : left + cell + 2 * GLYPH_SHIFT]
        windows = strip.unfold(0, 64 - 2 * GLYPH_SHIFT, 1).unfold(1, cell, 1).flatten(2).flatten(0, 1)
        windows = windows - windows.mean(-1, keepdim=True)
        # The added variance lets the correlation of an empty or faint window fade to 0, rather than be that of noise.
        windows = windows / (windows.square().sum(-1, keepdim=True) + 0.005 * windows.shape[-1]).sqrt()
        correlations.append(torch.einsum("wp,sgp->swg", windows, glyph_templates(length)).flatten(0, 1).amax(0))
    return torch.stack(correlations)


def glyph_text(prompt: str) -> str:
    """The text that glyph_match looks for. Raises ValueError for a prompt without one that it knows."""
    text = re.search(r'"([0-9A-Z]{1,3})"', prompt)
    if text is None:
        raise ValueError(f"glyph_match needs 1 to 3 of 0-9 and A-Z in double quotes, not the prompt {prompt!r}")
    return text[1]


def glyph_match(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """How well each picture (B, 3, H, W in [0, 1]) shows the quoted text: (B,) in [0, 1], mean over characters.

    A character's part is its legibility (correlation with the wanted glyph, 0 at 0.4, 1 from 0.9 on) times its
    probability among all 36 glyphs, so it rises smoothly both as the shape sharpens and as it beats its rivals.
    """
    texts = [glyph_text(prompt) for prompt in prompts]
    images = interpolate(images.float(), size=(64, 64), mode="bilinear", antialias=True)
    rewards = []
    for ink, text in zip(1 - images.amin(1), texts, strict=True):  # coloured ink is dark in at least one channel
        correlations = glyph_correlations(ink, len(text))
        wanted = torch.tensor([GLYPHS.index(character) for character in text])[:, None]
        legibility = ((correlations.gather(1, wanted) - 0.4) / 0.5).clamp(0, 1)
        rewards.append((legibility * (correlations / 0.015).softmax(1).gather(1, wanted)).mean())
    return torch.stack(rewards)


def glyph_accuracy(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """1 where glyph_match sees the right text, else 0: (B,)."""
    return (glyph_match(images, prompts, metadata) > GLYPH_MATCH_RIGHT).float()


# ----- Choosing and combining rewards ------------------------------------------------------------------------------

REWARDS: dict[str, RewardFunction] = {
    "glyph_match": glyph_match,
    "glyph_accuracy": glyph_accuracy,
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
}

# Rewards that look for a text, and the function that finds it in a prompt or raises ValueError.
TEXT_REWARDS = {"glyph_match": glyph_text, "glyph_accuracy": glyph_text, "ocr": quoted_text}


def load_reward(name: str) -> Reward:
    """A reward by its name in REWARDS, with its option after a colon if it takes one, or `path/to/module.py:function`.

    Raises ValueError that lists the names. A model is loaded on the CPU: check_rewards comes first.
    """
    if name in REWARDS:
        return Reward(REWARDS[name])
    kind, _, option = name.partition(":")
    if kind in LOADED_REWARDS:
        return LOADED_REWARDS[kind][1](option)
    if not name.rpartition(":")[0].endswith(".py"):
        known = ", ".join((*REWARDS, *LOADED_REWARDS))
        raise ValueError(f"reward {name!r} is unknown: choose from {known}, or module.py:function")
    return Reward(load_function(name))


def check_weights(names: Sequence[str], weights: Sequence[float] | None) -> None:
    """Refuse rewards named twice and weights that are not one usable number for each. Raises ValueError."""
    if len(set(names)) < len(names):
        raise ValueError(f"--reward_funcs names a reward twice: {' '.join(names)}")
    if weights is None:
        return
    if len(weights) != len(names):
        raise ValueError(f"--reward_weights has {len(weights)} values for {len(names)} --reward_funcs")
    if not (all(abs(weight) <= LARGEST for weight in weights) and any(weights)):  # NaN compares false
        raise ValueError(f"--reward_weights are {list(weights)}: give numbers up to {LARGEST:.0e} that are not all 0")


def check_rewards(names: Sequence[str]) -> dict[str, str]:
    """Find, before any model is loaded, what a reward lacks to run. Raises ValueError.

    Returns the names by the label of their metrics: of `clip:folder` clip, of `my_reward.py:score` score, or the whole
    name where another reward has the same.
    """
    shorts = []
    for name in names:
        kind, _, option = name.partition(":")
        if kind in LOADED_REWARDS:
            LOADED_REWARDS[kind][0](option)
        else:
            load_reward(name)
        shorts.append(kind if kind in LOADED_REWARDS else name.rpartition(":")[2])
    return {short if shorts.count(short) == 1 else name: name for short, name in zip(shorts, names, strict=True)}


def check_reward_prompts(names: Sequence[str], prompts: Sequence[Mapping[str, Any]], option: str) -> None:
    """Find prompts that a reward cannot use, before any model is loaded. option: where they come from."""
    for name in names:
        for number, row in enumerate(prompts if name in TEXT_REWARDS else (), start=1):
            try:
                TEXT_REWARDS[name](row["prompt"])
            except ValueError as error:
                raise ValueError(f"{option}, prompt {number}: {error}; change the prompt or the reward") from error


def score_images(
    rewards: Mapping[str, RewardFunction],
    images: Tensor,
    prompts: list[str],
    metadata: list[dict[str, Any]],
    sample_indices: Sequence[int],
) -> dict[str, list[float]]:
    """Each reward's B values. A reward that raises, or returns another count, None, NaN, infinity or a number whose
    square could be infinite, raises ValueError naming the reward and the sample: a failure is never a reward of 0."""
    scores = {}
    for name, reward in rewards.items():
        where = f"reward {name} on samples {sample_indices[0]} to {sample_indices[-1]}"
        try:
            values = reward(images, prompts, metadata)
        except (Exception, SystemExit) as error:  # whatever a user's function raises, say whose it was
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name} line {frame.lineno}"
            raise ValueError(f"{where} raised {type(error).__name__}: {error} ({place})") from error
        values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
        if not isinstance(values, list | tuple) or len(values) != len(prompts):
            found = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)[:40]
            raise ValueError(
                f"{where} returned {found} for {len(prompts)} images: return a list of one number an image"
            )
        for index, prompt, value in zip(sample_indices, prompts, values, strict=True):
            one = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
            number = value.item() if one else value
            if not isinstance(number, bool | int | float) or not abs(number) <= LARGEST:
                raise ValueError(
                    f"reward {name} is {value} for sample {index} ({prompt!r}): return finite numbers up to "
                    f"{LARGEST:.0e}"
                )
            scores.setdefault(name, []).append(float(number))
    return scores


# ----- Advantages --------------------------------------------------------------------------------------------------

AGGREGATIONS = ("sum", "gdpo")


def combine_rewards(
    table: Tensor, weights: Tensor, prompt_ids: Tensor, *, aggregation: str, global_std: bool
) -> tuple[Tensor, Tensor]:
    """The weighted sum (N,) float64 of R rewards (N, R), weights (R,), and the advantages (N,) fp32.

    "sum" normalises the sum. "gdpo" (arXiv 2601.05242) normalises each reward in its groups by the group's own std,
    adds them by weight and divides by the std of all samples: a reward of small spread keeps its say. The paper's
    mean over all samples is 0 already.
    """
    totals = table.double() @ weights.double()
    if aggregation == "sum":
        return totals, group_advantages(totals, prompt_ids, global_std=global_std)
    each = [group_advantages(column, prompt_ids, global_std=False).double() for column in table.T]
    combined = torch.stack(each, dim=1) @ weights.double()
    return totals, (combined / (combined.std(correction=0) + 1e-4)).float()


def group_advantages(rewards: Tensor, prompt_ids: Tensor, *, global_std: bool, eps: float = 1e-4) -> Tensor:
    """(reward - mean of its prompt's group) / (std + eps), population std of all rewards or of the group.

    rewards (N,), prompt_ids (N,) integers -> (N,) fp32. Normalised over samples, never over timesteps. A group whose
    rewards are all equal gives exactly 0.
    """
    rewards = rewards.double()
    _, group = torch.unique(prompt_ids, return_inverse=True)
    num_groups = int(group.max()) + 1
    counts = torch.bincount(group, minlength=num_groups)
    means = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, rewards) / counts
    centred = torch.where(constant_groups(rewards, group)[group], 0.0, rewards - means[group])
    if global_std:
        std = rewards.std(correction=0)
    else:
        std = (torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, centred**2) / counts).sqrt()[group]
    return (centred / (std + eps)).float()


def reward_metrics(table: Tensor, names: Sequence[str], total: Tensor, groups: Tensor) -> dict[str, float]:
    """Means and spreads of an epoch's rewards: table (N, R), weighted total (N,), prompt ids (N,)."""
    _, group = torch.unique(groups, return_inverse=True)
    stds = torch.stack([total[group == index].std(correction=0) for index in range(int(group.max()) + 1)])
    metrics = {
        "rollout/reward_mean": total.mean().item(),
        "rollout/reward_std": total.std(correction=0).item(),
        "rollout/reward_std_mean": stds.mean().item(),
        "rollout/zero_std_ratio": constant_groups(total, group).float().mean().item(),
    }
    for column, name in enumerate(names):
        metrics[f"rollout/{name}_mean"] = table[:, column].mean().item()
        metrics[f"rollout/{name}_std"] = table[:, column].std(correction=0).item()
    return metrics


def has_signal(rewards: Tensor, prompt_ids: Tensor) -> Tensor:
    """(N,) bool: True for samples whose group's rewards are not all equal."""
    _, group = torch.unique(prompt_ids, return_inverse=True)
    return ~constant_groups(rewards, group)[group]


def constant_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """(number of groups,) bool: True where all rewards of a group are equal. group (N,) holds indices from 0."""
    num_groups = int(group.max()) + 1
    extremes = [
        torch.zeros(num_groups, dtype=rewards.dtype).scatter_reduce_(0, group, rewards, how, include_self=False)
        for how in ("amin", "amax")
    ]
    return extremes[0] == extremes[1]
