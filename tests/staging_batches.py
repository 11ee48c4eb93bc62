"""Micro-batches for tests of staging.py, and what their steps must be.

Shapes: B samples, T timesteps, L tokens, C channels, S text tokens, D embedding width, K timesteps of one chunk.
"""

from itertools import chain, combinations

import torch

from staging import FLOWGRPO_FIELDS

B, L, C, S, D = 2, 3, 4, 5, 6
CPU = torch.device("cpu")
STEP_OPTIONS = ("ref_prev_sample_mean", "old_prev_sample_mean", "rollout_is_weights", "ref_log_prob")
CONDITION_OPTIONS = ("prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")


def subsets(names):
    return list(chain.from_iterable(combinations(names, size) for size in range(len(names) + 1)))


def numbered(*shape, dtype=torch.float32):
    """Elements that all differ, so that a wrong sample, timestep or token shows."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype)


def make_batch(num_timesteps=5, *, listed=False, options=STEP_OPTIONS, conditions=CONDITION_OPTIONS):
    """A micro-batch of all required fields and the named optional ones; listed: fields as lists of B views."""
    batch = {
        "prompt_embeds": numbered(B, S, D, dtype=torch.bfloat16),
        "prompt_embeds_mask": torch.tensor([[1] * S, [1] * 2 + [0] * (S - 2)], dtype=torch.int32),
        "negative_prompt_embeds": -numbered(B, 2, D, dtype=torch.bfloat16),
        "negative_prompt_embeds_mask": torch.tensor([[1, 1], [1, 0]], dtype=torch.int32),
        "sigma_max": numbered(B),
        "all_latents": numbered(B, num_timesteps + 1, L, C),
        "sigmas": -numbered(B, num_timesteps + 1),
        "ref_prev_sample_mean": 0.5 * numbered(B, num_timesteps, L, C),
        "old_prev_sample_mean": 0.25 * numbered(B, num_timesteps, L, C),
    }
    for number, name in enumerate(
        ("all_timesteps", "advantages", "old_log_probs", "rollout_is_weights", "ref_log_prob")
    ):
        batch[name] = numbered(B, num_timesteps) + 1000 * number
    unwanted = (set(STEP_OPTIONS) - set(options)) | (set(CONDITION_OPTIONS) - set(conditions))
    batch = {name: field for name, field in batch.items() if name not in unwanted}
    if listed:
        return {name: field if field.ndim == 1 else list(field) for name, field in batch.items()}
    return batch


def stacked(field):
    return torch.stack(field) if isinstance(field, list) else field


def direct_steps(batch, num_timesteps, chunk):
    """What iterate_timesteps must yield, by plain indexing."""
    for start in range(0, num_timesteps, chunk):
        stop = min(start + chunk, num_timesteps)
        step = {name: stacked(batch[name]) for name in FLOWGRPO_FIELDS.shared if name in batch}
        for name in FLOWGRPO_FIELDS.per_step:
            if name in batch:
                extra = 1 if name in ("all_latents", "sigmas") else 0
                step[name] = stacked(batch[name])[:, start : stop + extra]
        yield step


def assert_same_step(step, expected):
    assert step.keys() == expected.keys()
    for name, tensor in step.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
