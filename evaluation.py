"""Rewards of ODE images of fixed prompts from fixed seeds, with confidence intervals and grids.

The training scripts call its functions; as a script it compares an adapter with its base model:

    accelerate launch evaluation.py --pretrained_model_name_or_path Qwen/Qwen-Image --lora runs/flowgrpo \
        --eval_prompts eval.txt --reward_funcs ocr aesthetic --output_dir evaluations/flowgrpo

It writes evaluation.json (means and intervals), rewards.jsonl (a line a prompt) and grids. Images depend on prompt
number, seed and batch size alone, so any number of processes gives the same figures.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from diffusers.utils import make_image_grid
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torch.nn.functional import pad

from option_checks import check_numbers, check_sampling
from prompts import Size, load_prompts, parse_size, prompt_sizes
from qwen_image import (
    adapters_off,
    check_pipeline_class,
    decode_latents,
    lora_layers,
    predict_sized,
    prompt_conditions,
)
from rewards import check_reward_prompts, check_rewards, check_weights, to_pil
from rollout import find_whole_pipeline, load_models, sample_batch, schedules, size_facts, sizes_by_tokens
from run_folder import make_folder, run_script, write_text
from scorer import Scorer
from sharding import compute_dtype, make_accelerator, reduce_to_cpu
from staging import check_supported

EVALUATION = 2**32 - 1  # stands where the epoch does among the seed's words, far from any of them
GRID_IMAGES = 16


def evaluation_batches(sizes: Sequence[Size], batch_size: int) -> list[list[int]]:
    """Prompts in batches of one size each; a batch that they do not fill is filled up with its own first ones."""
    batches = []
    for size in dict.fromkeys(sizes):
        members = [index for index, each in enumerate(sizes) if each == size]
        for first in range(0, len(members), batch_size):
            batch = members[first : first + batch_size]
            batches.append([batch[place % len(batch)] for place in range(batch_size)])
    return batches


@torch.no_grad()
def sample_evaluation(
    predict: Callable[..., Tensor],
    *,
    prompts: Sequence[Mapping[str, Any]],
    sizes: Sequence[Size],
    embeddings: Mapping[int, Tensor],
    negative: Tensor | None,
    vae: torch.nn.Module,
    scorer: Scorer,
    rewards: Sequence[str],
    sigmas: Mapping[Size, Tensor],
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """ODE images of M fixed prompts from fixed seeds, this rank's part: rewards (M, R) float64 and 16 images, evenly
    spread over the prompts, (16, 3, H, W) uint8, the smaller ones framed in gray. Where another rank has them both are
    zero, so that a sum over ranks completes them."""
    device, num_images = next(vae.parameters()).device, len(prompts)
    scores = torch.zeros(num_images, len(rewards), dtype=torch.float64)
    stride = max(1, num_images // GRID_IMAGES)
    canvas = max(height for height, _ in sizes), max(width for _, width in sizes)
    grid = torch.zeros(min(GRID_IMAGES, num_images), 3, *canvas, dtype=torch.uint8)
    batches, own_samples = evaluation_batches(sizes, batch_size), []
    for number in range(rank, -(-len(batches) // world_size) * world_size, world_size):
        # Every rank makes the same number of rounds; batches past the end are made and dropped.
        samples = batches[number % len(batches)]
        height, width = size = sizes[samples[0]]
        trajectories = sample_batch(
            predict,
            conditions=prompt_conditions([embeddings[sample] for sample in samples], negative),
            samples=samples,
            device=device,
            sigmas=sigmas[size],
            height=height,
            width=width,
            seed_words=(seed, EVALUATION),
        )
        images = decode_latents(vae, trajectories["latents_clean"].to(device), height=height, width=width).cpu()
        if number >= len(batches):
            continue
        samples = list(dict.fromkeys(samples))
        rows = [dict(prompts[sample]) for sample in samples]
        scorer.submit(rewards, images[: len(samples)], [row["prompt"] for row in rows], rows, samples)
        own_samples += samples
        for sample, image in zip(samples, images, strict=False):
            if sample % stride == 0 and sample // stride < len(grid):
                frame = (canvas[1] - width) // 2, (canvas[0] - height) // 2
                sides = (frame[0], canvas[1] - width - frame[0], frame[1], canvas[0] - height - frame[1])
                grid[sample // stride] = pad((image * 255).round().byte(), sides, value=128)
    if own_samples:
        scores[own_samples] = torch.tensor(list(scorer.results().values()), dtype=torch.float64).T
    return scores, grid


def mean_with_interval(values: Tensor) -> tuple[float, float | None]:
    """Mean of (M,) and half the width of its 95 % interval: normal, over prompts, 1.96 std / sqrt(M); None for M = 1.

    It tells how far other prompts of this kind would move the mean. The seed is the same in all evaluations.
    """
    half = 1.96 * values.std(correction=1).item() / math.sqrt(len(values)) if len(values) > 1 else None
    return values.mean().item(), half


def evaluation_metrics(scores: Tensor, names: Sequence[str]) -> dict[str, float]:
    """eval/<name> and eval/<name>_ci95 from rewards (M, R)."""
    metrics = {}
    for name, column in zip(names, scores.T, strict=True):
        mean, half = mean_with_interval(column)
        metrics[f"eval/{name}"] = mean
        if half is not None:
            metrics[f"eval/{name}_ci95"] = half
    return metrics


def save_grid(images: Tensor, path: Path, *, title: str, base: Path | None = None) -> None:
    """Images (n, 3, H, W) uint8, each in a thin frame, as one square under a title, to the right of that of `base`."""
    columns = math.ceil(len(images) ** 0.5)
    blank = torch.full_like(images[0], 255)
    tiles = (*images, *[blank] * (-len(images) % columns))
    pictures = [
        ImageOps.expand(to_pil(tile / 255), border=max(1, tile.shape[-1] // 64), fill="gray") for tile in tiles
    ]
    grid = make_image_grid(pictures, rows=len(pictures) // columns, cols=columns)
    line = max(12, grid.height // 24)
    grid = ImageOps.expand(grid, border=(0, line, 0, 0), fill="white")
    ImageDraw.Draw(grid).text((2, 0), title, fill="black", font=ImageFont.load_default(size=round(0.75 * line)))
    if base is not None and base.is_file():
        with Image.open(base) as before:
            gap, both = grid.width // 32, Image.new("RGB", (before.width + grid.width, grid.height), "white")
            both = ImageOps.expand(both, border=(0, 0, gap, 0), fill="white")
            both.paste(before, (0, 0))
            both.paste(grid, (before.width + gap, 0))
            grid = both
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    grid.save(temporary, format="PNG")
    os.replace(temporary, path)


# ----- A script of its own -----------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the training scripts that an evaluation needs, with the same meaning and defaults."""
    description = "Compare an adapter with its base model on fixed prompts and seeds."
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--pretrained_model_name_or_path", required=True, help="hub name or folder of a QwenImagePipeline")
    add("--revision", help="branch, tag or commit of the hub model")
    add("--lora", help="folder of an adapter to sample with, such as a run folder; none: the model itself")
    add("--eval_prompts", required=True, help="prompts of the evaluation, as --prompts; none: no evaluation")
    add("--prompt_column", default="prompt", help="column or key that holds the prompt")
    add("--negative_prompt", default=" ", help="negative prompt of true CFG")
    add("--max_sequence_length", type=int, default=512, help="longest prompt in tokens")
    add(
        "--resolution", type=parse_size, nargs="+", default=[(512, 512)], help="512, or WIDTHxHEIGHT; several by turns"
    )
    add("--resolution_column", help="column or key that holds a prompt's own resolution")
    add("--eval_num_inference_steps", type=int, default=50, help="ODE steps of the evaluation")
    add("--true_cfg_scale", type=float, default=4.0, help="true CFG in rollout and update; 1 switches it off")
    add("--cfg_batched", action=flag, default=True, help="both CFG predictions in one forward of twice the batch")
    add("--train_batch_size", type=int, default=4, help="samples of one forward per device, in rollout and update")
    add(
        "--reward_funcs",
        nargs="+",
        required=True,
        help="names, with their option as name:option, or module.py:function",
    )
    add("--reward_workers", type=int, default=0, help="processes that score while the next batch is sampled; 0: none")
    add("--reward_timeout", type=float, default=600.0, help="seconds that a worker may take for a batch")
    add("--output_dir", required=True, help="folder for evaluation.json, rewards.jsonl and grids")
    add("--seed", type=int, default=0, help="of weights, prompts, noise and order")
    return parser.parse_args(argv)


