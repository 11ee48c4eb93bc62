"""Speed and memory at the real size: 20.4 B parameters of random weights, by the scripts' own rollout and update.

    accelerate launch --config_file accelerate_configs/single.yaml benchmarks/full_size.py
    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 benchmarks/full_size.py
    accelerate launch --config_file accelerate_configs/single.yaml benchmarks/full_size.py --algorithm nft
    python benchmarks/full_size.py --merge benchmarks/results/full_size.json

Arms take turns within a repetition, so that their ratios do not depend on the machine's mood. Seconds per rollout
image count the VAE's decode, not the text encoder nor the reward; an update's are per sample and trained timestep.
Images a second are those of the recipe: a rollout image and the update on its trained timesteps, 2 of FlowGRPO, 10 of
DiffusionNFT, however many this run trains.
Model FLOPs are those of one forward and backward, hardware FLOPs also count what is recomputed, both by torch's
counter; the shares are of the rate of a large bf16 product measured in the same run. The weights are made on the GPU,
nothing is downloaded, images are noise.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwen_image
import sharding
import train_flowgrpo
import train_nft
from rollout import sample_batch
from run_folder import git_commit, write_text
from staging import FLOWGRPO_FIELDS, nft_fields, step_input_bytes

TINY = {"num_attention_heads": 2, "attention_head_dim": 32, "joint_attention_dim": 32, "axes_dims_rope": (8, 12, 12)}
NUM_STEPS, TRAINED_STEPS = 10, {"flowgrpo": 2, "nft": 10}  # of the published recipes


class Arm(NamedTuple):
    """One way to run the same update."""

    name: str
    cfg_batched: bool = True
    compiled: bool = True
    checkpointed_blocks: int | None = None
    timesteps_per_forward: int = 1
    staged: bool = True
    prefetch: int = 0
    kept: bool = False  # every timestep's outputs
    attention: str = "native"
    ref_kl_coef: float = 0.0
    old_is_current: bool = False


FLOWGRPO_ARMS = [
    Arm("eager, CFG in two passes", cfg_batched=False, compiled=False),
    Arm("eager, CFG in one batch", compiled=False),
    Arm("compiled, CFG in two passes", cfg_batched=False),
    Arm("compiled, CFG in one batch"),
    Arm("and 40 of 60 blocks recomputed", checkpointed_blocks=40),
    Arm("and cuDNN attention", attention="_native_cudnn"),
    Arm("and two timesteps a forward", timesteps_per_forward=2),
    Arm("and four timesteps a forward", timesteps_per_forward=4),
]
NFT_ARMS = [
    Arm("eager, reference", compiled=False, ref_kl_coef=1e-4),
    Arm("compiled, reference", ref_kl_coef=1e-4),
    Arm("compiled, no reference"),
    Arm("compiled, no reference, old is current", old_is_current=True),
    Arm("and 40 of 60 blocks recomputed", old_is_current=True, checkpointed_blocks=40),
    Arm("and two timesteps a forward", old_is_current=True, timesteps_per_forward=2),
]
STAGING_ARMS = [Arm("not staged", staged=False), Arm("staged"), Arm("staged, prefetch 1", prefetch=1)]
MEMORY_ARMS = [
    Arm(f"{'staged' if staged else 'not staged'}, outputs {'kept' if kept else 'released'}", staged=staged, kept=kept)
    for staged in (True, False)
    for kept in (False, True)
]
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
)  # .item() of the device is the first


class Bench(NamedTuple):
    """The prepared model and what does not change between arms."""

    accelerator: Accelerator
    transformer: nn.Module
    blocks: list[nn.Module]
    compiled: list[Callable]  # the blocks' compiled forwards
    layers: list[nn.Module]
    optimizer: torch.optim.Optimizer
    trainable: list[nn.Parameter]
    vae: nn.Module
    text_width: int
    options: argparse.Namespace


def build(accelerator: Accelerator, options: argparse.Namespace) -> Bench:
    """Transformer with a default and an old adapter, and VAE, on the device in the compute dtype."""
    torch.manual_seed(0)
    dtype, shape = sharding.compute_dtype(accelerator), TINY if options.tiny else {}
    torch.set_default_dtype(dtype)
    with torch.device(accelerator.device):
        transformer = QwenImageTransformer2DModel(num_layers=options.num_layers, **shape).requires_grad_(False).eval()
        vae = AutoencoderKLQwenImage(**({"base_dim": 8, "num_res_blocks": 1} if options.tiny else {}))
        vae = vae.requires_grad_(False).eval()
    torch.set_default_dtype(torch.float32)
    qwen_image.use_image_convolutions(vae)
    qwen_image.add_lora(transformer, rank=64, lora_alpha=128, target_modules=qwen_image.LORA_TARGETS)
    if options.algorithm == "nft":
        qwen_image.add_old_adapter(transformer)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".lora_B." in name:  # zeros would leave lora_A without gradient
                parameter.normal_(std=1e-3)
    qwen_image.checkpoint_blocks(transformer)
    blocks = list(transformer.transformer_blocks)
    qwen_image.compile_blocks(
        transformer, mode="default", dynamic=options.dynamic, fullgraph=True, backend=options.backend
    )
    compiled = [block.forward for block in blocks]
    text_width = transformer.config.joint_attention_dim
    cuda = accelerator.device.type == "cuda"
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=cuda)  # Adam's full work, and every arm's weights alike
    prepared = sharding.prepare_policy(accelerator, transformer, optimizer)
    accelerator.print(qwen_image.parameter_census(prepared[0]))
    layers = qwen_image.lora_layers(prepared[0])
    return Bench(accelerator, prepared[0], blocks, compiled, layers, *prepared[1:], vae, text_width, options)


def set_arm(bench: Bench, arm: Arm) -> None:
    """Switch compilation, recomputed blocks and attention; weights stay."""
    for index, (block, compiled) in enumerate(zip(bench.blocks, bench.compiled, strict=True)):
        block.recomputed = arm.checkpointed_blocks is None or index < arm.checkpointed_blocks
        if arm.compiled:
            block.forward = compiled
        else:
            vars(block).pop("forward", None)
    model = bench.accelerator.unwrap_model(bench.transformer)
    model.set_attention_backend(arm.attention)


def prepare_arm(
    bench: Bench, arm: Arm, *, resolution: int, batch_size: int, timesteps: int
) -> tuple[Callable[[], dict[str, Any]], Callable[[Mapping[str, Any]], tuple[dict[str, float], list]]]:
    """An arm's rollout of a batch, and its update on a batch, which returns the script's metrics and kept outputs."""
    set_arm(bench, arm)
    accelerator, device, nft = bench.accelerator, bench.accelerator.device, bench.options.algorithm == "nft"
    size, dtype = {"height": resolution, "width": resolution}, sharding.compute_dtype(bench.accelerator)
    scale = 1.0 if nft else 4.0
    predict = partial(
        qwen_image.predict_velocity, bench.transformer, true_cfg_scale=scale, cfg_batched=arm.cfg_batched, dtype=dtype,
        **size,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(accelerator.process_index)
    embeds = torch.randn(batch_size + 1, bench.options.text_tokens, bench.text_width, generator=generator).to(dtype)
    conditions = qwen_image.prompt_conditions(list(embeds[1:]), None if nft else embeds[0])
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    num_steps = max(NUM_STEPS, timesteps + 1)
    sigmas = qwen_image.get_sigmas(scheduler, num_steps, **size)
    samples, flags = range(batch_size), ["--log_ratio_limit", "inf", "--divergence_limit", "inf"]
    flags = flags[2:] if nft else flags
    flags += ["--enable_timestep_staging", "--staging_prefetch", str(arm.prefetch)] if arm.staged else []
    flags += ["--return_model_output"] if arm.kept else []
    flags += ["--timesteps_per_forward", str(arm.timesteps_per_forward)]
    window = (0, 0) if nft else (1, 1 + timesteps) if timesteps < NUM_STEPS else (0, timesteps)
    policies = train_nft.adapter_predictors(predict, bench.layers)

    def rollout() -> dict[str, Any]:
        velocity = policies.current if arm.old_is_current or not nft else policies.old
        if bench.options.table == "memory":  # of the update alone, for which any trajectory will do
            velocity = zero_velocity
        with torch.no_grad():
            batch = sample_batch(
                velocity, conditions=conditions, samples=samples, device=device, sigmas=sigmas, sde_window=window,
                noise_level=1.2, seed_words=(0, accelerator.process_index), **size,
            )  # fmt: skip
        if bench.options.table != "memory":
            qwen_image.decode_latents(bench.vae, batch["latents_clean"].to(device), **size)
        batch |= conditions
        if not nft:
            return batch | {"advantages": torch.randn(batch_size, timesteps, generator=generator)}
        trained = (sigmas[:timesteps] * 1000).expand(batch_size, -1)
        batch |= {"train_timesteps": trained, "sample_index": list(samples), "noise_words": (0, 0, 0)}
        return batch | {"reward_prob": torch.rand(batch_size, timesteps, generator=generator)}

    def update(batch: Mapping[str, Any]) -> tuple[dict[str, float], list]:
        common = (accelerator, bench.transformer)
        trained = (bench.optimizer, bench.trainable, [batch])
        if nft:
            args = train_nft.parse_args([*flags, "--ref_kl_coef", str(arm.ref_kl_coef)])
            return train_nft.train_batch(args, *common, policies, *trained, old_is_current=arm.old_is_current)
        args = train_flowgrpo.parse_args([*flags, "--noise_level", "1.2"])
        return train_flowgrpo.train_batch(args, *common, predict, *trained)

    return rollout, update


def zero_velocity(latents: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A policy without a model."""
    return torch.zeros_like(latents)


