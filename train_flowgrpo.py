"""FlowGRPO for Qwen-Image (arXiv 2505.05470): policy gradient through the denoising steps of a flow-matching model.

Every epoch: (1) sample a group of images for each prompt, with noise injected in a window of denoising steps, and keep
those steps' latents and log-probs; (2) reward the images, advantage = reward against its group; (3) go through the
trajectories once or more, one timestep at a time, with PPO's clipped ratio of new to old log-prob; (4) log, evaluate.

    accelerate launch train_flowgrpo.py --enable_timestep_staging
    accelerate launch --config_file accelerate_configs/ddp.yaml train_flowgrpo.py --enable_timestep_staging \
        --pretrained_model_name_or_path Qwen/Qwen-Image --prompts train.txt --reward_funcs my_reward.py:score

How it differs from the official code: trajectories live in a memory-mapped cache on the CPU and only the current
timestep is on the device; the window's start is drawn anew each epoch; rollout and update share batches, order and
padding, so the first ratio is exactly 1; noise depends on (seed, epoch, sample), not on the number of GPUs.

Shapes: B samples of a micro-batch, W trained steps of a trajectory (the SDE window), K timesteps of one forward,
L image tokens, C latent channels, S text tokens, D embedding width.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from diffusers import QwenImagePipeline
from diffusers.optimization import SchedulerType, get_scheduler
from diffusers.utils import make_image_grid
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from prompts import check_batch_arithmetic, epoch_prompt_ids, load_prompts, rank_batches, update_plan
from qwen_image import (
    LORA_TARGETS,
    PIXELS_PER_TOKEN,
    SDE_TYPES,
    adapter_state_dict,
    add_lora,
    check_lora_targets,
    check_pipeline_class,
    decode_latents,
    encode_prompts,
    export_lora,
    get_sigmas,
    load_pipeline,
    predict_velocity,
    prompt_conditions,
    sde_step_with_logprob,
    tiny_pipeline,
)
from rewards import constant_groups, group_advantages, load_reward, score_images, to_pil
from rollout import draw_sde_window, sample_batch, write_rollout
from staging import CONDITIONS, FLOWGRPO_FIELDS, check_supported, iterate_timesteps, step_input_bytes, validate_batch
from trajectory_cache import (
    NEGATIVE_PROMPT_ID,
    TrajectoryCache,
    open_cache,
    read_embeddings,
    read_micro_batch,
    read_prompt_embeds,
    table_writer,
    write_manifest,
)

HERE = Path(__file__).resolve().parent
ROLLOUT_FIELDS = ("all_latents", "sigmas", "sigma_max", "all_timesteps", "old_log_probs")

# What differs for the demo model, which is 60,000 times smaller than Qwen-Image and is sampled at 64 px.
DEMO_DEFAULTS = {
    "resolution": 64,
    "learning_rate": 3e-3,
    "clip_range": 1e-3,
    "num_train_epochs": 40,
    "num_prompts_per_epoch": 8,
    "num_images_per_prompt": 8,
    "train_batch_size": 16,
    "rank": 16,
    "lora_alpha": 32,
    "eval_num_inference_steps": 10,
    "eval_epochs": 20,
}


# ----- Options -----------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The defaults are flow_grpo's recipe for Qwen-Image; without a model's name, DEMO_DEFAULTS come on top."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flag = argparse.BooleanOptionalAction

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--pretrained_model_name_or_path", help="hub name or folder of a QwenImagePipeline; none: the demo model")
    add("--revision", help="branch, tag or commit of the hub model")
    add("--rank", type=int, default=64, help="rank of the LoRA matrices")
    add("--lora_alpha", type=int, default=128, help="the adapter is scaled by lora_alpha / rank")
    add("--lora_target_modules", nargs="+", default=list(LORA_TARGETS), help="names of the linear layers that get one")
    add(
        "--gradient_checkpointing", action=flag, default=True, help="recompute the blocks' activations in the backward"
    )

    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", default=str(HERE / "assets/prompts.txt"), help=".txt, .jsonl, or a name or folder for `datasets`")
    add("--prompt_column", default="prompt", help="column or key that holds the prompt")
    add("--negative_prompt", default=" ", help="negative prompt of true CFG")
    add("--max_sequence_length", type=int, default=512, help="longest prompt in tokens")

    add = parser.add_argument_group("rollout").add_argument
    add("--resolution", type=int, default=512, help="height and width of the images in pixels")
    add("--num_inference_steps", type=int, default=10, help="denoising steps of the rollout")
    add("--true_cfg_scale", type=float, default=4.0, help="true CFG in rollout and update; 1 switches it off")
    add("--cfg_batched", action=flag, default=True, help="both CFG predictions in one forward of twice the batch")
    add("--num_prompts_per_epoch", type=int, default=32, help="prompts per epoch, over all processes")
    add("--num_images_per_prompt", type=int, default=16, help="images of a prompt, the group of its advantages")
    add("--sde_type", choices=SDE_TYPES, default="sde", help="how noise enters: Flow-SDE, CPS or DanceGRPO's")
    add("--noise_level", type=float, default=1.2, help="eta, the strength of the injected noise")
    add(
        "--sde_window_size",
        type=int,
        default=2,
        help="steps with noise, which are the trained ones; 0: all but the last",
    )
    add("--sde_window_range", type=int, nargs=2, default=(0, 5), help="the window is drawn within these steps [a, b)")

    add = parser.add_argument_group("reward").add_argument
    add(
        "--reward_funcs", nargs="+", default=["jpeg_compressibility"], help="names in rewards.py or module.py:function"
    )
    add("--reward_weights", nargs="+", type=float, help="one weight for each reward; default 1 each")
    add("--global_std", action=flag, default=True, help="divide by the std of the whole epoch, not of each group")

    add = parser.add_argument_group("algorithm").add_argument
    add("--clip_range", type=float, default=1e-4, help="ratios are clipped to 1 +- this; log-probs are means, so tiny")
    add("--adv_clip_max", type=float, default=5.0, help="advantages are clipped to +- this")
    add(
        "--num_updates_per_epoch", type=int, default=2, help="optimizer steps that one pass over a rollout is cut into"
    )
    add("--num_inner_epochs", type=int, default=1, help="passes over a rollout")

    add = parser.add_argument_group("optimization").add_argument
    add("--train_batch_size", type=int, default=4, help="samples of one forward per device, in rollout and update")
    add("--num_train_epochs", type=int, default=300, help="epochs: one rollout and its updates")
    add("--learning_rate", type=float, default=3e-4, help="AdamW's")
    add("--lr_scheduler", choices=[s.value for s in SchedulerType], default="constant", help="diffusers' schedules")
    add("--lr_warmup_steps", type=int, default=0, help="optimizer steps of warm-up")
    add("--adam_beta1", type=float, default=0.9, help="AdamW's first decay")
    add("--adam_beta2", type=float, default=0.999, help="AdamW's second decay")
    add("--adam_weight_decay", type=float, default=1e-4, help="AdamW's weight decay")
    add("--adam_epsilon", type=float, default=1e-8, help="AdamW's epsilon")
    add("--max_grad_norm", type=float, default=1.0, help="gradients are scaled down to this norm")

    add = parser.add_argument_group("staging").add_argument
    add("--enable_timestep_staging", action="store_true", help="only the current timestep's inputs on the device")
    add(
        "--staging_prefetch", type=int, default=0, help="steps copied ahead through pinned buffers; no change on a CPU"
    )
    add("--timesteps_per_forward", type=int, default=1, help="consecutive timesteps that run as one batch")
    add("--return_model_output", action="store_true", help="keep every timestep's outputs and write them to outputs/")

    add = parser.add_argument_group("evaluation and output").add_argument
    add(
        "--eval_prompts", default=str(HERE / "assets/eval_prompts.txt"), help="prompts of the evaluation, as --prompts"
    )
    add("--eval_epochs", type=int, default=10, help="evaluate every so many epochs, before the first too; 0: never")
    add("--eval_num_inference_steps", type=int, default=50, help="ODE steps of the evaluation")
    add("--keep_trajectories", type=int, default=1, help="epochs whose trajectory caches stay on disk")
    add("--output_dir", default="runs/flowgrpo", help="run folder: adapter, metrics.jsonl, grids, caches, code")
    add("--seed", type=int, default=0, help="of weights, prompts, noise and order")

    if parser.parse_known_args(argv)[0].pretrained_model_name_or_path is None:
        parser.set_defaults(**DEMO_DEFAULTS)
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace, *, world_size: int) -> None:
    """Refuse what the options alone show to be wrong. Raises ValueError: what is wrong, the values, what to do."""
    positive = (
        "rank", "lora_alpha", "max_sequence_length", "resolution", "num_prompts_per_epoch", "num_images_per_prompt",
        "clip_range", "adv_clip_max", "num_updates_per_epoch", "num_inner_epochs", "train_batch_size",
        "num_train_epochs", "learning_rate", "max_grad_norm", "timesteps_per_forward",
        "eval_num_inference_steps", "keep_trajectories",
    )  # fmt: skip
    for name in positive:
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be above 0")
    for name in ("seed", "staging_prefetch", "sde_window_size", "eval_epochs", "lr_warmup_steps"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must not be negative")
    if args.resolution % PIXELS_PER_TOKEN:
        nearest = max(1, round(args.resolution / PIXELS_PER_TOKEN)) * PIXELS_PER_TOKEN
        raise ValueError(
            f"--resolution {args.resolution} is no multiple of {PIXELS_PER_TOKEN}: the nearest is {nearest}"
        )
    if args.num_inference_steps < 2:
        raise ValueError(
            f"--num_inference_steps {args.num_inference_steps}: the last step is never trained, give at least 2"
        )
    if args.noise_level <= 0:
        raise ValueError(
            f"--noise_level {args.noise_level}: without noise a step has no log-prob to train, give above 0"
        )
    first, stop = args.sde_window_range
    if args.sde_window_size and not 0 <= first <= stop - args.sde_window_size:
        raise ValueError(
            f"--sde_window_size {args.sde_window_size} does not fit --sde_window_range {first} {stop}: widen it"
        )
    if args.sde_window_size and stop > args.num_inference_steps - 1:
        raise ValueError(
            f"--sde_window_range {first} {stop} reaches the last of {args.num_inference_steps} steps, which cannot be "
            f"trained: end it at {args.num_inference_steps - 1}"
        )
    weights = args.reward_weights or [1.0] * len(args.reward_funcs)
    if len(weights) != len(args.reward_funcs):
        raise ValueError(
            f"--reward_weights has {len(weights)} values for {len(args.reward_funcs)} --reward_funcs: give one each"
        )
    if args.max_sequence_length > 1024:
        raise ValueError(f"--max_sequence_length {args.max_sequence_length}: Qwen-Image reads at most 1024")
    check_batch_arithmetic(
        num_prompts=args.num_prompts_per_epoch,
        images_per_prompt=args.num_images_per_prompt,
        batch_size=args.train_batch_size,
        world_size=world_size,
        num_updates=args.num_updates_per_epoch,
    )


# ----- The loss ----------------------------------------------------------------------------------------------------


def clipped_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_range: float, adv_clip_max: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss per sample and the ratio, both of the inputs' shape (B, K) (FlowGRPO eq. 4 and 5)."""
    advantages = advantages.clamp(-adv_clip_max, adv_clip_max)
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio


