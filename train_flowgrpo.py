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
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.optimization import SchedulerType, get_scheduler
from torch import Tensor, nn
from tqdm.auto import tqdm

import cache_checks
import evaluation
import memory_plan
import model_files
import option_checks
import qwen_image
import rollout
import run_folder
import sharding
from prompts import (
    Size,
    batch_samples,
    epoch_samples,
    fill_batches,
    load_prompts,
    parse_size,
    plan_updates,
    prompt_sizes,
    rank_batches,
    size_name,
)
from qwen_image import ATTENTION_BACKENDS, COMPILE_MODES, LORA_TARGETS, SDE_TYPES, predict_sized, sde_step_with_logprob
from rewards import (
    AGGREGATIONS,
    check_reward_prompts,
    check_rewards,
    combine_rewards,
    group_advantages,
    has_signal,
    reward_metrics,
)
from scorer import Scorer
from staging import (
    CONDITIONS,
    FLOWGRPO_FIELDS,
    check_supported,
    field_ndim,
    iterate_timesteps,
    join_timesteps,
    step_input_bytes,
    validate_batch,
)
from trajectory_cache import TrajectoryCache, open_cache, read_rewards, table_bytes, write_manifest

HERE = Path(__file__).resolve().parent
POLICY_LOSSES = ("clip", "grpo_guard", "flow_dppo")
NEEDS_OLD_MEAN = ("grpo_guard", "flow_dppo")  # losses that compare with the rollout's mean of x_{t+1}
ADAPTERS = ("default",)  # of a checkpoint
STATE_KINDS: dict[str, type] = {}  # what its state.json holds besides both scripts' counters
LORA_DTYPES = ("float32", "bfloat16")
LR_SCHEDULERS = [s.value for s in SchedulerType if s != SchedulerType.PIECEWISE_CONSTANT]  # it needs rules
TRACKERS = ("tensorboard", "wandb", "trackio")
ROLLOUT_FIELDS = ("all_latents", "sigmas", "sigma_max", "all_timesteps", "old_log_probs")
FORWARD_FIELDS = FLOWGRPO_FIELDS._replace(per_step={"all_latents": 2, "sigmas": 2, "all_timesteps": 1})
# What a cache must hold before a model is loaded, and what it may.
CACHED_FIELDS = FLOWGRPO_FIELDS._replace(
    per_step={name: window for name, window in FLOWGRPO_FIELDS.per_step.items() if name != "advantages"},
    optional=FLOWGRPO_FIELDS.optional | {"old_log_probs"},
)

# What differs for the demo model, which is 60,000 times smaller than Qwen-Image and is sampled at 64 px.
DEMO_DEFAULTS = {
    "prompts": str(HERE / "assets/demo_prompts.txt"),
    "eval_prompts": str(HERE / "assets/demo_eval_prompts.txt"),
    "reward_funcs": ["glyph_match"],
    "eval_reward_funcs": ["glyph_accuracy", "jpeg_incompressibility"],
    "resolution": [(64, 64)],
    "true_cfg_scale": 1.0,
    "noise_level": 0.8,
    "num_prompts_per_epoch": 8,
    "train_batch_size": 16,
    "num_train_epochs": 30,
    "rank": 16,
    "lora_alpha": 32,
    "learning_rate": 1e-3,
    "clip_range": 1e-3,
    "eval_num_inference_steps": 10,
    "gradient_checkpointing": False,
}


