"""Prompts to trajectories with the current policy, to images, to rewards, to the cache.

The training scripts call its functions; as a script it writes a cache to train from later (--trajectory_cache):

    accelerate launch rollout.py --pretrained_model_name_or_path Qwen/Qwen-Image --prompts train.txt \
        --reward_funcs my_reward.py:score --output_dir caches/first

Shapes: B samples of a batch, N denoising steps, W trained steps (the SDE window), L image tokens, C channels.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import DistributedType
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
)
from torch import Tensor
from tqdm.auto import tqdm

from model_files import ADAPTER_FILE, check_exported_adapter, check_pipeline
from option_checks import check_numbers, check_sampling, check_sde_window, check_size, check_steps
from prompts import (
    Size,
    batch_samples,
    check_batch_arithmetic,
    epoch_samples,
    load_prompts,
    parse_size,
    prompt_sizes,
    rank_batches,
    size_name,
)
from qwen_image import (
    PIXELS_PER_TOKEN,
    SDE_TYPES,
    check_pipeline_class,
    decode_latents,
    encode_prompts,
    get_sigmas,
    load_pipeline,
    local_pipeline_folder,
    predict_sized,
    prompt_conditions,
    sde_step_with_logprob,
    seeded_noise,
    transformer_fingerprint,
)
from rewards import (
    AGGREGATIONS,
    check_reward_prompts,
    check_rewards,
    check_weights,
    combine_rewards,
)
from run_folder import make_folder, memory_of, run_script
from scorer import Scorer
from sharding import compute_dtype, make_accelerator, reduce_to_cpu
from staging import check_supported
from trajectory_cache import (
    NEGATIVE_PROMPT_ID,
    TrajectoryCache,
    read_embeddings,
    read_micro_batch,
    read_prompt_embeds,
    table_writer,
    write_manifest,
)

# The streams of random numbers that one sample draws from; each is a function of (seed, epoch, sample, stream).
INITIAL_NOISE, STEP_NOISE = 0, 1
SOLVERS = ("euler", "unipc")
WINDOW_SCHEDULES = ("random", "progressive")


def num_tokens(size: Size) -> int:
    """L of images of a size."""
    return (size[0] // PIXELS_PER_TOKEN) * (size[1] // PIXELS_PER_TOKEN)


def sizes_by_tokens(
    sizes: Sequence[Size], *, images_per_prompt: int | None = None, batch_size: int = 1
) -> dict[int, Size]:
    """A run's sizes by their number of tokens, which tells them apart. Raises ValueError where it does not, and where
    prompts of several sizes would share a batch."""
    by_tokens: dict[int, Size] = {}
    for size in sizes:
        check_size(size)
        other = by_tokens.setdefault(num_tokens(size), size)
        if other != size:
            raise ValueError(
                f"resolutions {size_name(other)} and {size_name(size)} have equally many tokens, by which a run tells "
                "its sizes apart: change a side"
            )
    if len(by_tokens) > 1 and images_per_prompt is not None and images_per_prompt % batch_size:
        raise ValueError(
            f"--train_batch_size {batch_size} with several resolutions: a batch has one size, so "
            f"--num_images_per_prompt, {images_per_prompt}, must be a multiple of it"
        )
    return dict(sorted(by_tokens.items()))


def size_facts(scheduler: FlowMatchEulerDiscreteScheduler, num_inference_steps: int, sizes: Sequence[Size]) -> dict:
    """Sizes and their sigma tables as a manifest has them: lists where there are several."""
    tables = [get_sigmas(scheduler, num_inference_steps, height=h, width=w).tolist() for h, w in sizes]
    if len(sizes) == 1:
        return {"height": sizes[0][0], "width": sizes[0][1], "sigmas": tables[0]}
    return {"sizes": [list(size) for size in sizes], "sigmas": tables}


def schedules(facts: Mapping[str, Any]) -> dict[Size, Tensor]:
    """The sigma table (N+1,) of each size of a manifest."""
    if "sizes" not in facts:
        return {(facts["height"], facts["width"]): torch.tensor(facts["sigmas"])}
    return {tuple(size): torch.tensor(s) for size, s in zip(facts["sizes"], facts["sigmas"], strict=True)}


def draw_sde_window(
    window_size: int,
    window_range: Sequence[int],
    num_inference_steps: int,
    *,
    seed: int,
    epoch: int,
    schedule: str = "random",
    epochs_per_window: int = 25,
    stride: int = 1,
) -> tuple[int, int]:
    """The trained steps [start, stop) of an epoch within [range[0], range[1]); size 0 means all steps but the last,
    which has sigma 0 at its end and is never trained.

    "random" draws the start from the seed; "progressive" begins at the range's first step, moves on by `stride` every
    `epochs_per_window` epochs and stays at the range's end (MixGRPO, arXiv 2507.21802, algorithm 1).
    """
    if window_size == 0:
        return 0, num_inference_steps - 1
    first, last = window_range[0], window_range[1] - window_size
    if schedule == "progressive":
        start = min(first + epoch // epochs_per_window * stride, last)
    else:
        start = int(np.random.default_rng((seed, 2, epoch)).integers(first, last + 1))
    return start, start + window_size


def make_solver(name: str, sigmas: Tensor) -> UniPCMultistepScheduler | None:
    """The ODE solver of one batch of samples: None for Euler, "unipc" for diffusers' second-order multistep solver."""
    if name == "euler":
        return None
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2)
    solver.set_timesteps(sigmas=sigmas[:-1].numpy().copy())
    solver.set_begin_index(0)
    return solver


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
    solver: UniPCMultistepScheduler | None = None,
) -> dict[str, Tensor]:
    """Denoise latents (B, L, C): SDE steps inside the window, the pipeline's own Euler (ODE) steps outside, or with an
    empty window those of a fresh solver.

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
        if solver is not None:
            latents = solver.step(velocity, solver.timesteps[step], latents, return_dict=False)[0]
            continue
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
    scorer: Scorer,
    rewards: Sequence[str],
    sizes: Sequence[Size],
    sigmas: Mapping[Size, Tensor],
    seed_words: tuple[int, int],
    fields: Sequence[str],
    sde_window: tuple[int, int] = (0, 0),
    sde_type: str = "sde",
    noise_level: float = 0.0,
    solver: str = "euler",
    show_progress: bool = False,
) -> Tensor:
    """Sample one rank's batches, write its trajectories and prompts tables, and return their rewards (n, R) float64,
    those of the scorer's that `rewards` names; with workers, images are scored while the next ones are sampled.

    batches lists the epoch's sample numbers of each batch; prompt_ids gives the prompt of every sample of the epoch;
    sizes that of each prompt's images, which is the same throughout a batch; sigmas the schedule of each size;
    seed_words is (seed, epoch). predict(latents, timesteps, **conditions) is the policy; `fields` are kept on disk.
    """
    device = next(vae.parameters()).device
    folder.mkdir(parents=True, exist_ok=True)  # by every rank: the folder may be on each node's own disk
    used = sorted({prompt_ids[sample] for batch in batches for sample in batch})
    with table_writer(folder / f"prompts-{shard:05d}.arrow") as write:
        if negative is not None:
            write({"prompt_id": NEGATIVE_PROMPT_ID, "prompt": "", "prompt_embeds": negative})
        for prompt_id in used:
            row = {"prompt_id": prompt_id, "prompt": prompts[prompt_id]["prompt"]}
            write(row | {"prompt_embeds": embeddings[prompt_id]})

    with table_writer(folder / f"trajectories-{shard:05d}.arrow") as write:
        for batch in tqdm(batches, desc="rollout", leave=False, disable=not show_progress):
            ids = [prompt_ids[sample] for sample in batch]
            ((height, width),) = {sizes[prompt_id] for prompt_id in ids}
            trajectories = sample_batch(
                predict,
                conditions=prompt_conditions([embeddings[prompt_id] for prompt_id in ids], negative),
                samples=batch,
                device=device,
                sigmas=sigmas[height, width],
                height=height,
                width=width,
                sde_window=sde_window,
                sde_type=sde_type,
                noise_level=noise_level,
                seed_words=seed_words,
                keep_prev_sample_mean="old_prev_sample_mean" in fields,
                solver=solver,
            )
            images = decode_latents(vae, trajectories["latents_clean"].to(device), height=height, width=width).cpu()
            texts = [prompts[prompt_id]["prompt"] for prompt_id in ids]
            scorer.submit(rewards, images, texts, [dict(prompts[i]) for i in ids], batch)
            for row, (sample, prompt_id) in enumerate(zip(batch, ids, strict=True)):
                plain = {"sample_index": sample, "prompt_id": prompt_id}
                write(plain | {name: trajectories[name][row] for name in fields})
    return torch.tensor(list(scorer.results().values()), dtype=torch.float64).T


def write_values(
    folder: Path,
    shard: int,
    samples: Sequence[int],
    prompt_ids: Sequence[int],
    table: Tensor,
    names: Sequence[str],
    rewards: Tensor,
    advantages: Tensor,
) -> None:
    """The shard's third table, for this rank's samples: each reward, their weighted sum and the advantage.

    table (N, R) float64 holds the R rewards of all samples, prompt_ids, rewards and advantages (N,).
    """
    with table_writer(folder / f"values-{shard:05d}.arrow") as write:
        for sample in samples:
            row = {"sample_index": sample, "prompt_id": prompt_ids[sample], "reward": rewards[sample].item()}
            row |= {f"reward_{name}": value for name, value in zip(names, table[sample].tolist(), strict=True)}
            write(row | {"advantage": advantages[sample].item()})


class Sampling(NamedTuple):
    """What a policy is sampled with besides itself; without a VAE when it trains from a cache."""

    vae: torch.nn.Module | None
    scheduler: FlowMatchEulerDiscreteScheduler
    embeddings: dict[int, Tensor]  # (S, D) by prompt id, of the prompts this rank samples
    eval_embeddings: dict[int, Tensor]
    negative: Tensor | None


def longest_prompt(sampling: Sampling, cache: TrajectoryCache | None) -> int:
    """Text tokens of the longest prompt that this process has still to sample, or of a cache's first row."""
    if cache is None:
        return max((len(embedding) for embedding in sampling.embeddings.values()), default=0)
    return load_micro_batch(cache, [0])["prompt_embeds"].shape[1]


