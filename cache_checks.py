"""Whether a run can train from a trajectory cache that another run or program wrote: checked before a model is loaded.

trajectory_cache.py sees that the files are whole; here their facts, samples, rewards, latents, steps and embeddings
are compared with the run. Each function raises ValueError with what is wrong, both values and what to do.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prompts import batch_samples
from rewards import LARGEST
from rollout import load_micro_batch, num_tokens, schedules
from staging import StepFields, validate_batch
from trajectory_cache import NEGATIVE_PROMPT_ID, TrajectoryCache, open_cache, read_tensors

OPTIONAL_NUMBERS = {"old_log_probs", "ref_log_prob", "rollout_is_weights"}  # of a foreign cache, fp32 like the rest
EMBEDDING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_checked_cache(
    folder: str | Path,
    facts: Mapping[str, Any],
    fields: StepFields,
    *,
    batch_size: int,
    num_updates: int,
    world_size: int,
    text_width: int,
    reads_values: bool,
) -> TrajectoryCache:
    """Open a cache and refuse it where a run cannot train from it.

    facts: what its manifest must agree with; fields: those of each micro-batch; text_width: of the transformer's
    prompt embeddings. reads_values: verify checksums and look for NaN and infinity, which reads every byte.
    """
    cache = open_cache(folder, verify_checksums=reads_values)
    check_facts(cache.facts, facts)
    check_samples(cache, unit=(num_updates, world_size, batch_size))
    check_cached_rewards(cache)
    check_trajectories(cache, facts, reads_values=reads_values)
    check_embeddings(cache, text_width, needs_negative=facts["true_cfg_scale"] > 1, reads_values=reads_values)
    row_of = {sample: row for row, sample in enumerate(cache.sample_indices)}
    for batch in range(len(row_of) // batch_size):
        rows = [row_of[sample] for sample in batch_samples(batch, batch_size)]
        validate_batch(load_micro_batch(cache, rows), fields)
    return cache


def check_facts(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a manifest that does not agree with the run's model, sizes, schedules and sampling."""
    for name, value in expected.items():
        if not same_fact(found.get(name), value):
            raise ValueError(
                f"the trajectory cache was made with {name} {found.get(name)}, this run has {value}: change the "
                "option (for sigmas --num_inference_steps or --resolution), or roll out again"
            )


def same_fact(found: Any, expected: Any) -> bool:
    """Equal, or lists of equally many numbers (or lists of them) within 1e-6: sigmas of another machine."""
    if not (isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected)):
        return found == expected
    numbers, others = ([n for x in v for n in (x if isinstance(x, list) else [x])] for v in (expected, found))
    comparable = len(numbers) == len(others) and all(isinstance(number, int | float) for number in others)
    return comparable and np.allclose(numbers, others, rtol=0, atol=1e-6)


def check_samples(cache: TrajectoryCache, *, unit: tuple[int, int, int]) -> None:
    """Refuse samples that are not numbered from 0, not in both tables, or cannot be dealt to a run's updates, ranks
    and batches, of which `unit` tells how many updates and ranks there are and how large batches are."""
    samples = sorted(cache.sample_indices)
    if cache.values is None or not {"reward", "sample_index"} <= set(cache.values.column_names):
        raise ValueError(
            "the trajectory cache has no values table with columns reward and sample_index: write one, see README"
        )
    if samples != list(range(len(samples))):
        raise ValueError(
            f"the trajectory cache's sample_index must count its {len(samples)} rows from 0 without a gap"
        )
    if cache.values.features["sample_index"].dtype != "int64" or sorted(cache.values["sample_index"][:]) != samples:
        raise ValueError("the trajectory cache's values table must hold each sample_index of the trajectories once")
    num_updates, world_size, batch_size = unit
    if len(samples) % (num_updates * world_size * batch_size):
        raise ValueError(
            f"the trajectory cache holds {len(samples)} trajectories, which cannot be dealt to {num_updates} updates "
            f"x {world_size} ranks x batches of {batch_size} = {num_updates * world_size * batch_size}: change "
            "--train_batch_size or --num_updates_per_epoch"
        )


def check_cached_rewards(cache: TrajectoryCache) -> None:
    """Refuse rewards that are no usable numbers."""
    for sample, reward in zip(cache.values["sample_index"][:], cache.values["reward"][:], strict=True):
        if not isinstance(reward, int | float) or not abs(reward) <= LARGEST:
            raise ValueError(
                f"the trajectory cache's reward of sample {sample} is {reward}: write finite numbers up to "
                f"{LARGEST:.0e}"
            )


