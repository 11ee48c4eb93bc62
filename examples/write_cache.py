"""A trajectory cache from plain tensors, as another rollout engine would write it.

    python examples/write_cache.py caches/foreign
    python trajectory_cache.py caches/foreign
    accelerate launch train_flowgrpo.py --trajectory_cache caches/foreign --train_batch_size 4

The numbers are random here: put your engine's in their place.
"""

import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qwen_image import get_sigmas, transformer_fingerprint
from trajectory_cache import table_writer, write_manifest


def write_example(folder: Path, model: Path, *, prompts: int = 2, images: int = 4, steps: int = 10) -> None:
    """Write one shard: `images` trajectories of 64 px for each prompt, trained on steps 3 and 4 of `steps`."""
    folder.mkdir(parents=True)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model, subfolder="scheduler")
    sigmas = get_sigmas(scheduler, steps, height=64, width=64)
    with table_writer(folder / "prompts-00000.arrow") as write:
        for prompt_id in range(prompts):  # (S, D), what pipe.encode_prompt(text)[0][0] gives
            write({"prompt_id": prompt_id, "prompt_embeds": torch.randn(5 + prompt_id, 32)})
    with table_writer(folder / "trajectories-00000.arrow") as write:
        for sample in range(prompts * images):
            row = {"sample_index": sample, "prompt_id": sample // images}
            row |= {"all_latents": torch.randn(3, 16, 64)}  # (W+1, L, 64): before step 3, after it, after step 4
            write(row | {"sigmas": sigmas[3:6], "sigma_max": sigmas[1], "all_timesteps": 1000 * sigmas[3:5]})
    with table_writer(folder / "values-00000.arrow") as write:
        for sample in range(prompts * images):
            write({"sample_index": sample, "reward": float(torch.rand(()))})
    facts = {"num_shards": 1, "model": transformer_fingerprint(model), "height": 64, "width": 64}
    facts |= {"sigmas": sigmas.tolist(), "true_cfg_scale": 1.0, "sde_type": "sde", "noise_level": 0.8}
    write_manifest(folder, 0, facts)  # last: a folder without manifest is known to be unfinished


if __name__ == "__main__":
    write_example(Path(sys.argv[1]), Path(__file__).resolve().parent.parent / "assets/demo_pipeline")
