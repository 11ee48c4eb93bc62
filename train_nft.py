"""DiffusionNFT for Qwen-Image (arXiv 2509.16117): reinforcement learning on the forward process, no log-probs.

Every epoch: (1) sample a group of images for each prompt with the OLD policy and an ODE solver, keep only the images'
latents; (2) reward the images, advantage = reward against its group, reward_prob = its place in [0, 1]; (3) noise the
latents to several timesteps and move the policy towards the old one's implicit positive and away from its negative;
let the old policy follow; (4) log, evaluate.

    accelerate launch train_nft.py --enable_timestep_staging
    accelerate launch --config_file accelerate_configs/ddp.yaml train_nft.py --enable_timestep_staging \
        --pretrained_model_name_or_path Qwen/Qwen-Image --prompts train.txt --reward_funcs my_reward.py:score

How it differs from the official code: only x0 is cached, on the CPU, and only the current timestep is on the device;
no reference forward at --ref_kl_coef 0 and no old forward while old and current are the same weights; noise depends on
(seed, epoch, sample, step), not on the number of GPUs; full weights can be trained.

Shapes: B samples of a micro-batch, T trained timesteps of a sample, K timesteps of one forward, L image tokens,
C latent channels, S text tokens, D embedding width.
"""

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
    load_prompts,
    parse_size,
    plan_updates,
    prompt_sizes,
    rank_batches,
    size_name,
)
from qwen_image import ATTENTION_BACKENDS, COMPILE_MODES, LORA_TARGETS, predict_sized, seeded_noise
from rewards import (
    AGGREGATIONS,
    check_reward_prompts,
    check_rewards,
    combine_rewards,
    group_advantages,
    reward_metrics,
)
from scorer import Scorer
from staging import (
    CONDITIONS,
    NFT_FIELDS,
    StepFields,
    check_supported,
    field_ndim,
    iterate_timesteps,
    join_timesteps,
    nft_fields,
    step_input_bytes,
    validate_batch,
)
from trajectory_cache import TrajectoryCache, open_cache, read_rewards, table_bytes, write_manifest

HERE = Path(__file__).resolve().parent
TIMESTEP_KINDS = ("rollout", "uniform", "logit_normal")
NOISE_LAYOUTS = ("on_demand", "per_step", "shared")
ADV_MODES = ("all", "positive_only", "negative_only", "one_only", "binary")
OLD_POLICY_DECAYS = {  # flat, rate, cap: old <- d old + (1-d) current, d = 0 before `flat` steps, then rising to `cap`
    "copy": (0, 0.0, 0.0),
    "linear_to_0_5": (0, 0.001, 0.5),
    "delayed_linear_to_0_999": (75, 0.0075, 0.999),
}
ADAPTERS = ("default", "old")  # of a checkpoint
STATE_KINDS: dict[str, type] = {"old_is_current": bool}  # what its state.json holds besides both scripts' counters
LORA_DTYPES = ("float32", "bfloat16")
LR_SCHEDULERS = [s.value for s in SchedulerType if s != SchedulerType.PIECEWISE_CONSTANT]  # it needs rules
TRACKERS = ("tensorboard", "wandb", "trackio")
ROLLOUT_FIELDS = ("latents_clean",)
CACHED_FIELDS = StepFields(shared=(*CONDITIONS, "latents_clean"), per_step={}, optional=NFT_FIELDS.optional)
# First words of the streams of random numbers of an update; rollout.py's begin with the run's seed alone.
TIMESTEP_STREAM, NOISE_STREAM = 5, 6

# What differs for the demo model, which is 60,000 times smaller than Qwen-Image and is sampled at 64 px.
DEMO_DEFAULTS = {
    "prompts": str(HERE / "assets/demo_prompts.txt"),
    "eval_prompts": str(HERE / "assets/demo_eval_prompts.txt"),
    "reward_funcs": ["glyph_match"],
    "eval_reward_funcs": ["glyph_accuracy", "jpeg_incompressibility"],
    "resolution": [(64, 64)],
    "true_cfg_scale": 1.0,
    "num_prompts_per_epoch": 8,
    "train_batch_size": 16,
    "num_updates_per_epoch": 1,
    "num_train_epochs": 20,
    "nft_beta": 1.0,
    "ref_kl_coef": 0.0,
    "old_policy_decay": "linear_to_0_5",
    "old_policy_update_interval": 1,
    "rank": 16,
    "lora_alpha": 32,
    "learning_rate": 1e-3,
    "eval_num_inference_steps": 10,
    "gradient_checkpointing": False,
}


