"""Memory, time and equality of one update with and without timestep staging, by the scripts' own train_batch.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 benchmarks/staging_grid.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 2 benchmarks/staging_grid.py
    python benchmarks/staging_grid.py --merge benchmarks/results/staging_grid.json

Arms: M keeps the micro-batch on the device and every timestep's outputs, A releases the outputs, AB stages timesteps,
AB1 stages with one step of prefetch. Every arm of a case starts from the same weights, optimizer state, random numbers
and old log-probs. Passes: `memory` (peaks, every T), `timing` (arms alternate, pairs of updates), `equality` (losses,
gradients, weights and forward-only outputs, under deterministic algorithms). A json file per case and pass is written
as soon as it is measured, and finished ones are not run again; --merge makes one file and the tables of them.

CUBLAS_WORKSPACE_CONFIG is set for the equality pass alone: its value is the default of an H200, so peaks do not
depend on it, but while it is set PyTorch parses it in every matrix product, which makes an update take twice as long.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_flowgrpo
import train_nft
from qwen_image import add_lora, add_old_adapter, get_sigmas, lora_layers, parameter_census, predict_velocity
from run_folder import git_commit, write_text
from sharding import compute_dtype, make_accelerator, prepare_policy, reshard
from staging import FLOWGRPO_FIELDS, nft_fields

ARMS = {
    "M": ["--return_model_output"],
    "A": [],
    "AB": ["--enable_timestep_staging"],
    "AB1": ["--enable_timestep_staging", "--staging_prefetch", "1"],
}
PROFILES = {  # algorithm and dtype of the adapter
    "fsdp": [("flow_grpo", "float32"), ("diffusion_nft", "float32")],
    "fsdp2": [("flow_grpo", "float32"), ("diffusion_nft", "float32"), ("diffusion_nft", "bfloat16")],
}
SEED = 20260906
RANK_BATCH, MICRO_BATCH, CHANNELS, TEXT_TOKENS, TEXT_WIDTH = 4, 2, 64, 16, 32
SIZES = {"cuda": (512, (1, 8, 32)), "cpu": (64, (1, 4))}  # resolution and numbers of timesteps
MIB = 2**20


class Case(NamedTuple):
    """One cell of the grid."""

    profile: str
    algorithm: str
    lora_dtype: str
    cfg: str  # two_pass or batched
    noise: str  # layout of DiffusionNFT's noise
    timesteps: int


class Bench(NamedTuple):
    """A prepared fixture."""

    script: ModuleType
    accelerator: Accelerator
    transformer: nn.Module
    optimizer: torch.optim.Optimizer
    trainable: list[nn.Parameter]
    resolution: int


def build(
    accelerator: Accelerator, algorithm: str, lora_dtype: str, resolution: int, pos_embed: nn.Module | None
) -> Bench:
    """Two layers of random weights in the compute dtype with LoRA on every linear layer, prepared by accelerate.

    pos_embed: an earlier fixture's. Its lru_cache would keep each one's tables on the device, 1.3 MiB of them.
    """
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
    transformer.pos_embed = pos_embed or transformer.pos_embed
    transformer = transformer.to(compute_dtype(accelerator)).requires_grad_(False)
    targets = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    add_lora(transformer, rank=8, lora_alpha=16, target_modules=targets, dtype=getattr(torch, lora_dtype))
    if algorithm == "diffusion_nft":
        add_old_adapter(transformer, dtype=getattr(torch, lora_dtype))
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=1e-4)
    prepared = prepare_policy(accelerator, transformer, optimizer)
    accelerator.print(f"{algorithm} {lora_dtype}: {type(prepared[0]).__name__}, {parameter_census(prepared[0])}")
    script = train_flowgrpo if algorithm == "flow_grpo" else train_nft
    return Bench(script, accelerator, *prepared, resolution)


def parse_script_args(case: Case, *options: str) -> argparse.Namespace:
    """The script's options for a case."""
    words = ["--true_cfg_scale", "2", "--max_grad_norm", "1", "--divergence_limit", "inf", *options]
    words += ["--cfg_batched" if case.cfg == "batched" else "--no-cfg_batched"]
    if case.algorithm == "flow_grpo":
        return train_flowgrpo.parse_args(
            ["--noise_level", "0.8", "--clip_range", "0.2", "--log_ratio_limit", "inf", *words]
        )
    return train_nft.parse_args(["--ref_kl_coef", "1e-4", "--nft_beta", "0.1", *words])


