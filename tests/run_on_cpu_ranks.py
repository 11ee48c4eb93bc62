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
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

USE_FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"


class CpuState(AcceleratorState):
    """accelerate's state, which says FSDP where the launcher asked for it."""

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs a GPU
            new = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu"), "fsdp_plugin": fsdp_plugin}
            for state in (PartialState._shared_state, AcceleratorState._shared_state):
                state.update(new)


class CpuAccelerator(accelerate.Accelerator):
    """An Accelerator that checks what prepare() made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.num_processes == int(os.environ.get("WORLD_SIZE", "1")), f"{self.num_processes} processes"
        assert self.num_processes == 1 or (self.distributed_type == DistributedType.FSDP) == USE_FSDP

    def get_state_dict(self, model, unwrap=True):
        """Under FSDP 1, torch would hand out parts of gathered weights which it then frees: it takes what is on the
        CPU already for offloaded."""
        if self.num_processes == 1 or not isinstance(model, FullyShardedDataParallel):
            return super().get_state_dict(model, unwrap)
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return model.state_dict()

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
    accelerate.Accelerator, accelerate.accelerator.AcceleratorState = CpuAccelerator, CpuState
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