# ----- Options -----------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The defaults are verl-omni's recipe for Qwen-Image; without a model's name, DEMO_DEFAULTS come on top."""
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
    add("--rollout_solver", choices=rollout.SOLVERS, default="euler", help="ODE solver; unipc is of second order")
    add("--true_cfg_scale", type=float, default=1.0, help="true CFG in rollout and update; 1 switches it off")
    add("--cfg_batched", action=flag, default=True, help="both CFG predictions in one forward of twice the batch")
    add("--num_prompts_per_epoch", type=int, default=24, help="prompts per epoch, over all processes")
    add("--num_images_per_prompt", type=int, default=16, help="images of a prompt, the group of its advantages")

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
    add("--global_std", action=flag, default=True, help="divide by the std of the whole epoch, not of each group")

    add = parser.add_argument_group("algorithm").add_argument
    add("--nft_beta", type=float, default=0.1, help="how far positive and negative lie from the old policy")
    add("--ref_kl_coef", type=float, default=1e-4, help="weight of the pull to the base model; 0 runs no such forward")
    add("--adv_mode", choices=ADV_MODES, default="all", help="which advantages count, and how")
    add("--old_policy_decay", default="delayed_linear_to_0_999", help="copy, linear_to_0_5, ... or flat:rate:cap")
    add("--old_policy_update_interval", type=int, default=2, help="epochs between updates of the old policy")
    add("--train_timesteps", choices=TIMESTEP_KINDS, default="rollout", help="the rollout's, permuted, or drawn")
    add("--timestep_fraction", type=float, default=1.0, help="share of num_inference_steps that are trained")
    add("--forward_noise", choices=NOISE_LAYOUTS, default="on_demand", help="drawn when needed, or stored on the CPU")
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
    add("--export_old_policy", action="store_true", help="export the old policy too, to old_policy/")
    add("--output_dir", default="runs/nft", help="run folder: adapter, metrics.jsonl, grids, caches, code")
    add("--ddp_timeout", type=int, default=1800, help="seconds a process waits for the others, then it ends")
    add("--seed", type=int, default=0, help="of weights, prompts, noise and order")

    if parser.parse_known_args(argv)[0].pretrained_model_name_or_path is None:
        parser.set_defaults(**DEMO_DEFAULTS)
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Refuse what DiffusionNFT's own options show to be wrong."""
    if args.nft_beta <= 0:
        raise ValueError(f"--nft_beta is {args.nft_beta}: the loss divides by it, give above 0")
    if args.old_policy_update_interval <= 0:
        raise ValueError(f"--old_policy_update_interval is {args.old_policy_update_interval}: it must be above 0")
    if not 0 < args.timestep_fraction <= 1:
        raise ValueError(
            f"--timestep_fraction {args.timestep_fraction}: give a share of the steps above 0 and up to 1"
        )
    if args.ref_kl_coef < 0:
        raise ValueError(f"--ref_kl_coef is {args.ref_kl_coef}: it must not be negative")
    if args.ref_kl_coef and not args.use_lora:
        raise ValueError(
            f"--ref_kl_coef {args.ref_kl_coef} with --no-use_lora: the reference is the model with its adapter off, "
            "so it needs LoRA; use --use_lora or --ref_kl_coef 0"
        )
    if not args.use_lora and args.export_old_policy:
        raise ValueError("--export_old_policy exports an adapter: use it with --use_lora")
    if not args.use_lora and option_checks.launched_fsdp_version() == 1:
        raise ValueError(
            "--no-use_lora under FSDP version 1: it would not see the old policy's new weights; launch with "
            "accelerate_configs/fsdp2.yaml"
        )
    parse_old_policy_decay(args.old_policy_decay)


