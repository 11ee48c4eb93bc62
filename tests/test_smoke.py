"""tests/smoke.py on two CPU ranks, and on GPUs where there are two: python -m pytest tests/test_smoke.py"""

import os
import subprocess
import sys

import pytest
import torch
from script_runs import ROOT, launch

BOTH = ("train_flowgrpo", "train_nft")


def checks_of(output: str) -> int:
    """How many checks a finished smoke run made, of which none failed."""
    summary = output[: output.index(" failed")].splitlines()[-1]  # "42 checks on 2 process(es), 0"
    assert summary.endswith(" on 2 process(es), 0")
    return int(summary.split()[0])


def test_sharded_training_is_bound_exported_and_saved_and_a_killed_rank_ends_it():
    cases = ("train_flowgrpo:bfloat16", "train_nft:float32")
    output = launch("fsdp2", "tests/smoke.py", *cases, "--phases", "train,kill,after_kill", precision="bf16")
    assert output.count("prepared as FSDPModule over (2,) on 2 ranks") >= 2 * 3
    assert checks_of(output) == 8 + 11 + 2


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp", "fsdp2", "ddp"])
def test_all_phases_on_two_cpu_ranks(config):
    phases = "train,resume,one_process,kill,after_kill,full" + (",offload" if config == "fsdp2" else "")
    output = launch(config, "tests/smoke.py", *BOTH, "--phases", phases, precision="bf16", timeout=1800)
    assert checks_of(output) > 40


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", ["fsdp", "fsdp2"])
def test_all_phases_on_two_gpus(config):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [f"accelerate_configs/{config}.yaml", "tests/smoke.py", *BOTH, "--phases", "all"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert checks_of(result.stdout) > 50