@memory_of("encoding of prompts")
def load_models(
    model_folder: Path,
    *,
    dtype: torch.dtype,
    encode_dtype: torch.dtype,
    output_dir: Path,
    rank: int,
    device: torch.device,
    texts: Mapping[int, str],
    eval_texts: Mapping[int, str],
    negative_prompt: str | None,
    max_sequence_length: int,
    lora: str | None = None,
) -> tuple[QwenImageTransformer2DModel, Sampling]:
    """Load the pipeline, encode each prompt once into this rank's tables, and drop the text encoder.

    Without texts neither text encoder nor VAE is loaded. lora: folder of an adapter that the transformer gets.
    """
    leave_out = () if texts else ("text_encoder", "tokenizer", "vae")
    pipeline = load_pipeline(model_folder, dtype=dtype, leave_out=leave_out)
    embeddings, eval_embeddings = {}, {}
    if texts:
        pipeline.text_encoder.to(device=device, dtype=encode_dtype)
        if negative_prompt is not None:
            texts = {**texts, NEGATIVE_PROMPT_ID: negative_prompt}
        encode = partial(
            encode_prompt_table, pipeline=pipeline, device=device, max_sequence_length=max_sequence_length
        )
        embeddings = encode(output_dir / f"prompt_embeds-{rank:05d}.arrow", texts=texts)
        if eval_texts:
            eval_embeddings = encode(output_dir / f"eval_prompt_embeds-{rank:05d}.arrow", texts=eval_texts)
        pipeline.text_encoder = None
    if lora is not None:
        options = {"prefix": "transformer", "weight_name": ADAPTER_FILE, "use_safetensors": True}
        pipeline.transformer.load_lora_adapter(lora, **options)
    negative = embeddings.pop(NEGATIVE_PROMPT_ID, None)
    return pipeline.transformer, Sampling(pipeline.vae, pipeline.scheduler, embeddings, eval_embeddings, negative)


