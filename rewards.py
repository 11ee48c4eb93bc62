"""Rewards of images and the advantages made of them.

A reward is a function (images, prompts, metadata) -> B numbers: images (B, 3, H, W) fp32 in [0, 1] on the CPU, prompts
a list of B strings, metadata a list of B dicts (what the prompt file holds besides the prompt). Add your own to
REWARDS, or name it `path/to/module.py:function`.
"""

import importlib.util
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

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


REWARDS: dict[str, RewardFunction] = {
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
}


def load_reward(name: str) -> RewardFunction:
    """A reward by its name in REWARDS, or `path/to/module.py:function`. Raises ValueError that lists the names."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function_name = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"reward {name!r} is unknown: choose from {', '.join(REWARDS)}, or module.py:function")
    if not Path(path).is_file():
        raise ValueError(f"reward {name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(vars(module).get(function_name)):
        raise ValueError(f"reward {name!r}: {path} defines no function {function_name}")
    return vars(module)[function_name]


def score_images(
    rewards: Mapping[str, RewardFunction],
    images: Tensor,
    prompts: list[str],
    metadata: list[dict[str, Any]],
    sample_indices: Sequence[int],
) -> dict[str, list[float]]:
    """Each reward's B values. A reward that raises, or returns another count, None, NaN or infinity, raises ValueError
    naming the reward and the sample: a failure is never a reward of 0."""
    scores = {}
    for name, reward in rewards.items():
        where = f"reward {name} on samples {sample_indices[0]} to {sample_indices[-1]}"
        try:
            values = reward(images, prompts, metadata)
        except Exception as error:  # whatever a user's function raises, the message must say whose it was
            raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
        values = values.tolist() if isinstance(values, Tensor) else values
        if values is None or len(values) != len(prompts):
            count = "None" if values is None else f"{len(values)} values"
            raise ValueError(f"{where} returned {count} for {len(prompts)} images: return one number an image")
        for index, prompt, value in zip(sample_indices, prompts, values, strict=True):
            if value is None or not math.isfinite(value):
                raise ValueError(f"reward {name} is {value} for sample {index} ({prompt!r}): return finite numbers")
        scores[name] = [float(value) for value in values]
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