def run_arm(
    bench: Bench, arm: Arm, shared: dict[str, Any], *, resolution: int, batch_size: int, timesteps: int
) -> dict[str, float]:
    """One rollout and one update on it: seconds and peaks, the slower and larger rank's; FlowGRPO's ratio_max_dev.

    shared: empty in the warm-up's first arm, which leaves its batch there; every later warm-up trains on it too, so
    that its loss and gradient norm can be compared.
    """
    sizes = {"resolution": resolution, "batch_size": batch_size, "timesteps": timesteps}
    rollout, update = prepare_arm(bench, arm, **sizes)
    figures: dict[str, float] = {}
    batch = timed(bench.accelerator, "rollout", rollout, figures)
    metrics, _ = timed(bench.accelerator, "update", lambda: update(batch), figures)
    if "ratio_max_dev" in metrics:
        figures["ratio_max_dev"] = metrics["ratio_max_dev"]
    figures["step_input_mib"] = input_bytes(bench, arm, batch) / 2**20
    if arm.name not in shared:
        metrics, _ = update(shared.setdefault("batch", batch))
        shared[arm.name] = {name: metrics[name] for name in ("policy_loss", "grad_norm")}
    return figures


def input_bytes(bench: Bench, arm: Arm, batch: Mapping[str, Any]) -> int:
    """Bytes of a batch that are on the device in a step."""
    fields = nft_fields(batch) if bench.options.algorithm == "nft" else FLOWGRPO_FIELDS
    how = {"chunk": arm.timesteps_per_forward, "prefetch": arm.prefetch}
    return step_input_bytes(batch, fields, staged=arm.staged, **how)