# ----- Options -----------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The defaults are flow_grpo's recipe for Qwen-Image; without a model's name, DEMO_DEFAULTS come on top."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flag = argparse.BooleanOptionalAction

    add = parser.add_argument_group("model").add_argument
    add("--pretrained_model_name_or_path", help="hub name or folder of a QwenImagePipeline; none: the demo model")
    add("--revision", help="branch, tag or commit of the hub model")
    add("--use_lora", action=flag, default=True, help="train an adapter; --no-use_lora trains all weights")
    add("--rank", type=int, default=64, help="rank of the LoRA matrices")
    add("--lora_alpha", type=int, default=128, help="the adapter is scaled by lora_alpha / rank")
    add("--lora_dtype", choices=LORA_DTYPES, default="float32", help="dtype of the adapters and their Adam state")
    add("--lora_target_modules", nargs="+", default=list(LORA_TARGETS), help="names of the linear layers that get one")
    add("--gradient_checkpointing", action=flag, default=True, help="recompute activations in the backward")
    add("--checkpointed_blocks", type=int, help="recompute the first so many blocks; default: all")
    add("--attention_backend", choices=ATTENTION_BACKENDS, help="of diffusers' dispatcher; default: PyTorch's choice")
    add(
        "--gathered_rollout",
        action=flag,
        default=False,
        help="FSDP2: gather weights once a rollout, if they fit whole",
    )
    add("--compile_blocks", action=flag, default=False, help="compile the transformer's blocks, once for all of them")
    add("--compile_mode", choices=COMPILE_MODES, default="default", help="of torch.compile")
    add("--compile_dynamic", action=flag, default=True, help="one graph for all shapes; else one, faster, for each")
    add("--compile_fullgraph", action=flag, default=False, help="fail where a block does not compile as a whole")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", help=".txt, .jsonl, or a name or folder for `datasets`")
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
    add("--sde_window_schedule", choices=rollout.WINDOW_SCHEDULES, default="random", help="drawn anew, or moving on")
    add("--sde_window_epochs", type=int, default=25, help="progressive: epochs until the window moves on")
    add("--sde_window_stride", type=int, default=1, help="progressive: steps that it moves, up to the range's end")

    add = parser.add_argument_group("reward").add_argument
    add("--reward_funcs", nargs="+", help="names, with their option as name:option, or module.py:function")
    add("--reward_weights", nargs="+", type=float, help="one weight for each reward; default 1 each")
    add(
        "--reward_aggregation",
        choices=AGGREGATIONS,
        default="sum",
        help="normalise the sum, or each reward first (GDPO)",
    )
    add("--reward_workers", type=int, default=0, help="processes that score while the next batch is sampled; 0: none")
    add("--reward_timeout", type=float, default=600.0, help="seconds that a worker may take for a batch")
    add("--drop_zero_std_groups", action=flag, default=False, help="leave prompts whose rewards are all equal out")
    add("--global_std", action=flag, default=True, help="divide by the std of the whole epoch, not of each group")

    add = parser.add_argument_group("algorithm").add_argument
    add("--policy_loss", choices=POLICY_LOSSES, default="clip", help="PPO's clip, GRPO-Guard or Flow-DPPO")
    add("--kl_beta", type=float, default=0.0, help="weight of the KL to the base model; 0 runs no reference forward")
    add("--clip_range", type=float, default=1e-4, help="ratios are clipped to 1 +- this; log-probs are means, so tiny")
    add("--dppo_kl_threshold", type=float, default=1e-5, help="flow_dppo: KL of a step beyond which a term may drop")
    add("--log_ratio_limit", type=float, default=0.2, help="a log-ratio further from 0 stops the run: healthy is 1e-3")
    add("--adv_clip_max", type=float, default=5.0, help="advantages are clipped to +- this")
    add("--num_updates_per_epoch", type=int, default=2, help="optimizer steps of one pass over a rollout")
    add("--num_inner_epochs", type=int, default=1, help="passes over a rollout")

    add = parser.add_argument_group("optimization").add_argument
    add("--train_batch_size", type=int, default=4, help="samples of one forward per device, in rollout and update")
    add("--num_train_epochs", type=int, default=300, help="epochs: one rollout and its updates")
    add("--learning_rate", type=float, default=3e-4, help="AdamW's")
    add("--lr_scheduler", choices=LR_SCHEDULERS, default="constant", help="diffusers' schedules")
    add("--lr_warmup_steps", type=int, default=0, help="optimizer steps of warm-up")
    add("--adam_beta1", type=float, default=0.9, help="AdamW's first decay")
    add("--adam_beta2", type=float, default=0.999, help="AdamW's second decay")
    add("--adam_weight_decay", type=float, default=1e-4, help="AdamW's weight decay")
    add("--adam_epsilon", type=float, default=1e-8, help="AdamW's epsilon")
    add("--max_grad_norm", type=float, default=1.0, help="gradients are scaled down to this norm")
    add("--divergence_limit", type=float, default=1e6, help="a larger loss of a sample or gradient norm stops the run")
    add("--skip_nonfinite", action="store_true", help="leave an update out that would stop the run, and go on")

    add = parser.add_argument_group("staging").add_argument
    add("--enable_timestep_staging", action="store_true", help="only the current timestep's inputs on the device")
    add("--staging_prefetch", type=int, default=0, help="steps copied ahead through pinned buffers; GPU only")
    add("--timesteps_per_forward", type=int, default=1, help="consecutive timesteps that run as one batch")
    add("--return_model_output", action="store_true", help="keep every timestep's outputs and write them to outputs/")

    add = parser.add_argument_group("evaluation and output").add_argument
    add("--eval_prompts", help="prompts of the evaluation, as --prompts; none: no evaluation")
    add("--eval_reward_funcs", nargs="*", default=[], help="rewards evaluated besides, never trained on")
    add("--eval_epochs", type=int, default=10, help="evaluate every so many epochs, before the first too; 0: never")
    add("--eval_num_inference_steps", type=int, default=50, help="ODE steps of the evaluation")
    add("--trajectory_cache", help="train from this cache instead of rolling out")
    add("--verify_cache", action="store_true", help="verify the checksums of this run's own caches too")
    add("--keep_trajectories", type=int, default=1, help="epochs whose trajectory caches stay on disk")
    add("--checkpointing_steps", type=int, default=20, help="checkpoint at the next epoch's end; 0: never")
    add("--checkpoints_total_limit", type=int, default=2, help="older checkpoints are deleted")
    add("--resume_from_checkpoint", help="`latest` or a checkpoint's folder, with the same command otherwise")
    add("--report_to", default="none", choices=("none", *TRACKERS), help="tracker besides metrics.jsonl")
    add("--output_dir", default="runs/flowgrpo", help="run folder: adapter, metrics.jsonl, grids, caches, code")
    add("--ddp_timeout", type=int, default=1800, help="seconds a process waits for the others, then it ends")
    add("--seed", type=int, default=0, help="of weights, prompts, noise and order")

    if parser.parse_known_args(argv)[0].pretrained_model_name_or_path is None:
        parser.set_defaults(**DEMO_DEFAULTS)
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Refuse what FlowGRPO's own options show to be wrong."""
    for name in ("clip_range", "log_ratio_limit", "dppo_kl_threshold"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be above 0")
    option_checks.check_sde_window(
        args.sde_window_size, args.sde_window_range, args.num_inference_steps, args.noise_level,
        schedule=args.sde_window_schedule, epochs_per_window=args.sde_window_epochs, stride=args.sde_window_stride,
    )  # fmt: skip
    if args.kl_beta < 0:
        raise ValueError(f"--kl_beta is {args.kl_beta}: it must not be negative")
    if args.kl_beta and not args.use_lora:
        raise ValueError(
            f"--kl_beta {args.kl_beta} with --no-use_lora: the reference is the model with its adapter off, so it "
            "needs LoRA; use --use_lora or --kl_beta 0"
        )
    if args.policy_loss == "grpo_guard" and args.sde_type != "sde":
        raise ValueError(f"--policy_loss grpo_guard is defined for --sde_type sde, not {args.sde_type}: change one")


# ----- The loss ----------------------------------------------------------------------------------------------------


def clipped_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_range: float, adv_clip_max: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss per sample and the ratio, both of the inputs' shape (B, K) (FlowGRPO eq. 4 and 5)."""
    advantages = advantages.clamp(-adv_clip_max, adv_clip_max)
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio


def guard_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    prev_sample_mean: Tensor,
    old_prev_sample_mean: Tensor,
    std_dev_t: Tensor,
    sqrt_dt: Tensor,
    *,
    clip_range: float,
    adv_clip_max: float,
) -> tuple[Tensor, Tensor]:
    """GRPO-Guard (arXiv 2510.22319): the ratio freed of its bias and scaled to the same spread at every timestep.

    All (B, K) but the means, (B, K, L, C). Returns losses and ratios (B, K).
    """
    noise_std = sqrt_dt * std_dev_t
    bias = ((prev_sample_mean - old_prev_sample_mean) ** 2).mean(dim=(-2, -1)) / (2 * noise_std**2)
    log_ratio = (log_probs - old_log_probs + bias) * noise_std
    losses, ratio = clipped_loss(
        log_ratio, torch.zeros_like(log_ratio), advantages, clip_range=clip_range, adv_clip_max=adv_clip_max
    )
    return losses / sqrt_dt**2, ratio


def dppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    prev_sample_mean: Tensor,
    old_prev_sample_mean: Tensor,
    noise_std: Tensor,
    *,
    kl_threshold: float,
    adv_clip_max: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Flow-DPPO (arXiv 2606.11025): no clip; a term drops where the step's KL to the rollout policy has reached the
    threshold and its gradient would move the policy further away.

    All (B, K) but the means, (B, K, L, C); the KL is a mean over L and C. Returns losses, ratios and which drop.
    """
    advantages = advantages.clamp(-adv_clip_max, adv_clip_max)
    ratio = torch.exp(log_probs - old_log_probs)
    kl = ((prev_sample_mean - old_prev_sample_mean) ** 2).mean(dim=(-2, -1)) / (2 * noise_std**2)
    outwards = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
    dropped = outwards & (kl >= kl_threshold)
    return torch.where(dropped, 0.0, -advantages * ratio), ratio, dropped


def kl_to_reference(prev_sample_mean: Tensor, ref_prev_sample_mean: Tensor, std_dev_t: Tensor) -> Tensor:
    """KL of one step to the base model per sample (B, K), from means (B, K, L, C); without dt, as flow_grpo has it."""
    return ((prev_sample_mean - ref_prev_sample_mean) ** 2).mean(dim=(-2, -1)) / (2 * std_dev_t**2)


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
    _, log_probs, mean, std_dev_t, sqrt_dt = sde_step_with_logprob(
        predict(x_t, step["all_timesteps"].flatten(), **conditions),
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
    batch = qwen_image.drop_full_masks(batch)
    with closing(iterate_timesteps(batch, FORWARD_FIELDS, device, staged=False)) as steps:
        outputs = [forward_timesteps(args, predict, step) for step in steps]
    return {name: tensor.cpu() for name, tensor in join_timesteps(outputs).items()}


def train_timesteps(
    args: argparse.Namespace,
    accelerator: Accelerator,
    predict: Callable[..., Tensor],
    predict_reference: Callable[..., Tensor] | None,
    step: Mapping[str, Tensor],
    weight: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward, loss and backward of one step; returns detached numbers for the metrics and the detached outputs.

    A function of its own, so that nothing of a step is alive when the next one is staged.
    """
    reference_mean = step.get("ref_prev_sample_mean")
    if args.kl_beta and reference_mean is None:
        with torch.no_grad():
            reference_mean = forward_timesteps(args, predict_reference, step)["prev_sample_mean"]
    outputs = forward_timesteps(args, predict, step)
    limits = {"clip_range": args.clip_range, "adv_clip_max": args.adv_clip_max}
    log_probs, old_log_probs, advantages = outputs["log_probs"], step["old_log_probs"], step["advantages"]
    records = {}
    if args.policy_loss == "grpo_guard":
        means = outputs["prev_sample_mean"], step["old_prev_sample_mean"]
        scales = outputs["std_dev_t"], outputs["sqrt_dt"]
        losses, ratio = guard_loss(log_probs, old_log_probs, advantages, *means, *scales, **limits)
    elif args.policy_loss == "flow_dppo":
        noise_std = outputs["std_dev_t"] * (outputs["sqrt_dt"] if args.sde_type == "sde" else 1)
        losses, ratio, records["dropped"] = dppo_loss(
            log_probs, old_log_probs, advantages, outputs["prev_sample_mean"], step["old_prev_sample_mean"], noise_std,
            kl_threshold=args.dppo_kl_threshold, adv_clip_max=args.adv_clip_max,
        )  # fmt: skip
    else:
        losses, ratio = clipped_loss(log_probs, old_log_probs, advantages, **limits)
    if "rollout_is_weights" in step:
        losses = losses * step["rollout_is_weights"]
    loss = losses.mean()
    records |= {"policy_loss": losses, "ratio": ratio, "log_ratio": log_probs - old_log_probs}
    if args.kl_beta:
        records["kl_loss"] = kl_to_reference(outputs["prev_sample_mean"], reference_mean, outputs["std_dev_t"])
        loss = loss + args.kl_beta * records["kl_loss"].mean()
    kept = {name: tensor.detach() for name, tensor in outputs.items()} if args.return_model_output else {}
    del outputs, reference_mean  # what the backward needs it has
    accelerator.backward(loss * weight)
    return {name: tensor.detach() for name, tensor in records.items()}, kept