def encode_prompt_table(
    path: Path,
    pipeline: QwenImagePipeline,
    texts: Mapping[int, str],
    *,
    device: torch.device,
    max_sequence_length: int,
) -> dict[int, Tensor]:
    """Encode prompts once into a memory-mapped table; returns read-only views (S, D) by prompt id."""
    with table_writer(path) as write:
        for prompt_id, text in tqdm(texts.items(), desc="encode prompts", disable=None, leave=False):
            (embedding,) = encode_prompts(pipeline, [text], device=device, max_sequence_length=max_sequence_length)
            write({"prompt_id": prompt_id, "prompt_embeds": embedding})
    return read_embeddings(path)


def load_micro_batch(cache: TrajectoryCache, rows: Sequence[int]) -> dict[str, Any]:
    """Rows of a cache for an update: views of their trajectories and the conditions, padded as in the rollout."""
    embeddings = [read_prompt_embeds(cache, cache.prompt_ids[row]) for row in rows]
    negative = read_prompt_embeds(cache, NEGATIVE_PROMPT_ID) if NEGATIVE_PROMPT_ID in cache.prompt_rows else None
    return read_micro_batch(cache, rows) | prompt_conditions(embeddings, negative)


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
    solver: str = "euler",
) -> dict[str, Tensor]:
    """Trajectories of one batch whose noise depends on (seed, epoch, sample) alone; the default is plain ODE."""
    shape = num_tokens((height, width)), 64
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
        solver=make_solver(solver, sigmas),
    )