def make_micro_batches(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """This rank's micro-batches on the CPU, FlowGRPO's with the policy's old log-probs."""
    generator = torch.Generator().manual_seed(SEED + 1 + bench.accelerator.process_index)
    tokens, num_timesteps = (bench.resolution // 16) ** 2, case.timesteps
    shape, pick = (MICRO_BATCH, tokens, CHANNELS), [0.25, 0.75, -0.25, -0.75]
    sigmas = get_sigmas(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 40, height=512, width=512)
    batches = []
    for first in range(0, RANK_BATCH, MICRO_BATCH):
        embeds = torch.randn(2, MICRO_BATCH, TEXT_TOKENS, TEXT_WIDTH, generator=generator).bfloat16()
        batch = {"prompt_embeds": embeds[0], "negative_prompt_embeds": embeds[1]}
        batch |= {f"{name}_mask": torch.ones(MICRO_BATCH, TEXT_TOKENS, dtype=torch.int32) for name in list(batch)}
        values = torch.tensor(pick[first : first + MICRO_BATCH])[:, None].repeat(1, num_timesteps)
        if case.algorithm == "flow_grpo":
            batch |= {
                "all_latents": torch.randn(MICRO_BATCH, num_timesteps + 1, *shape[1:], generator=generator),
                "sigmas": sigmas[: num_timesteps + 1].repeat(MICRO_BATCH, 1),
                "sigma_max": sigmas[1].repeat(MICRO_BATCH),
                "all_timesteps": (sigmas[:num_timesteps] * 1000).repeat(MICRO_BATCH, 1),
                "advantages": values,
                "old_log_probs": torch.zeros(MICRO_BATCH, num_timesteps),
            }
            batch["old_log_probs"] = forward_only(case, bench, batch)["log_probs"]
        else:
            spread = torch.linspace(900, 100, num_timesteps)
            rows = [spread[torch.randperm(num_timesteps, generator=generator)] for _ in range(MICRO_BATCH)]
            batch |= {
                "latents_clean": torch.randn(shape, generator=generator),
                "train_timesteps": torch.stack(rows),
                "reward_prob": values.abs(),
                "sample_index": list(range(first, first + MICRO_BATCH)),
                "noise_words": (SEED, 0, 0),
            }
            if case.noise == "per_step":
                batch["forward_noise"] = torch.randn(MICRO_BATCH, num_timesteps, *shape[1:], generator=generator)
            elif case.noise == "shared":
                batch["forward_noise"] = torch.randn(shape, generator=generator)
        batches.append(batch)
    return batches


def predictors(case: Case, bench: Bench) -> Any:
    """What the script's train_batch takes: the policy's velocity, for DiffusionNFT those of three policies."""
    predict = partial(
        predict_velocity,
        bench.transformer,
        height=bench.resolution,
        width=bench.resolution,
        true_cfg_scale=2.0,
        cfg_batched=case.cfg == "batched",
        dtype=compute_dtype(bench.accelerator),
    )
    if case.algorithm == "flow_grpo":
        return predict
    return train_nft.adapter_predictors(predict, lora_layers(bench.transformer))


def forward_only(case: Case, bench: Bench, batch: Mapping[str, Any], *options: str) -> dict[str, Tensor]:
    """The script's own forward-only pass over one micro-batch."""
    args = parse_script_args(case, *options)
    return bench.script.forward_only(args, predictors(case, bench), batch, bench.accelerator.device)


def measure_update(
    bench: Bench, case: Case, arm: str, micro_batches: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, float], dict[str, float]]:
    """One update; MiB at the start and at the peak and seconds, the larger of the ranks, and the script's metrics."""
    accelerator, args, velocities = bench.accelerator, parse_script_args(case, *ARMS[arm]), predictors(case, bench)
    cuda = accelerator.device.type == "cuda"
    torch.manual_seed(SEED)
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    accelerator.wait_for_everyone()
    start, began = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
    metrics, kept = bench.script.train_batch(
        args, accelerator, bench.transformer, velocities, bench.optimizer, bench.trainable, micro_batches
    )
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    assert len(kept) == (len(micro_batches) if arm == "M" else 0)
    for outputs in kept:
        assert all(tensor.shape[:2] == (MICRO_BATCH, case.timesteps) for tensor in outputs.values())
    del kept
    numbers = torch.tensor([start / MIB, peak / MIB, reserved / MIB, seconds], dtype=torch.float64)
    numbers = accelerator.gather(numbers[None].to(accelerator.device)).amax(dim=0).tolist()
    return dict(zip(("start_mib", "peak_mib", "reserved_mib", "seconds"), numbers, strict=True)), metrics


# ----- The same start for every arm --------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """A rank's own part of a parameter, gradient or optimizer state."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def snapshot(bench: Bench) -> list[list[Tensor]]:
    """Copies, on the CPU, of the trainable parameters and their optimizer state."""
    state = bench.optimizer.state
    return [[local(t).detach().cpu().clone() for t in (p, *state[p].values())] for p in bench.trainable]


@torch.no_grad()
def restore(bench: Bench, saved: Sequence[Sequence[Tensor]]) -> None:
    """Write a snapshot back in place, so that no allocation changes."""
    reshard(bench.transformer)  # a forward-only pass leaves the root's weights gathered, which would stay as they were
    for parameter, tensors in zip(bench.trainable, saved, strict=True):
        for tensor, value in zip((parameter, *bench.optimizer.state[parameter].values()), tensors, strict=True):
            local(tensor).copy_(value)


# ----- The three passes --------------------------------------------------------------------------------------------


def memory_pass(bench: Bench, case: Case, repeats: int) -> dict[str, Any]:
    """Peaks of every arm, and rough seconds."""
    micro_batches = make_micro_batches(case, bench)
    measure_update(bench, case, "A", micro_batches)  # the warm-up; makes the optimizer state
    saved, results = snapshot(bench), {}
    for _ in range(repeats):
        for arm in ARMS:
            restore(bench, saved)
            results.setdefault(arm, []).append(measure_update(bench, case, arm, micro_batches))
    arms = {}
    for arm, updates in results.items():
        figures = [update[0] for update in updates]
        arms[arm] = {name: statistics.median(f[name] for f in figures) for name in figures[0]}
        arms[arm] |= {"policy_loss": updates[-1][1]["policy_loss"], "updates": len(updates)}
    return arms


def timing_pass(bench: Bench, case: Case, pairs: int) -> dict[str, Any]:
    """Ratios to arm A of updates that alternate, with 95 % bootstrap intervals of the ratio of medians."""
    micro_batches = make_micro_batches(case, bench)
    measure_update(bench, case, "A", micro_batches)
    saved, names, seconds = snapshot(bench), ["A", "AB", "AB1"], {}
    for repeat in range(pairs + 1):  # the first is a warm-up; the order turns
        for arm in names[repeat % 3 :] + names[: repeat % 3]:
            restore(bench, saved)
            seconds.setdefault(arm, []).append(measure_update(bench, case, arm, micro_batches)[0]["seconds"])
    times = {arm: np.array(values[1:]) for arm, values in seconds.items()}
    generator, results = np.random.default_rng(0), {}
    for arm in names:
        picks = generator.integers(0, pairs, (5000, pairs))
        ratios = np.median(times[arm][picks], axis=1) / np.median(times["A"][picks], axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        median = float(np.median(times[arm]))
        ratio = median / float(np.median(times["A"]))
        results[arm] = {"seconds": median, "ratio": ratio, "low": float(low), "high": float(high), "pairs": pairs}
    return results


def equality_pass(bench: Bench, case: Case) -> dict[str, Any]:
    """One update of every arm under deterministic algorithms, compared with arm A's on every rank; also what each arm
    had on the device."""
    micro_batches = make_micro_batches(case, bench)
    measure_update(bench, case, "A", micro_batches)
    saved, found = snapshot(bench), {}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        for arm in ARMS:
            restore(bench, saved)
            found[arm] = watched_update(bench, case, arm, micro_batches)
    finally:
        torch.use_deterministic_algorithms(False)
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    results = {}
    for arm, (tensors, metrics, input_bytes) in found.items():
        expected, expected_metrics, _ = found["A"]
        assert tensors.keys() == expected.keys()
        assert metrics.keys() == expected_metrics.keys()
        pairs = [(tensors[name], expected[name]) for name in expected]
        pairs += [(torch.tensor(metrics[name]), torch.tensor(expected_metrics[name])) for name in metrics]
        difference = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
        close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
        numbers = torch.tensor([[difference, float(not close), input_bytes / MIB]], dtype=torch.float64)
        difference, failed, inputs = (
            bench.accelerator.gather(numbers.to(bench.accelerator.device)).amax(dim=0).tolist()
        )
        assert not failed, f"{case}: arm {arm} differs from arm A by {difference}"
        results[arm] = {"largest_difference": difference, "step_input_mib": inputs, "compared": len(pairs)}
    return results


def watched_update(
    bench: Bench, case: Case, arm: str, micro_batches: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, float], int]:
    """One update's clipped local gradients, new local weights and forward-only outputs, its metrics, and the most
    bytes of step inputs that were on the device at once, counted by storage."""
    script, tensors, largest = bench.script, {}, 0
    fields = FLOWGRPO_FIELDS if case.algorithm == "flow_grpo" else nft_fields(micro_batches[0])
    iterate = script.iterate_timesteps

    def watch(*arguments: Any, **options: Any) -> Iterator[dict[str, Tensor]]:
        nonlocal largest
        for step in iterate(*arguments, **options):
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stepped(step, fields)}
            largest = max(largest, sum(storages.values()))
            if options["staged"]:
                for name, window in fields.per_step.items():
                    assert name not in step or step[name].shape[:2] == (MICRO_BATCH, window)
            yield step

    def keep_gradients(*_: Any) -> None:
        for number, parameter in enumerate(bench.trainable):
            tensors[f"gradient {number}"] = local(parameter.grad).detach().cpu().clone()

    hook = bench.optimizer.optimizer.register_step_pre_hook(keep_gradients)
    script.iterate_timesteps = watch
    try:
        metrics = measure_update(bench, case, arm, micro_batches)[1]
    finally:
        script.iterate_timesteps = iterate
        hook.remove()
    tensors |= {f"weight {n}": local(p).detach().cpu().clone() for n, p in enumerate(bench.trainable)}
    outputs = forward_only(case, bench, micro_batches[0], *ARMS[arm])
    assert all(tensor.shape[:2] == (MICRO_BATCH, case.timesteps) for tensor in outputs.values())
    return tensors | {f"forward-only {name}": tensor for name, tensor in outputs.items()}, metrics, largest


