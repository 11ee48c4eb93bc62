"""Rollout and update on the 20.4 B transformer with random weights, by the scripts' own code, both algorithms.

    accelerate launch --config_file accelerate_configs/single.yaml benchmarks/full_size.py

Prints seconds per rollout image (VAE decode counted, text encoder and reward not) and per update sample-timestep, and
the peak of the allocated memory. The weights are made on the GPU, nothing is downloaded; images are noise.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwen_image
import sharding
import train_flowgrpo
import train_nft
from rollout import sample_batch
from staging import FLOWGRPO_FIELDS, nft_fields, step_input_bytes

TRAINED_STEPS = 2


def build_models(accelerator: Accelerator, num_layers: int) -> tuple[Any, Any]:
    """Transformer with a default and an old adapter, and VAE, on the device in the compute dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(sharding.compute_dtype(accelerator))
    with torch.device(accelerator.device):
        transformer = QwenImageTransformer2DModel(num_layers=num_layers).requires_grad_(False).eval()
        vae = AutoencoderKLQwenImage().requires_grad_(False).eval()
    torch.set_default_dtype(torch.float32)
    qwen_image.add_lora(transformer, rank=64, lora_alpha=128, target_modules=qwen_image.LORA_TARGETS)
    qwen_image.add_old_adapter(transformer)
    transformer.enable_gradient_checkpointing()
    return transformer, vae


def measure(accelerator: Accelerator, rollout: Callable[[], list], update: Callable[[list], dict]) -> dict[str, Any]:
    """Run rollout and update twice, the first to warm up; seconds and peak GiB of the second, and a micro-batch."""
    for _ in range(2):
        figures = {}
        for phase in ("rollout", "update"):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            if phase == "rollout":
                batches = rollout()
            else:
                update(batches)
            torch.cuda.synchronize()
            figures[f"{phase}_s"] = time.perf_counter() - started
            figures[f"{phase}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures | {"batch": batches[0]}


def main() -> None:
    """Measure each case and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_layers", type=int, default=60)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_batches", type=int, default=2)
    parser.add_argument("--text_tokens", type=int, default=64)
    parser.add_argument("--output", help="json file for the figures")
    options = parser.parse_args()

    accelerator = sharding.make_accelerator()
    device, dtype = accelerator.device, sharding.compute_dtype(accelerator)
    transformer, vae = build_models(accelerator, options.num_layers)
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=3e-4)
    transformer, optimizer, trainable = sharding.prepare_policy(accelerator, transformer, optimizer)
    accelerator.print(qwen_image.parameter_census(transformer))
    layers = qwen_image.lora_layers(transformer)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    size = {"height": options.resolution, "width": options.resolution}
    sigmas = qwen_image.get_sigmas(scheduler, 10, **size)
    embeddings = list(torch.randn(options.batch_size, options.text_tokens, 3584).to(dtype))
    negative = torch.randn(options.text_tokens, 3584).to(dtype)
    num_images = options.num_batches * options.batch_size
    train_args = (accelerator, transformer)

    def sample(predict: Callable[..., Tensor], conditions: dict, window: tuple[int, int]) -> list[dict[str, Any]]:
        batches = []
        for number in range(options.num_batches):
            samples = range(number * options.batch_size, (number + 1) * options.batch_size)
            with torch.no_grad():
                batch = sample_batch(
                    predict, conditions=conditions, samples=samples, device=device, sigmas=sigmas, sde_window=window,
                    noise_level=1.2, seed_words=(0, 0), **size,
                )  # fmt: skip
            qwen_image.decode_latents(vae, batch["latents_clean"].to(device), **size)
            batches.append(batch | conditions | {"sample_index": list(samples), "noise_words": (0, 0, 0)})
        return batches

    rows = []
    for algorithm, cfg, staged, option in (
        ("flowgrpo", "batched", True, []),
        ("flowgrpo", "batched", False, []),
        ("flowgrpo", "two_pass", True, []),
        ("nft", "none", True, ["--ref_kl_coef", "0"]),
        ("nft", "none", True, ["--ref_kl_coef", "1e-4"]),
    ):
        flags = [*option, *(["--enable_timestep_staging"] if staged else [])]
        predict = partial(
            qwen_image.predict_velocity, transformer, true_cfg_scale=1.0 if cfg == "none" else 4.0,
            cfg_batched=cfg == "batched", dtype=dtype, **size,
        )  # fmt: skip
        conditions = qwen_image.prompt_conditions(embeddings, None if cfg == "none" else negative)
        if algorithm == "flowgrpo":
            args = train_flowgrpo.parse_args([*flags, "--log_ratio_limit", "inf"])

            def rollout(predict=predict, conditions=conditions) -> list:
                batches = sample(predict, conditions, (1, 1 + TRAINED_STEPS))
                return [b | {"advantages": torch.randn(options.batch_size, TRAINED_STEPS)} for b in batches]

            def update(batches: list, predict=predict, args=args) -> dict:
                return train_flowgrpo.train_batch(args, *train_args, predict, optimizer, trainable, batches)

            fields = FLOWGRPO_FIELDS
        else:
            args = train_nft.parse_args(flags)
            predictors = train_nft.adapter_predictors(predict, layers)

            def rollout(predict=predictors.old, conditions=conditions) -> list:
                batches = sample(predict, conditions, (0, 0))
                timesteps = (sigmas[1 : 1 + TRAINED_STEPS] * 1000).expand(options.batch_size, -1)
                steps = {"train_timesteps": timesteps, "reward_prob": torch.rand_like(timesteps)}
                return [batch | steps for batch in batches]

            def update(batches: list, args=args, predictors=predictors) -> dict:
                return train_nft.train_batch(args, *train_args, predictors, optimizer, trainable, batches)

            fields = nft_fields({})
        figures = measure(accelerator, rollout, update)
        row = {
            "algorithm": algorithm, "cfg": cfg, "staged": staged, "options": " ".join(option),
            "rollout_s_per_image": figures["rollout_s"] / num_images,
            "update_s_per_sample_timestep": figures["update_s"] / (TRAINED_STEPS * num_images),
            "images_per_gpu_s": num_images / (figures["rollout_s"] + figures["update_s"]),
            "rollout_peak_gib": figures["rollout_peak_gib"], "update_peak_gib": figures["update_peak_gib"],
            "step_inputs_mib": step_input_bytes(figures["batch"], fields, staged=staged) / 2**20,
        }  # fmt: skip
        rows.append(row)
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        accelerator.print("  ".join(shown))
    if options.output and accelerator.is_main_process:
        facts = {
            "options": {k: v for k, v in vars(options).items() if k != "output"},
            "device": torch.cuda.get_device_name(),
            "rows": rows,
        }
        Path(options.output).write_text(json.dumps(facts, indent=1) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