# ----- One update --------------------------------------------------------------------------------------------------


def forward_timesteps(
    args: argparse.Namespace, predict: Callable[..., Tensor], step: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs at the K timesteps of a step: log_probs, std_dev_t, sqrt_dt (B, K), prev_sample_mean (B, K, L, C)."""
    latents = step["all_latents"]  # (B, K+1, L, C) fp32
    num_timesteps = latents.shape[1] - 1
    conditions = {name: step[name] for name in CONDITIONS if name in step}
    if num_timesteps > 1:
        conditions = {name: tensor.repeat_interleave(num_timesteps, dim=0) for name, tensor in conditions.items()}
    x_t, x_next = (pair.flatten(0, 1) for pair in (latents[:, :-1], latents[:, 1:]))  # (B*K, L, C)
    velocity = predict(x_t, step["all_timesteps"].flatten(), **conditions)
    _, log_probs, mean, std_dev_t, sqrt_dt = sde_step_with_logprob(
        velocity,
        x_t,
        step["sigmas"][:, :-1].flatten(),
        step["sigmas"][:, 1:].flatten(),
        sigma_max=step["sigma_max"].repeat_interleave(num_timesteps),
        noise_level=args.noise_level,
        sde_type=args.sde_type,
        prev_sample=x_next,
    )
    outputs = {"log_probs": log_probs, "prev_sample_mean": mean, "std_dev_t": std_dev_t, "sqrt_dt": sqrt_dt}
    return {name: tensor.unflatten(0, (-1, num_timesteps)) for name, tensor in outputs.items()}


@torch.no_grad()
def forward_only(
    args: argparse.Namespace, predict: Callable[..., Tensor], batch: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """All outputs (B, W, ...) of one micro-batch, on the CPU: for old log-probs and reference means; never staged."""
    with closing(iterate_timesteps(batch, FLOWGRPO_FIELDS, device, staged=False)) as steps:
        outputs = [forward_timesteps(args, predict, step) for step in steps]
    return {name: torch.cat([output[name] for output in outputs], dim=1).cpu() for name in outputs[0]}


def train_timesteps(
    args: argparse.Namespace,
    accelerator: Accelerator,
    predict: Callable[..., Tensor],
    step: Mapping[str, Tensor],
    weight: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward, loss and backward of one step; returns detached numbers for the metrics and the detached outputs.

    A function of its own, so that nothing of a step is alive when the next one is staged.
    """
    outputs = forward_timesteps(args, predict, step)
    losses, ratio = clipped_loss(
        outputs["log_probs"],
        step["old_log_probs"],
        step["advantages"],
        clip_range=args.clip_range,
        adv_clip_max=args.adv_clip_max,
    )
    if "rollout_is_weights" in step:
        losses = losses * step["rollout_is_weights"]
    loss = losses.mean()
    accelerator.backward(loss * weight)
    records = {"policy_loss": losses, "ratio": ratio, "log_ratio": outputs["log_probs"] - step["old_log_probs"]}
    return (
        {name: tensor.detach() for name, tensor in records.items()},
        {name: tensor.detach() for name, tensor in outputs.items()} if args.return_model_output else {},
    )


def train_batch(
    args: argparse.Namespace,
    accelerator: Accelerator,
    transformer: nn.Module,
    predict: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    trainable: Sequence[nn.Parameter],
    micro_batches: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """One optimizer step over this rank's micro-batches. Returns metrics over all ranks and, with
    --return_model_output, the outputs (B, W, ...) of every micro-batch on the device."""
    lengths = [validate_batch(batch, FLOWGRPO_FIELDS) for batch in micro_batches]  # all, before the first forward
    records, kept = [], []
    try:
        for number, (batch, length) in enumerate(zip(micro_batches, lengths, strict=True)):
            outputs = []
            steps = iterate_timesteps(
                batch,
                FLOWGRPO_FIELDS,
                accelerator.device,
                staged=args.enable_timestep_staging,
                chunk=args.timesteps_per_forward,
                prefetch=args.staging_prefetch,
            )
            with closing(steps):
                done = 0
                for step in steps:
                    num_timesteps = step["all_timesteps"].shape[1]
                    done += num_timesteps
                    last = number == len(micro_batches) - 1 and done == length
                    weight = num_timesteps / (len(micro_batches) * length)
                    with nullcontext() if last else accelerator.no_sync(transformer):
                        record, output = train_timesteps(args, accelerator, predict, step, weight)
                    records.append(record)
                    outputs.append(output)
            if args.return_model_output:
                kept.append({name: torch.cat([output[name] for output in outputs], dim=1) for name in outputs[0]})
        if adapters_are_replicated(accelerator):
            average_gradients(accelerator, trainable)
        grad_norm = accelerator.clip_grad_norm_(trainable, args.max_grad_norm)
        metrics = update_metrics(args, accelerator, records, grad_norm)
        optimizer.step()
    finally:  # also after an error: the next update starts from clean gradients
        optimizer.zero_grad()
    return metrics, kept


def update_metrics(
    args: argparse.Namespace, accelerator: Accelerator, records: Sequence[Mapping[str, Tensor]], grad_norm: Tensor
) -> dict[str, float]:
    """Means over all samples, timesteps and ranks; the one place of an update where the host waits for the device."""
    losses, ratio, log_ratio = (
        torch.cat([record[name].flatten() for record in records]) for name in ("policy_loss", "ratio", "log_ratio")
    )
    deviation = ratio.double() - 1  # the ratio is within 1e-3 of 1, where fp32 squares lose its spread
    above, below = ratio > 1 + args.clip_range, ratio < 1 - args.clip_range
    means = {
        "policy_loss": losses.mean(),
        "ratio_mean": deviation.mean(),
        "ratio_square": (deviation**2).mean(),
        "approx_kl": 0.5 * (log_ratio**2).mean(),
        "clipfrac": (above | below).float().mean(),
        "clipfrac_gt_one": above.float().mean(),
        "clipfrac_lt_one": below.float().mean(),
    }
    values = accelerator.reduce(torch.stack([mean.double() for mean in means.values()]), "mean").tolist()
    metrics = dict(zip(means, values, strict=True))
    metrics["ratio_std"] = max(0.0, metrics.pop("ratio_square") - metrics["ratio_mean"] ** 2) ** 0.5
    metrics["ratio_mean"] += 1
    metrics["ratio_max_dev"] = accelerator.gather(deviation.abs().max()).max().item()
    metrics["grad_norm"] = (grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm).item()
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RuntimeError(
                f"{name} is {value}: the update is not applied; lower --learning_rate or look at the rewards"
            )
    return metrics


EVAL_EPOCH = 2**32 - 1  # the evaluation's own stream of random numbers, far from any training epoch


# ----- Evaluation and export ---------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    args: argparse.Namespace,
    accelerator: Accelerator,
    predict: Callable[..., Tensor],
    vae: nn.Module,
    sigmas: Tensor,
    prompts: Sequence[Mapping[str, Any]],
    embeddings: Mapping[int, Tensor],
    negative: Tensor | None,
    rewards: Mapping[str, Callable],
    grid_path: Path,
) -> dict[str, float]:
    """ODE images of the fixed prompts from fixed seeds: mean rewards over all, and a grid of the first 16."""
    size, world_size = args.train_batch_size, accelerator.num_processes
    num_images, num_rounds = len(prompts), math.ceil(len(prompts) / (size * world_size))
    scores = torch.zeros(num_images, len(rewards), dtype=torch.float64)
    grid = torch.zeros(min(16, num_images), 3, args.resolution, args.resolution, dtype=torch.uint8)
    for number in range(num_rounds):  # every rank makes the same number of rounds; past the end they are dropped
        first = (number * world_size + accelerator.process_index) * size
        samples = [sample % num_images for sample in range(first, first + size)]
        trajectories = sample_batch(
            predict,
            conditions=prompt_conditions([embeddings[sample] for sample in samples], negative),
            samples=samples,
            device=accelerator.device,
            sigmas=sigmas,
            height=args.resolution,
            width=args.resolution,
            seed_words=(args.seed, EVAL_EPOCH),
        )
        latents = trajectories["latents_clean"].to(accelerator.device)
        images = decode_latents(vae, latents, height=args.resolution, width=args.resolution).cpu()
        samples = samples[: max(0, num_images - first)]
        if not samples:
            continue
        rows = [dict(prompts[sample]) for sample in samples]
        values = score_images(rewards, images[: len(samples)], [row["prompt"] for row in rows], rows, samples)
        for row, sample in enumerate(samples):
            scores[sample] = torch.tensor([values[name][row] for name in rewards])
            if sample < len(grid):
                grid[sample] = (images[row] * 255).round().byte()
    scores = accelerator.reduce(scores.to(accelerator.device), "sum").cpu()
    grid = accelerator.reduce(grid.to(accelerator.device), "sum").cpu()
    if accelerator.is_main_process:
        columns = math.ceil(len(grid) ** 0.5)
        pictures = [to_pil(image / 255) for image in grid]
        pictures += [to_pil(torch.ones_like(grid[0] / 255))] * (-len(pictures) % columns)
        grid_path.parent.mkdir(exist_ok=True)
        make_image_grid(pictures, rows=len(pictures) // columns, cols=columns).save(grid_path)
    return {f"eval/{name}": value for name, value in zip(rewards, scores.mean(dim=0).tolist(), strict=True)}


def gather_adapter(transformer: nn.Module, adapter_name: str = "default") -> dict[str, Tensor]:
    """The whole adapter on the CPU of every rank; all ranks must call it, since a sharded tensor is gathered."""
    state_dict = adapter_state_dict(transformer.named_parameters(), adapter_name)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in state_dict.items()
    }


# ----- The run's files ---------------------------------------------------------------------------------------------


def start_run_folder(args: argparse.Namespace) -> None:
    """Write args.json with the git commit and a copy of the scripts that run."""
    output_dir = Path(args.output_dir)
    (output_dir / "code").mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "-C", HERE, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"git_commit": commit.stdout.strip() or None, "args": vars(args)}
    (output_dir / "args.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    for path in HERE.glob("*.py"):
        shutil.copy(path, output_dir / "code")


def parameter_census(model: nn.Module) -> str:
    """Parameters by dtype and whether they train, e.g. `338,400 frozen float32, 49,152 trainable float32`."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        kind = f"{'trainable' if parameter.requires_grad else 'frozen'} {str(parameter.dtype).removeprefix('torch.')}"
        counts[kind] = counts.get(kind, 0) + parameter.numel()
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))


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


def write_values(
    folder: Path,
    shard: int,
    samples: Sequence[int],
    prompt_ids: Sequence[int],
    table: Tensor,
    names: Sequence[str],
    total: Tensor,
    advantages: Tensor,
) -> None:
    """The shard's third table: rewards and advantages of this rank's samples, in the order of its trajectories."""
    with table_writer(folder / f"values-{shard:05d}.arrow") as write:
        for sample in samples:
            row = {"sample_index": sample, "prompt_id": prompt_ids[sample], "reward": total[sample].item()}
            row |= {f"reward_{name}": value for name, value in zip(names, table[sample].tolist(), strict=True)}
            write(row | {"advantage": advantages[sample].item()})


def write_outputs(folder: Path, step: int, rank: int, outputs: Sequence[Mapping[str, Tensor]]) -> None:
    """What --return_model_output kept of one update, a safetensors file per rank: <micro-batch>.<name> (B, W, ...)."""
    folder.mkdir(exist_ok=True)
    tensors = {f"{i}.{name}": tensor.cpu() for i, output in enumerate(outputs) for name, tensor in output.items()}
    save_file(tensors, folder / f"step-{step:06d}-rank-{rank:05d}.safetensors")


def log_metrics(args: argparse.Namespace, accelerator: Accelerator, metrics: Mapping[str, float | int]) -> None:
    """Append one line to metrics.jsonl, on the main process."""
    if accelerator.is_main_process:
        with open(Path(args.output_dir) / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")


def peak_memory(accelerator: Accelerator, phase: str) -> dict[str, float]:
    """Peak of the allocated device memory in GiB since the last call; nothing on a CPU."""
    if accelerator.device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(accelerator.device) / 2**30
    torch.cuda.reset_peak_memory_stats(accelerator.device)
    return {f"memory/{phase}_peak_gib": round(peak, 3)}


def encode_table(
    path: Path,
    pipeline: QwenImagePipeline,
    texts: Mapping[int, str],
    *,
    device: torch.device,
    max_sequence_length: int,
) -> dict[int, Tensor]:
    """Encode this rank's prompts once into a memory-mapped table; returns read-only views (S, D) by prompt id."""
    with table_writer(path) as write:
        for prompt_id, text in tqdm(texts.items(), desc="encode prompts", disable=None, leave=False):
            (embedding,) = encode_prompts(pipeline, [text], device=device, max_sequence_length=max_sequence_length)
            write({"prompt_id": prompt_id, "prompt_embeds": embedding})
    return read_embeddings(path)


def load_micro_batch(cache: TrajectoryCache, rows: Sequence[int], advantages: Tensor) -> dict[str, Any]:
    """A micro-batch for train_batch: views of the cached trajectories, padded conditions, advantages (B,) as (B, W)."""
    batch = read_micro_batch(cache, rows)
    embeddings = [read_prompt_embeds(cache, cache.prompt_ids[row]) for row in rows]
    negative = read_prompt_embeds(cache, NEGATIVE_PROMPT_ID) if NEGATIVE_PROMPT_ID in cache.prompt_rows else None
    num_timesteps = batch["all_timesteps"].shape[1]
    return (
        batch | prompt_conditions(embeddings, negative) | {"advantages": advantages[:, None].expand(-1, num_timesteps)}
    )


def planned_bytes(args: argparse.Namespace, num_timesteps: int) -> dict[str, int]:
    """Bytes of one micro-batch's step inputs on the device, staged and not, and of one epoch's trajectories on disk."""
    size, tokens = args.train_batch_size, (args.resolution // PIXELS_PER_TOKEN) ** 2
    shapes = {"all_latents": (size, num_timesteps + 1, tokens, 64), "sigmas": (size, num_timesteps + 1)}
    shapes |= dict.fromkeys(("all_timesteps", "advantages", "old_log_probs"), (size, num_timesteps))
    batch = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    samples = args.num_prompts_per_epoch * args.num_images_per_prompt
    per_sample = sum(tensor[0].nbytes for name, tensor in batch.items() if name != "advantages")
    return {
        "staged": step_input_bytes(batch, FLOWGRPO_FIELDS, staged=True, chunk=args.timesteps_per_forward),
        "not staged": step_input_bytes(batch, FLOWGRPO_FIELDS, staged=False),
        "cache": samples * per_sample,
    }


# ----- Main --------------------------------------------------------------------------------------------------------


def make_accelerator() -> Accelerator:
    """The launcher's configuration; FSDP2 reduces gradients in fp32, for which the yaml has no key."""
    plugin = None
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" and os.environ.get("FSDP_VERSION") == "2":
        param_dtype = torch.bfloat16 if os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    return Accelerator(fsdp_plugin=plugin)


def prepare_policy(
    accelerator: Accelerator, transformer: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
    """accelerator.prepare for a model with adapters; also returns the parameters that train.

    FSDP (version 1) cannot mix fp32 adapters with a bf16 base in a flat parameter: there the adapters stay whole on
    every rank, and `average_gradients` does for them what DDP does.
    """
    if adapters_are_replicated(accelerator):
        adapters = [
            m for name, m in transformer.named_modules() if name.rpartition(".")[0].endswith(("lora_A", "lora_B"))
        ]
        for module in adapters:
            module.to(accelerator.device)
        accelerator.state.fsdp_plugin.ignored_modules = adapters
    transformer, optimizer = accelerator.prepare(transformer, optimizer)
    return transformer, optimizer, [parameter for parameter in transformer.parameters() if parameter.requires_grad]


def adapters_are_replicated(accelerator: Accelerator) -> bool:
    """True where no wrapper averages the adapters' gradients over the ranks."""
    return accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2


def average_gradients(accelerator: Accelerator, parameters: Sequence[nn.Parameter]) -> None:
    """Mean of the gradients over all ranks, as one message."""
    flat = accelerator.reduce(torch.cat([parameter.grad.flatten() for parameter in parameters]), "mean")
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(gradient.view_as(parameter))


def main(args: argparse.Namespace) -> None:
    """Train; the sections of an epoch are the docstring's."""
    output_dir = Path(args.output_dir)

    # ----- Checks: what options, prompts and rewards can tell, before any model is loaded.
    check_supported(os.environ)
    check_args(args, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    if args.pretrained_model_name_or_path is not None:
        check_pipeline_class(args.pretrained_model_name_or_path, revision=args.revision)
        check_lora_targets(args.pretrained_model_name_or_path, args.lora_target_modules, revision=args.revision)
    prompts = load_prompts(args.prompts, column=args.prompt_column)
    eval_prompts = load_prompts(args.eval_prompts, column=args.prompt_column) if args.eval_epochs else []
    rewards = {name: load_reward(name) for name in args.reward_funcs}
    weights = torch.tensor(args.reward_weights or [1.0] * len(rewards), dtype=torch.float64)
    if (output_dir / "args.json").exists():
        raise ValueError(f"--output_dir {output_dir} holds a run already: name another folder, or delete it")

    accelerator = make_accelerator()
    device, rank, world_size = accelerator.device, accelerator.process_index, accelerator.num_processes
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision {accelerator.mixed_precision} is not supported: choose bf16 or no")
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    if accelerator.is_main_process:
        start_run_folder(args)
    output_dir.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()

    # ----- Sizes: N samples an epoch in U x K batches of B, see prompts.py.
    num_samples = args.num_prompts_per_epoch * args.num_images_per_prompt
    size, num_updates = args.train_batch_size, args.num_updates_per_epoch
    batches_per_update = num_samples // (size * num_updates)
    own_batches = rank_batches(num_updates, batches_per_update, rank=rank, world_size=world_size)
    own_samples = [list(range(batch * size, (batch + 1) * size)) for batch in own_batches]

    def sample_prompts(epoch: int) -> list[int]:  # prompt id of each of the N samples
        ids = epoch_prompt_ids(len(prompts), args.num_prompts_per_epoch, seed=args.seed, epoch=epoch)
        return [prompt_id for prompt_id in ids for _ in range(args.num_images_per_prompt)]

    # ----- Models: encode what this rank will sample, then drop the text encoder.
    model_path = args.pretrained_model_name_or_path
    if model_path is None:
        model_path = output_dir / "demo_pipeline"
        if accelerator.is_main_process:
            tiny_pipeline(args.seed).save_pretrained(model_path)
        accelerator.wait_for_everyone()
    pipeline = load_pipeline(model_path, dtype=dtype, revision=args.revision)
    pipeline.text_encoder.to(device)
    encode = partial(encode_table, pipeline=pipeline, device=device, max_sequence_length=args.max_sequence_length)
    needed = {sample_prompts(epoch)[i] for epoch in range(args.num_train_epochs) for own in own_samples for i in own}
    texts = {prompt_id: prompts[prompt_id]["prompt"] for prompt_id in sorted(needed)}
    use_cfg = args.true_cfg_scale > 1
    if use_cfg:
        texts[NEGATIVE_PROMPT_ID] = args.negative_prompt
    embeddings = encode(output_dir / f"prompt_embeds-{rank:05d}.arrow", texts=texts)
    negative = embeddings.pop(NEGATIVE_PROMPT_ID) if use_cfg else None
    eval_embeddings = {}
    if eval_prompts:
        eval_texts = {index: row["prompt"] for index, row in enumerate(eval_prompts)}
        eval_embeddings = encode(output_dir / f"eval_prompt_embeds-{rank:05d}.arrow", texts=eval_texts)
    pipeline.text_encoder = None

    vae, transformer = pipeline.vae, pipeline.transformer
    set_seed(args.seed)  # every rank makes the same adapter
    add_lora(transformer, rank=args.rank, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules)
    lora_config = transformer.peft_config["default"]
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in transformer.parameters() if parameter.requires_grad],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
    )
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.num_train_epochs * num_updates * args.num_inner_epochs,
    )
    census = parameter_census(transformer)
    transformer, optimizer, trainable = prepare_policy(accelerator, transformer, optimizer)
    sigmas, eval_sigmas = (
        get_sigmas(pipeline.scheduler, steps, height=args.resolution, width=args.resolution)
        for steps in (args.num_inference_steps, args.eval_num_inference_steps)
    )
    predict = partial(
        predict_velocity,
        transformer,
        height=args.resolution,
        width=args.resolution,
        true_cfg_scale=args.true_cfg_scale,
        cfg_batched=args.cfg_batched,
        dtype=dtype,
    )
    num_timesteps = args.sde_window_size or args.num_inference_steps - 1
    planned = planned_bytes(args, num_timesteps)
    accelerator.print(
        f"***** FlowGRPO *****\n"
        f"model              {args.pretrained_model_name_or_path or 'random demo pipeline at 64 px'}\n"
        f"parameters         {census}\n"
        f"precision          {accelerator.mixed_precision}, {accelerator.distributed_type.value}, "
        f"{world_size} process(es), {device.type}\n"
        f"epoch              {args.num_prompts_per_epoch} prompts x {args.num_images_per_prompt} images in batches of "
        f"{size}, {num_updates} updates x {args.num_inner_epochs} inner epochs, accumulating "
        f"{batches_per_update // world_size} batches x {num_timesteps} timesteps a process\n"
        f"timestep staging   {'on' if args.enable_timestep_staging else 'off'}, step inputs on the device: "
        f"{planned['staged'] / 2**20:.2f} MiB staged, {planned['not staged'] / 2**20:.2f} MiB not staged\n"
        f"cache on disk      {planned['cache'] / 2**20:.1f} MiB an epoch, {args.keep_trajectories} epoch(s) kept"
    )
    if args.pretrained_model_name_or_path is None:
        accelerator.print(f"demo values        {DEMO_DEFAULTS}")
    if args.clip_range > 1e-2:
        accelerator.print(
            f"warning: --clip_range {args.clip_range} clips nothing: log-probs are means over all latent elements, so "
            "ratios stay within about 1e-3 of 1; use 1e-5 to 1e-4"
        )

    def run_evaluation(epoch: int) -> None:
        vae.to(device)
        metrics = evaluate(
            args, accelerator, predict, vae, eval_sigmas, eval_prompts, eval_embeddings, negative, rewards,
            output_dir / f"grids/epoch-{epoch:05d}.png",
        )  # fmt: skip
        vae.to("cpu")
        log_metrics(args, accelerator, {"epoch": epoch, "step": global_step, **metrics})

    global_step = 0
    if args.eval_epochs:
        run_evaluation(0)
    progress = tqdm(range(args.num_train_epochs), desc="epochs", disable=not accelerator.is_local_main_process)
    for epoch in progress:
        # ----- 1. Rollout: every rank samples its own batches and writes its own shard.
        started = time.perf_counter()
        window = draw_sde_window(
            args.sde_window_size, args.sde_window_range, args.num_inference_steps, seed=args.seed, epoch=epoch
        )
        prompt_ids = sample_prompts(epoch)
        folder = output_dir / f"trajectories/epoch-{epoch:05d}"
        folder.mkdir(parents=True, exist_ok=True)  # by every rank: the folder may be on each node's own disk
        vae.to(device)
        scores = write_rollout(
            predict,
            folder=folder,
            shard=rank,
            batches=own_samples,
            prompt_ids=prompt_ids,
            prompts=prompts,
            embeddings=embeddings,
            negative=negative,
            vae=vae,
            rewards=rewards,
            sigmas=sigmas,
            height=args.resolution,
            width=args.resolution,
            sde_window=window,
            sde_type=args.sde_type,
            noise_level=args.noise_level,
            seed_words=(args.seed, epoch),
            fields=ROLLOUT_FIELDS,
            progress=progress.refresh,
        )
        vae.to("cpu")

        # ----- 2. Advantages: a group may be spread over ranks, so every rank sees all rewards, by sample number.
        table = torch.zeros(num_samples, len(rewards), dtype=torch.float64)
        flat_samples = [sample for batch in own_samples for sample in batch]
        table[flat_samples] = torch.tensor(list(scores.values()), dtype=torch.float64).T
        table = accelerator.reduce(table.to(device), "sum").cpu()
        total, groups = table @ weights, torch.tensor(prompt_ids)
        advantages = group_advantages(total, groups, global_std=args.global_std)
        write_values(folder, rank, flat_samples, prompt_ids, table, list(rewards), total, advantages)
        facts = {
            "num_shards": world_size, "epoch": epoch, "seed": args.seed, "model": str(model_path),
            "height": args.resolution, "width": args.resolution, "sigmas": sigmas.tolist(), "sde_type": args.sde_type,
            "noise_level": args.noise_level, "sde_window": list(window), "true_cfg_scale": args.true_cfg_scale,
        }  # fmt: skip
        write_manifest(folder, rank, facts)
        rollout_metrics = reward_metrics(table, list(rewards), total, groups)
        rollout_metrics |= {"time/rollout_s": time.perf_counter() - started, **peak_memory(accelerator, "rollout")}

        # ----- 3. Update: one timestep of one micro-batch after the other.
        started = time.perf_counter()
        cache = open_cache(folder, shards=[rank])
        for inner_epoch in range(args.num_inner_epochs):
            seed_words = (args.seed, 3, epoch, inner_epoch)
            plan = update_plan(
                num_updates, batches_per_update, rank=rank, world_size=world_size, seed_words=seed_words
            )
            for batches in plan:
                first_rows = [own_batches.index(batch) * size for batch in batches]
                micro_batches = [
                    load_micro_batch(cache, rows, advantages[[cache.sample_indices[row] for row in rows]])
                    for rows in (range(first, first + size) for first in first_rows)
                ]
                metrics, outputs = train_batch(
                    args, accelerator, transformer, predict, optimizer, trainable, micro_batches
                )
                lr_scheduler.step()
                global_step += 1
                train_metrics = {f"train/{name}": value for name, value in metrics.items()}
                train_metrics["train/learning_rate"] = lr_scheduler.get_last_lr()[0]
                log_metrics(args, accelerator, {"epoch": epoch, "step": global_step, **train_metrics})
                if outputs:
                    write_outputs(output_dir / "outputs", global_step, rank, outputs)
        rollout_metrics |= {"time/update_s": time.perf_counter() - started, **peak_memory(accelerator, "update")}

        # ----- 4. Log, evaluate, tidy up.
        log_metrics(args, accelerator, {"epoch": epoch, "step": global_step, **rollout_metrics})
        progress.set_postfix(reward=f"{rollout_metrics['rollout/reward_mean']:.4g}")
        expired = output_dir / f"trajectories/epoch-{epoch - args.keep_trajectories:05d}"
        if accelerator.is_local_main_process and expired.is_dir():
            shutil.rmtree(expired)
        if args.eval_epochs and ((epoch + 1) % args.eval_epochs == 0 or epoch + 1 == args.num_train_epochs):
            run_evaluation(epoch + 1)

    state_dict = gather_adapter(transformer)
    if accelerator.is_main_process:
        export_lora(output_dir, state_dict, lora_config)
    accelerator.print(f"adapter, metrics.jsonl and grids are in {output_dir}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main(parse_args())
    except (ValueError, RuntimeError) as error:
        # What this repository raises is one line that says what to do; anything else keeps its traceback.
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent != HERE:
            raise
        print(f"train_flowgrpo.py: {error}", file=sys.stderr)
        sys.exit(2)
