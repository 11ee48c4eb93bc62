"""Run a script on CPU ranks over gloo as a configuration of accelerate_configs has it, FSDP included, which accelerate
itself offers on GPUs only.

    ACCELERATE_USE_CPU=1 accelerate launch --config_file accelerate_configs/fsdp2.yaml --mixed_precision no \
        tests/run_on_cpu_ranks.py train_flowgrpo.py --output_dir ...

The settings are what `accelerate launch` made of the yaml. Only accelerate's state is changed, right after it was
made, to say FSDP; everything else is the library's own code. The prepared model's class, its mesh and the number of
processes are checked, since a wrong launch would pass as one process.
"""

import os
import runpy
import sys
from pathlib import Path

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

USE_FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"


class CpuAccelerator(accelerate.Accelerator):
    """An Accelerator that also shards over gloo, and checks what prepare() made."""

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        assert self.num_processes == int(os.environ.get("WORLD_SIZE", "1")), f"{self.num_processes} processes"
        if USE_FSDP and self.num_processes > 1:
            plugin = fsdp_plugin or accelerate.FullyShardedDataParallelPlugin()
            if self.mixed_precision != "no":
                plugin.set_mixed_precision(self.mixed_precision)
            new = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu"), "fsdp_plugin": plugin}
            for state in (PartialState._shared_state, AcceleratorState._shared_state, self.state.__dict__):
                state.update(new)

    def prepare(self, *args, **kwargs):
        prepared = super().prepare(*args, **kwargs)
        model, expected = prepared[0], DistributedDataParallel
        if USE_FSDP:
            expected = FSDPModule if os.environ["FSDP_VERSION"] == "2" else FullyShardedDataParallel
        if self.num_processes > 1:
            assert isinstance(model, expected), f"prepare() made a {type(model).__name__}"
            mesh = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)][:1]
            what = f"{expected.__name__}{' over ' + str(tuple(mesh[0].shape)) if mesh else ''}"
            print(f"prepared as {what} on {self.num_processes} ranks", flush=True)
        return prepared


if __name__ == "__main__":
    accelerate.Accelerator = CpuAccelerator
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
