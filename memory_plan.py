"""What an update needs, before it runs: an estimate of the most memory that it allocates on a device.

Step inputs, kept outputs and the cache on disk follow exactly from shapes: see planned_bytes of the scripts. The
estimate is for LoRA on one device or under DDP. Its constants were measured on Qwen-Image's blocks in bf16; a test
compares it with every peak in benchmarks/results/full_size.json.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

# In sizes of a block's input, tokens x width x bytes of the compute dtype:
BLOCK_SAVED = 17.5  # what a block that is not recomputed keeps for its backward, besides its input
BLOCK_LIVE = {"compiled": 24.6, "eager": 33.5}  # the most that the recomputation and backward of one block hold


def estimate_peak(
    transformer: nn.Module,
    *,
    tokens: int,
    num_passes: int,
    recomputed_blocks: int,
    compiled: bool,
    step_bytes: int = 0,
    other_bytes: int = 0,
) -> int:
    """Estimated bytes at the peak of an update of a transformer with adapters; meta tensors will do.

    tokens: image and text tokens of all rows of one forward (of both CFG predictions where they share one).
    num_passes: forwards whose graphs live together, 2 with CFG in two passes.
    step_bytes: step inputs and kept outputs on the device; other_bytes: whatever else lies there, such as a VAE.
    """
    config = transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    block_input = tokens * width * transformer.proj_out.weight.element_size()
    weights = sum(parameter.nbytes for parameter in transformer.parameters())
    trainable = sum(parameter.nbytes for parameter in transformer.parameters() if parameter.requires_grad)
    num_blocks = config.num_layers
    saved = num_passes * block_input * (num_blocks + BLOCK_SAVED * max(0, num_blocks - recomputed_blocks))
    live = block_input * BLOCK_LIVE["compiled" if compiled else "eager"]
    training_state = 3 * trainable  # the gradient and AdamW's two moments
    return round(weights + training_state + saved + live) + step_bytes + other_bytes


def update_peak(
    options: Mapping[str, Any], transformer: nn.Module, planned: Mapping[str, int], *, num_timesteps: int, tokens: int
) -> int:
    """Bytes allocated at the peak of an update under a training script's options; a sample has so many image and text
    tokens."""
    rows, num_passes = options["train_batch_size"] * min(options["timesteps_per_forward"], num_timesteps), 1
    if options["true_cfg_scale"] > 1:
        rows, num_passes = (2 * rows, 1) if options["cfg_batched"] else (rows, 2)
    recomputed = options["checkpointed_blocks"]
    recomputed = transformer.config.num_layers if recomputed is None else recomputed
    step_bytes = planned["staged" if options["enable_timestep_staging"] else "not staged"]
    return estimate_peak(
        transformer,
        tokens=rows * tokens,
        num_passes=num_passes,
        recomputed_blocks=recomputed if options["gradient_checkpointing"] else 0,
        compiled=options["compile_blocks"],
        step_bytes=step_bytes + planned["outputs"] * options["return_model_output"],
    )


def describe(planned: Mapping[str, int]) -> str:
    """The planned bytes as the line of a banner or an error."""
    mib = {name: size / 2**20 for name, size in planned.items()}
    line = (
        f"step inputs {mib['staged']:.2f} MiB staged, {mib['not staged']:.2f} MiB not staged; outputs of an update "
        f"{mib['outputs']:.2f} MiB if kept"
    )
    return line + (f"; estimated peak of an update {mib['peak'] / 1024:.1f} GiB" if "peak" in planned else "")