class Predictors(NamedTuple):
    """Velocities (latents, timesteps, **conditions) -> (B, L, C) of the three policies."""

    current: Callable[..., Tensor]
    old: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # the base model


# ----- The loss ----------------------------------------------------------------------------------------------------


def reward_probability(advantages: Tensor, *, adv_mode: str, adv_clip_max: float) -> Tensor:
    """Advantages (N,) to the probability (N,) in [0, 1] of being a positive sample (DiffusionNFT eq. 6)."""
    if adv_mode == "positive_only":
        advantages = advantages.clamp(0, adv_clip_max)
    elif adv_mode == "negative_only":
        advantages = advantages.clamp(-adv_clip_max, 0)
    elif adv_mode == "one_only":
        advantages = (advantages > 0).float()
    elif adv_mode == "binary":
        advantages = advantages.sign()
    return (advantages.clamp(-adv_clip_max, adv_clip_max) / adv_clip_max / 2 + 0.5).clamp(0, 1)


def nft_loss(
    forward_prediction: Tensor,
    old_prediction: Tensor,
    x0: Tensor,
    xt: Tensor,
    t: Tensor,
    reward_prob: Tensor,
    *,
    nft_beta: float,
    adv_clip_max: float,
) -> Tensor:
    """Loss of each sample (N,) on x0, with adaptive weights (DiffusionNFT eq. 5 and appendix).

    Velocities, x0 and xt (N, L, C), t (N, 1, 1) in [0, 1], reward_prob (N,). The positive policy lies nft_beta of the
    way from the old one to the current, the implicit negative as far on the other side.
    """
    target = xt - x0

    def weighted_error(weight: float) -> Tensor:
        velocity = torch.lerp(old_prediction, forward_prediction, weight)
        error = torch.addcmul(target, t, velocity, value=-1)  # what the predicted x0 lacks
        with torch.no_grad():
            scale = error.abs().mean(dim=(1, 2), dtype=torch.float64).clamp_min(1e-5)
        return (error**2).mean(dim=(1, 2)) / scale

    losses = reward_prob * weighted_error(nft_beta) + (1 - reward_prob) * weighted_error(-nft_beta)
    return losses * adv_clip_max / nft_beta


def parse_old_policy_decay(name: str) -> tuple[int, float, float]:
    """flat, rate and cap of a named schedule or of `flat:rate:cap`. Raises ValueError."""
    if name in OLD_POLICY_DECAYS:
        return OLD_POLICY_DECAYS[name]
    try:
        flat, rate, cap = name.split(":")
        decay = int(flat), float(rate), float(cap)
    except ValueError as error:
        names = ", ".join(OLD_POLICY_DECAYS)
        raise ValueError(f"--old_policy_decay {name!r}: choose from {names}, or write flat:rate:cap") from error
    if decay[0] < 0 or decay[1] < 0 or not 0 <= decay[2] < 1:
        raise ValueError(f"--old_policy_decay {name!r}: flat and rate must not be negative, cap lie in [0, 1)")
    return decay


def old_policy_decay(decay: tuple[int, float, float], num_steps: int) -> float:
    """The d of old <- d old + (1 - d) current after so many optimizer steps."""
    flat, rate, cap = decay
    return 0.0 if num_steps < flat else min((num_steps - flat) * rate, cap)


# ----- One update --------------------------------------------------------------------------------------------------


def draw_train_timesteps(
    args: argparse.Namespace, sigmas: Tensor, samples: Sequence[int], seed_words: Sequence[int]
) -> Tensor:
    """The trained timesteps (B, T) of some samples, in [0, 1000]; each sample draws from its own stream."""
    num_steps = len(sigmas) - 1
    count = max(1, int(num_steps * args.timestep_fraction))
    rows = []
    for sample in samples:
        generator = np.random.default_rng((TIMESTEP_STREAM, *seed_words, sample))
        if args.train_timesteps == "rollout":
            rows.append(sigmas[generator.permutation(num_steps)[:count]] * 1000)
        elif args.train_timesteps == "uniform":
            rows.append(torch.from_numpy(generator.uniform(0, 1000, count)).float())
        else:
            rows.append(torch.from_numpy(1000 / (1 + np.exp(-generator.standard_normal(count)))).float())
    return torch.stack(rows)