# ----- A script of its own -----------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the training scripts that a rollout needs, with the same meaning and defaults."""
    description = "Write a trajectory cache: one epoch of rollouts with their rewards."
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument_group("model").add_argument
    add("--pretrained_model_name_or_path", required=True, help="hub name or folder of a QwenImagePipeline")
    add("--revision", help="branch, tag or commit of the hub model")
    add("--lora", help="folder of an adapter to sample with, such as a run folder; none: the model itself")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", required=True, help=".txt, .jsonl, or a name or folder for `datasets`")
    add("--prompt_column", default="prompt", help="column or key that holds the prompt")
    add("--negative_prompt", default=" ", help="negative prompt of true CFG")
    add("--max_sequence_length", type=int, default=512, help="longest prompt in tokens")

    add = parser.add_argument_group("rollout").add_argument
    add(
        "--resolution", type=parse_size, nargs="+", default=[(512, 512)], help="512, or WIDTHxHEIGHT; several by turns"
    )
    add("--resolution_column", help="column or key that holds a prompt's own resolution")
    add("--num_inference_steps", type=int, default=10, help="denoising steps of the rollout")
    add("--true_cfg_scale", type=float, default=4.0, help="true CFG in rollout and update; 1 switches it off")
    add("--cfg_batched", action=flag, default=True, help="both CFG predictions in one forward of twice the batch")
    add("--num_prompts_per_epoch", type=int, default=32, help="prompts per epoch, over all processes")
    add("--num_images_per_prompt", type=int, default=16, help="images of a prompt, the group of its advantages")
    add("--sde_type", choices=SDE_TYPES, default="sde", help="how noise enters: Flow-SDE, CPS or DanceGRPO's")
    add("--noise_level", type=float, default=1.2, help="eta, the strength of the injected noise")
    add("--sde_window_size", type=int, default=2, help="steps with noise, the trained ones; 0: all but the last")
    add("--sde_window_range", type=int, nargs=2, default=(0, 5), help="the window lies within [a, b)")
    add("--sde_window_schedule", choices=WINDOW_SCHEDULES, default="random", help="drawn anew, or moving on")
    add("--sde_window_epochs", type=int, default=25, help="progressive: epochs until the window moves on")
    add("--sde_window_stride", type=int, default=1, help="progressive: steps that it moves, up to the range's end")
    add("--train_batch_size", type=int, default=4, help="samples of one forward per device, in rollout and update")
    add("--epoch", type=int, default=0, help="which epoch of a training run to sample: its prompts, noise and window")
    add("--seed", type=int, default=0, help="of weights, prompts, noise and order")

    add = parser.add_argument_group("reward and output").add_argument
    add(
        "--reward_funcs",
        nargs="+",
        required=True,
        help="names, with their option as name:option, or module.py:function",
    )
    add("--reward_weights", nargs="+", type=float, help="one weight for each reward; default 1 each")
    add(
        "--reward_aggregation",
        choices=AGGREGATIONS,
        default="sum",
        help="normalise the sum, or each reward first (GDPO)",
    )
    add("--reward_workers", type=int, default=0, help="processes that score while the next batch is sampled; 0: none")
    add("--reward_timeout", type=float, default=600.0, help="seconds that a worker may take for a batch")
    add("--global_std", action=flag, default=True, help="divide by the std of the whole epoch, not of each group")
    add("--keep_prev_sample_mean", action="store_true", help="keep what grpo_guard and flow_dppo compare with")
    add("--output_dir", required=True, help="the cache's folder; it must not exist")
    return parser.parse_args(argv)


