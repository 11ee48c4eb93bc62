"""What a run will need, without running it: bytes that are exact and an estimate of the peak on a device.

    python benchmarks/plan.py train_flowgrpo.py --pretrained_model_name_or_path Qwen/Qwen-Image --prompts x.txt
    python benchmarks/plan.py --text_tokens 200 train_nft.py --resolution 1024 --train_batch_size 1 ...

After the script's name come its own options, of which the sizes matter; nothing is loaded and no file need exist.
Where the model is no local folder, it is taken to be as large as Qwen-Image. Of several sizes it is the largest that
counts. The peak is that of LoRA in bf16 on one device or under DDP, without what else lies on the device.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

import torch
from diffusers import QwenImageTransformer2DModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import memory_plan
import qwen_image
import train_flowgrpo
import train_nft
from model_files import read_json
from option_checks import ABOVE_ZERO, MAY_BE_INFINITE, NOT_NEGATIVE, check_numbers, check_sampling, check_steps
from prompts import check_batch_arithmetic
from rollout import num_tokens, sizes_by_tokens

SCRIPTS = {"train_flowgrpo.py": train_flowgrpo, "train_nft.py": train_nft}


def meta_transformer(script: ModuleType, args: argparse.Namespace) -> QwenImageTransformer2DModel:
    """The script's model with its adapters, without memory."""
    folder = Path(args.pretrained_model_name_or_path or script.HERE / "assets/demo_pipeline")
    config = read_json(folder / "transformer/config.json") if folder.is_dir() else {}
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel.from_config(config)
    qwen_image.check_target_names(transformer, args.lora_target_modules)
    transformer = transformer.bfloat16().requires_grad_(False)
    dtype = getattr(torch, args.lora_dtype)
    qwen_image.add_lora(
        transformer, rank=args.rank, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules, dtype=dtype
    )
    if script is train_nft:
        with torch.device("meta"):
            qwen_image.add_old_adapter(transformer, dtype=dtype)
    return transformer


def check_options(script: ModuleType, args: argparse.Namespace, *, text_tokens: int, num_processes: int) -> None:
    """Refuse what a plan cannot tell or no run could have: a plan of it would mislead."""
    for name, value in (("text_tokens", text_tokens), ("num_processes", num_processes)):
        if value <= 0:
            raise ValueError(f"--{name} is {value}: it must be above 0")
    for name in ("trajectory_cache", "resolution_column"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} {getattr(args, name)}: a plan reads no caches and no prompts; give --resolution and the "
                "other options that it was or will be made with instead"
            )
    check_numbers(vars(args), above_zero=ABOVE_ZERO, not_negative=NOT_NEGATIVE, may_be_infinite=MAY_BE_INFINITE)
    check_sampling(vars(args))
    check_steps(args.num_inference_steps)
    batches = {"images_per_prompt": args.num_images_per_prompt, "batch_size": args.train_batch_size}
    sizes_by_tokens(list(dict.fromkeys(args.resolution)), **batches)
    script.check_args(args)
    check_batch_arithmetic(
        num_prompts=args.num_prompts_per_epoch,
        **batches,
        world_size=num_processes,
        num_updates=args.num_updates_per_epoch,
    )


def plan(script: ModuleType, args: argparse.Namespace, *, text_tokens: int, num_processes: int) -> dict[str, int]:
    """Bytes by name: the script's planned ones, and the peaks with staging on and off, outputs released and kept."""
    num_timesteps = script.trained_timesteps(args)
    tokens = max(num_tokens(size) for size in args.resolution)
    num_samples = args.num_prompts_per_epoch * args.num_images_per_prompt
    sizes = {"num_timesteps": num_timesteps, "num_samples": num_samples, "tokens": tokens}
    planned = script.planned_bytes(args, **sizes, num_shards=num_processes, cached={})
    if not args.use_lora:
        return planned
    transformer, found = meta_transformer(script, args), dict(planned)
    for staged in (True, False):
        for kept in (False, True):
            arm = vars(args) | {"enable_timestep_staging": staged, "return_model_output": kept}
            name = f"peak, {'' if staged else 'not '}staged, outputs {'kept' if kept else 'released'}"
            found[name] = memory_plan.update_peak(
                arm, transformer, planned, num_timesteps=num_timesteps, tokens=tokens + text_tokens
            )
    return found


def main() -> int:
    """Print the plan; the exit code is 2 and the message one line where an option is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--text_tokens", type=int, default=64, help="length of the longest prompt")
    parser.add_argument("--num_processes", type=int, default=1, help="ranks, each with its own part of the cache")
    parser.add_argument("script", choices=SCRIPTS, help="followed by its own options")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args()
    script = SCRIPTS[options.script]
    args = script.parse_args(options.options)
    place = {"text_tokens": options.text_tokens, "num_processes": options.num_processes}
    try:
        check_options(script, args, **place)
        planned = plan(script, args, **place)
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    disk = "trajectories of an epoch on disk"
    for name, size in planned.items():
        label = {
            "staged": "step inputs, staged",
            "not staged": "step inputs, not staged",
            "outputs": "outputs of an update, if kept",
            "cache": f"{disk}, at most" if len(args.resolution) > 1 else disk,
        }.get(name, name)
        print(f"{label:42}{size:>20,} bytes{size / 2**30:>12.3f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
