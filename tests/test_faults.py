"""kill -9 at many moments, full and read-only disks, hanging rewards, dying ranks, and then resume.

python -m pytest tests/test_faults.py runs three moments; `-m slow` the rest.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import in_child, run_child
from script_runs import SMALL, adapter_bytes, metrics_of, options_of, write_prompts

import run_folder
import train_flowgrpo

ROOT = Path(__file__).resolve().parent.parent
VALUES = {
    "resolution": 32,
    "num_inference_steps": 3,
    "num_train_epochs": 4,
    "checkpointing_steps": 1,
    "eval_epochs": 2,
}
OWN = {
    "train_flowgrpo": VALUES | {"sde_window_range": (0, 2), "sde_window_size": 1, "clip_range": 1e-3},
    "train_nft": VALUES | {"old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1},
}
RESUME = ("--resume_from_checkpoint", "latest")

# name: (function, which call, before or after or half done, what its arguments contain), the checkpoint that is left
MOMENTS = {
    "rollout": (("rollout.sample_batch", 11), 2),
    "cache write": (("trajectory_cache.row_table", 60), 1),
    "cache rename": (("os.replace", 3, "before", "trajectories-00000.arrow"), 2),
    "cache without manifest": (("os.replace", 2, "before", "manifest-00000.json"), 1),
    "mid-update": (("sharding.clip_gradients", 4), 1),
    "update applied but not logged": (("sharding.check_finite", 6, "after"), 2),
    "half a line of metrics": (("run_folder.append_metrics", 9, "half"), 2),
    "tidying trajectories": (("shutil.rmtree", 2, "half", "trajectories"), 2),
    "checkpoint write": (("run_folder.save_file", 3, "half", "adapter_default"), 2),
    "checkpoint rename": (("os.replace", 1, "before", "epoch-00003.tmp"), 2),
    "old checkpoint half deleted": (("shutil.rmtree", 2, "half", "checkpoints/epoch-00001.tmp"), 3),
    "evaluation": (("evaluation.save_grid", 2), 1),
    "export": (("qwen_image.sort_safetensors_header", 1), 4),
    "export rename": (("os.replace", 1, "before", "unfinished.safetensors"), 4),
}
IN_CI = ("cache rename", "checkpoint write", "export")
CASES = [
    pytest.param(script, name, marks=() if script == "train_flowgrpo" and name in IN_CI else pytest.mark.slow)
    for script in OWN
    for name in MOMENTS
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_pipeline_folder):
    """A function that gives the folder of a run that nothing disturbed."""
    folders = {}

    def run_whole(script: str) -> Path:
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp(script) / "whole"
            assert in_child(run_child, script, folders[script], tiny_pipeline_folder, (), OWN[script]) == 0
        return folders[script]

    return run_whole


def assert_same_run(folder: Path, whole: Path) -> None:
    assert metrics_of(folder) == metrics_of(whole)
    assert adapter_bytes(folder) == adapter_bytes(whole)
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp") or "unfinished" in path.name]


@pytest.mark.parametrize("name", MOMENTS)
def test_a_moment_is_at_a_function_that_exists(name):
    module, _, function = MOMENTS[name][0][0].rpartition(".")
    assert callable(vars(importlib.import_module(module))[function])


@pytest.mark.parametrize(("script", "name"), CASES)
def test_killed_at_any_moment_it_resumes_to_the_same_run(tmp_path, tiny_pipeline_folder, whole, script, name):
    moment, epoch = MOMENTS[name]
    folder = tmp_path / "run"
    assert in_child(run_child, script, folder, tiny_pipeline_folder, (), OWN[script], moment) == -signal.SIGKILL
    assert run_folder.find_checkpoint(folder, "latest").name == f"epoch-{epoch:05d}"
    assert not (folder / "pytorch_lora_weights.safetensors").exists()
    assert in_child(run_child, script, folder, tiny_pipeline_folder, RESUME, OWN[script]) == 0
    assert_same_run(folder, whole(script))


def test_killed_before_its_first_checkpoint_it_says_what_is_lost(tmp_path, tiny_pipeline_folder):
    folder, moment = tmp_path / "run", ("rollout.sample_batch", 2)
    arguments = ("train_flowgrpo", folder, tiny_pipeline_folder)
    assert in_child(run_child, *arguments, (), OWN["train_flowgrpo"], moment) == -signal.SIGKILL
    assert in_child(run_child, *arguments, RESUME, OWN["train_flowgrpo"]) == 2
    assert "holds no checkpoint; start without it" in last_line(folder)


def last_line(folder: Path) -> str:
    return Path(f"{folder}.log").read_text().strip().splitlines()[-1]


# ----- Disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a disk of so many bytes, or makes it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: int) -> Path:
        options = ["-o", f"{'remount,' if os.path.ismount(disk) else ''}size={size}"]
        done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", disk], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("mounting a small disk needs privileges")
        return disk

    yield mount
    if os.path.ismount(disk):
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", OWN)
@pytest.mark.parametrize("share", [0.4, 0.6, 0.7, 0.8, 0.9])
def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    tmp_path, tiny_pipeline_folder, whole, small_disk, script, share
):
    needed = sum(path.stat().st_blocks * 512 for path in whole(script).rglob("*"))
    disk = small_disk(int(needed * share))
    folder = disk / "run"
    arguments = (script, folder, tiny_pipeline_folder)
    log = tmp_path / "run.log"
    log.touch()
    (disk / "run.log").symlink_to(log)  # the log is not what fills the disk
    assert in_child(run_child, *arguments, (), OWN[script]) == 2
    assert "No space left" in last_line(folder)
    assert not (folder / "pytorch_lora_weights.safetensors").exists()
    small_disk(needed * 4)
    if not list(folder.glob("checkpoints/epoch-?????")):
        assert in_child(run_child, *arguments, RESUME, OWN[script]) == 2
        assert "holds no checkpoint" in last_line(folder)
        return
    assert in_child(run_child, *arguments, RESUME, OWN[script]) == 0
    assert_same_run(folder, whole(script))


@pytest.mark.slow
def test_a_disk_that_turns_read_only_is_one_line(tmp_path, tiny_pipeline_folder, whole, small_disk):
    folder = small_disk(2**26) / "run"
    (folder.parent / "run.log").symlink_to(tmp_path / "run.log")
    arguments = ("train_flowgrpo", folder, tiny_pipeline_folder)
    values = OWN["train_flowgrpo"]
    assert in_child(run_child, *arguments, (), values, ("run_folder.append_metrics", 6)) == -signal.SIGKILL
    subprocess.run(["mount", "-o", "remount,ro", folder.parent], check=True)
    assert in_child(run_child, *arguments, RESUME, values) == 2
    assert "Read-only file system" in last_line(folder)
    subprocess.run(["mount", "-o", "remount,rw", folder.parent], check=True)
    assert in_child(run_child, *arguments, RESUME, values) == 0
    assert_same_run(folder, whole("train_flowgrpo"))


# ----- Rewards that hang, Ctrl-C, ranks that die -------------------------------------------------------------------

HANGING = """
import pathlib, time
def score(images, prompts, metadata):
    flag = pathlib.Path(__file__).with_name("hang")
    marks = pathlib.Path(__file__).with_name("calls")
    marks.touch()
    calls = len(marks.read_text())
    marks.write_text("x" * (calls + 1))
    while flag.exists() and calls >= 9:  # in the third epoch
        time.sleep(0.05)
    return images.mean(dim=(1, 2, 3))
