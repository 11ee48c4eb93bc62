"""Peak memory and time of one update with and without timestep staging, by the scripts' own train_batch.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 benchmarks/staging_grid.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 2 benchmarks/staging_grid.py

Arms: M keeps the micro-batch on the device and every timestep's outputs, A releases the outputs, AB stages timesteps,
AB1 stages with one step of prefetch. Every arm of a case starts from the same weights, optimizer state and old
log-probs. One json file a case is written to --output_dir as soon as it is measured; finished cases are not run again.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_flowgrpo
from qwen_image import add_lora, get_sigmas, parameter_census, predict_velocity
from sharding import make_accelerator, prepare_policy
from staging import FLOWGRPO_FIELDS, step_input_bytes

ARMS = {
    "M": ["--return_model_output"],
    "A": [],
    "AB": ["--enable_timestep_staging"],
    "AB1": ["--enable_timestep_staging", "--staging_prefetch", "1"],
}
SEED = 20260906
RANK_BATCH, MICRO_BATCH, TOKENS, CHANNELS, TEXT_TOKENS, TEXT_WIDTH = 4, 2, 1024, 64, 16, 32


def build_transformer() -> QwenImageTransformer2DModel:
    """Two layers of random bf16 weights."""
    torch.manual_seed(SEED)
    transformer = QwenImageTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=2,
        in_channels=CHANNELS,
        out_channels=16,
        patch_size=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=False,
    )
    return transformer.to(torch.bfloat16).requires_grad_(False)


def flowgrpo_micro_batches(num_timesteps: int, rank: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches on the CPU, without old log-probs."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    sigmas = get_sigmas(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 40, height=512, width=512)
    advantages = torch.tensor([0.25, 0.75, -0.25, -0.75])
    batches = []
    for first in range(0, RANK_BATCH, MICRO_BATCH):
        embeds = torch.randn(2, MICRO_BATCH, TEXT_TOKENS, TEXT_WIDTH, generator=generator).bfloat16()
        mask = torch.ones(MICRO_BATCH, TEXT_TOKENS, dtype=torch.int32)
        batches.append(
            {
                "prompt_embeds": embeds[0],
                "prompt_embeds_mask": mask,
                "negative_prompt_embeds": embeds[1],
                "negative_prompt_embeds_mask": mask.clone(),
                "all_latents": torch.randn(MICRO_BATCH, num_timesteps + 1, TOKENS, CHANNELS, generator=generator),
                "sigmas": sigmas[: num_timesteps + 1].repeat(MICRO_BATCH, 1),
                "sigma_max": sigmas[1].repeat(MICRO_BATCH),
                "all_timesteps": (sigmas[:num_timesteps] * 1000).repeat(MICRO_BATCH, 1),
                "advantages": advantages[first : first + MICRO_BATCH, None].repeat(1, num_timesteps),
            }
        )
    return batches


def parse_script_args(*options: str) -> argparse.Namespace:
    """The options of train_flowgrpo.py that its train_batch reads."""
    return train_flowgrpo.parse_args(
        ["--noise_level", "0.8", "--clip_range", "0.2", "--true_cfg_scale", "2", "--max_grad_norm", "1", *options]
    )


def measure_update(
    accelerator: Accelerator,
    transformer: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainable: Sequence[nn.Parameter],
    predict: Any,
    args: argparse.Namespace,
    micro_batches: Sequence[Mapping[str, Tensor]],
) -> dict[str, float]:
    """One update: MiB at the start and at the peak, seconds, the slower and larger rank of both."""
    cuda = accelerator.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    accelerator.wait_for_everyone()
    start = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    metrics, kept = train_flowgrpo.train_batch(
        args, accelerator, transformer, predict, optimizer, trainable, micro_batches
    )
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    del kept
    numbers = torch.tensor([start, peak, reserved, seconds], dtype=torch.float64, device=accelerator.device)
    start, peak, reserved, seconds = accelerator.gather(numbers[None]).amax(dim=0).tolist()
    return {
        "start_mib": start / 2**20,
        "peak_mib": peak / 2**20,
        "reserved_mib": reserved / 2**20,
        "seconds": seconds,
        "policy_loss": metrics["policy_loss"],
        "grad_norm": metrics["grad_norm"],
    }


def local(tensor: Tensor) -> Tensor:
    """A rank's own part of a parameter, gradient or optimizer state."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def snapshot(optimizer: torch.optim.Optimizer, trainable: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Copies, on the CPU, of the trainable parameters and their optimizer state."""
    return [[local(tensor).detach().cpu().clone() for tensor in (p, *optimizer.state[p].values())] for p in trainable]