def profile_arm(bench: Bench, arm: Arm, batch: Mapping[str, Any], **sizes: int) -> dict[str, float]:
    """One profiled update: waits of the host for the device before the gradients are clipped, and the share of that
    time in which a kernel ran."""
    update, clip = prepare_arm(bench, arm, **sizes)[1], sharding.clip_gradients

    def mark_and_clip(*arguments: Any) -> torch.Tensor:
        with torch.profiler.record_function("clip"):
            return clip(*arguments)

    sharding.clip_gradients = mark_and_clip
    torch.cuda.synchronize()
    try:
        with torch.profiler.profile() as profile:
            update(batch)
            torch.cuda.synchronize()
    finally:
        sharding.clip_gradients = clip
    events = profile.events()
    ends = min(event.time_range.start for event in events if event.name == "clip")
    begin = min(event.time_range.start for event in events)
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and e.name != "clip"]
    busy, reached = 0.0, begin
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in kernels if e.time_range.start < ends):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    waits = {name: sum(e.name == name and e.time_range.start < ends for e in events) for name in WAITS}
    bench.accelerator.print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))
    return waits | {"device_busy": busy / (max(reached, ends) - begin)}


def timed(accelerator: Accelerator, phase: str, run: Callable[[], Any], figures: dict[str, float]) -> Any:
    """Run a phase on all ranks and put its seconds and peak GiB, the largest of the ranks, into figures."""
    cuda = accelerator.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    accelerator.wait_for_everyone()
    started = time.perf_counter()
    result = run()
    if cuda:
        torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    numbers = torch.tensor([[seconds, peak]], dtype=torch.float64, device=accelerator.device)
    figures[f"{phase}_s"], figures[f"{phase}_peak_gib"] = accelerator.gather(numbers).amax(dim=0).tolist()
    return result


# ----- FLOPs -------------------------------------------------------------------------------------------------------