def train_batch(
    args: argparse.Namespace,
    accelerator: Accelerator,
    transformer: nn.Module,
    predict: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    trainable: Sequence[nn.Parameter],
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    predict_reference: Callable[..., Tensor] | None = None,
    where: str = "this update",
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """One optimizer step over this rank's micro-batches, of which every rank must have the same number.

    predict(latents, timesteps, **conditions) is the policy, predict_reference the base model, needed with kl_beta.
    Numbers that go wrong raise RuntimeError with `where` and the sample; with skip_nonfinite they change no weight.
    Returns metrics over all ranks and, with --return_model_output, each micro-batch's outputs (B, W, ...).
    """
    lengths = [validate_batch(batch, FLOWGRPO_FIELDS) for batch in micro_batches]  # all, before the first forward
    records, kept, unsynchronised = [], [], ExitStack()
    try:
        if args.use_lora:  # full weights: their unsharded gradients would not fit, so every backward reduces them
            unsynchronised.enter_context(accelerator.no_sync(transformer))
        for number, (batch, length) in enumerate(zip(micro_batches, lengths, strict=True)):
            results, done = [], 0
            steps = iterate_timesteps(
                qwen_image.drop_full_masks(batch),
                FLOWGRPO_FIELDS,
                accelerator.device,
                staged=args.enable_timestep_staging,
                chunk=args.timesteps_per_forward,
                prefetch=args.staging_prefetch,
            )
            with closing(steps):
                for step in steps:
                    num_timesteps = step["all_timesteps"].shape[1]
                    done += num_timesteps
                    if number == len(micro_batches) - 1 and done == length:
                        unsynchronised.close()
                    weight = num_timesteps / (len(micro_batches) * length)
                    results.append(train_timesteps(args, accelerator, predict, predict_reference, step, weight))
            records.append(join_timesteps([record for record, _ in results]))
            kept.append(join_timesteps([outputs for _, outputs in results]))
            results.clear()
        grad_norm = sharding.clip_gradients(accelerator, transformer, trainable, args.max_grad_norm)
        limits = {"log_ratio": args.log_ratio_limit}
        limits |= dict.fromkeys(("policy_loss", "kl_loss", "grad_norm"), args.divergence_limit)
        fault = sharding.find_fault(accelerator, records, micro_batches, grad_norm, limits)
        metrics = update_metrics(args, accelerator, records, grad_norm)
        metrics |= apply_update(args, accelerator, optimizer, fault, where)
        sharding.check_finite(accelerator, trainable, where)
    finally:  # also after an error: the next update starts from clean gradients
        unsynchronised.close()
        sharding.clear_gradients(accelerator, optimizer)
    return metrics, kept if args.return_model_output else []


def apply_update(
    args: argparse.Namespace,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    fault: str | None,
    where: str,
) -> dict[str, float]:
    """Step the optimizer unless there is a fault, which raises RuntimeError or, with skip_nonfinite, is only told."""
    if fault is None:
        optimizer.step()
    elif args.skip_nonfinite:
        accelerator.print(f"warning: {where}: {fault}: the update is left out")
    else:
        raise RuntimeError(
            f"{where}: {fault}: the update is not applied, the last checkpoint is whole; lower --learning_rate, look "
            "at the rewards, or leave such updates out with --skip_nonfinite"
        )
    return {"skipped": float(fault is not None)} if args.skip_nonfinite else {}


def update_metrics(
    args: argparse.Namespace, accelerator: Accelerator, records: Sequence[Mapping[str, Tensor]], grad_norm: Tensor
) -> dict[str, float]:
    """Means over all samples, timesteps and ranks, after the last backward: the host waits for the device here."""
    losses, ratio, log_ratio = (
        torch.cat([record[name].flatten() for record in records]) for name in ("policy_loss", "ratio", "log_ratio")
    )
    deviation = ratio.double() - 1  # the ratio is within 1e-3 of 1, where fp32 squares lose its spread
    above, below = ratio > 1 + args.clip_range, ratio < 1 - args.clip_range
    if args.policy_loss == "flow_dppo":
        dropped = torch.cat([record["dropped"].flatten() for record in records])
        above, below = dropped & (ratio > 1), dropped & (ratio < 1)
    means = {
        "policy_loss": losses.mean(),
        "ratio_mean": deviation.mean(),
        "ratio_square": (deviation**2).mean(),
        "approx_kl": 0.5 * (log_ratio**2).mean(),
        "clipfrac": (above | below).float().mean(),
        "clipfrac_gt_one": above.float().mean(),
        "clipfrac_lt_one": below.float().mean(),
    }
    if args.kl_beta:
        means["kl_loss"] = torch.cat([record["kl_loss"].flatten() for record in records]).mean()
    values = accelerator.reduce(torch.stack([mean.double() for mean in means.values()]), "mean").tolist()
    metrics = dict(zip(means, values, strict=True))
    metrics["ratio_std"] = max(0.0, metrics.pop("ratio_square") - metrics["ratio_mean"] ** 2) ** 0.5
    metrics["ratio_mean"] += 1
    metrics["ratio_max_dev"] = accelerator.gather(deviation.abs().max()).max().item()
    metrics["grad_norm"] = grad_norm.item()
    return metrics


# ----- Checks and facts --------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """All that a run starts from but models, checked."""

    model_folder: Path
    prompts: list[dict[str, Any]]
    eval_prompts: list[dict[str, Any]]
    rewards: list[str]  # labels of those that are trained on
    reward_names: dict[str, str]  # by label, of those and the held-out ones
    reward_weights: Tensor  # (R,) float64
    cache: TrajectoryCache | None  # of --trajectory_cache
    checkpoint: Path | None
    state: dict[str, Any] | None  # the checkpoint's counters
    num_samples: int  # N of an epoch, over all ranks
    sizes: dict[int, Size]  # the run's image sizes by their number of tokens


def check_run(args: argparse.Namespace, world_size: int) -> Inputs:
    """Refuse what options, prompts, rewards, caches and checkpoints show to be wrong, before any model is loaded."""
    check_supported(os.environ)
    option_checks.check_training_options(vars(args), world_size=world_size)
    check_args(args)
    online = args.trajectory_cache is None
    if args.pretrained_model_name_or_path is not None:
        qwen_image.check_pipeline_class(args.pretrained_model_name_or_path, revision=args.revision)
    trained = args.reward_funcs or []
    reward_names = check_rewards(list(dict.fromkeys([*trained, *args.eval_reward_funcs])))
    has_evaluation = online and args.eval_epochs and args.eval_prompts
    prompts = load_prompts(args.prompts, column=args.prompt_column) if online else []
    eval_prompts = []
    if has_evaluation:
        eval_prompts = load_prompts(args.eval_prompts, column=args.prompt_column, option="--eval_prompts")
    check_reward_prompts(trained, prompts, "--prompts")
    check_reward_prompts(list(reward_names.values()), eval_prompts, "--eval_prompts")
    sizes = args.resolution
    if args.resolution_column is not None:
        sizes = [size for rows in (prompts, eval_prompts) for size in prompt_sizes(rows, [], args.resolution_column)]
    images = args.num_images_per_prompt if online else None  # a cache's batches are looked at themselves
    sizes = list(dict.fromkeys(sizes))
    sizes = rollout.sizes_by_tokens(sizes, images_per_prompt=images, batch_size=args.train_batch_size)
    model_folder = find_model_folder(args)  # after all that a download need not wait for
    cache, num_samples = None, args.num_prompts_per_epoch * args.num_images_per_prompt
    if not online:
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder, subfolder="scheduler")
        cache = cache_checks.open_checked_cache(
            args.trajectory_cache,
            cache_facts(args, scheduler, model_folder, list(sizes.values())),
            CACHED_FIELDS,
            batch_size=args.train_batch_size,
            num_updates=args.num_updates_per_epoch,
            world_size=world_size,
            text_width=model_files.read_json(model_folder / "transformer/config.json")["joint_attention_dim"],
            reads_values=int(os.environ.get("LOCAL_RANK", "0")) == 0,  # one rank of a node reads every byte
        )
        num_samples = len(cache.sample_indices)
    checkpoint = state = None
    if args.resume_from_checkpoint is not None:
        checkpoint = run_folder.find_checkpoint(Path(args.output_dir), args.resume_from_checkpoint)
        state = run_folder.read_state(checkpoint, checkpoint_identity(args), STATE_KINDS)
        if args.use_lora:
            shapes = model_files.adapter_shapes(model_folder, rank=args.rank, target_modules=args.lora_target_modules)
            model_files.check_checkpoint(checkpoint, ADAPTERS, shapes)
    return Inputs(
        model_folder=model_folder,
        prompts=prompts,
        eval_prompts=eval_prompts,
        rewards=[label for label, name in reward_names.items() if name in trained],
        reward_names=reward_names,
        reward_weights=torch.tensor(args.reward_weights or [1.0] * len(trained), dtype=torch.float64),
        cache=cache,
        checkpoint=checkpoint,
        state=state,
        num_samples=num_samples,
        sizes=sizes,
    )


def find_model_folder(args: argparse.Namespace) -> Path:
    """The pipeline's folder, downloaded if it is not there yet, and checked; the demo's where none is named."""
    folder = HERE / "assets/demo_pipeline"
    if args.pretrained_model_name_or_path is not None:
        online_parts = ("text_encoder", "tokenizer", "vae") if args.trajectory_cache is None else ()
        subfolders = ("scheduler", "transformer", *online_parts)
        folder = qwen_image.local_pipeline_folder(
            args.pretrained_model_name_or_path, revision=args.revision, subfolders=subfolders
        )
        model_files.check_pipeline(folder, subfolders)
    if args.use_lora:
        qwen_image.check_lora_targets(folder, args.lora_target_modules)
    return folder