def find_whole_pipeline(name_or_path: str, *, revision: str | None, lora: str | None) -> Path:
    """A pipeline's folder, downloaded if it is not there yet; all its parts and an adapter's folder are checked."""
    subfolders = ("scheduler", "transformer", "text_encoder", "tokenizer", "vae")
    folder = local_pipeline_folder(name_or_path, revision=revision, subfolders=subfolders)
    check_pipeline(folder, subfolders)
    if lora is not None:
        check_exported_adapter(folder, Path(lora))
    return folder


class Inputs(NamedTuple):
    """All that a rollout starts from but models, checked."""

    model_folder: Path
    prompts: list[dict[str, Any]]
    rewards: dict[str, str]  # names by label
    sizes: list[Size]  # of each prompt's images
    run_sizes: dict[int, Size]  # by their number of tokens
    batches_per_update: int


def check_rollout(args: argparse.Namespace, world_size: int) -> Inputs:
    """Refuse what options, prompts, rewards and the model's files show to be wrong, before any model is loaded."""
    check_supported(os.environ)
    above_zero = ("num_prompts_per_epoch", "num_images_per_prompt", "train_batch_size", "max_sequence_length")
    check_numbers(vars(args), above_zero=(*above_zero, "reward_timeout"), not_negative=("epoch", "reward_workers"))
    check_weights(args.reward_funcs, args.reward_weights)
    check_sampling(vars(args))
    check_steps(args.num_inference_steps)
    check_sde_window(
        args.sde_window_size, args.sde_window_range, args.num_inference_steps, args.noise_level,
        schedule=args.sde_window_schedule, epochs_per_window=args.sde_window_epochs, stride=args.sde_window_stride,
    )  # fmt: skip
    batches_per_update = check_batch_arithmetic(
        num_prompts=args.num_prompts_per_epoch,
        images_per_prompt=args.num_images_per_prompt,
        batch_size=args.train_batch_size,
        world_size=world_size,
        num_updates=1,
    )
    check_pipeline_class(args.pretrained_model_name_or_path, revision=args.revision)
    if any(Path(args.output_dir).glob("manifest-*.json")):
        raise ValueError(f"--output_dir {args.output_dir} holds a cache already: name another folder, or delete it")
    prompts = load_prompts(args.prompts, column=args.prompt_column)
    rewards = check_rewards(args.reward_funcs)
    check_reward_prompts(args.reward_funcs, prompts, "--prompts")
    sizes = prompt_sizes(prompts, args.resolution, args.resolution_column, epoch=args.epoch)
    run_sizes = sizes_by_tokens(
        list(dict.fromkeys(sizes if args.resolution_column else args.resolution)),
        images_per_prompt=args.num_images_per_prompt,
        batch_size=args.train_batch_size,
    )
    model_folder = find_whole_pipeline(args.pretrained_model_name_or_path, revision=args.revision, lora=args.lora)
    return Inputs(model_folder, prompts, rewards, sizes, run_sizes, batches_per_update)


