"""Run one of the scripts on CPU ranks over gloo, under DDP or under real FSDP2, which accelerate offers on GPUs only.

    ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 tests/run_on_cpu_ranks.py fsdp2 train_flowgrpo.py --output_dir ...

accelerate's state is told that the run is FSDP right after it was made; everything else is the library's own code. The
prepared model's class and the number of processes are checked, since a wrong launch would pass as one process.
"""

import os
import runpy
import sys
from pathlib import Path

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

FSDP2_ENVIRONMENT = {  # what `accelerate launch --config_file accelerate_configs/fsdp2.yaml` sets
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "QwenImageTransformerBlock",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_SYNC_MODULE_STATES": "false",
}


class CpuAccelerator(accelerate.Accelerator):
    """An Accelerator that also shards over gloo, and checks what prepare() made."""

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        assert self.num_processes == int(os.environ["WORLD_SIZE"]), f"{self.num_processes} processes"
        if fsdp_plugin is not None:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            new = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu"), "fsdp_plugin": fsdp_plugin}
            for state in (PartialState._shared_state, AcceleratorState._shared_state, self.state.__dict__):
                state.update(new)

    def prepare(self, *args, **kwargs):
        prepared = super().prepare(*args, **kwargs)
        model = prepared[0]
        expected = FSDPModule if self.is_fsdp2 else DistributedDataParallel
        assert isinstance(model, expected), f"prepare() made a {type(model).__name__}"
        print(f"prepared as {expected.__name__} on {self.num_processes} ranks", flush=True)
        return prepared


if __name__ == "__main__":
    kind, script = sys.argv[1], sys.argv[2]
    if kind == "fsdp2":
        os.environ.update(FSDP2_ENVIRONMENT)
    accelerate.Accelerator = CpuAccelerator
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