def summarize(scores: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By reward, mean and 95 % interval of each model and of their difference prompt by prompt. scores (M, R) each."""
    columns = {model: dict(zip(names, table.T, strict=True)) for model, table in scores.items()}
    if len(columns) == 2:
        columns["difference"] = {name: columns["trained"][name] - columns["base"][name] for name in names}
    summary: dict[str, dict[str, Any]] = {name: {} for name in names}
    for model, values in columns.items():
        for name in names:
            summary[name][model], summary[name][f"{model}_ci95"] = mean_with_interval(values[name])
    return summary


def main(args: argparse.Namespace) -> None:
    """Sample and score all prompts with the base model and then with the adapter; ranks share the batches."""
    check_supported(os.environ)
    above_zero = ("train_batch_size", "max_sequence_length", "eval_num_inference_steps", "reward_timeout")
    check_numbers(vars(args), above_zero=above_zero, not_negative=("reward_workers",))
    check_weights(args.reward_funcs, None)
    check_sampling(vars(args))
    check_pipeline_class(args.pretrained_model_name_or_path, revision=args.revision)
    folder = Path(args.output_dir)
    if (folder / "evaluation.json").exists():
        raise ValueError(f"--output_dir {folder} holds an evaluation already: name another folder, or delete it")
    prompts = load_prompts(args.eval_prompts, column=args.prompt_column, option="--eval_prompts")
    rewards = check_rewards(args.reward_funcs)
    check_reward_prompts(args.reward_funcs, prompts, "--eval_prompts")
    sizes = prompt_sizes(prompts, args.resolution, args.resolution_column)
    run_sizes = sizes_by_tokens(sizes)
    model_folder = find_whole_pipeline(args.pretrained_model_name_or_path, revision=args.revision, lora=args.lora)

    accelerator = make_accelerator()
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("evaluation.py keeps the model whole on each GPU: launch with accelerate_configs/ddp.yaml")
    rank, device, dtype = accelerator.process_index, accelerator.device, compute_dtype(accelerator)
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
            texts={index: row["prompt"] for index, row in enumerate(prompts)},
            eval_texts={},
            negative_prompt=args.negative_prompt if args.true_cfg_scale > 1 else None,
            max_sequence_length=args.max_sequence_length,
            lora=args.lora,
        )
        layers = lora_layers(transformer)
        facts = size_facts(sampling.scheduler, args.eval_num_inference_steps, list(run_sizes.values()))
        predict = partial(
            predict_sized,
            accelerator.prepare_model(transformer, evaluation_mode=True),
            true_cfg_scale=args.true_cfg_scale,
            cfg_batched=args.cfg_batched,
            dtype=dtype,
            sizes=run_sizes,
        )

        def predict_base(*tensors: Tensor, **conditions: Tensor) -> Tensor:
            with adapters_off(layers):
                return predict(*tensors, **conditions)

        sampling.vae.to(device)
        scorer.to(device, list(rewards))
        scores = {}
        for model, model_predict in {"base": predict_base, "trained": predict}.items():
            if model == "trained" and args.lora is None:
                continue
            table, grid = sample_evaluation(
                model_predict,
                prompts=prompts,
                sizes=sizes,
                embeddings=sampling.embeddings,
                negative=sampling.negative,
                vae=sampling.vae,
                scorer=scorer,
                rewards=list(rewards),
                sigmas=schedules(facts),
                batch_size=args.train_batch_size,
                rank=rank,
                world_size=accelerator.num_processes,
                seed=args.seed,
            )
            scores[model], grid = reduce_to_cpu(accelerator, table), reduce_to_cpu(accelerator, grid)
            if accelerator.is_main_process:
                base = folder / "grids/base.png"
                path = base if model == "base" else folder / "grids/base_and_trained.png"
                title = "base model" if model == "base" else "with the adapter"
                save_grid(grid, path, title=title, base=None if model == "base" else base)
    scorer.close()
    if accelerator.is_main_process:
        write_results(folder, vars(args), prompts, scores, list(rewards))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def write_results(
    folder: Path,
    args: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Tensor],
    names: Sequence[str],
) -> None:
    """Write rewards.jsonl and then evaluation.json, and print the means. scores: (M, R) by model."""
    with open(folder / "rewards.jsonl", "w", encoding="utf-8") as file:
        for index, row in enumerate(prompts):
            line = {"index": index, "prompt": row["prompt"]}
            line |= {model: dict(zip(names, table[index].tolist(), strict=True)) for model, table in scores.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    summary = summarize(scores, names)
    results = {"args": dict(args), "num_prompts": len(prompts), "rewards": summary}
    write_text(folder / "evaluation.json", json.dumps(results, indent=1))
    print(f"{len(prompts)} prompts, mean and 95 % interval")
    for name, values in summary.items():
        halves = {model: values[f"{model}_ci95"] for model in values if not model.endswith("_ci95")}
        shown = (f"{m} {values[m]:.4f}" + ("" if half is None else f" +- {half:.4f}") for m, half in halves.items())
        print(name, *shown, sep="    ")


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(parse_args())))
