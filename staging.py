"""Put one timestep of a micro-batch of trajectories on the device at a time.

A micro-batch is a dict of CPU tensors; a trajectory field may also be a list of B tensors, one per sample, such as
the memory-mapped views of trajectory_cache.py. A field map says which fields all timesteps share and which are read
per timestep; `iterate_timesteps` yields, staged or not, the same dicts, so the loss does not know the difference.

Shapes: B samples of a micro-batch, T trained timesteps, K timesteps of one chunk.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Field = Tensor | list[Tensor]


class StepFields(NamedTuple):
    """Which fields of a micro-batch an update reads; fields it does not name are neither checked nor copied.

    shared     (B, ...): copied once per micro-batch.
    per_step   (B, T + window - 1, ...): step i reads entries i to i + window - 1. A pair x_t, x_{t+1} has window 2.
    optional   the names among both that may be missing.
    """

    shared: tuple[str, ...]
    per_step: dict[str, int]
    optional: frozenset[str] = frozenset()


CONDITIONS = ("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")

FLOWGRPO_FIELDS = StepFields(
    shared=(*CONDITIONS, "sigma_max"),
    per_step={
        "all_latents": 2,
        "sigmas": 2,
        "all_timesteps": 1,
        "advantages": 1,
        "old_log_probs": 1,
        "ref_prev_sample_mean": 1,
        "old_prev_sample_mean": 1,
        "rollout_is_weights": 1,
        "ref_log_prob": 1,
    },
    optional=frozenset(
        {
            "prompt_embeds_mask",
            "negative_prompt_embeds",
            "negative_prompt_embeds_mask",
            "ref_prev_sample_mean",
            "old_prev_sample_mean",
            "rollout_is_weights",
            "ref_log_prob",
        }
    ),
)


def validate_batch(batch: Mapping[str, Field], fields: StepFields) -> int:
    """Check a micro-batch before anything runs on it and return T, or 0 for a map without per-step fields.

    Raises ValueError naming the field at fault.
    """
    batch_sizes, lengths = {}, {}
    for name in (*fields.shared, *fields.per_step):
        if name not in batch:
            if name in fields.optional:
                continue
            raise ValueError(f"field {name!r} is missing from the micro-batch, which holds {', '.join(sorted(batch))}")
        field = batch[name]
        rows = field if isinstance(field, list) else [field]
        if not rows:
            raise ValueError(f"field {name!r} is an empty list: give one tensor a sample")
        for row in rows:
            if not isinstance(row, Tensor):
                raise ValueError(f"field {name!r} holds a {type(row).__name__}: give CPU tensors")
            if row.device.type != "cpu":
                raise ValueError(
                    f"field {name!r} is on {row.device}: trajectories stay on the CPU, pass it as a CPU tensor"
                )
            if row.requires_grad:
                raise ValueError(f"field {name!r} requires grad: step inputs are data, detach it")
            along_time = name in fields.per_step and field is rows
            if row.dtype != rows[0].dtype or row.shape[along_time:] != rows[0].shape[along_time:]:
                raise ValueError(
                    f"field {name!r} mixes rows of {tuple(rows[0].shape)} {rows[0].dtype} "
                    f"and {tuple(row.shape)} {row.dtype}"
                )
        if rows is not field and field.ndim == 0:
            raise ValueError(f"field {name!r} has no batch dimension: give it (B, ...), not a scalar")
        listed = isinstance(field, list)
        if name in fields.per_step:
            if field_ndim(field) < 2:
                raise ValueError(
                    f"field {name!r} has no time dimension: give it (B, T, ...), not {tuple(rows[0].shape)}"
                )
            row_lengths = {len(row) for row in field} if listed else {field.shape[1]}
            if len(row_lengths) > 1:
                raise ValueError(
                    f"field {name!r} has rows of {sorted(row_lengths)} entries along time: give all the same"
                )
            lengths[name] = row_lengths.pop() - fields.per_step[name] + 1
        batch_sizes[name] = len(field)

    for what, sizes in (("samples", batch_sizes), ("timesteps", lengths)):
        if not sizes:
            return 0
        reference, expected = next(iter(sizes.items()))
        for name, size in sizes.items():
            if size != expected:
                raise ValueError(
                    f"field {name!r} has {size} {what} and field {reference!r} {expected}: they must agree"
                )
    num_timesteps = next(iter(lengths.values()))
    if num_timesteps < 1:
        raise ValueError(
            f"field {next(iter(lengths))!r} holds no whole timestep: give it at least one window of entries"
        )
    return num_timesteps


NFT_FIELDS = StepFields(
    shared=(*CONDITIONS, "latents_clean"),
    per_step={"train_timesteps": 1, "reward_prob": 1},
    optional=frozenset({"prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask"}),
)


def nft_fields(batch: Mapping[str, Field]) -> StepFields:
    """NFT_FIELDS for this micro-batch's layout of forward_noise: (B, T, L, C) is per step, (B, L, C) shared; where it
    is absent the noise is drawn on the device when a step needs it, and staging saves no noise memory."""
    if "forward_noise" not in batch:
        return NFT_FIELDS
    if field_ndim(batch["forward_noise"]) == 4:
        return NFT_FIELDS._replace(per_step=NFT_FIELDS.per_step | {"forward_noise": 1})
    return NFT_FIELDS._replace(shared=(*NFT_FIELDS.shared, "forward_noise"))


def check_supported(environment: Mapping[str, str]) -> None:
    """Refuse, from the launcher's environment variables, engines and parallelisms under which staging was not tried.

    Raises ValueError. FSDP, FSDP2, DDP and one process are supported.
    """
    for variable, engine in (
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_TPU", "XLA"),
    ):
        if environment.get(variable, "false").lower() in ("y", "yes", "t", "true", "on", "1"):
            raise ValueError(
                f"{engine} is not supported ({variable} is set): launch with accelerate_configs/fsdp2.yaml"
            )
    for kind in ("CP", "SP", "TP"):
        size = environment.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")
        if size not in ("", "1"):
            raise ValueError(
                "context, sequence and tensor parallelism are not supported "
                f"(PARALLELISM_CONFIG_{kind}_SIZE is {size}): set parallelism_config_{kind.lower()}_size to 1"
            )


def step_input_bytes(
    batch: Mapping[str, Field], fields: StepFields, *, staged: bool, chunk: int = 1, prefetch: int = 0
) -> int:
    """Bytes of per-step fields that are on the device at once for one micro-batch; meta tensors will do. prefetch:
    steps copied ahead, on a GPU."""
    total = 0
    for name, window in fields.per_step.items():
        if name in batch:
            field = batch[name]
            per_entry = len(field) * (field[0][0].numel() * field[0].element_size())
            num_timesteps = len(field[0]) - window + 1
            slots = min(prefetch + 1, math.ceil(num_timesteps / chunk))
            total += per_entry * (slots * (min(chunk, num_timesteps) + window - 1) if staged else len(field[0]))
    return total


def field_ndim(field: Field) -> int:
    """Dimensions of a field, the batch dimension included."""
    return field[0].ndim + 1 if isinstance(field, list) else field.ndim


def iterate_timesteps(
    batch: Mapping[str, Field],
    fields: StepFields,
    device: torch.device,
    *,
    staged: bool,
    chunk: int = 1,
    prefetch: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of K = `chunk` timesteps: shared fields (B, ...), per-step fields (B, K + window - 1, ...).

    Not staged, the whole micro-batch is copied to the device once and a step is a view of it. Staged, a step's entries
    are gathered on the CPU and copied when it is asked for; its dict is emptied before the next one is copied, and
    when the iterator is closed, so a consumer that keeps no tensor has one step on the device. The last chunk may be
    shorter. With `prefetch` > 0 on a CUDA device the next steps are copied while this one computes, through a ring of
    prefetch + 1 pinned and as many device buffers; elsewhere it changes nothing. Values are the same in every mode.
    """
    if chunk < 1 or prefetch < 0:
        raise ValueError(f"chunk is {chunk} and prefetch {prefetch}: give at least 1 and 0")
    num_timesteps = validate_batch(batch, fields)
    windows = {name: window for name, window in fields.per_step.items() if name in batch}
    shared = {name: gather(batch[name], device) for name in fields.shared if name in batch}
    chunks = [(start, min(start + chunk, num_timesteps)) for start in range(0, num_timesteps, chunk)]

    if not staged:
        resident = {name: gather(batch[name], device) for name in windows}
        steps = (
            {name: resident[name][:, start : stop + window - 1] for name, window in windows.items()}
            for start, stop in chunks
        )
    elif prefetch and torch.device(device).type == "cuda":
        steps = prefetched_steps(batch, windows, chunks, device, prefetch)
    else:
        steps = (
            {name: gather(batch[name], device, start, stop + window - 1) for name, window in windows.items()}
            for start, stop in chunks
        )
    for step in steps:
        step.update(shared)
        try:
            yield step
        finally:
            step.clear()


