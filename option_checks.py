"""What the options of a run show to be wrong, before anything is loaded: numbers, sizes, schedules, what needs what.

Functions of plain values; each raises ValueError with what is wrong, the values and what to do. What only one
algorithm has is checked in its own script.
"""

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from prompts import Size, check_batch_arithmetic, size_name
from qwen_image import PIXELS_PER_TOKEN, check_attention_backend
from rewards import check_weights

MAX_PROMPT_TOKENS = 1024  # of Qwen-Image
POLYNOMIAL_END = 1e-7  # of diffusers' polynomial schedule
ABOVE_ZERO = (
    "rank", "lora_alpha", "max_sequence_length", "num_prompts_per_epoch", "num_images_per_prompt", "adv_clip_max",
    "num_updates_per_epoch", "num_inner_epochs", "train_batch_size", "num_train_epochs", "learning_rate",
    "max_grad_norm", "divergence_limit", "timesteps_per_forward", "eval_num_inference_steps", "keep_trajectories",
    "checkpoints_total_limit", "reward_timeout", "ddp_timeout", "adam_epsilon",
)  # fmt: skip
NOT_NEGATIVE = (
    "staging_prefetch", "eval_epochs", "lr_warmup_steps", "checkpointing_steps", "reward_workers", "adam_weight_decay",
)  # fmt: skip
MAY_BE_INFINITE = ("divergence_limit", "log_ratio_limit", "max_grad_norm", "clip_range", "adv_clip_max")


def check_training_options(options: Mapping[str, Any], *, world_size: int) -> None:
    """Refuse what the options that both training scripts have show to be wrong."""
    check_numbers(options, above_zero=ABOVE_ZERO, not_negative=NOT_NEGATIVE, may_be_infinite=MAY_BE_INFINITE)
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= options[name] < 1:
            raise ValueError(f"--{name} is {options[name]}: give a number in [0, 1)")
    check_sampling(options)
    check_steps(options["num_inference_steps"])
    num_epochs = options["num_train_epochs"] if options["trajectory_cache"] is None else 1
    check_lr_schedule(
        options["lr_scheduler"],
        options["learning_rate"],
        num_warmup_steps=options["lr_warmup_steps"],
        num_steps=num_epochs * options["num_inner_epochs"] * options["num_updates_per_epoch"],
    )
    check_speed_options(options)
    check_weights(options["reward_funcs"] or [], options["reward_weights"])
    tracker = options["report_to"]
    if tracker != "none" and find_spec(tracker) is None:
        raise ValueError(f"--report_to {tracker}: the package is not installed; pip install {tracker}")
    if options["trajectory_cache"] is not None:
        check_cache_options(options)
        return
    for name in ("prompts", "reward_funcs"):
        if not options[name]:
            raise ValueError(
                f"--{name} is missing: only the demo, without --pretrained_model_name_or_path, has its own"
            )
    check_batch_arithmetic(
        num_prompts=options["num_prompts_per_epoch"],
        images_per_prompt=options["num_images_per_prompt"],
        batch_size=options["train_batch_size"],
        world_size=world_size,
        num_updates=options["num_updates_per_epoch"],
    )


def check_numbers(
    options: Mapping[str, Any],
    *,
    above_zero: Sequence[str],
    not_negative: Sequence[str] = (),
    may_be_infinite: Sequence[str] = (),
) -> None:
    """Refuse, by name, an option that is too small, or no number that fp32 can hold."""
    for name in above_zero:
        if not options[name] > 0:
            raise ValueError(f"--{name} is {options[name]}: it must be above 0")
    for name in not_negative:
        if options[name] < 0:
            raise ValueError(f"--{name} is {options[name]}: it must not be negative")
    for name, value in options.items():
        if name in may_be_infinite and value == math.inf:
            continue
        if isinstance(value, float) and not abs(value) <= torch.finfo(torch.float32).max:
            raise ValueError(f"--{name} is {value}: give a finite number")
        if isinstance(value, int) and value >= 2**63:
            raise ValueError(f"--{name} is {value}: give a number below 2**63")


def check_sampling(options: Mapping[str, Any]) -> None:
    """Refuse sizes, scales, prompt lengths and seeds that cannot be sampled; rollouts and evaluations have these."""
    for size in options["resolution"]:
        check_size(size)
    if options["true_cfg_scale"] < 1:
        raise ValueError(f"--true_cfg_scale {options['true_cfg_scale']}: give 1, which is no CFG, or more")
    if options["max_sequence_length"] > MAX_PROMPT_TOKENS:
        raise ValueError(
            f"--max_sequence_length {options['max_sequence_length']}: Qwen-Image reads at most {MAX_PROMPT_TOKENS}"
        )
    if not 0 <= options["seed"] < 2**32:
        raise ValueError(f"--seed is {options['seed']}: give 0 to {2**32 - 1}, what all random generators take")