def main(args: argparse.Namespace) -> None:
    """Sample one epoch's prompts and write the cache; ranks share the batches."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model_folder, prompts, rewards, sizes, run_sizes, batches_per_update = check_rollout(args, world_size)
    folder = Path(args.output_dir)
    reward_weights = torch.tensor(args.reward_weights or [1.0] * len(rewards), dtype=torch.float64)
    accelerator = make_accelerator()
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("rollout.py keeps the model whole on each GPU: launch with accelerate_configs/ddp.yaml")
    rank, device, dtype = accelerator.process_index, accelerator.device, compute_dtype(accelerator)
    own_batches = rank_batches(1, batches_per_update, rank=rank, world_size=world_size)
    batches = [batch_samples(batch, args.train_batch_size) for batch in own_batches]
    own_samples = [sample for batch in batches for sample in batch]
    counts = len(prompts), args.num_prompts_per_epoch, args.num_images_per_prompt
    prompt_ids = epoch_samples(*counts, seed=args.seed, epoch=args.epoch)
    window = draw_sde_window(
        args.sde_window_size, args.sde_window_range, args.num_inference_steps, seed=args.seed, epoch=args.epoch,
        schedule=args.sde_window_schedule, epochs_per_window=args.sde_window_epochs, stride=args.sde_window_stride,
    )  # fmt: skip
    make_folder(folder)
    scorer = Scorer(rewards, num_workers=args.reward_workers, timeout=args.reward_timeout)
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
        transformer, sampling = load_models(
            model_folder,
            dtype=dtype,
            encode_dtype=dtype,
            output_dir=Path(scratch),
            rank=rank,
            device=device,
            texts={prompt_ids[sample]: prompts[prompt_ids[sample]]["prompt"] for sample in own_samples},
            eval_texts={},
            negative_prompt=args.negative_prompt if args.true_cfg_scale > 1 else None,
            max_sequence_length=args.max_sequence_length,
            lora=args.lora,
        )
        facts = size_facts(sampling.scheduler, args.num_inference_steps, list(run_sizes.values()))
        predict = partial(
            predict_sized,
            accelerator.prepare_model(transformer, evaluation_mode=True),
            true_cfg_scale=args.true_cfg_scale,
            cfg_batched=args.cfg_batched,
            dtype=dtype,
            sizes=run_sizes,
        )
        fields = ["all_latents", "sigmas", "sigma_max", "all_timesteps", "old_log_probs", "latents_clean"]
        sampling.vae.to(device)
        scorer.to(device, list(rewards))
        scores = write_rollout(
            predict,
            folder=folder,
            shard=rank,
            batches=batches,
            prompt_ids=prompt_ids,
            prompts=prompts,
            embeddings=sampling.embeddings,
            negative=sampling.negative,
            vae=sampling.vae,
            scorer=scorer,
            rewards=list(rewards),
            sizes=sizes,
            sigmas=schedules(facts),
            sde_window=window,
            sde_type=args.sde_type,
            noise_level=args.noise_level,
            seed_words=(args.seed, args.epoch),
            fields=[*fields, "old_prev_sample_mean"] if args.keep_prev_sample_mean else fields,
            show_progress=accelerator.is_local_main_process,
        )
    scorer.close()
    table = torch.zeros(len(prompt_ids), len(rewards), dtype=torch.float64)
    table[own_samples] = scores
    table = reduce_to_cpu(accelerator, table)
    how = {"aggregation": args.reward_aggregation, "global_std": args.global_std}
    totals, advantages = combine_rewards(table, reward_weights, torch.tensor(prompt_ids), **how)
    write_values(folder, rank, own_samples, prompt_ids, table, list(rewards), totals, advantages)
    facts |= {
        "num_shards": world_size, "epoch": args.epoch, "seed": args.seed, "sde_window": window,
        "model": transformer_fingerprint(model_folder), "sde_type": args.sde_type,
        "noise_level": args.noise_level, "true_cfg_scale": args.true_cfg_scale,
    }  # fmt: skip
    write_manifest(folder, rank, facts)
    accelerator.wait_for_everyone()
    accelerator.print(f"{len(prompt_ids)} trajectories are in {folder}, mean reward {totals.mean():.4g}")
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(parse_args())))