def join_timesteps(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What the steps of one micro-batch gave, each (B, K, ...), as (B, T, ...)."""
    return {name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]}


def gather(field: Field, device: torch.device, start: int = 0, stop: int | None = None) -> Tensor:
    """Copy entries start:stop along time (all of them by default) of every sample to the device; never an alias."""
    if isinstance(field, list):
        return torch.stack(field if stop is None else [row[start:stop] for row in field]).to(device)
    return (field if stop is None else field[:, start:stop]).to(device, copy=True)


def prefetched_steps(
    batch: Mapping[str, Field],
    windows: Mapping[str, int],
    chunks: Sequence[tuple[int, int]],
    device: torch.device,
    prefetch: int,
) -> Iterator[dict[str, Tensor]]:
    """Copy up to `prefetch` steps ahead on a side stream, through fixed slots of pinned and device memory."""
    copy_stream, compute_stream = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    copy_stream.wait_stream(compute_stream)  # fresh device memory may still be read by work queued before
    longest = chunks[0][1] - chunks[0][0]
    slots = []
    for _ in range(min(prefetch + 1, len(chunks))):
        buffers = {}
        for name, window in windows.items():
            row = batch[name][0]
            numel = len(batch[name]) * (longest + window - 1) * row[0].numel()
            pinned = torch.empty(numel, dtype=row.dtype, pin_memory=True)
            buffers[name] = pinned, torch.empty(numel, dtype=row.dtype, device=device)
        slots.append((buffers, torch.cuda.Event(), torch.cuda.Event()))

    def copy(index: int) -> dict[str, Tensor]:
        buffers, copied, computed = slots[index % len(slots)]
        start, stop = chunks[index]
        copied.synchronize()  # the pinned buffer is free once its last copy has ended
        copy_stream.wait_event(computed)  # the device buffer once the step that read it has
        step = {}
        for name, window in windows.items():
            field, end = batch[name], stop + window - 1
            shape = (len(field), end - start, *field[0].shape[1:])
            pinned, resident = (buffer[: math.prod(shape)].view(shape) for buffer in buffers[name])
            if isinstance(field, list):
                torch.stack([row[start:end] for row in field], out=pinned)
            else:
                pinned.copy_(field[:, start:end])
            with torch.cuda.stream(copy_stream):
                resident.copy_(pinned, non_blocking=True)
            step[name] = resident
        copied.record(copy_stream)
        return step

    ahead = deque(copy(index) for index in range(len(slots)))
    try:
        for index in range(len(chunks)):
            _, copied, computed = slots[index % len(slots)]
            compute_stream.wait_event(copied)
            yield ahead.popleft()
            computed.record(compute_stream)
            if index + len(slots) < len(chunks):
                ahead.append(copy(index + len(slots)))
    finally:  # memory given back while the side stream still writes it would be handed out again too early
        compute_stream.wait_stream(copy_stream)
