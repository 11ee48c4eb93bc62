"""All that depends on how accelerate spreads the model: one process, DDP, FSDP (version 1) or FSDP2.

The only module with collectives: every rank calls each of its functions, in the same order. The scripts keep the
loop's own (reduce of rewards and metrics, backward, wait_for_everyone).
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import run_folder
from qwen_image import adapter_state_dict

DDP_TYPES = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def make_accelerator(
    *,
    report_to: str = "none",
    logging_dir: str | Path | None = None,
    checkpoints_blocks: bool = False,
    autocast: bool = False,
    timeout: float = 1800,
) -> Accelerator:
    """The launcher's configuration; FSDP2 reduces gradients in fp32, for which the yaml has no key.

    checkpoints_blocks: whether the model recomputes its blocks itself. autocast: for fp32 weights that neither FSDP
    casts; everything else computes in its inputs' dtype, since autocast runs norms and all that follows them in fp32,
    at twice the memory. timeout: seconds until a collective that another rank does not join ends this one. Raises
    ValueError for what is not supported.
    """
    plugin, is_fsdp = None, os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    if is_fsdp and os.environ.get("FSDP_VERSION") == "2":
        param_dtype = torch.bfloat16 if os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    tracker = None if report_to == "none" else report_to
    started = int(os.environ.get("WORLD_SIZE", "1"))  # before accelerate sets it, which it does under MPI
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        log_with=tracker,
        project_dir=logging_dir and str(logging_dir),
        kwargs_handlers=[
            AutocastKwargs(enabled=autocast and not is_fsdp),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # or every gradient is there twice
            InitProcessGroupKwargs(timeout=timedelta(seconds=timeout)),
        ],
    )
    if started != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {started} processes (WORLD_SIZE), but this one finds {accelerator.num_processes} "
            f"(device {accelerator.device.type}): accelerate_configs/ are for GPUs; without any, leave --config_file "
            "out; MPI is not supported"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision {accelerator.mixed_precision} is not supported: choose bf16 or no")
    if accelerator.device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {accelerator.device.type} was not tried: use a GPU, or `accelerate launch --cpu`")
    plugin = accelerator.state.fsdp_plugin if accelerator.distributed_type == DistributedType.FSDP else None
    if checkpoints_blocks and plugin is not None and plugin.activation_checkpointing:
        raise ValueError(
            "--gradient_checkpointing and fsdp_activation_checkpointing both recompute blocks: choose one"
        )
    return accelerator


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """The dtype of forward passes."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def reduce_to_cpu(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """Sum over all ranks, from and to the CPU."""
    return accelerator.reduce(tensor.to(accelerator.device), "sum").cpu()


def is_fsdp1(accelerator: Accelerator) -> bool:
    """True under FSDP version 1."""
    return accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2


def prepare_policy(
    accelerator: Accelerator, transformer: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
    """accelerator.prepare; also returns the parameters that train.

    FSDP (version 1) cannot mix fp32 adapters with a bf16 base in a flat parameter: there the adapters stay whole on
    every rank and `clip_gradients` averages their gradients, as DDP would. Under FSDP2 accelerate makes what trains
    fp32, bf16 adapters too (and not a frozen "old" one): nothing trains while it prepares.
    """
    trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    if accelerator.is_fsdp2:
        transformer.requires_grad_(False)
    if is_fsdp1(accelerator):
        names = ("lora_A", "lora_B")
        adapters = [m for name, m in transformer.named_modules() if name.rpartition(".")[0].endswith(names)]
        for module in adapters:
            module.to(accelerator.device)
        accelerator.state.fsdp_plugin.ignored_modules = adapters or None
    transformer, optimizer = accelerator.prepare(transformer, optimizer)
    if accelerator.is_fsdp2:
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(name in trained)
    return transformer, optimizer, [parameter for parameter in transformer.parameters() if parameter.requires_grad]


def prepare_frozen(accelerator: Accelerator, transformer: nn.Module) -> nn.Module:
    """A second, frozen model, sharded and computing like the prepared one."""
    if accelerator.is_fsdp2:
        transformer = fsdp2_prepare_model(accelerator, transformer)
        accelerator._models.append(transformer)  # what save_state and load_state go through
        return transformer
    return accelerator.prepare_model(transformer, evaluation_mode=accelerator.distributed_type != DistributedType.FSDP)


@contextmanager
def gathered(transformer: nn.Module, keep: bool) -> Iterator[None]:
    """Under FSDP2 and with `keep`, let each block stay whole on every rank after its first forward in here, so that
    the steps of a rollout gather it once. All weights in the compute dtype must fit; at the end they are shards again.
    """
    modules = transformer.modules() if keep else []
    blocks = [module for module in modules if isinstance(module, FSDPModule) and module is not transformer]
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        if blocks:
            reshard(transformer)


def reshard(transformer: nn.Module) -> None:
    """Under FSDP2, drop the gathered weights that a forward leaves behind for what lies outside the blocks.

    Until then the model shows those, rounded to the compute dtype, in place of the shards that train.
    """
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(
    accelerator: Accelerator, transformer: nn.Module, trainable: Sequence[nn.Parameter], max_norm: float
) -> Tensor:
    """Finish an update's gradients: average what no wrapper averages, clip; returns their norm, a plain scalar."""
    if is_fsdp1(accelerator):
        if accelerator.state.fsdp_plugin.ignored_modules is None:  # full weights: sharded flat parameters
            return transformer.clip_grad_norm_(max_norm)
        flat = torch.cat([parameter.grad.flatten() for parameter in trainable]).float()
        flat = accelerator.reduce(flat, "mean")
        for parameter, gradient in zip(trainable, flat.split([p.numel() for p in trainable]), strict=True):
            parameter.grad.copy_(gradient.view_as(parameter))
    norm = accelerator.clip_grad_norm_(trainable, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clear_gradients(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Under DDP gradients stay in its buckets, as zeros: new ones would lie beside them until the last backward."""
    optimizer.zero_grad(set_to_none=accelerator.distributed_type not in DDP_TYPES)


def find_fault(
    accelerator: Accelerator,
    records: Sequence[Mapping[str, Tensor]],
    micro_batches: Sequence[Mapping[str, Any]],
    grad_norm: Tensor,
    limits: Mapping[str, float],
) -> str | None:
    """In words, what in an update is no number or beyond its limit, the same on every rank; None if all is well.

    records hold numbers (B, T) of each micro-batch's samples and timesteps by name; limits has grad_norm's limit and
    those of the records to look at. A micro-batch may name its samples in sample_index.
    """
    names = [name for name in limits if name in records[0]]
    sizes = torch.stack([torch.cat([record[name].flatten() for record in records]) for name in names]).double().abs()
    places = []  # (sample, timestep) of each number
    for batch in micro_batches:
        times = batch["all_timesteps" if "all_timesteps" in batch else "train_timesteps"]
        samples = batch.get("sample_index", range(len(times)))
        places += [(sample, float(time)) for sample, row in zip(samples, times, strict=True) for time in row]
    worst, index = sizes.max(dim=1)  # NaN counts as the largest
    place = torch.tensor(places, dtype=torch.float64).to(sizes.device)[index]
    every_rank = accelerator.gather(torch.cat([worst[:, None], place], dim=1)[None]).tolist()  # (ranks, names, 3)
    texts = []
    for entry, name in enumerate(names):
        found = [rank[entry] for rank in every_rank]
        value, sample, timestep = max(found, key=lambda fact: math.inf if math.isnan(fact[0]) else fact[0])
        texts.append(f"{name} is {value:.4g} for sample {sample:.0f} at timestep {timestep:.6g}")
        if not (math.isfinite(value) and value <= limits[name]):
            return f"{texts[-1]} (limit {limits[name]:g})"
    norm = grad_norm.item()
    if not (math.isfinite(norm) and norm <= limits["grad_norm"]):
        return f"grad_norm is {norm:.4g} (limit {limits['grad_norm']:g}); the largest {texts[0]}"
    return None


def check_finite(accelerator: Accelerator, parameters: Sequence[nn.Parameter], where: str) -> None:
    """Raise RuntimeError, on every rank, if an update made weights something else than numbers."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in (parameter.detach() for parameter in parameters)]
    wrong = torch.stack([tensor.isfinite().all() for tensor in local]).logical_not().sum()
    if accelerator.reduce(wrong, "sum").item():
        raise RuntimeError(
            f"{where}: weights are not finite after the update: lower --learning_rate; the last checkpoint is from "
            "before it"
        )


# ----- Whole tensors, for export and checkpoints -------------------------------------------------------------------


def gather(accelerator: Accelerator, named_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, whole, one tensor after the other, on the main process; the others get an empty dict."""
    gathered = {}
    for name, tensor in named_tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if accelerator.is_main_process:
            gathered[name] = tensor.detach().to("cpu", copy=True)
    return gathered


def gather_adapter(
    accelerator: Accelerator, transformer: nn.Module, adapter_name: str = "default"
) -> dict[str, Tensor]:
    """An adapter's whole tensors under peft's names, on the main process."""
    reshard(transformer)
    return gather(accelerator, adapter_state_dict(transformer.named_parameters(), adapter_name))


def gather_optimizer(
    accelerator: Accelerator, transformer: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The optimizer's whole state of the default adapter as `<parameter>.<state>`, on the main process."""
    reshard(transformer)
    state = {
        f"{name}.{key}": value
        for name, parameter in adapter_state_dict(transformer.named_parameters()).items()
        for key, value in optimizer.state[parameter].items()
    }
    return gather(accelerator, state)


@torch.no_grad()
def restore_adapter(
    transformer: nn.Module, tensors: Mapping[str, Tensor], adapter_name: str = "default", *, source: str | Path
) -> None:
    """Write whole tensors into an adapter, however it is sharded. Raises ValueError where names or shapes differ."""
    reshard(transformer)
    parameters = adapter_state_dict(transformer.named_parameters(), adapter_name)
    if {name: p.shape for name, p in parameters.items()} != {name: t.shape for name, t in tensors.items()}:
        raise ValueError(
            f"{source} holds other tensors than this run's adapter: use the --rank and targets that made it"
        )
    for name, parameter in parameters.items():
        parameter.copy_(like_parameter(tensors[name], parameter))


def restore_optimizer(transformer: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Write whole optimizer state back, sharded as the parameters now are."""
    reshard(transformer)
    for name, parameter in adapter_state_dict(transformer.named_parameters()).items():
        if f"{name}.step" not in tensors:  # no update had been made
            continue
        state = {key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {
            key: like_parameter(tensor, parameter) if tensor.ndim else tensor.to(parameter.device)
            for key, tensor in state.items()
        }


def like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole CPU tensor on the parameter's device, and sharded like it."""
    if isinstance(parameter, DTensor):  # offloaded, its part is on the CPU, though its mesh is of GPUs
        sharded = distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
        return torch.empty_like(parameter, dtype=tensor.dtype).copy_(sharded)
    return tensor.to(parameter.device)


def save_checkpoint(
    accelerator: Accelerator,
    transformer: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    output_dir: Path,
    epoch: int,
    counters: Mapping[str, Any],
    adapters: Sequence[str],
    total_limit: int,
) -> None:
    """Write checkpoints/epoch-NNNNN under a temporary name and rename it.

    With adapters: their whole tensors and the optimizer's, for any number of ranks to resume. Without: accelerate's
    state of the full weights, for as many ranks as now.
    """
    folder = run_folder.checkpoint_folder(output_dir, epoch)
    temporary = folder.with_suffix(".tmp")
    tensors = {f"adapter_{name}": gather_adapter(accelerator, transformer, name) for name in adapters}
    if adapters:
        tensors["optimizer"] = gather_optimizer(accelerator, transformer, optimizer)
    else:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while it wrote
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()  # every rank's files are there
    if accelerator.is_main_process:
        state = {"epoch": epoch, "lr_scheduler": lr_scheduler.state_dict(), **counters}
        state["metrics_bytes"] = (output_dir / "metrics.jsonl").stat().st_size
        run_folder.write_checkpoint(temporary, tensors, state)
        run_folder.finish_checkpoint(temporary, folder, total_limit)
    accelerator.wait_for_everyone()


def load_checkpoint(
    accelerator: Accelerator,
    transformer: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    folder: Path,
    state: Mapping[str, Any],
    adapters: Sequence[str],
    output_dir: Path,
) -> None:
    """Put weights, optimizer and schedule back, and drop what the interrupted run wrote after the checkpoint."""
    for name in adapters:
        restore_adapter(transformer, run_folder.read_checkpoint(folder, f"adapter_{name}"), name, source=folder)
    if adapters:
        restore_optimizer(transformer, optimizer, run_folder.read_checkpoint(folder, "optimizer"))
    else:
        if is_fsdp1(accelerator):
            make_optimizer_state(optimizer)
        accelerator.load_state(str(folder))
    lr_scheduler.load_state_dict(dict(state["lr_scheduler"]))
    for group, learning_rate in zip(optimizer.param_groups, lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = learning_rate
    if accelerator.is_main_process:
        run_folder.cut_metrics(output_dir, state["metrics_bytes"])
        run_folder.delete_checkpoints(output_dir, first=state["epoch"] + 1)
    if accelerator.is_local_main_process:
        run_folder.delete_trajectories(output_dir, first=state["epoch"])
    accelerator.wait_for_everyone()


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a new optimizer the state it has after a step, by one that changes nothing: accelerate's loader for FSDP
    version 1 fills what is there, and without a word nothing where nothing is."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the schedule sets it again
        for parameter in group["params"]:
            if parameter.numel():  # none of some parameters is on this rank
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def save_full_weights(accelerator: Accelerator, transformer: nn.Module, config: Any, folder: Path) -> None:
    """Write all weights as a diffusers transformer folder, by the main process. config is the transformer's."""
    state_dict = accelerator.get_state_dict(transformer)
    if accelerator.is_main_process:
        with torch.device("meta"):
            model = QwenImageTransformer2DModel.from_config(config)
        model.load_state_dict(state_dict, assign=True)
        temporary = folder.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was longer
        os.replace(temporary, folder)