def check_size(size: Size) -> None:
    """Refuse an image size that is no whole number of tokens."""
    if any(side <= 0 or side % PIXELS_PER_TOKEN for side in size):
        nearest = tuple(max(1, round(side / PIXELS_PER_TOKEN)) * PIXELS_PER_TOKEN for side in size)
        raise ValueError(
            f"--resolution {size_name(size)}: not a multiple of {PIXELS_PER_TOKEN}, the nearest is "
            f"{size_name(nearest)}"
        )


def check_steps(num_inference_steps: int) -> None:
    """Refuse a rollout without a step that can be trained."""
    if num_inference_steps < 2:
        raise ValueError(f"--num_inference_steps {num_inference_steps}: give at least 2")


def check_sde_window(
    window_size: int,
    window_range: Sequence[int],
    num_inference_steps: int,
    noise_level: float,
    *,
    schedule: str,
    epochs_per_window: int,
    stride: int,
) -> None:
    """Refuse a window that does not fit or move, and noise that gives no log-prob."""
    first, stop = window_range
    if noise_level <= 0:
        raise ValueError(f"--noise_level {noise_level}: without noise a step has no log-prob to train on")
    if window_size < 0:
        raise ValueError(f"--sde_window_size is {window_size}: give 0 for all steps but the last, or more")
    if window_size and not 0 <= first <= stop - window_size:
        raise ValueError(
            f"--sde_window_size {window_size} does not fit in --sde_window_range {first} {stop}: widen it"
        )
    if window_size and stop > num_inference_steps - 1:
        raise ValueError(
            f"--sde_window_range {first} {stop} reaches the last of {num_inference_steps} steps, which cannot be "
            f"trained: end it at {num_inference_steps - 1}"
        )
    for name, value in (("epochs", epochs_per_window), ("stride", stride)):
        if value <= 0:
            raise ValueError(f"--sde_window_{name} is {value}: it must be above 0")
    if schedule == "progressive" and not window_size:
        raise ValueError(
            "--sde_window_schedule progressive with --sde_window_size 0, which is all steps: give a size above 0"
        )


def check_lr_schedule(name: str, learning_rate: float, *, num_warmup_steps: int, num_steps: int) -> None:
    """Refuse a learning rate schedule that this run's optimizer steps cannot follow."""
    if num_warmup_steps and name == "constant":
        raise ValueError(
            f"--lr_warmup_steps {num_warmup_steps} with --lr_scheduler constant, which has no warm-up: choose "
            "constant_with_warmup"
        )
    if num_warmup_steps > num_steps:
        raise ValueError(
            f"--lr_warmup_steps {num_warmup_steps} is beyond the {num_steps} optimizer steps of this run: lower it"
        )
    if name == "polynomial" and learning_rate <= POLYNOMIAL_END:
        raise ValueError(
            f"--lr_scheduler polynomial ends at {POLYNOMIAL_END}, --learning_rate is {learning_rate}: raise it, or "
            "choose linear"
        )


def check_speed_options(options: Mapping[str, Any]) -> None:
    """Refuse options of staging, recomputation, compilation and attention that need another one or cannot work."""
    if options["staging_prefetch"] and not options["enable_timestep_staging"]:
        raise ValueError(f"--staging_prefetch {options['staging_prefetch']} needs --enable_timestep_staging: add it")
    blocks = options["checkpointed_blocks"]
    if blocks is not None and (blocks < 1 or not options["gradient_checkpointing"]):
        raise ValueError(f"--checkpointed_blocks {blocks}: give at least 1, with --gradient_checkpointing")
    compiled = options["compile_mode"] != "default" or not options["compile_dynamic"] or options["compile_fullgraph"]
    if compiled and not options["compile_blocks"]:
        raise ValueError("--compile_mode, --no-compile_dynamic and --compile_fullgraph need --compile_blocks: add it")
    if options["gathered_rollout"] and launched_fsdp_version() != 2:
        raise ValueError("--gathered_rollout is for FSDP2, whose rollouts gather weights at every step: leave it out")
    if options["compile_blocks"] and launched_fsdp_version() == 1:
        raise ValueError(
            "--compile_blocks under FSDP version 1, which swaps parameters inside what is compiled: launch with "
            "accelerate_configs/fsdp2.yaml"
        )
    if options["attention_backend"] is not None:
        check_attention_backend(options["attention_backend"])


def launched_fsdp_version() -> int | None:
    """The version of FSDP that the launcher asked for, or None."""
    return int(os.environ.get("FSDP_VERSION", "1")) if os.environ.get("ACCELERATE_USE_FSDP") == "true" else None


def check_cache_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a run from a trajectory cache could not follow."""
    if options["reward_aggregation"] != "sum":
        raise ValueError(
            f"--reward_aggregation {options['reward_aggregation']} with --trajectory_cache: a cache holds the "
            "weighted sum; leave it out"
        )
    if options["resolution_column"] is not None:
        raise ValueError(
            f"--resolution_column {options['resolution_column']} with --trajectory_cache, which reads no prompts: "
            "name the cache's sizes with --resolution"
        )