def stepped(step: Mapping[str, Tensor], fields: Any) -> list[Tensor]:
    """The tensors of a step that are read per timestep."""
    return [step[name] for name in fields.per_step if name in step]


# ----- Cases, files, tables ----------------------------------------------------------------------------------------


def planned_cases(profile: str, timesteps: Sequence[int], algorithms: Sequence[str], passes: Sequence[str]) -> list:
    """(case, pass) in order, those of one fixture together."""
    planned = []
    for algorithm, lora_dtype in PROFILES[profile]:
        if algorithm not in algorithms:
            continue
        cells = [("two_pass", "per_step", count) for count in timesteps] + [("batched", "per_step", max(timesteps))]
        if (profile, algorithm, lora_dtype) == ("fsdp2", "diffusion_nft", "float32"):
            cells += [("two_pass", noise, max(timesteps)) for noise in ("shared", "on_demand")]
        for cfg, noise, count in cells:
            case = Case(profile, algorithm, lora_dtype, cfg, noise, count)
            planned += [(case, "memory")] if "memory" in passes else []
            # Equality at a T that takes seconds; on_demand at the largest too, the only other kind of noise.
            if "equality" in passes and (count == sorted(timesteps)[len(timesteps) // 2] or noise != "per_step"):
                planned += [(case, "equality")]
        if "timing" in passes and lora_dtype == "float32":
            middle = sorted(timesteps)[len(timesteps) // 2]
            planned += [(Case(profile, algorithm, lora_dtype, "batched", "per_step", middle), "timing")]
    return planned


def case_file(folder: Path, case: Case, kind: str) -> Path:
    """Where the result of a case and pass lies."""
    return folder / f"{'-'.join(map(str, case))}-{kind}.json"


def show(case: Case, kind: str, arms: Mapping[str, Mapping[str, float]]) -> str:
    """One case as a line."""
    cells = []
    for arm, figures in arms.items():
        if kind == "memory":
            cells.append(f"{arm} {figures['peak_mib']:.2f} MiB {figures['seconds']:.2f} s")
        elif kind == "timing":
            interval = f"{figures['low']:.3f} to {figures['high']:.3f}"
            cells.append(f"{arm} {figures['seconds']:.3f} s x {figures['ratio']:.3f} ({interval})")
        else:
            cells.append(f"{arm} {figures['largest_difference']:.1e}, inputs {figures['step_input_mib']:.2f} MiB")
    return f"{'-'.join(map(str, case))} {kind}: " + "; ".join(cells)


def merge(folder: Path, output: Path) -> None:
    """One json of all cases, with the commit of this checkout, and the tables in Markdown on stdout."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not rows:
        raise SystemExit(f"{folder} holds no measured case: run the grid first")
    write_text(output, json.dumps({"commit": git_commit(), "cases": rows}, indent=1))
    print("| | T | M | A | A+B | A+B, prefetch 1 | start |\n|---|---|---|---|---|---|---|")
    for row in sorted((r for r in rows if r["pass"] == "memory"), key=lambda r: [str(r[k]) for k in Case._fields[:5]]):
        peaks = [f"{row['arms'][arm]['peak_mib']:.2f}" for arm in ARMS] + [f"{row['arms']['A']['start_mib']:.2f}"]
        name = f"{row['profile']} {row['algorithm']}, {row['lora_dtype']} LoRA, CFG {row['cfg']}, {row['noise']}"
        print(f"| {name} | {row['timesteps']} | {' | '.join(peaks)} |")
    print("\n| | A, s | A+B / A | A+B, prefetch 1 / A |\n|---|---|---|---|")
    for row in (r for r in rows if r["pass"] == "timing"):
        a, *others = (row["arms"][arm] for arm in ("A", "AB", "AB1"))
        ratios = [f"{o['ratio']:.3f} ({o['low']:.3f} to {o['high']:.3f})" for o in others]
        name = f"{row['profile']} {row['algorithm']}, {row['lora_dtype']} LoRA, T = {row['timesteps']}"
        print(f"| {name} | {a['seconds']:.2f} | {' | '.join(ratios)} |")


def main() -> None:
    """Run the launched profile's cases that have no file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cuda", help="cpu: small sizes, no memory figures")
    parser.add_argument("--passes", nargs="+", default=["memory", "equality", "timing"], help="what to measure")
    parser.add_argument("--algorithms", nargs="+", default=["flow_grpo", "diffusion_nft"], help="whose train_batch")
    parser.add_argument("--timesteps", type=int, nargs="+", help="trained timesteps; default 1 8 32, on the CPU 1 4")
    parser.add_argument("--repeats", type=int, default=1, help="measured updates of an arm in the memory pass")
    parser.add_argument("--pairs", type=int, default=30, help="updates of an arm in the timing pass")
    parser.add_argument("--output_dir", default="runs/staging_grid", help="a json file for each case and pass")
    parser.add_argument("--merge", help="write all cases of --output_dir to this json and print the tables")
    options = parser.parse_args()
    output_dir = Path(options.output_dir)
    if options.merge:
        merge(output_dir, Path(options.merge))
        return

    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    accelerator = make_accelerator()
    if accelerator.device.type != options.device:
        raise SystemExit(f"--device {options.device}, but this run is on {accelerator.device}: change one")
    profile = "fsdp2" if accelerator.is_fsdp2 else accelerator.distributed_type.value.lower()
    if profile not in PROFILES or accelerator.num_processes != 2:
        raise SystemExit(f"launch two processes with fsdp.yaml or fsdp2.yaml, not {profile} {accelerator.state}")
    resolution, timesteps = SIZES[options.device]
    planned = planned_cases(profile, options.timesteps or timesteps, options.algorithms, options.passes)
    runs: dict[str, Callable[[Bench, Case], dict]] = {
        "memory": partial(memory_pass, repeats=options.repeats),
        "timing": partial(timing_pass, pairs=options.pairs),
        "equality": equality_pass,
    }
    bench, fixture, unequal = None, None, []
    for case, kind in planned:
        path = case_file(output_dir, case, kind)
        if path.exists():
            continue
        if fixture != (case.algorithm, case.lora_dtype):
            pos_embed, bench = bench and bench.transformer.pos_embed, None
            accelerator.free_memory()
            gc.collect()
            fixture = case.algorithm, case.lora_dtype
            bench = build(accelerator, *fixture, resolution, pos_embed)
        arms = runs[kind](bench, case)
        facts = case._asdict() | {"pass": kind, "arms": arms, "torch": torch.__version__}
        facts["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        if accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(facts, indent=1))
        accelerator.print(show(case, kind, arms), flush=True)
        starts = {round(figures.get("start_mib", 0.0), 2) for figures in arms.values()}
        unequal += [(case, starts)] if len(starts) > 1 else []
        accelerator.wait_for_everyone()
    done = sum(case_file(output_dir, *item).exists() for item in planned)
    assert done == len(planned), f"{done} of {len(planned)} cases have a result"
    assert not unequal, f"arms that start from unequal allocations, in MiB: {unequal}"
    accelerator.print(f"staging grid complete: {len(planned)} of {len(planned)} cases of {profile} in {output_dir}")
    del bench
    gc.collect()
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