def checkpoint_identity(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
    names = (
        "pretrained_model_name_or_path", "use_lora", "rank", "lora_alpha", "lora_dtype", "lora_target_modules",
        "learning_rate",
    )  # fmt: skip
    return {"script": "train_flowgrpo.py"} | {name: getattr(args, name) for name in names}


def cache_facts(
    args: argparse.Namespace, scheduler: FlowMatchEulerDiscreteScheduler, model_folder: Path, sizes: Sequence[Size]
) -> dict[str, Any]:
    """What a cache's manifest says of its rollout, and a run that trains from it must share."""
    facts = {"model": qwen_image.transformer_fingerprint(model_folder)}
    facts |= rollout.size_facts(scheduler, args.num_inference_steps, sizes)
    return facts | {name: getattr(args, name) for name in ("sde_type", "noise_level", "true_cfg_scale")}


def needed_fields(args: argparse.Namespace) -> list[str]:
    """The trajectory fields an update reads, so what a rollout stores."""
    return [*ROLLOUT_FIELDS, *(["old_prev_sample_mean"] if args.policy_loss in NEEDS_OLD_MEAN else [])]


def trained_timesteps(args: argparse.Namespace) -> int:
    """How many timesteps of each trajectory of an own rollout are trained."""
    return args.sde_window_size or args.num_inference_steps - 1


def planned_bytes(
    args: argparse.Namespace,
    *,
    num_timesteps: int,
    num_samples: int,
    tokens: int,
    num_shards: int,
    cached: Mapping[str, Any],
) -> dict[str, int]:
    """Exact bytes of a micro-batch's step inputs on the device, staged and not, of an update's outputs, and of an
    epoch's trajectories on disk, for images of `tokens` tokens. cached: a micro-batch of --trajectory_cache, or {}."""
    size = args.train_batch_size
    per_update = num_samples // (size * args.num_updates_per_epoch * num_shards)
    shapes = {"all_latents": (size, num_timesteps + 1, tokens, 64), "sigmas": (size, num_timesteps + 1)}
    shapes |= dict.fromkeys(("all_timesteps", "advantages", "old_log_probs"), (size, num_timesteps))
    if args.policy_loss in NEEDS_OLD_MEAN:
        shapes["old_prev_sample_mean"] = (size, num_timesteps, tokens, 64)
    if args.drop_zero_std_groups:
        shapes["rollout_is_weights"] = (size, num_timesteps)
    batch = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for name in FLOWGRPO_FIELDS.optional & FLOWGRPO_FIELDS.per_step.keys() & cached.keys():
        shape = (tokens, 64) if field_ndim(cached[name]) == 4 else ()
        batch[name] = torch.empty(size, num_timesteps, *shape, dtype=cached[name][0].dtype, device="meta")
    row = {"sample_index": 0, "prompt_id": 0, "sigma_max": torch.empty(())}
    row |= {name: torch.empty(shapes[name][1:]) for name in needed_fields(args) if name in shapes}
    how = {"chunk": args.timesteps_per_forward, "prefetch": args.staging_prefetch}
    return {
        "staged": step_input_bytes(batch, FLOWGRPO_FIELDS, staged=True, **how),
        "not staged": step_input_bytes(batch, FLOWGRPO_FIELDS, staged=False),
        # A mean, a log-prob and two scales, fp32.
        "outputs": per_update * size * num_timesteps * (tokens * 64 + 3) * 4,
        "cache": table_bytes(row, num_rows=num_samples, num_shards=num_shards),
    }


def print_banner(
    args: argparse.Namespace,
    accelerator: Accelerator,
    inputs: Inputs,
    census: str,
    num_timesteps: int,
    planned: Mapping[str, int],
) -> None:
    """What runs, in numbers, before it runs."""
    per_update = inputs.num_samples // (args.train_batch_size * args.num_updates_per_epoch * accelerator.num_processes)
    shown = {name: value for name, value in DEMO_DEFAULTS.items() if isinstance(value, int | float)}
    sizes = ", ".join(size_name(size) for size in inputs.sizes.values())
    groups = f" ({args.num_prompts_per_epoch} prompts x {args.num_images_per_prompt} images)"
    groups = groups if inputs.cache is None else ""
    demo = f"demo pipeline, whose defaults are {shown}"
    accelerator.print(
        f"***** FlowGRPO *****\n"
        f"model              {args.pretrained_model_name_or_path or demo}\n"
        f"parameters         {census}\n"
        f"resolution         {sizes}\n"
        f"launch             mixed precision {accelerator.mixed_precision}, distributed "
        f"{accelerator.distributed_type.value}, {accelerator.num_processes} process(es), {accelerator.device.type}\n"
        f"epoch              {inputs.num_samples} samples{groups} in batches of {args.train_batch_size}; "
        f"{args.num_inner_epochs} x {args.num_updates_per_epoch} updates, each of {per_update} batches x "
        f"{num_timesteps} timesteps a process\n"
        f"timestep staging   {'on' if args.enable_timestep_staging else 'off'}\n"
        f"device             {memory_plan.describe(planned)}"
    )
    if inputs.cache is None:
        bound = "up to " if len(inputs.sizes) > 1 else ""
        size = f"{bound}{planned['cache'] / 2**20:.1f} MiB an epoch"
        accelerator.print(f"cache on disk      {size}, {args.keep_trajectories} epoch(s) kept")
    else:
        accelerator.print(f"trajectories       of {args.trajectory_cache}: one epoch, its rewards, no evaluation")
    if args.clip_range > 1e-2:
        accelerator.print(
            f"warning: --clip_range {args.clip_range} clips nothing: log-probs are means over all latent elements, so "
            "ratios stay within about 1e-3 of 1; use 1e-5 to 1e-4"
        )


# ----- The policy and the phases of an epoch -----------------------------------------------------------------------


class Policy(NamedTuple):
    """The prepared model and what trains it."""

    transformer: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    trainable: list[nn.Parameter]
    predict: Callable[..., Tensor]  # velocity of the policy
    predict_reference: Callable[..., Tensor]  # velocity of the base model


@run_folder.memory_of("loading")
def make_policy(
    args: argparse.Namespace,
    accelerator: Accelerator,
    transformer: nn.Module,
    num_steps: int,
    sizes: Mapping[int, Size],
) -> Policy:
    """Adapter or full weights, optimizer and schedule of `num_steps` optimizer steps, prepared by accelerate."""
    set_seed(args.seed)  # every rank makes the same adapter
    if args.use_lora:
        dtype = getattr(torch, args.lora_dtype)
        qwen_image.add_lora(
            transformer,
            rank=args.rank,
            lora_alpha=args.lora_alpha,
            target_modules=args.lora_target_modules,
            dtype=dtype,
        )
    else:
        qwen_image.train_all_used(transformer)
    if args.gradient_checkpointing:
        qwen_image.checkpoint_blocks(transformer, args.checkpointed_blocks)
    if args.attention_backend is not None:
        transformer.set_attention_backend(args.attention_backend)
    if args.compile_blocks:
        qwen_image.compile_blocks(
            transformer, mode=args.compile_mode, dynamic=args.compile_dynamic, fullgraph=args.compile_fullgraph
        )
    optimizer = torch.optim.AdamW(
        [parameter for parameter in transformer.parameters() if parameter.requires_grad],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
        fused=accelerator.device.type == "cuda",
    )
    lr_scheduler = get_scheduler(
        args.lr_scheduler, optimizer, num_warmup_steps=args.lr_warmup_steps, num_training_steps=num_steps
    )
    transformer, optimizer, trainable = sharding.prepare_policy(accelerator, transformer, optimizer)
    predict = partial(
        predict_sized,
        transformer,
        sizes=sizes,
        true_cfg_scale=args.true_cfg_scale,
        cfg_batched=args.cfg_batched,
        dtype=sharding.compute_dtype(accelerator),
    )
    layers = qwen_image.lora_layers(transformer)

    def predict_reference(*tensors: Tensor, **conditions: Tensor) -> Tensor:
        with qwen_image.adapters_off(layers):
            return predict(*tensors, **conditions)

    return Policy(transformer, optimizer, lr_scheduler, trainable, predict, predict_reference)


@run_folder.memory_of("rollout")
def roll_out(
    args: argparse.Namespace,
    accelerator: Accelerator,
    inputs: Inputs,
    policy: Policy,
    sampling: rollout.Sampling,
    scorer: Scorer,
    facts: Mapping[str, Any],
    own_batches: Sequence[int],
    epoch: int,
) -> tuple[TrajectoryCache, Tensor, Tensor, dict[str, float]]:
    """Every rank samples its own batches and writes its own shard. facts: of cache_facts.

    Returns this rank's cache, the advantages (N,) and prompt ids (N,) of all ranks' samples, and metrics.
    """
    rank, device = accelerator.process_index, accelerator.device
    folder = run_folder.trajectory_folder(Path(args.output_dir), epoch)
    window = rollout.draw_sde_window(
        args.sde_window_size, args.sde_window_range, args.num_inference_steps, seed=args.seed, epoch=epoch,
        schedule=args.sde_window_schedule, epochs_per_window=args.sde_window_epochs, stride=args.sde_window_stride,
    )  # fmt: skip
    prompt_ids = epoch_samples(
        len(inputs.prompts), args.num_prompts_per_epoch, args.num_images_per_prompt, seed=args.seed, epoch=epoch
    )
    batches = [batch_samples(batch, args.train_batch_size) for batch in own_batches]
    sampling.vae.to(device)
    scorer.to(device, inputs.rewards)
    with sharding.gathered(policy.transformer, args.gathered_rollout):
        scores = rollout.write_rollout(
            policy.predict,
            folder=folder,
            shard=rank,
            batches=batches,
            prompt_ids=prompt_ids,
            prompts=inputs.prompts,
            embeddings=sampling.embeddings,
            negative=sampling.negative,
            vae=sampling.vae,
            scorer=scorer,
            rewards=inputs.rewards,
            sizes=prompt_sizes(inputs.prompts, args.resolution, args.resolution_column, epoch=epoch),
            sigmas=rollout.schedules(facts),
            sde_window=window,
            sde_type=args.sde_type,
            noise_level=args.noise_level,
            seed_words=(args.seed, epoch),
            fields=needed_fields(args),
            show_progress=accelerator.is_local_main_process,
        )
    sampling.vae.to("cpu")
    scorer.to("cpu", inputs.rewards)

    # A prompt's group may be spread over ranks: every rank gets all rewards, by sample number.
    own_samples = [sample for batch in batches for sample in batch]
    table = torch.zeros(inputs.num_samples, len(inputs.rewards), dtype=torch.float64)
    table[own_samples] = scores
    table = sharding.reduce_to_cpu(accelerator, table)
    groups, how = torch.tensor(prompt_ids), {"aggregation": args.reward_aggregation, "global_std": args.global_std}
    rewards, advantages = combine_rewards(table, inputs.reward_weights, groups, **how)
    rollout.write_values(folder, rank, own_samples, prompt_ids, table, inputs.rewards, rewards, advantages)
    shard_facts = {"num_shards": accelerator.num_processes, "epoch": epoch, "seed": args.seed, "sde_window": window}
    write_manifest(folder, rank, shard_facts | dict(facts))
    cache = open_cache(folder, shards=[rank], verify_checksums=args.verify_cache)
    metrics = reward_metrics(table, inputs.rewards, rewards, groups)
    return cache, advantages, groups, metrics | {"time/reward_wait_s": scorer.take_seconds_waited()}


def update_policy(
    args: argparse.Namespace,
    accelerator: Accelerator,
    policy: Policy,
    cache: TrajectoryCache,
    advantages: Tensor,
    groups: Tensor,
    own_batches: Sequence[int],
    epoch: int,
    step: int,
) -> Iterator[tuple[dict[str, float], list[dict[str, Tensor]]]]:
    """All updates of an epoch, one timestep of one micro-batch after the other. advantages, groups (N,); `step`
    updates were made before.

    Yields each update's metrics and kept outputs.
    """
    size, num_updates = args.train_batch_size, args.num_updates_per_epoch
    rank, world_size = accelerator.process_index, accelerator.num_processes
    signal_of = has_signal(advantages, groups)  # a group without spread has advantages of exactly 0
    row_of = {sample: row for row, sample in enumerate(cache.sample_indices)}

    def micro_batch(batch: int) -> dict[str, Any]:
        samples = batch_samples(batch, size)
        fields = rollout.load_micro_batch(cache, [row_of[sample] for sample in samples])
        num_timesteps = fields["all_timesteps"].shape[1]
        fields["advantages"] = advantages[samples][:, None].expand(-1, num_timesteps)
        return fields | {"sample_index": samples}

    recomputed = recompute_missing(args, accelerator, policy.predict, cache.fields, own_batches, micro_batch)
    per_update = len(advantages) // (size * num_updates)
    for inner_epoch in range(args.num_inner_epochs):
        plans = [
            plan_updates(
                num_updates, per_update, rank=r, world_size=world_size, seed_words=(args.seed, 3, epoch, inner_epoch)
            )
            for r in range(world_size)
        ]
        for update in range(num_updates):
            every_rank = [plan[update] for plan in plans]
            batches, scale = every_rank[rank], None
            if args.drop_zero_std_groups:
                batches, scale = drop_constant_groups(every_rank, signal_of, size, rank)
                if not batches:
                    continue  # on every rank
            micro_batches = [micro_batch(batch) | recomputed.get(batch, {}) for batch in batches]
            if scale is not None:
                for batch, fields in zip(batches, micro_batches, strict=True):
                    weights = signal_of[batch_samples(batch, size)].float()[:, None] * scale
                    weights = weights.expand_as(fields["advantages"])
                    fields["rollout_is_weights"] = fields.get("rollout_is_weights", 1.0) * weights
            metrics, outputs = train_batch(
                args, accelerator, policy.transformer, policy.predict, policy.optimizer, policy.trainable,
                micro_batches, predict_reference=policy.predict_reference, where=f"epoch {epoch} step {step + 1}",
            )  # fmt: skip
            step += 1
            policy.lr_scheduler.step()
            if inner_epoch == update == 0 and metrics["ratio_max_dev"] > args.clip_range:
                accelerator.print(
                    f"warning: before the first update of epoch {epoch} a ratio is off 1 by "
                    f"{metrics['ratio_max_dev']:.1e}, more than --clip_range {args.clip_range}: the rollout was "
                    "another policy's or precision's"
                )
            yield metrics, outputs
            del outputs


def recompute_missing(
    args: argparse.Namespace,
    accelerator: Accelerator,
    predict: Callable[..., Tensor],
    fields: frozenset[str],
    own_batches: Sequence[int],
    micro_batch: Callable[[int], dict[str, Any]],
) -> dict[int, dict[str, Tensor]]:
    """By batch, what a cache of another program does not hold in its `fields` and a forward of the policy gives: old
    log-probs (B, W) and means (B, W, L, C)."""
    sources = {"old_log_probs": "log_probs", "old_prev_sample_mean": "prev_sample_mean"}
    missing = [name for name in needed_fields(args) if name in sources and name not in fields]
    recomputed: dict[int, dict[str, Tensor]] = {}
    if missing:
        quiet = not accelerator.is_local_main_process
        for batch in tqdm(own_batches, desc="old log-probs", leave=False, disable=quiet):
            outputs = forward_only(args, predict, micro_batch(batch), accelerator.device)
            recomputed[batch] = {name: outputs[sources[name]] for name in missing}
    return recomputed


def drop_constant_groups(
    every_rank: Sequence[Sequence[int]], signal_of: Tensor, size: int, rank: int
) -> tuple[list[int], Tensor]:
    """Of each rank's batches of one update, those of `rank` that hold a sample with signal, as many on every rank, and
    the weight of such a sample: what is dropped weighs nothing and the rest takes its place in the mean."""
    wanted = {batch: bool(signal_of[batch_samples(batch, size)].any()) for plan in every_rank for batch in plan}
    batches = fill_batches(every_rank, wanted, rank)
    members = [sample for plan in every_rank for batch in plan for sample in batch_samples(batch, size)]
    return batches, len(batches) * len(every_rank) * size / signal_of[members].sum()


@run_folder.memory_of("evaluation")
def evaluate(
    args: argparse.Namespace,
    accelerator: Accelerator,
    inputs: Inputs,
    policy: Policy,
    sampling: rollout.Sampling,
    scorer: Scorer,
    epoch: int,
) -> dict[str, float]:
    """Mean rewards, with intervals, of the current policy's ODE images of the evaluation prompts; a grid of 16 of them
    beside the base model's."""
    facts = rollout.size_facts(sampling.scheduler, args.eval_num_inference_steps, list(inputs.sizes.values()))
    sampling.vae.to(accelerator.device)
    scorer.to(accelerator.device, list(inputs.reward_names))
    with sharding.gathered(policy.transformer, args.gathered_rollout):
        scores, grid = evaluation.sample_evaluation(
            policy.predict,
            prompts=inputs.eval_prompts,
            sizes=prompt_sizes(inputs.eval_prompts, args.resolution, args.resolution_column),
            embeddings=sampling.eval_embeddings,
            negative=sampling.negative,
            vae=sampling.vae,
            scorer=scorer,
            rewards=list(inputs.reward_names),
            sigmas=rollout.schedules(facts),
            batch_size=args.train_batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            seed=args.seed,
        )
    sampling.vae.to("cpu")
    scorer.to("cpu", list(inputs.reward_names))
    scores, grid = sharding.reduce_to_cpu(accelerator, scores), sharding.reduce_to_cpu(accelerator, grid)
    if accelerator.is_main_process:
        grids = Path(args.output_dir) / "grids"
        base = grids / "epoch-00000.png" if epoch else None
        title = f"epoch {epoch}" if epoch else "base model"
        evaluation.save_grid(grid, grids / f"epoch-{epoch:05d}.png", title=title, base=base)
    return evaluation.evaluation_metrics(scores, list(inputs.reward_names))


# ----- Main --------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    """Train; the sections of an epoch are the docstring's."""
    output_dir, world_size = Path(args.output_dir), int(os.environ.get("WORLD_SIZE", "1"))
    inputs = check_run(args, world_size)
    accelerator = sharding.make_accelerator(
        report_to=args.report_to,
        logging_dir=output_dir / "logs",
        checkpoints_blocks=args.gradient_checkpointing,
        autocast=not args.use_lora,
        timeout=args.ddp_timeout,
    )
    rank, device = accelerator.process_index, accelerator.device
    if accelerator.is_main_process:
        if inputs.state is None:
            run_folder.create_run_folder(output_dir, vars(args))
        else:
            changes = run_folder.note_resume(output_dir, vars(args), inputs.state["epoch"])
            print("resuming from", inputs.checkpoint, *changes, sep="\n    ")
    accelerator.wait_for_everyone()
    output_dir.mkdir(parents=True, exist_ok=True)  # by every rank: it may be on each node's own disk
    if args.report_to != "none":
        options = {name: str(value) for name, value in vars(args).items()}
        named = {"wandb": {"name": output_dir.name, "dir": str(output_dir)}, "trackio": {"name": output_dir.name}}
        accelerator.init_trackers("flowgrpo", config=options, init_kwargs=named)

    # N samples of an epoch in U x K batches of B, of which a rank owns every world_size-th column: see prompts.py.
    num_epochs = args.num_train_epochs if inputs.cache is None else 1
    per_update = inputs.num_samples // (args.train_batch_size * args.num_updates_per_epoch)
    own_batches = rank_batches(args.num_updates_per_epoch, per_update, rank=rank, world_size=world_size)
    first_epoch = inputs.state["epoch"] if inputs.state else 0
    texts = {}
    if inputs.cache is None:
        sizes = len(inputs.prompts), args.num_prompts_per_epoch, args.num_images_per_prompt
        own_samples = [sample for batch in own_batches for sample in batch_samples(batch, args.train_batch_size)]
        for epoch in range(first_epoch, num_epochs):
            prompt_ids = epoch_samples(*sizes, seed=args.seed, epoch=epoch)
            texts |= {prompt_ids[sample]: inputs.prompts[prompt_ids[sample]]["prompt"] for sample in own_samples}

    # Models: of the text encoder only the embeddings stay. Reward workers start meanwhile.
    scorer = Scorer(
        inputs.reward_names if inputs.cache is None else {},
        num_workers=args.reward_workers if inputs.cache is None else 0,
        timeout=args.reward_timeout,
    )
    dtype = sharding.compute_dtype(accelerator)
    transformer, sampling = rollout.load_models(
        inputs.model_folder,
        dtype=dtype if args.use_lora else torch.float32,  # weights that train are fp32, and cast where they compute
        encode_dtype=dtype,
        output_dir=output_dir,
        rank=rank,
        device=device,
        texts=dict(sorted(texts.items())),
        eval_texts={index: row["prompt"] for index, row in enumerate(inputs.eval_prompts)},
        negative_prompt=args.negative_prompt if args.true_cfg_scale > 1 else None,
        max_sequence_length=args.max_sequence_length,
    )
    facts = cache_facts(args, sampling.scheduler, inputs.model_folder, list(inputs.sizes.values()))
    policy = make_policy(
        args,
        accelerator,
        transformer,
        num_epochs * args.num_inner_epochs * args.num_updates_per_epoch,
        inputs.sizes,
    )
    export_config = transformer.peft_config["default"] if args.use_lora else transformer.config
    num_timesteps = trained_timesteps(args)
    cached = rollout.load_micro_batch(inputs.cache, [0]) if inputs.cache is not None else {}
    if cached:
        num_timesteps = validate_batch(cached, CACHED_FIELDS)
    sizes = {"num_timesteps": num_timesteps, "num_samples": inputs.num_samples, "tokens": max(inputs.sizes)}
    planned = planned_bytes(args, **sizes, num_shards=world_size, cached=cached)
    if device.type == "cuda" and args.use_lora and accelerator.distributed_type != DistributedType.FSDP:
        tokens = max(inputs.sizes) + rollout.longest_prompt(sampling, inputs.cache)
        planned["peak"] = memory_plan.update_peak(
            vars(args), transformer, planned, num_timesteps=num_timesteps, tokens=tokens
        )
    census = qwen_image.parameter_census(policy.transformer)
    print_banner(args, accelerator, inputs, census, num_timesteps, planned)
    trained = policy.transformer, policy.optimizer, policy.lr_scheduler
    adapters = ADAPTERS if args.use_lora else ()
    global_step = saved_step = inputs.state["global_step"] if inputs.state else 0
    if inputs.state is not None:
        sharding.load_checkpoint(
            accelerator,
            *trained,
            folder=inputs.checkpoint,
            state=inputs.state,
            adapters=adapters,
            output_dir=output_dir,
        )
    stop_requests = run_folder.stop_on_interrupt()

    def log(epoch: int, metrics: Mapping[str, float]) -> None:
        if accelerator.is_main_process:
            run_folder.append_metrics(output_dir, {"epoch": epoch, "step": global_step, **metrics})
        if args.report_to != "none":
            accelerator.log({"epoch": epoch, **metrics}, step=global_step)

    if inputs.eval_prompts and inputs.state is None:
        log(0, evaluate(args, accelerator, inputs, policy, sampling, scorer, 0))
    epochs, stopping = range(first_epoch, num_epochs), False
    quiet = not accelerator.is_local_main_process
    progress = tqdm(epochs, desc="epochs", initial=first_epoch, total=num_epochs, disable=quiet)
    for epoch in progress:
        # ----- 1. and 2. Rollout and rewards.
        started, metrics = time.perf_counter(), {}
        run_folder.peak_memory("before")  # what evaluation and loading took is not the rollout's
        if inputs.cache is None:
            cache, advantages, groups, metrics = roll_out(
                args, accelerator, inputs, policy, sampling, scorer, facts, own_batches, epoch
            )
            progress.set_postfix(reward=f"{metrics['rollout/reward_mean']:.4g}")
        else:
            cache, (rewards, groups) = inputs.cache, read_rewards(inputs.cache)
            advantages = group_advantages(rewards, groups, global_std=args.global_std)
        metrics |= {"time/rollout_s": time.perf_counter() - started, **run_folder.peak_memory("rollout")}

        # ----- 3. Update.
        started = time.perf_counter()
        with run_folder.memory_of("update", f"planned: {memory_plan.describe(planned)}; "):
            for update_metrics, outputs in update_policy(
                args, accelerator, policy, cache, advantages, groups, own_batches, epoch, global_step
            ):
                global_step += 1
                update_metrics["learning_rate"] = policy.lr_scheduler.get_last_lr()[0]
                log(epoch, {f"train/{name}": value for name, value in update_metrics.items()})
                if outputs:
                    run_folder.write_outputs(output_dir / "outputs", global_step, rank, outputs)
                del outputs  # a step's outputs must not live on through the next one
        metrics |= {"time/update_s": time.perf_counter() - started, **run_folder.peak_memory("update")}
        if args.compile_blocks:
            metrics["time/compile_s"] = qwen_image.seconds_compiled()

        # ----- 4. Log, evaluate, tidy up, checkpoint.
        log(epoch, metrics)
        if accelerator.is_local_main_process:
            run_folder.delete_trajectories(output_dir, stop=epoch + 1 - args.keep_trajectories)
        last = epoch + 1 == num_epochs
        if inputs.eval_prompts and ((epoch + 1) % args.eval_epochs == 0 or last):
            log(epoch + 1, evaluate(args, accelerator, inputs, policy, sampling, scorer, epoch + 1))
        stop = run_folder.stop_requested(output_dir, stop_requests)
        stopping = sharding.reduce_to_cpu(accelerator, torch.tensor(int(stop))).item() > 0
        if args.checkpointing_steps:
            passed = global_step // args.checkpointing_steps > saved_step // args.checkpointing_steps
            if passed or stopping or last:
                sharding.save_checkpoint(
                    accelerator,
                    *trained,
                    output_dir=output_dir,
                    epoch=epoch + 1,
                    counters={"global_step": global_step, **checkpoint_identity(args)},
                    adapters=adapters,
                    total_limit=args.checkpoints_total_limit,
                )
                saved_step = global_step
        if stopping:
            break

    scorer.close()

    # ----- The trained policy, ready for inference.
    if args.use_lora:
        state_dict = sharding.gather_adapter(accelerator, policy.transformer)
        if accelerator.is_main_process:
            qwen_image.export_lora(output_dir, state_dict, export_config)
            run_folder.write_model_card(output_dir, "FlowGRPO", vars(args))
    else:
        sharding.save_full_weights(accelerator, policy.transformer, export_config, output_dir / "transformer")
    (output_dir / "STOP").unlink(missing_ok=True)
    if stopping:
        way = ": --resume_from_checkpoint latest goes on" if args.checkpointing_steps else ", without a checkpoint"
        accelerator.print(f"stopped after {epoch + 1} of {num_epochs} epochs{way}")
    grids = " and grids" if inputs.eval_prompts else ""
    accelerator.print(f"{'adapter' if args.use_lora else 'transformer'}, metrics.jsonl{grids} are in {output_dir}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(run_folder.run_script(lambda: main(parse_args())))