def stored_noise(
    layout: str, samples: Sequence[int], seed_words: Sequence[int], shape: tuple[int, int, int]
) -> list[Tensor]:
    """forward_noise of some samples on the CPU, from the streams of add_noise: `shape` (T, L, C) each with the layout
    "per_step", with "shared" the first step's (L, C)."""
    count = shape[0] if layout == "per_step" else 1
    noise = [[seeded_noise((NOISE_STREAM, *seed_words, s, k), shape[1:]) for k in range(count)] for s in samples]
    return [torch.stack(rows) if layout == "per_step" else rows[0] for rows in noise]


def forward_timesteps(
    predictors: Predictors, step: Mapping[str, Tensor], *, old_is_current: bool, with_reference: bool
) -> dict[str, Tensor]:
    """Outputs at the K timesteps of a step, all (B, K, ...): forward_prediction, old_prediction, x0, xt (L, C),
    t_expanded (1, 1) and, with_reference, ref_forward_prediction. Only the first has a graph."""
    timesteps = step["train_timesteps"]  # (B, K)
    num_timesteps = timesteps.shape[1]
    conditions = {name: step[name] for name in CONDITIONS if name in step}
    x0, noise = step["latents_clean"], step["forward_noise"]
    if num_timesteps > 1:
        conditions = {name: tensor.repeat_interleave(num_timesteps, dim=0) for name, tensor in conditions.items()}
        x0 = x0.repeat_interleave(num_timesteps, dim=0)
        if noise.ndim == 3:
            noise = noise.repeat_interleave(num_timesteps, dim=0)
    if noise.ndim == 4:
        noise = noise.flatten(0, 1)
    t = (timesteps.flatten() / 1000).view(-1, 1, 1)
    xt = (1 - t) * x0 + t * noise  # (B*K, L, C) fp32
    inputs = (xt, timesteps.flatten())
    outputs = {"x0": x0, "xt": xt, "t_expanded": t}
    with torch.no_grad():
        if with_reference:
            outputs["ref_forward_prediction"] = predictors.reference(*inputs, **conditions)
        if not old_is_current:
            outputs["old_prediction"] = predictors.old(*inputs, **conditions)
    outputs["forward_prediction"] = predictors.current(*inputs, **conditions)
    if old_is_current:  # the same weights give the same velocity
        outputs["old_prediction"] = outputs["forward_prediction"].detach()
    return {name: tensor.unflatten(0, (-1, num_timesteps)) for name, tensor in outputs.items()}


