"""Prompts to trajectories with the current policy, to images, to rewards, to the cache.

Shapes: B samples of a batch, N denoising steps, W trained steps (the SDE window), L image tokens, C channels.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_image import PIXELS_PER_TOKEN, decode_latents, prompt_conditions, sde_step_with_logprob, seeded_noise
from rewards import RewardFunction, score_images
from trajectory_cache import NEGATIVE_PROMPT_ID, table_writer

# The streams of random numbers that one sample draws from; each is a function of (seed, epoch, sample, stream).
INITIAL_NOISE, STEP_NOISE = 0, 1


def draw_sde_window(
    window_size: int, window_range: Sequence[int], num_inference_steps: int, *, seed: int, epoch: int
) -> tuple[int, int]:
    """The trained steps [start, stop) of an epoch, drawn from the seed within [range[0], range[1]); size 0 means all
    steps but the last, which has sigma 0 at its end and is never trained."""
    if window_size == 0:
        return 0, num_inference_steps - 1
    start = int(np.random.default_rng((seed, 2, epoch)).integers(window_range[0], window_range[1] - window_size + 1))
    return start, start + window_size


@torch.no_grad()
def sample_trajectories(
    predict: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    sigmas: Tensor,
    *,
    sde_window: tuple[int, int],
    sde_type: str,
    noise_level: float,
    step_noise: Callable[[int], Tensor],
    keep_prev_sample_mean: bool = False,
) -> dict[str, Tensor]:
    """Denoise latents (B, L, C): SDE steps inside the window, the pipeline's own Euler (ODE) steps outside.

    predict takes latents and timesteps (B,) in [0, 1000]; step_noise(i) gives (B, L, C) for step i. Returns CPU
    tensors: latents_clean (B, L, C) and, with a window that is not empty, all_latents (B, W+1, L, C), sigmas (B, W+1),
    sigma_max (B,), all_timesteps (B, W), old_log_probs (B, W) and, if asked, old_prev_sample_mean (B, W, L, C).
    """
    start, stop = sde_window
    batch_size, device = len(latents), latents.device
    sigmas_on_device = sigmas.to(device)
    latents = latents.float()
    all_latents, log_probs, means = [], [], []
    for step in range(len(sigmas) - 1):
        sigma, sigma_next = (sigmas_on_device[i].expand(batch_size) for i in (step, step + 1))
        velocity = predict(latents, sigma * 1000)
        if not start <= step < stop:
            latents = latents + (sigma_next - sigma).view(-1, 1, 1) * velocity
            continue
        if step == start:
            all_latents.append(latents.cpu())
        latents, log_prob, mean, _, _ = sde_step_with_logprob(
            velocity,
            latents,
            sigma,
            sigma_next,
            sigma_max=sigmas_on_device[1].expand(batch_size),
            noise_level=noise_level,
            sde_type=sde_type,
            noise=step_noise(step).to(device),
        )
        all_latents.append(latents.cpu())
        log_probs.append(log_prob)
        if keep_prev_sample_mean:
            means.append(mean.cpu())

    trajectories = {"latents_clean": latents.cpu()}
    if all_latents:
        trajectories |= {
            "all_latents": torch.stack(all_latents, dim=1),
            "sigmas": sigmas[start : stop + 1].expand(batch_size, -1),
            "sigma_max": sigmas[1].expand(batch_size),
            "all_timesteps": (sigmas[start:stop] * 1000).expand(batch_size, -1),
            "old_log_probs": torch.stack(log_probs, dim=1).cpu(),
        }
    if means:
        trajectories["old_prev_sample_mean"] = torch.stack(means, dim=1)
    return trajectories


def write_rollout(
    predict: Callable[..., Tensor],
    *,
    folder: Path,
    shard: int,
    batches: Sequence[Sequence[int]],
    prompt_ids: Sequence[int],
    prompts: Sequence[Mapping[str, Any]],
    embeddings: Mapping[int, Tensor],
    negative: Tensor | None,
    vae: torch.nn.Module,
    rewards: Mapping[str, RewardFunction],
    sigmas: Tensor,
    height: int,
    width: int,
    sde_window: tuple[int, int],
    sde_type: str,
    noise_level: float,
    seed_words: tuple[int, int],
    fields: Sequence[str],
    progress: Callable[[], Any],
) -> dict[str, list[float]]:
    """Sample one rank's batches, write its trajectories and prompts tables, and return each reward's values.

    batches lists the epoch's sample numbers of each batch; prompt_ids gives the prompt of every sample of the epoch;
    seed_words is (seed, epoch). predict(latents, timesteps, **conditions) is the policy; `fields` are kept on disk.
    """
    device = next(vae.parameters()).device
    scores: dict[str, list[float]] = {name: [] for name in rewards}
    used = sorted({prompt_ids[sample] for batch in batches for sample in batch})
    with table_writer(folder / f"prompts-{shard:05d}.arrow") as write:
        if negative is not None:
            write({"prompt_id": NEGATIVE_PROMPT_ID, "prompt": "", "prompt_embeds": negative})
        for prompt_id in used:
            row = {"prompt_id": prompt_id, "prompt": prompts[prompt_id]["prompt"]}
            write(row | {"prompt_embeds": embeddings[prompt_id]})

    with table_writer(folder / f"trajectories-{shard:05d}.arrow") as write:
        for batch in batches:
            ids = [prompt_ids[sample] for sample in batch]
            trajectories = sample_batch(
                predict,
                conditions=prompt_conditions([embeddings[prompt_id] for prompt_id in ids], negative),
                samples=batch,
                device=device,
                sigmas=sigmas,
                height=height,
                width=width,
                sde_window=sde_window,
                sde_type=sde_type,
                noise_level=noise_level,
                seed_words=seed_words,
                keep_prev_sample_mean="old_prev_sample_mean" in fields,
            )
            images = decode_latents(vae, trajectories["latents_clean"].to(device), height=height, width=width).cpu()
            texts = [prompts[prompt_id]["prompt"] for prompt_id in ids]
            for name, values in score_images(rewards, images, texts, [dict(prompts[i]) for i in ids], batch).items():
                scores[name] += values
            for row, (sample, prompt_id) in enumerate(zip(batch, ids, strict=True)):
                plain = {"sample_index": sample, "prompt_id": prompt_id}
                write(plain | {name: trajectories[name][row] for name in fields})
            progress()
    return scores


def sample_batch(
    predict: Callable[..., Tensor],
    *,
    conditions: Mapping[str, Tensor],
    samples: Sequence[int],
    device: torch.device,
    sigmas: Tensor,
    height: int,
    width: int,
    seed_words: tuple[int, int],
    sde_window: tuple[int, int] = (0, 0),
    sde_type: str = "sde",
    noise_level: float = 0.0,
    keep_prev_sample_mean: bool = False,
) -> dict[str, Tensor]:
    """Trajectories of one batch whose noise depends on (seed, epoch, sample) alone; the default is plain ODE."""
    shape = ((height // PIXELS_PER_TOKEN) * (width // PIXELS_PER_TOKEN), 64)
    conditions = {name: tensor.to(device) for name, tensor in conditions.items()}

    def noise(*stream: int) -> Tensor:
        return torch.stack([seeded_noise((*seed_words, sample, *stream), shape) for sample in samples])

    return sample_trajectories(
        lambda latents, timesteps: predict(latents, timesteps, **conditions),
        noise(INITIAL_NOISE).to(device),
        sigmas,
        sde_window=sde_window,
        sde_type=sde_type,
        noise_level=noise_level,
        step_noise=lambda step: noise(STEP_NOISE, step),
        keep_prev_sample_mean=keep_prev_sample_mean,
    )