def count_flops(options: argparse.Namespace, resolution: int, num_passes: int) -> dict[str, float]:
    """TFLOPs of one sample at one timestep, all CFG passes: a forward, and a forward and backward, by torch's counter
    on the meta device."""
    with torch.device("meta"):
        shape = TINY if options.tiny else {}
        model = QwenImageTransformer2DModel(num_layers=options.num_layers, **shape).requires_grad_(False)
        qwen_image.add_lora(model, rank=64, lora_alpha=128, target_modules=qwen_image.LORA_TARGETS)
        latents = torch.empty(1, (resolution // 16) ** 2, 64)
        embeds = torch.empty(1, options.text_tokens, model.config.joint_attention_dim)
        with FlopCounterMode(display=False) as counter:
            velocity = qwen_image.predict_velocity(
                model, latents, torch.empty(1), embeds, height=resolution, width=resolution, true_cfg_scale=1.0,
                cfg_batched=False, dtype=torch.float32,
            )  # fmt: skip
            forward = counter.get_total_flops()
            velocity.sum().backward()
    return {"forward": num_passes * forward / 1e12, "train": num_passes * counter.get_total_flops() / 1e12}


def matmul_tflops(device: torch.device) -> float:
    """The rate of a large bf16 matrix product, TFLOP/s."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    times = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 10 * 2 * size**3 / statistics.median(times) / 1e12


# ----- Cases -------------------------------------------------------------------------------------------------------


def measure(
    bench: Bench, arms: Sequence[Arm], *, resolution: int, batch_size: int, timesteps: int, rate: float
) -> list[dict[str, Any]]:
    """A row for each arm: medians over the repetitions; an arm that runs out of memory says so and is left out."""
    options, nft = bench.options, bench.options.algorithm == "nft"
    flops = count_flops(options, resolution, 1 if nft else 2)
    sizes = {"resolution": resolution, "batch_size": batch_size, "timesteps": timesteps}
    taken: dict[str, list[dict[str, float]]] = {}
    warm_up, shared, failed = {}, {}, set()
    for repeat in range(options.repeats + 1):
        for arm in arms:
            if arm.name in failed:
                continue
            started = time.perf_counter()
            try:
                figures = run_arm(bench, arm, shared, **sizes)
            except torch.OutOfMemoryError as error:
                failed.add(arm.name)
                bench.accelerator.print(f"{arm.name}: {str(error).splitlines()[0]}")
                continue
            seconds = {name: round(figures[name], 2) for name in ("rollout_s", "update_s")}
            bench.accelerator.print(f"{arm.name}, {'warm-up' if repeat == 0 else repeat}: {seconds}", flush=True)
            if repeat == 0:
                warm_up[arm.name] = time.perf_counter() - started
            else:
                taken.setdefault(arm.name, []).append(figures)
    rows = []
    for arm in arms:
        if arm.name in failed:
            rows.append({"arm": arm.name, **sizes, "out_of_memory": True})
            continue
        row = {name: statistics.median(f[name] for f in taken[arm.name]) for name in taken[arm.name][0]}
        trained = batch_size * timesteps
        per_image, per_step = row["rollout_s"] / batch_size, row["update_s"] / trained
        extra = (not arm.old_is_current) + (arm.ref_kl_coef > 0) if nft else 0  # no-grad forwards of the update
        share = 1.0 if arm.checkpointed_blocks is None else min(1.0, arm.checkpointed_blocks / options.num_layers)
        model = flops["train"] + extra * flops["forward"]
        row |= {
            "arm": arm.name, **sizes, **arm._asdict(), "rollout_s_per_image": per_image,
            "update_s_per_sample_timestep": per_step,
            "images_per_gpu_s": 1 / (per_image + TRAINED_STEPS[options.algorithm] * per_step),
            "warm_up_s": warm_up[arm.name],
            "model_tflops": model / per_step, "model_share": model / per_step / rate,
            "hardware_share": (model + share * flops["forward"]) / per_step / rate,
            "rollout_share": num_forward_steps(timesteps) * flops["forward"] / per_image / rate,
        }  # fmt: skip
        row |= {f"same_batch_{name}": value for name, value in shared[arm.name].items()}
        if options.profile:
            row |= profile_arm(bench, arm, shared["batch"], **sizes)
        row.pop("name")
        rows.append(row)
        bench.accelerator.print(show(row), flush=True)
    return rows


def measure_memory(bench: Bench, arms: Sequence[Arm], **sizes: int) -> list[dict[str, Any]]:
    """A row for each arm of one update: peak, what was there before, inputs and kept outputs on the device, and the
    anonymous memory of the process. Weights do not move, so arms need not take turns."""
    rows = []
    for arm in arms:
        rollout, update = prepare_arm(bench, arm, **sizes)
        batch, figures = rollout(), {}
        start = torch.cuda.memory_allocated() if bench.accelerator.device.type == "cuda" else 0
        try:
            _, kept = timed(bench.accelerator, "update", partial(update, batch), figures)
        except torch.OutOfMemoryError as error:
            bench.accelerator.print(f"{arm.name}, {sizes}: {str(error).splitlines()[0]}")
            rows.append({"arm": arm.name, **sizes, "out_of_memory": True})
            continue
        outputs = sum(tensor.nbytes for micro_batch in kept for tensor in micro_batch.values())
        del kept
        anonymous = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
        row = {
            "arm": arm.name, **sizes, "staged": arm.staged, "kept": arm.kept, "start_gib": start / 2**30, **figures,
            "step_input_mib": input_bytes(bench, arm, batch) / 2**20, "kept_output_mib": outputs / 2**20,
            "anonymous_gib": int(anonymous.split()[1]) / 2**20,
        }  # fmt: skip
        rows.append(row)
        bench.accelerator.print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def num_forward_steps(timesteps: int) -> int:
    """Denoising steps of a rollout that trains so many."""
    return max(NUM_STEPS, timesteps + 1)


def show(row: Mapping[str, Any]) -> str:
    """One arm as a line."""
    return (
        f"{row['resolution']} px, batch {row['batch_size']}, T {row['timesteps']}, {row['arm']}: "
        f"{row['rollout_s_per_image']:.3f} s/image, {row['update_s_per_sample_timestep']:.3f} s/sample-timestep, "
        f"{row['images_per_gpu_s']:.3f} images/GPU/s, model {row['model_share']:.0%}, hardware "
        f"{row['hardware_share']:.0%}, {row['rollout_peak_gib']:.1f} and {row['update_peak_gib']:.1f} GiB, "
        f"inputs {row['step_input_mib']:.2f} MiB, "
        + (f"ratio within {row['ratio_max_dev']:.1e}, " if "ratio_max_dev" in row else "")
        + f"same batch: loss {row['same_batch_policy_loss']:.9g}, gradient {row['same_batch_grad_norm']:.9g}, warm-up "
        f"{row['warm_up_s']:.0f} s" + "".join(f", {row[name]} {name}" for name in WAITS if name in row)
    )


def merge(folder: Path, output: Path) -> None:
    """One json of all measured configurations, with the commit of this checkout, and a table on stdout."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not files:
        raise SystemExit(f"{folder} holds no result: run the benchmark first")
    write_text(output, json.dumps({"commit": git_commit(), "configurations": files}, indent=1))
    print("| | s per image | s per sample-timestep | faster | images/GPU/s | model, hardware | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for file in files:
        rows = [row for row in file["rows"] if "update_s_per_sample_timestep" in row]
        first = {}  # arm of each size, which the others are compared with
        for row in rows:
            first.setdefault((row["resolution"], row["batch_size"], row["timesteps"]), row)
        for row in rows:
            name = (
                f"{file['algorithm']}, {file['launched']}, {row['resolution']} px x {row['batch_size']}, {row['arm']}"
            )
            start = first[row["resolution"], row["batch_size"], row["timesteps"]]
            ratio = start["update_s_per_sample_timestep"] / row["update_s_per_sample_timestep"]
            shares = f"{row['model_share']:.0%}, {row['hardware_share']:.0%}"
            peak = max(row["rollout_peak_gib"], row["update_peak_gib"])
            print(
                f"| {name} | {row['rollout_s_per_image']:.3f} | {row['update_s_per_sample_timestep']:.3f} | "
                f"{ratio:.2f} | {row['images_per_gpu_s']:.3f} | {shares} | {peak:.1f} |"
            )
    print("\n| | T | batch | inputs MiB | kept outputs MiB | peak GiB | process GiB |\n|---|---|---|---|---|---|---|")
    memory = [(file, row) for file in files for row in file["rows"] if "start_gib" in row]
    for file, row in sorted(memory, key=lambda pair: [pair[1][k] for k in ("timesteps", "batch_size", "arm")]):
        name = f"{file['algorithm']}, {file['launched']}, {row['resolution']} px, {row['arm']}"
        print(
            f"| {name} | {row['timesteps']} | {row['batch_size']} | {row['step_input_mib']:.2f} "
            f"| {row['kept_output_mib']:.2f} | {row['update_peak_gib']:.2f} | {row['anonymous_gib']:.2f} |"
        )
    for file in files:
        for row in file["rows"]:
            if row.get("out_of_memory"):
                print(f"out of memory: {file['algorithm']}, {file['launched']}, {row}")


def main() -> None:
    """Measure the asked sizes and write one json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--algorithm", choices=("flowgrpo", "nft"), default="flowgrpo", help="whose rollout and update"
    )
    parser.add_argument("--resolutions", type=int, nargs="+", default=[512, 1024], help="pixels")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[4], help="samples of a forward")
    parser.add_argument(
        "--table", choices=("speed", "staging", "memory"), default="speed", help="which arms take turns"
    )
    parser.add_argument("--profile", action="store_true", help="count waits for the GPU in an update of each arm")
    parser.add_argument("--deterministic", action="store_true", help="deterministic algorithms")
    parser.add_argument("--timesteps", type=int, nargs="+", default=[2], help="trained timesteps")
    parser.add_argument("--arms", type=int, nargs="+", help="numbers of the arms; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions after the warm-up")
    parser.add_argument("--num_layers", type=int, default=60, help="blocks")
    parser.add_argument("--text_tokens", type=int, default=64, help="length of a prompt")
    parser.add_argument("--dynamic", action=argparse.BooleanOptionalAction, default=True, help="of compilation")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a CPU")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/full_size"), help="a json file for each call")
    parser.add_argument("--merge", type=Path, help="write all results of --output_dir to this json, print the table")
    options = parser.parse_args()
    if options.merge:
        merge(options.output_dir, options.merge)
        return
    speed = FLOWGRPO_ARMS if options.algorithm == "flowgrpo" else NFT_ARMS
    arms = {"speed": speed, "staging": STAGING_ARMS, "memory": MEMORY_ARMS}[options.table]
    if options.repeats < 1 or not set(options.arms or ()) <= set(range(len(arms))):
        raise SystemExit(
            f"--repeats is {options.repeats}, --arms {options.arms}: give at least 1, and 0 to {len(arms) - 1}"
        )
    diffusers.utils.logging.set_verbosity_error()  # a warning for every switch of the attention backend
    accelerator = sharding.make_accelerator()
    if options.profile and accelerator.device.type != "cuda":
        raise SystemExit(f"--profile counts waits for a GPU, but this run is on {accelerator.device}: leave it out")
    torch.use_deterministic_algorithms(options.deterministic)
    bench = build(accelerator, options)
    arms = arms if options.arms is None else [arms[number] for number in options.arms]
    rate = matmul_tflops(accelerator.device)
    accelerator.print(f"bf16 product {rate:.3g} TFLOP/s", flush=True)
    cuda = accelerator.device.type == "cuda"
    launched = "fsdp2" if accelerator.is_fsdp2 else accelerator.distributed_type.value.lower()
    launched = f"{launched} on {accelerator.num_processes}" if accelerator.num_processes > 1 else "one GPU"
    facts = {
        "algorithm": options.algorithm, "launched": launched, "table": options.table, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu", "matmul_tflops": rate,
        "num_layers": options.num_layers, "text_tokens": options.text_tokens, "dynamic": options.dynamic,
        "deterministic": options.deterministic,
    }  # fmt: skip
    words = [options.algorithm, launched.replace(" ", "_"), options.table]
    words += map(str, [*options.resolutions, *options.batch_sizes, *options.timesteps])
    path, rows = options.output_dir / f"{'-'.join(words)}.json", []
    if options.table == "memory":  # compiles, and makes the optimizer state
        measure_memory(bench, arms[:1], resolution=options.resolutions[0], batch_size=1, timesteps=1)
    for resolution in options.resolutions:
        for batch_size in options.batch_sizes:
            for timesteps in options.timesteps:
                sizes = {"resolution": resolution, "batch_size": batch_size, "timesteps": timesteps}
                if options.table == "memory":
                    rows += measure_memory(bench, arms, **sizes)
                else:
                    rows += measure(bench, arms, **sizes, rate=rate)
                if accelerator.is_main_process:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_text(path, json.dumps(facts | {"rows": rows}, indent=1))
    assert all(math.isfinite(row["update_s"]) for row in rows if not row.get("out_of_memory"))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