@torch.no_grad()
def forward_only(
    args: argparse.Namespace, predictors: Predictors, batch: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """All outputs (B, T, ...) of one micro-batch, on the CPU, whatever the options; never staged."""
    outputs, done, batch = [], 0, qwen_image.drop_full_masks(batch)
    with closing(iterate_timesteps(batch, nft_fields(batch), device, staged=False)) as steps:
        for step in steps:
            add_noise(step, batch, done)
            output = forward_timesteps(predictors, step, old_is_current=False, with_reference=args.ref_kl_coef > 0)
            outputs.append({name: tensor.cpu() for name, tensor in output.items()})
            done += 1
    return join_timesteps(outputs)


def add_noise(step: dict[str, Tensor], batch: Mapping[str, Any], first: int) -> None:
    """Where the micro-batch stores no forward_noise, draw the step's (B, K, L, C) on the device from its streams:
    batch["noise_words"] are (seed, epoch, inner epoch), batch["sample_index"] the samples, `first` the first step."""
    if "forward_noise" in step:
        return
    x0, count = step["latents_clean"], step["train_timesteps"].shape[1]
    rows = [
        [
            seeded_noise((NOISE_STREAM, *batch["noise_words"], sample, first + k), x0.shape[1:], x0.device)
            for k in range(count)
        ]
        for sample in batch["sample_index"]
    ]
    step["forward_noise"] = torch.stack([torch.stack(row) for row in rows])


def train_timesteps(
    args: argparse.Namespace,
    accelerator: Accelerator,
    predictors: Predictors,
    step: Mapping[str, Tensor],
    weight: float,
    *,
    old_is_current: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward, loss and backward of one step; returns detached numbers for the metrics and the detached outputs.

    A function of its own, so that nothing of a step is alive when the next one is staged.
    """
    with_reference = args.ref_kl_coef > 0
    outputs = forward_timesteps(predictors, step, old_is_current=old_is_current, with_reference=with_reference)
    kept = {name: tensor.detach() for name, tensor in outputs.items()} if args.return_model_output else {}
    flat = {name: outputs.pop(name).flatten(0, 1) for name in list(outputs)}
    prediction, old = flat.pop("forward_prediction"), flat.pop("old_prediction")
    records = {"old_deviate": ((prediction.detach() - old) ** 2).mean(dim=(1, 2))}
    if with_reference:
        records["kl_loss"] = ((prediction - flat.pop("ref_forward_prediction")) ** 2).mean(dim=(1, 2))
    records["policy_loss"] = nft_loss(
        prediction,
        old,
        flat["x0"],
        flat["xt"],
        flat["t_expanded"],
        step["reward_prob"].flatten(),
        nft_beta=args.nft_beta,
        adv_clip_max=args.adv_clip_max,
    )
    loss = records["policy_loss"].mean()
    if with_reference:
        loss = loss + args.ref_kl_coef * records["kl_loss"].mean()
    del flat, prediction, old  # what the backward needs it has
    accelerator.backward(loss * weight)
    num_timesteps = step["train_timesteps"].shape[1]
    return {name: tensor.detach().view(-1, num_timesteps) for name, tensor in records.items()}, kept


def train_batch(
    args: argparse.Namespace,
    accelerator: Accelerator,
    transformer: nn.Module,
    predictors: Predictors,
    optimizer: torch.optim.Optimizer,
    trainable: Sequence[nn.Parameter],
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    old_is_current: bool = False,
    where: str = "this update",
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """One optimizer step over this rank's micro-batches, of which every rank must have the same number.

    A micro-batch without forward_noise needs sample_index and noise_words: see add_noise. With old_is_current the old
    policy's forward is not run. Numbers that go wrong raise RuntimeError with `where` and the sample, or with
    skip_nonfinite leave the weights alone. Returns metrics over all ranks and, with --return_model_output, each
    micro-batch's outputs (B, T, ...).
    """
    lengths = [validate_batch(batch, nft_fields(batch)) for batch in micro_batches]  # all, before the first forward
    records, kept, unsynchronised = [], [], ExitStack()
    try:
        if args.use_lora:  # full weights: their unsharded gradients would not fit, so every backward reduces them
            unsynchronised.enter_context(accelerator.no_sync(transformer))
        for number, (batch, length) in enumerate(zip(micro_batches, lengths, strict=True)):
            results, done = [], 0
            steps = iterate_timesteps(
                qwen_image.drop_full_masks(batch),
                nft_fields(batch),
                accelerator.device,
                staged=args.enable_timestep_staging,
                chunk=args.timesteps_per_forward,
                prefetch=args.staging_prefetch,
            )
            with closing(steps):
                for step in steps:
                    num_timesteps = step["train_timesteps"].shape[1]
                    add_noise(step, batch, done)
                    done += num_timesteps
                    if number == len(micro_batches) - 1 and done == length:
                        unsynchronised.close()
                    weight = num_timesteps / (len(micro_batches) * length)
                    results.append(
                        train_timesteps(args, accelerator, predictors, step, weight, old_is_current=old_is_current)
                    )
            records.append(join_timesteps([record for record, _ in results]))
            kept.append(join_timesteps([outputs for _, outputs in results]))
            results.clear()
        grad_norm = sharding.clip_gradients(accelerator, transformer, trainable, args.max_grad_norm)
        limits = dict.fromkeys(("policy_loss", "kl_loss", "grad_norm"), args.divergence_limit)
        fault = sharding.find_fault(accelerator, records, micro_batches, grad_norm, limits)
        metrics = update_metrics(accelerator, records, grad_norm)
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
    accelerator: Accelerator, records: Sequence[Mapping[str, Tensor]], grad_norm: Tensor
) -> dict[str, float]:
    """Means over all samples, timesteps and ranks, after the last backward: the host waits for the device here."""
    means = [torch.cat([record[name].flatten() for record in records]).double().mean() for name in records[0]]
    values = accelerator.reduce(torch.stack(means), "mean").tolist()
    metrics = dict(zip(records[0], values, strict=True)) | {"grad_norm": grad_norm.item()}
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
    return {"script": "train_nft.py"} | {name: getattr(args, name) for name in names}


def cache_facts(
    args: argparse.Namespace, scheduler: FlowMatchEulerDiscreteScheduler, model_folder: Path, sizes: Sequence[Size]
) -> dict[str, Any]:
    """What a cache's manifest says of its rollout, and a run that trains from it must share."""
    facts = {"model": qwen_image.transformer_fingerprint(model_folder)}
    facts |= rollout.size_facts(scheduler, args.num_inference_steps, sizes)
    return facts | {"true_cfg_scale": args.true_cfg_scale}


def trained_timesteps(args: argparse.Namespace) -> int:
    """How many timesteps of each sample are trained."""
    return max(1, int(args.num_inference_steps * args.timestep_fraction))


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
    shapes = dict.fromkeys(("train_timesteps", "reward_prob"), (size, num_timesteps))
    if args.forward_noise == "per_step" and "forward_noise" not in cached:
        shapes["forward_noise"] = (size, num_timesteps, tokens, 64)
    batch = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if "forward_noise" in cached and field_ndim(cached["forward_noise"]) == 4:
        dtype = cached["forward_noise"][0].dtype
        batch["forward_noise"] = torch.empty(size, num_timesteps, tokens, 64, dtype=dtype, device="meta")
    row = {"sample_index": 0, "prompt_id": 0, "latents_clean": torch.empty(tokens, 64)}
    how = {"chunk": args.timesteps_per_forward, "prefetch": args.staging_prefetch}
    return {
        "staged": step_input_bytes(batch, nft_fields(batch), staged=True, **how),
        "not staged": step_input_bytes(batch, nft_fields(batch), staged=False),
        "outputs": per_update * size * num_timesteps * ((4 + (args.ref_kl_coef > 0)) * tokens * 64 + 1) * 4,
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
        f"***** DiffusionNFT *****\n"
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


# ----- The policy and the phases of an epoch -----------------------------------------------------------------------


class Policy(NamedTuple):
    """The prepared model and what trains it."""

    transformer: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    trainable: list[nn.Parameter]
    predictors: Predictors
    old: list[Tensor]  # the old policy's parameters, in the order of
    current: list[nn.Parameter]  # the trained ones they follow
    old_transformer: nn.Module | None  # of full-weight runs


@run_folder.memory_of("loading")
def make_policy(
    args: argparse.Namespace,
    accelerator: Accelerator,
    transformer: nn.Module,
    num_steps: int,
    sizes: Mapping[int, Size],
) -> Policy:
    """Adapters or full weights of the current and the old policy, optimizer and schedule of `num_steps` optimizer
    steps, prepared by accelerate."""
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
        qwen_image.add_old_adapter(transformer, dtype=dtype)
        old_transformer = None
    else:
        old_transformer = copy.deepcopy(transformer)
        qwen_image.train_all_used(transformer)
    if args.gradient_checkpointing:
        qwen_image.checkpoint_blocks(transformer, args.checkpointed_blocks)
    models = [transformer] if args.use_lora else [transformer, old_transformer]
    for model in models:
        if args.attention_backend is not None:
            model.set_attention_backend(args.attention_backend)
        if args.compile_blocks:
            qwen_image.compile_blocks(
                model, mode=args.compile_mode, dynamic=args.compile_dynamic, fullgraph=args.compile_fullgraph
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
    if args.use_lora:
        current, old = (
            list(qwen_image.adapter_state_dict(transformer.named_parameters(), name).values())
            for name in ("default", "old")
        )
        predictors = adapter_predictors(predict, qwen_image.lora_layers(transformer))
    else:
        old_transformer = sharding.prepare_frozen(accelerator, old_transformer)
        parameters = zip(transformer.parameters(), old_transformer.parameters(), strict=True)
        current, old = zip(*[pair for pair in parameters if pair[0].requires_grad], strict=True)
        predictors = Predictors(predict, partial(predict_sized, old_transformer, **predict.keywords), predict)
    return Policy(
        transformer, optimizer, lr_scheduler, trainable, predictors, list(old), list(current), old_transformer
    )


def adapter_predictors(predict: Callable[..., Tensor], layers: Sequence[nn.Module]) -> Predictors:
    """The three policies of one transformer, by which of its LoRA layers' adapters is on: default, old or none."""

    def predict_old(*tensors: Tensor, **conditions: Tensor) -> Tensor:
        with qwen_image.adapter_active(layers, "old"):
            return predict(*tensors, **conditions)

    def predict_reference(*tensors: Tensor, **conditions: Tensor) -> Tensor:
        with qwen_image.adapters_off(layers):
            return predict(*tensors, **conditions)

    return Predictors(predict, predict_old, predict_reference)


@torch.no_grad()
def follow(old: Sequence[Tensor], current: Sequence[Tensor], decay: float) -> None:
    """old <- decay old + (1 - decay) current, in place, each rank its own part."""
    for old_parameter, parameter in zip(old, current, strict=True):
        old_parameter.lerp_(parameter.to(old_parameter.dtype), 1 - decay)


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
) -> tuple[TrajectoryCache, Tensor, dict[str, float]]:
    """Every rank samples its own batches with the old policy and writes its own shard. facts: of cache_facts.

    Returns this rank's cache, the advantages (N,) of all ranks' samples, and metrics.
    """
    rank, device = accelerator.process_index, accelerator.device
    folder = run_folder.trajectory_folder(Path(args.output_dir), epoch)
    prompt_ids = epoch_samples(
        len(inputs.prompts), args.num_prompts_per_epoch, args.num_images_per_prompt, seed=args.seed, epoch=epoch
    )
    batches = [batch_samples(batch, args.train_batch_size) for batch in own_batches]
    sampling.vae.to(device)
    scorer.to(device, inputs.rewards)
    with sharding.gathered(policy.old_transformer or policy.transformer, args.gathered_rollout):
        scores = rollout.write_rollout(
            policy.predictors.old,
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
            seed_words=(args.seed, epoch),
            fields=ROLLOUT_FIELDS,
            solver=args.rollout_solver,
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
    shard_facts = {"num_shards": accelerator.num_processes, "epoch": epoch, "seed": args.seed}
    write_manifest(folder, rank, shard_facts | dict(facts))
    cache = open_cache(folder, shards=[rank], verify_checksums=args.verify_cache)
    metrics = reward_metrics(table, inputs.rewards, rewards, groups)
    return cache, advantages, metrics | {"time/reward_wait_s": scorer.take_seconds_waited()}


def update_policy(
    args: argparse.Namespace,
    accelerator: Accelerator,
    policy: Policy,
    schedules: Mapping[int, Tensor],
    cache: TrajectoryCache,
    advantages: Tensor,
    own_batches: Sequence[int],
    epoch: int,
    step: int,
    *,
    old_is_current: bool,
) -> Iterator[tuple[dict[str, float], list[dict[str, Tensor]]]]:
    """All updates of an epoch, one timestep of one micro-batch after the other. advantages (N,);
    schedules: sigmas (N+1,) by a size's number of tokens; `step` updates were made before.

    Yields each update's metrics and kept outputs.
    """
    size, num_updates = args.train_batch_size, args.num_updates_per_epoch
    rank, world_size = accelerator.process_index, accelerator.num_processes
    probabilities = reward_probability(advantages, adv_mode=args.adv_mode, adv_clip_max=args.adv_clip_max)
    row_of = {sample: row for row, sample in enumerate(cache.sample_indices)}

    def micro_batch(batch: int, inner_epoch: int) -> dict[str, Any]:
        samples, words = batch_samples(batch, size), (args.seed, epoch, inner_epoch)
        fields = rollout.load_micro_batch(cache, [row_of[sample] for sample in samples])
        sigmas = schedules[fields["latents_clean"][0].shape[0]]  # a batch has one size
        timesteps = draw_train_timesteps(args, sigmas, samples, words)
        fields |= {"train_timesteps": timesteps, "sample_index": samples, "noise_words": words}
        fields["reward_prob"] = probabilities[samples][:, None].expand_as(timesteps)
        if args.forward_noise != "on_demand" and "forward_noise" not in fields:
            shape = timesteps.shape[1], *fields["latents_clean"][0].shape
            fields["forward_noise"] = stored_noise(args.forward_noise, samples, words, shape)
        return fields

    per_update = len(advantages) // (size * num_updates)
    for inner_epoch in range(args.num_inner_epochs):
        seed_words = (args.seed, 3, epoch, inner_epoch)
        plan = plan_updates(num_updates, per_update, rank=rank, world_size=world_size, seed_words=seed_words)
        for batches in plan:
            metrics, outputs = train_batch(
                args,
                accelerator,
                policy.transformer,
                policy.predictors,
                policy.optimizer,
                policy.trainable,
                [micro_batch(batch, inner_epoch) for batch in batches],
                old_is_current=old_is_current,
                where=f"epoch {epoch} step {step + 1}",
            )
            step += 1
            old_is_current = False
            policy.lr_scheduler.step()
            spread = {"mean": probabilities.mean(), "std": probabilities.std(correction=0)}
            yield metrics | {f"reward_prob_{name}": value.item() for name, value in spread.items()}, outputs
            del outputs


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
            policy.predictors.current,
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
        accelerator.init_trackers("nft", config=options, init_kwargs=named)

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
    sizes = {"num_timesteps": num_timesteps, "num_samples": inputs.num_samples, "tokens": max(inputs.sizes)}
    cached = rollout.load_micro_batch(inputs.cache, [0]) if inputs.cache is not None else {}
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
    schedules = {rollout.num_tokens(size): sigmas for size, sigmas in rollout.schedules(facts).items()}
    decay = parse_old_policy_decay(args.old_policy_decay)
    old_is_current = inputs.state["old_is_current"] if inputs.state else True
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
            cache, advantages, metrics = roll_out(
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
                args,
                accelerator,
                policy,
                schedules,
                cache,
                advantages,
                own_batches,
                epoch,
                global_step,
                old_is_current=old_is_current,
            ):
                global_step += 1
                update_metrics["learning_rate"] = policy.lr_scheduler.get_last_lr()[0]
                log(epoch, {f"train/{name}": value for name, value in update_metrics.items()})
                if outputs:
                    run_folder.write_outputs(output_dir / "outputs", global_step, rank, outputs)
                del outputs  # a step's outputs must not live on through the next one
            old_is_current = False
            if (epoch + 1) % args.old_policy_update_interval == 0:
                metrics["train/old_policy_decay"] = old_policy_decay(decay, global_step)
                follow(policy.old, policy.current, metrics["train/old_policy_decay"])
                if policy.old_transformer is not None:
                    sharding.reshard(policy.old_transformer)
                old_is_current = metrics["train/old_policy_decay"] == 0
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
                    counters={
                        "global_step": global_step,
                        "old_is_current": old_is_current,
                        **checkpoint_identity(args),
                    },
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
            run_folder.write_model_card(output_dir, "DiffusionNFT", vars(args))
        if args.export_old_policy:
            state_dict = sharding.gather_adapter(accelerator, policy.transformer, "old")
            if accelerator.is_main_process:
                qwen_image.export_lora(output_dir / "old_policy", state_dict, export_config)
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
