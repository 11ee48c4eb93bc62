"""A training run of the tiny pipeline that is watched, and what must hold for it. For tests/smoke.py."""

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from script_runs import run, values_of
from torch import Tensor
from torch.distributed.tensor import DTensor

import qwen_image
import run_folder
import sharding
import train_flowgrpo
import train_nft

SCRIPTS = {"train_flowgrpo": train_flowgrpo, "train_nft": train_nft}
TARGETS = (*qwen_image.LORA_TARGETS, "img_in", "proj_out")  # the last two lie outside the blocks
COMMON = {
    "num_train_epochs": 5,
    "num_images_per_prompt": 2,
    "train_batch_size": 2,
    "checkpointing_steps": 1,
    "checkpoints_total_limit": 5,
    "eval_epochs": 5,
    "lora_target_modules": TARGETS,
    "learning_rate": 1e-2,
}
OWN = {
    "train_flowgrpo": {"sde_window_range": (0, 3), "clip_range": 1e-3, "kl_beta": 0.1},
    "train_nft": {"ref_kl_coef": 0.1, "old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1},
}
NO_REFERENCE = {"train_flowgrpo": {"kl_beta": 0}, "train_nft": {"ref_kl_coef": 0}}  # it needs an adapter
COMPARED = ("train/policy_loss", "train/kl_loss", "train/grad_norm", "rollout/reward_mean")
TOLERANCE = {"no": 1e-5, "bf16": 5e-2}  # of predictions, relative to their largest; peft rounds otherwise than we do
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Row(NamedTuple):
    """One line of the table."""

    case: str
    check: str
    value: str
    ok: bool


class Seen:
    """What `watched` sees of a run."""

    accelerator = policy = None
    num_updates = 0
    census: list[str]
    moved: dict[str, bool]  # by parameter, during updates
    kill_at: int | None = None  # update within which the last rank kills itself

    def __init__(self) -> None:
        self.census, self.moved = [], {}


# ----- A run, watched ----------------------------------------------------------------------------------------------


def own_parts(transformer: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's part of every parameter."""
    sharding.reshard(transformer)
    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in transformer.named_parameters()
    }


@contextmanager
def watched(script: Any) -> Iterator[Seen]:
    """Let the script's policy and its updates be seen, which run under deterministic algorithms."""
    seen, originals = Seen(), (script.make_policy, script.train_batch, script.train_timesteps)
    make_policy, train_batch, train_timesteps = originals

    def watch_make_policy(args, accelerator, *rest):
        seen.accelerator, seen.policy = accelerator, make_policy(args, accelerator, *rest)
        return seen.policy

    def watch_train_batch(*args, **kwargs):
        before = own_parts(seen.policy.transformer)
        seen.census.append(qwen_image.parameter_census(seen.policy.transformer))
        result = train_batch(*args, **kwargs)
        seen.num_updates += 1
        seen.census.append(qwen_image.parameter_census(seen.policy.transformer))
        for name, tensor in own_parts(seen.policy.transformer).items():
            seen.moved[name] = seen.moved.get(name, False) or not torch.equal(tensor, before[name])
        return result

    def watch_train_timesteps(*args, **kwargs):
        if seen.num_updates + 1 == seen.kill_at and RANK == WORLD_SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_timesteps(*args, **kwargs)

    watchers = (watch_make_policy, watch_train_batch, watch_train_timesteps)
    script.make_policy, script.train_batch, script.train_timesteps = watchers
    torch.use_deterministic_algorithms(True)
    try:
        yield seen
    finally:
        script.make_policy, script.train_batch, script.train_timesteps = originals


def run_case(work: Path, case: str, *options: str, folder: str | None = None, kill_at: int | None = None, **values):
    """One run of a case, `train_nft bfloat16` or `train_nft full`; returns what was seen and the run folder."""
    name, kind = case.split()
    output_dir = work / (folder or case.replace(" ", "-"))
    values = COMMON | OWN[name] | {"ddp_timeout": 60} | values
    values["reward_funcs"] = f"{work / 'inputs/reward.py'}:mean_red"
    if kind == "full":
        options, values = ("--no-use_lora", *options), values | NO_REFERENCE[name] | {"learning_rate": 5e-3}
    else:
        values["lora_dtype"] = kind
        options = (*options, *(["--export_old_policy"] if name == "train_nft" else []))
    with watched(SCRIPTS[name]) as seen:
        seen.kill_at = kill_at
        prompts = str(work / "inputs/prompts.txt")
        run(SCRIPTS[name], output_dir, work / "inputs/pipeline", *options, prompts=prompts, **values)
    return seen, output_dir


def copy_for_resume(source: Path, target: Path, *, epoch: int = 1) -> None:
    """The run as it was after so many epochs and a kill -9, to be resumed for one epoch; by the main process."""
    shutil.copytree(source, target)
    run_folder.delete_checkpoints(target, first=epoch + 1)
    for name in ("pytorch_lora_weights.safetensors", "transformer", "old_policy"):
        path = target / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (target / "STOP").touch()


# ----- Checks ------------------------------------------------------------------------------------------------------


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def probe(predict: Any, device: torch.device) -> Tensor:
    """A policy's velocity (2, L, C) at fixed inputs, on the CPU."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"latents": (2, 16, 64), "prompt_embeds": (2, 5, 32), "negative_prompt_embeds": (2, 4, 32)}
    inputs = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    with torch.no_grad():
        return predict(inputs.pop("latents"), torch.tensor([900.0, 300.0], device=device), **inputs).cpu()


def new_model_probe(seen: Seen, model: Path, adapter: Path | Mapping[str, Tensor] | None, case: str) -> Tensor:
    """The same of a newly loaded pipeline, with an adapter from a folder, or written into it as tensors, or none."""
    accelerator = seen.accelerator
    dtype = sharding.compute_dtype(accelerator)
    pipeline = qwen_image.load_pipeline(model, dtype=dtype, leave_out=("vae", "text_encoder", "tokenizer"))
    if isinstance(adapter, Path):
        pipeline.load_lora_weights(adapter)
    elif adapter is not None:
        lora_dtype = getattr(torch, case.split()[1])
        qwen_image.add_lora(pipeline.transformer, rank=4, lora_alpha=8, target_modules=TARGETS, dtype=lora_dtype)
        sharding.restore_adapter(pipeline.transformer, adapter, source="gathered tensors")
    pipeline.transformer.to(accelerator.device)
    options = {"height": 64, "width": 64, "true_cfg_scale": 2.0, "cfg_batched": True, "dtype": dtype}
    return probe(partial(qwen_image.predict_velocity, pipeline.transformer, **options), accelerator.device)


def check_predictions(seen: Seen, folder: Path, model: Path, case: str, gathered: Mapping[str, Tensor]) -> list[Row]:
    """The policy, its export in a new pipeline, and the gathered tensors in a new model predict the same."""
    nft = case.startswith("train_nft")
    predict = seen.policy.predictors.current if nft else seen.policy.predict
    policies = {"policy": probe(predict, seen.accelerator.device)}  # with collectives: every rank
    if nft:
        policies["old policy"] = probe(seen.policy.predictors.old, seen.accelerator.device)
    if not seen.accelerator.is_main_process:
        return []
    rows, base = [], new_model_probe(seen, model, None, case)
    tolerance = TOLERANCE[seen.accelerator.mixed_precision]
    for name, velocity in policies.items():
        exported = new_model_probe(seen, model, folder if name == "policy" else folder / "old_policy", case)
        scale = (velocity - base).abs().max()  # what training has changed
        error = ((velocity - exported).abs().max() / base.abs().max()).item()
        effect = (scale / base.abs().max()).item()
        value, ok = f"{error:.1e} of {effect:.1e} trained", error < tolerance < effect / 3
        rows.append(Row(case, f"{name} = its export in a new pipeline", value, ok))
    again = new_model_probe(seen, model, gathered, case)
    error = ((policies["policy"] - again).abs().max() / base.abs().max()).item()
    return [*rows, Row(case, "policy = its tensors in a new model", f"{error:.1e}", error < tolerance)]


def moved_on_any_rank(seen: Seen, names: Sequence[str]) -> int:
    """How many of the parameters moved; of a small one a rank may hold no element."""
    moved = torch.tensor([[seen.moved[name] for name in names]], dtype=torch.float32)
    return int((sharding.reduce_to_cpu(seen.accelerator, moved) > 0).sum())


def check_run(seen: Seen, folder: Path, model: Path, case: str) -> list[Row]:
    """All that holds for a finished run with an adapter."""
    names = ("default", "old") if case.startswith("train_nft") else ("default",)
    gathered = {name: sharding.gather_adapter(seen.accelerator, seen.policy.transformer, name) for name in names}
    adapter = [name for name in seen.moved if ".lora_" in name and ".default." in name]
    num_moved = moved_on_any_rank(seen, adapter)
    others = sum(moved for name, moved in seen.moved.items() if name not in adapter)
    dtype = case.split()[1]
    rows = [
        Row(case, "adapter parameters that moved", f"{num_moved} of {len(adapter)}", num_moved == len(adapter) > 0),
        Row(case, "others that moved", f"{others} of {len(seen.moved) - len(adapter)}", others == 0),
        Row(case, f"census before and after {seen.num_updates} updates", seen.census[0],
            len(set(seen.census)) == 1 and seen.num_updates == 10 and f"trainable {dtype}" in seen.census[0]),
        *check_predictions(seen, folder, model, case, gathered["default"]),
    ]  # fmt: skip
    if seen.accelerator.is_main_process:
        exported = load_file(folder / "pytorch_lora_weights.safetensors")
        exported = {name.removeprefix("transformer."): tensor for name, tensor in exported.items()}
        ok = digest(exported) == digest(gathered["default"]) and len(exported) == len(adapter)
        ok = ok and {tensor.dtype for tensor in exported.values()} == {getattr(torch, dtype)}
        rows.append(Row(case, "export = gathered tensors", f"{len(exported)}, {digest(exported)[:12]}", ok))
        num_states = len(load_file(folder / "checkpoints/epoch-00005/optimizer.safetensors"))
        rows.append(Row(case, "checkpoint holds Adam's state", str(num_states), num_states == 3 * len(adapter)))
        for name in names:
            held = load_file(folder / f"checkpoints/epoch-00005/adapter_{name}.safetensors")
            ok = digest(held) == digest(gathered[name]) and len(held) == len(adapter)
            rows.append(Row(case, f"checkpoint holds {name}", f"{len(held)}, {digest(held)[:12]}", ok))
        if "old" in names:
            rows.append(Row(case, "old is not default", "", digest(gathered["old"]) != digest(gathered["default"])))
    return rows


def compare(case: str, what: str, folder: Path, whole: Path, tolerance: float, *, steps: slice = slice(2, 4)):
    """Rows that compare the metrics of some updates of two runs, the largest difference of each, relative where a
    value is above 1."""
    worst, lengths = 0.0, set()
    for name in COMPARED:
        one, two = ([float(value) for value in values_of(f, name)] for f in (whole, folder))
        part = steps if name.startswith("train/") else slice(steps.start // 2, steps.stop and -(-steps.stop // 2))
        one, two = one[part], two[part]
        lengths.add(len(one) == len(two) and (len(one) > 0 or name == "train/kl_loss"))
        worst = max([worst, *(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one, two, strict=False))])
    return Row(case, what, f"{worst:.1e}", lengths == {True} and worst <= tolerance)