def check_trajectories(cache: TrajectoryCache, facts: Mapping[str, Any], *, reads_values: bool) -> None:
    """Refuse a row whose latents or steps are not those of a size of the run."""
    by_tokens = {num_tokens(size): sigmas for size, sigmas in schedules(facts).items()}
    for row in range(len(cache.sample_indices)):
        tensors = read_tensors(cache.trajectories, row)
        latents = tensors.get("all_latents", tensors.get("latents_clean"))
        tokens = latents.shape[-2] if latents is not None and latents.ndim > 1 else 0
        tokens = tokens if tokens in by_tokens else next(iter(by_tokens))
        check_trajectory(tensors, row, shape=(tokens, 64), sigmas=by_tokens[tokens])
        if reads_values:
            check_all_finite(tensors, f"row {row}")


def check_trajectory(tensors: Mapping[str, Tensor], row: int, *, shape: Sequence[int], sigmas: Tensor) -> None:
    """Refuse a row whose latents are not (..., *shape) fp32, or whose steps are not consecutive ones of the run's
    schedule sigmas (N+1,)."""
    for name in tensors.keys() & {"all_latents", "latents_clean", "old_prev_sample_mean"}:
        found = tuple(tensors[name].shape[-2:])
        if found != shape or tensors[name].dtype != torch.float32:
            raise ValueError(
                f"the trajectory cache's {name} of row {row} ends in {found} {tensors[name].dtype}: this run "
                f"needs {shape} torch.float32"
            )
    if "sigmas" not in tensors:  # DiffusionNFT's trajectories are clean latents alone
        return
    for name in ("sigmas", "sigma_max", "all_timesteps", *sorted(tensors.keys() & OPTIONAL_NUMBERS)):
        if name not in tensors or tensors[name].dtype != torch.float32:
            found = tensors[name].dtype if name in tensors else "nothing"
            raise ValueError(f"the trajectory cache's {name} of row {row} must be float32, it holds {found}")
    start = int((sigmas - tensors["sigmas"][0]).abs().argmin())
    steps = sigmas[start : start + len(tensors["sigmas"])]
    expected = {"sigmas": steps, "sigma_max": sigmas[1], "all_timesteps": 1000 * steps[:-1]}
    for name, values in expected.items():
        if tensors[name].shape != values.shape or not torch.allclose(tensors[name], values, rtol=1e-5, atol=1e-6):
            raise ValueError(
                f"the trajectory cache's {name} of row {row} are {tensors[name].tolist()}, the schedule has "
                f"{values.tolist()}: all_timesteps are 1000 x sigmas[:-1], sigma_max is the second of the schedule"
            )


def check_embeddings(cache: TrajectoryCache, text_width: int, *, needs_negative: bool, reads_values: bool) -> None:
    """Refuse prompts without an embedding, and embeddings that the transformer does not read."""
    unknown = sorted(set(cache.prompt_ids) - set(cache.prompt_rows))
    if needs_negative and NEGATIVE_PROMPT_ID not in cache.prompt_rows:
        unknown.append(NEGATIVE_PROMPT_ID)
    if unknown:
        raise ValueError(
            f"the trajectory cache's prompts table lacks prompt_id {unknown[0]} ({NEGATIVE_PROMPT_ID} is the negative "
            "prompt of true CFG): write its embedding"
        )
    for prompt_id, row in cache.prompt_rows.items():
        tensors = read_tensors(cache.prompts, row)
        embedding = tensors.get("prompt_embeds", torch.empty(0))
        readable = embedding.ndim == 2 and embedding.shape[1] == text_width and len(embedding) > 0
        if not readable or embedding.dtype not in EMBEDDING_DTYPES:
            raise ValueError(
                f"the trajectory cache's prompt_embeds of prompt_id {prompt_id} are {tuple(embedding.shape)} "
                f"{embedding.dtype}: this model reads (tokens, {text_width}) of floating-point numbers"
            )
        if reads_values:
            check_all_finite(tensors, f"prompt_id {prompt_id}")


def check_all_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse a row with NaN or infinity in it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(
                f"the trajectory cache's {name} of {where} holds NaN or infinity: roll out again, its model or "
                "precision made them"
            )
