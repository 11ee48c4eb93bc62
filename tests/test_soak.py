"""300 epochs leave memory, open files and disk as they were: python -m pytest tests/test_soak.py -m slow"""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from faults import in_child

EPOCHS, WARM = 300, 60
SIZES = {
    "resolution": 32, "num_inference_steps": 3, "num_prompts_per_epoch": 2, "num_images_per_prompt": 2,
    "train_batch_size": 2, "num_updates_per_epoch": 2, "num_train_epochs": EPOCHS, "checkpointing_steps": 10,
    "eval_epochs": 50, "eval_num_inference_steps": 2, "learning_rate": 1e-5,
}  # fmt: skip
OWN = {
    "train_flowgrpo": {"sde_window_range": (0, 2), "kl_beta": 0.01},
    "train_nft": {"ref_kl_coef": 0.01, "old_policy_decay": "0:0.1:0.5", "forward_noise": "per_step"},
}


def anonymous_bytes() -> int:
    """Resident memory of this process that belongs to no file."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def soak(name: str, folder: Path, model: Path) -> None:
    """Run the script and append what it holds to <folder>.jsonl at the end of every epoch."""
    import importlib

    import torch
    from script_runs import run

    import run_folder

    torch.set_num_threads(1)
    delete_trajectories = run_folder.delete_trajectories

    def sampled(output_dir: Path, **options) -> None:
        delete_trajectories(output_dir, **options)
        files = [path for path in output_dir.rglob("*") if path.is_file()]
        kept = [path for path in files if path.name != "metrics.jsonl" and path.parent.name != "grids"]
        facts = {"anonymous": anonymous_bytes(), "open_files": len(os.listdir("/proc/self/fd"))}
        facts |= {"files": len(kept), "disk": sum(path.stat().st_size for path in kept)}
        with open(f"{folder}.jsonl", "a") as file:
            file.write(json.dumps(facts) + "\n")

    run_folder.delete_trajectories = sampled
    options = ("--enable_timestep_staging", "--skip_nonfinite")
    run(importlib.import_module(name), folder, model, *options, **SIZES, **OWN[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_nothing_grows_over_300_epochs(tmp_path, tiny_pipeline_folder, name):
    folder = tmp_path / name
    assert in_child(soak, name, folder, tiny_pipeline_folder, timeout=3600) == 0
    facts = [json.loads(line) for line in Path(f"{folder}.jsonl").read_text().splitlines()]
    assert len(facts) == EPOCHS
    for epoch in (0, WARM, 120, 180, 240, EPOCHS - 1):
        print(f"{name} epoch {epoch}: {facts[epoch]}")

    def mean(key: str, first: int, stop: int) -> float:
        return sum(fact[key] for fact in facts[first:stop]) / (stop - first)

    sizes = [fact["anonymous"] for fact in facts[WARM:]]
    steps = sorted(after - before for before, after in pairwise(sizes))
    grown, at_once = sum(steps) / 2**20, steps[-1] / 2**20
    print(f"{name} anonymous: {grown:.2f} MiB more since epoch {WARM}, of it {at_once:.2f} at once")
    assert sum(steps[:-1]) < 2 * 2**20  # the allocator may take one larger piece, at any time and once
    assert sum(steps) < 8 * 2**20
    for key in ("open_files", "files"):
        assert max(fact[key] for fact in facts[-60:]) <= max(fact[key] for fact in facts[WARM : WARM + 60])
    assert mean("disk", EPOCHS - 60, EPOCHS) < 1.01 * mean("disk", WARM, WARM + 60)
