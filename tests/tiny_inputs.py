"""Seeded inputs of the tiny pipeline's transformer, and its velocity at them."""

import torch

from qwen_image import predict_velocity

HEIGHT, WIDTH, TOKENS, TEXT_WIDTH = 64, 32, 8, 32  # not square, so that swapped sides show
SIZE = {"height": HEIGHT, "width": WIDTH}


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_embeds(*lengths):
    return [randn(length, length, TEXT_WIDTH) for length in lengths]


def velocity(transformer, conditions, *, scale=1.0, batched=False, dtype=torch.float32, timestep=700.0):
    latents = randn(0, len(conditions["prompt_embeds"]), TOKENS, 64)
    timesteps = torch.full((len(latents),), timestep)
    options = SIZE | {"true_cfg_scale": scale, "cfg_batched": batched, "dtype": dtype}
    return predict_velocity(transformer, latents, timesteps, **conditions, **options)
