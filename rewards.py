"""Rewards of images and the advantages made of them.

A reward is a function (images, prompts, metadata) -> B numbers: images (B, 3, H, W) fp32 in [0, 1] on the CPU, prompts
a list of B strings, metadata a list of B dicts (what the prompt file holds besides the prompt). Add your own to
REWARDS, or name it `path/to/module.py:function`.
"""

import importlib.util
import io
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import interpolate, pad

LARGEST = 1e30  # of a reward and of a weight: spreads are squares, which must stay numbers
RewardFunction = Callable[[Tensor, list[str], list[dict[str, Any]]], Sequence[float] | Tensor]


def to_pil(image: Tensor) -> Image.Image:
    """(3, H, W) in [0, 1] to an 8-bit RGB picture."""
    return Image.fromarray((image * 255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().contiguous().numpy())


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


def glyph_match(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """How well each picture (B, 3, H, W in [0, 1]) shows the quoted text: (B,) in [0, 1], mean over characters.

    A character's part is its legibility (correlation with the wanted glyph, 0 at 0.4, 1 from 0.9 on) times its
    probability among all 36 glyphs, so it rises smoothly both as the shape sharpens and as it beats its rivals.
    """
    texts = [re.search(r'"([0-9A-Z]{1,3})"', prompt) for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        if text is None:
            raise ValueError(f"glyph_match needs 1 to 3 of 0-9 and A-Z in double quotes, not the prompt {prompt}")
    images = interpolate(images.float(), size=(64, 64), mode="bilinear", antialias=True)
    rewards = []
    for ink, text in zip(1 - images.amin(1), texts, strict=True):  # coloured ink is dark in at least one channel
        correlations = glyph_correlations(ink, len(text[1]))
        wanted = torch.tensor([GLYPHS.index(character) for character in text[1]])[:, None]
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


@lru_cache
def load_module(path: str) -> ModuleType:
    """Import a file once, whatever number of its functions is asked for."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def load_reward(name: str) -> RewardFunction:
    """A reward by its name in REWARDS, or `path/to/module.py:function`. Raises ValueError that lists the names."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function_name = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"reward {name!r} is unknown: choose from {', '.join(REWARDS)}, or module.py:function")
    if not Path(path).is_file():
        raise ValueError(f"reward {name!r}: there is no file {path}")
    try:
        module = load_module(str(Path(path).resolve()))
    except (Exception, SystemExit) as error:  # it is the user's file: whatever it raises, say whose it was
        raise ValueError(f"reward {name!r}: importing {path} raised {type(error).__name__}: {error}") from error
    if not callable(vars(module).get(function_name)):
        raise ValueError(f"reward {name!r}: {path} defines no function {function_name}")
    return vars(module)[function_name]


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
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a user's function raises, the message must say whose it was
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