"""


@pytest.mark.slow
def test_a_reward_that_hangs_is_left_by_a_second_ctrl_c(tmp_path, tiny_pipeline_folder):
    (tmp_path / "reward.py").write_text(HANGING)
    (tmp_path / "hang").touch()
    values = OWN["train_flowgrpo"] | {"reward_funcs": f"{tmp_path / 'reward.py'}:score", "eval_epochs": 0}
    named = {"pretrained_model_name_or_path": tiny_pipeline_folder, "prompts": write_prompts(tmp_path)}
    folder = tmp_path / "run"
    command = [sys.executable, train_flowgrpo.__file__, *options_of(SMALL | values | named | {"output_dir": folder})]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: (tmp_path / "calls").exists() and len((tmp_path / "calls").read_text()) == 10, process)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # the first asks for the end of the epoch, which the reward never lets come
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"stopped at once; --resume_from_checkpoint latest" in output
    (tmp_path / "hang").unlink()
    assert in_child(run_child, "train_flowgrpo", folder, tiny_pipeline_folder, RESUME, values) == 0
    undisturbed = tmp_path / "undisturbed"
    assert in_child(run_child, "train_flowgrpo", undisturbed, tiny_pipeline_folder, (), values) == 0
    assert_same_run(folder, undisturbed)


def wait_until(condition, process: subprocess.Popen, seconds: float = 240) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        assert process.poll() is None, process.stdout.read()[-2000:]
        time.sleep(0.05)
    raise AssertionError("it took too long")


DYING = """
import os, pathlib, signal
def score(images, prompts, metadata):
    flag = pathlib.Path(__file__).with_name("die")
    if os.environ.get("RANK") == "1" and flag.exists():
        calls = len(flag.read_text())
        flag.write_text("x" * (calls + 1))
        if calls == 4:  # in the third epoch
            os.kill(os.getpid(), signal.SIGKILL)
    return images.mean(dim=(1, 2, 3))
"""


@pytest.mark.slow
def test_a_dead_rank_ends_the_run_and_it_resumes(tmp_path, tiny_pipeline_folder):
    (tmp_path / "reward.py").write_text(DYING)
    values = OWN["train_flowgrpo"] | {"reward_funcs": f"{tmp_path / 'reward.py'}:score", "eval_epochs": 0}
    values |= {"pretrained_model_name_or_path": tiny_pipeline_folder, "prompts": write_prompts(tmp_path)}
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}

    def launch(folder: Path, *options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["tests/run_on_cpu_ranks.py", train_flowgrpo.__file__]
        command += [*options_of(SMALL | values | {"output_dir": folder}), *options]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    whole = launch(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    (tmp_path / "die").touch()
    started = time.monotonic()
    died = launch(tmp_path / "run")
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr or "-9" in died.stderr
    assert time.monotonic() - started < 240
    assert run_folder.find_checkpoint(tmp_path / "run", "latest").name == "epoch-00002"
    (tmp_path / "die").unlink()
    assert launch(tmp_path / "run", *RESUME).returncode == 0
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "whole")
