"""kill -9 and Ctrl-C in a process of its own, then resume: python -m pytest tests/test_interruptions.py"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import CONTEXT, run_child
from script_runs import SMALL, adapter_bytes, metrics_of, options_of, run, write_prompts

import run_folder
import train_flowgrpo
import train_nft

ROOT = Path(__file__).resolve().parent.parent
OWN = {
    train_flowgrpo: {"sde_window_range": (0, 3), "clip_range": 1e-3},
    train_nft: {"old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1},
}
SLOW_REWARD = (
    "import time\ndef score(images, prompts, metadata):\n    time.sleep(0.05)\n    return images.mean(dim=(1, 2, 3))\n"
)


def start(script, folder: Path, model: Path, **values) -> subprocess.Popen:
    """The script in a process of its own."""
    prompts = write_prompts(folder.parent)
    named = {"pretrained_model_name_or_path": model, "prompts": prompts, "eval_prompts": prompts, "output_dir": folder}
    command = [sys.executable, script.__file__, *options_of(SMALL | OWN[script] | named | values)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(path: Path, is_alive: Callable[[], bool]) -> None:
    """Until the path exists; fails if the process ends before, or after two minutes."""
    for _ in range(2400):
        if path.exists():
            return
        assert is_alive()
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_killed_and_resumed_is_the_same_run(tmp_path, tiny_pipeline_folder, script):
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    options = {"num_train_epochs": 4, "checkpointing_steps": 1, "reward_funcs": f"{tmp_path / 'reward.py'}:score"}
    whole = run(script, tmp_path / "whole", tiny_pipeline_folder, **OWN[script], **options)
    killed = tmp_path / "killed"
    arguments = (script.__name__, killed, tiny_pipeline_folder, (), OWN[script] | options)
    process = CONTEXT.Process(target=run_child, args=arguments)
    process.start()
    wait_for(killed / "checkpoints/epoch-00002", process.is_alive)
    process.kill()
    process.join()
    assert not (killed / "pytorch_lora_weights.safetensors").exists()
    run(script, killed, tiny_pipeline_folder, "--resume_from_checkpoint", "latest", **OWN[script], **options)
    assert metrics_of(killed) == metrics_of(whole)
    assert adapter_bytes(killed) == adapter_bytes(whole)


def test_ctrl_c_ends_with_a_checkpoint_and_an_adapter(tmp_path, tiny_pipeline_folder):
    options = {"num_train_epochs": 500, "checkpointing_steps": 100_000, "eval_epochs": 0}
    folder = tmp_path / "run"
    process = start(train_flowgrpo, folder, tiny_pipeline_folder, **options)
    wait_for(folder / "metrics.jsonl", lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output[-2000:]
    assert "stopping after this epoch" in output
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["epoch"] == len(
        {line["epoch"] for line in metrics_of(folder)}
    )
    assert len(adapter_bytes(folder)) > 10_000


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
@pytest.mark.parametrize(
    ("checkpointing_steps", "text"),
    [(0, "stopped after 1 of 2 epochs, without a checkpoint"), (50, "of 2 epochs: --resume_from_checkpoint latest")],
)
def test_a_stopped_run_promises_what_it_kept(
    tmp_path, tiny_pipeline_folder, monkeypatch, capsys, script, checkpointing_steps, text
):
    monkeypatch.setattr(run_folder, "stop_requested", lambda output_dir, requests: True)
    values = OWN[script] | {"checkpointing_steps": checkpointing_steps, "eval_epochs": 0}
    folder = run(script, tmp_path / "run", tiny_pipeline_folder, **values)
    assert text in capsys.readouterr().out
    assert (folder / "checkpoints/epoch-00001").exists() == bool(checkpointing_steps)
