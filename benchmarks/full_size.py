"""One epoch of rollout and update on the 20.4 B transformer with random weights, by the scripts' own code.

    accelerate launch --config_file accelerate_configs/single.yaml benchmarks/full_size.py

Prints seconds per rollout image (VAE decode counted, text encoder and reward not) and per update sample-timestep, and
the peak of the allocated memory. The weights are made on the GPU, nothing is downloaded; images are noise.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_flowgrpo
from qwen_image import (
    LORA_TARGETS,
    add_lora,
    decode_latents,
    get_sigmas,
    parameter_census,
    predict_velocity,
    prompt_conditions,
)
from rollout import sample_batch
from sharding import make_accelerator, prepare_policy
from staging import FLOWGRPO_FIELDS, step_input_bytes


def main() -> None:
    """Measure once and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_layers", type=int, default=60)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_batches", type=int, default=2)
    parser.add_argument("--text_tokens", type=int, default=64)
    parser.add_argument("--true_cfg_scale", type=float, default=4.0)
    parser.add_argument("--output", help="json file for the figures")
    options = parser.parse_args()

    accelerator = make_accelerator()
    device = accelerator.device
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        transformer = QwenImageTransformer2DModel(num_layers=options.num_layers).requires_grad_(False).eval()
        vae = AutoencoderKLQwenImage().requires_grad_(False).eval()
    torch.set_default_dtype(torch.float32)
    add_lora(transformer, rank=64, lora_alpha=128, target_modules=LORA_TARGETS)
    transformer.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=3e-4)
    transformer, optimizer, trainable = prepare_policy(accelerator, transformer, optimizer)
    accelerator.print(parameter_census(transformer))

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    size = {"height": options.resolution, "width": options.resolution}
    sigmas = get_sigmas(scheduler, 10, **size)
    embeddings = list(torch.randn(options.batch_size, options.text_tokens, 3584).to(dtype))
    conditions = prompt_conditions(embeddings, torch.randn(options.text_tokens, 3584).to(dtype))
    rows = []
    for cfg_batched in (True, False):
        predict = partial(
            predict_velocity,
            transformer,
            true_cfg_scale=options.true_cfg_scale,
            cfg_batched=cfg_batched,
            dtype=dtype,
            **size,
        )
        for staged in (True, False):
            args = train_flowgrpo.parse_args(["--enable_timestep_staging"] if staged else [])
            seconds = {}
            for attempt in range(2):  # the first warms up
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                started = time.perf_counter()
                micro_batches = []
                for number in range(options.num_batches):
                    samples = range(number * options.batch_size, (number + 1) * options.batch_size)
                    with torch.no_grad():
                        batch = sample_batch(
                            predict,
                            conditions=conditions,
                            samples=samples,
                            device=device,
                            sigmas=sigmas,
                            sde_window=(1, 3),
                            noise_level=1.2,
                            seed_words=(0, attempt),
                            **size,
                        )
                    decode_latents(vae, batch.pop("latents_clean").to(device), **size)
                    batch["advantages"] = torch.randn(options.batch_size, 2)
                    micro_batches.append(batch | conditions)
                torch.cuda.synchronize()
                seconds["rollout"] = time.perf_counter() - started
                seconds["rollout_peak"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                metrics, _ = train_flowgrpo.train_batch(
                    args, accelerator, transformer, predict, optimizer, trainable, micro_batches
                )
                torch.cuda.synchronize()
                seconds["update"] = time.perf_counter() - started
                seconds["update_peak"] = torch.cuda.max_memory_allocated() / 2**30
                if attempt == 0:
                    seconds["first_ratio_max_dev"] = metrics["ratio_max_dev"]
            num_images = options.num_batches * options.batch_size
            row = {
                "cfg": "batched" if cfg_batched else "two_pass",
                "staged": staged,
                "rollout_s_per_image": seconds["rollout"] / num_images,
                "update_s_per_sample_timestep": seconds["update"] / (2 * num_images),
                "images_per_gpu_s": num_images / (seconds["rollout"] + seconds["update"]),
                "rollout_peak_gib": seconds["rollout_peak"],
                "update_peak_gib": seconds["update_peak"],
                "first_ratio_max_dev": seconds["first_ratio_max_dev"],
                "step_inputs_mib": step_input_bytes(micro_batches[0], FLOWGRPO_FIELDS, staged=staged) / 2**20,
            }
            rows.append(row)
            accelerator.print(
                "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            )
    if options.output and accelerator.is_main_process:
        facts = {"options": vars(options), "device": torch.cuda.get_device_name(), "rows": rows}
        Path(options.output).write_text(json.dumps(facts, indent=1) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