@torch.no_grad()
def restore(
    optimizer: torch.optim.Optimizer, trainable: Sequence[nn.Parameter], saved: Sequence[Sequence[Tensor]]
) -> None:
    """Write a snapshot back in place, so that no allocation changes."""
    for parameter, tensors in zip(trainable, saved, strict=True):
        for tensor, value in zip((parameter, *optimizer.state[parameter].values()), tensors, strict=True):
            local(tensor).copy_(value)


def main() -> None:
    """Run the cases of the launched profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timesteps", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cfg_batched", action="store_true", help="one forward of 2B instead of two passes")
    parser.add_argument("--lora_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--output_dir", default="benchmarks/results/staging_grid")
    options = parser.parse_args()

    accelerator = make_accelerator()
    profile = "fsdp2" if accelerator.is_fsdp2 else accelerator.distributed_type.value.lower()
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    transformer = build_transformer().to(dtype)
    targets = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    lora_dtype = getattr(torch, options.lora_dtype)
    add_lora(transformer, rank=8, lora_alpha=16, target_modules=targets, dtype=lora_dtype)
    parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    transformer, optimizer, trainable = prepare_policy(accelerator, transformer, optimizer)
    census = parameter_census(transformer)
    accelerator.print(f"{profile}: {type(transformer).__name__}, {accelerator.num_processes} ranks, {census}")
    predict = partial(
        predict_velocity,
        transformer,
        height=512,
        width=512,
        true_cfg_scale=2.0,
        cfg_batched=options.cfg_batched,
        dtype=dtype,
    )

    output_dir = Path(options.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for num_timesteps in options.timesteps:
        micro_batches = flowgrpo_micro_batches(num_timesteps, accelerator.process_index)
        script_args = parse_script_args()
        for batch in micro_batches:
            batch["old_log_probs"] = torch.zeros(MICRO_BATCH, num_timesteps)
            outputs = train_flowgrpo.forward_only(script_args, predict, batch, accelerator.device)
            batch["old_log_probs"] = outputs["log_probs"]
            del outputs
        run = partial(measure_update, accelerator, transformer, optimizer, trainable, predict)
        run(script_args, micro_batches)  # makes the optimizer state
        saved = snapshot(optimizer, trainable)
        results: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
        for repeat in range(options.repeats + 1):  # the first is a warm-up; arms alternate within a repeat
            for arm in options.arms:
                restore(optimizer, trainable, saved)
                result = run(parse_script_args(*ARMS[arm]), micro_batches)
                if repeat:
                    results[arm].append(result)
        for arm, repeats in results.items():
            staged = arm.startswith("AB")
            inputs = step_input_bytes(micro_batches[0], FLOWGRPO_FIELDS, staged=staged)
            facts = {name: statistics.median(r[name] for r in repeats) for name in repeats[0]}
            facts |= {
                "profile": profile, "algorithm": "flow_grpo", "arm": arm, "timesteps": num_timesteps,
                "cfg": "batched" if options.cfg_batched else "two_pass", "lora_dtype": options.lora_dtype,
                "step_input_mib": inputs / 2**20, 
                "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
                "repeats": repeats,
            }  # fmt: skip
            if accelerator.is_main_process:
                name = f"{profile}-flow_grpo-{facts['cfg']}-{options.lora_dtype}-T{num_timesteps:02d}-{arm}.json"
                (output_dir / f"{name}.tmp").write_text(json.dumps(facts, indent=1) + "\n")
                os.replace(output_dir / f"{name}.tmp", output_dir / name)
            accelerator.print(
                f"{profile} T={num_timesteps:2d} {arm:3s} start {facts['start_mib']:7.2f} "
                f"peak {facts['peak_mib']:7.2f} MiB step inputs {facts['step_input_mib']:6.2f} MiB "
                f"{facts['seconds']:7.3f} s loss {facts['policy_loss']:.6e} grad norm {facts['grad_norm']:.6e}"
            )
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
