"""Bad input is one line that says what is wrong, before a model loads: python -m pytest tests/test_bad_input.py"""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bad_inputs import CASES, Place, write
from script_runs import SMALL, SMALL_ROLLOUT, options_of, reset_accelerate, roll_out, run, write_prompts

import rollout
import run_folder
import sharding
import train_flowgrpo
import train_nft
from trajectory_cache import open_cache

OWN = {
    train_flowgrpo: {"sde_window_range": (0, 3)},
    train_nft: {"true_cfg_scale": 2, "old_policy_decay": "copy"},
    rollout: {"sde_window_range": (0, 3)},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_pipeline_folder):
    """A cache and a run of each training script, which the cases copy."""
    folder = tmp_path_factory.mktemp("good")
    roll_out(folder / "cache", tiny_pipeline_folder)
    for script in (train_flowgrpo, train_nft):
        run(script, folder / script.__name__, tiny_pipeline_folder, **OWN[script], eval_epochs=0)
    return folder


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for name, (scripts, _, _) in CASES.items() for script in scripts],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_bad_input_is_one_line_before_a_model_is_loaded(
    tmp_path, good, tiny_pipeline_folder, monkeypatch, capsys, script, name
):
    _, change, expected = CASES[name]
    monkeypatch.setattr(rollout, "load_models", None)  # reaching it would be a TypeError with a traceback
    kind = change.__qualname__.partition(".")[0]  # copies are made only of what the case spoils
    sources = {"model": tiny_pipeline_folder, "cache": good / "cache", "run": good / script.__name__}
    if script is rollout:
        sources["run"] = good / "train_flowgrpo"
    for part, source in sources.items():
        if kind in (part, "<lambda>") or (kind, part) == ("checkpoint", "run"):
            shutil.copytree(source, tmp_path / part)
    values = SMALL if script is not rollout else SMALL_ROLLOUT
    defaults = {"pretrained_model_name_or_path": tiny_pipeline_folder, "prompts": write_prompts(tmp_path)}
    defaults |= {"output_dir": tmp_path / "out"}
    if script is not rollout:
        defaults["eval_prompts"] = defaults["prompts"]
    place = Place(tmp_path, tmp_path / "model", tmp_path / "cache", tmp_path / "run")
    changed = change(place)
    before = files_of(tmp_path)
    reset_accelerate()
    argv = options_of(values | OWN[script] | defaults | changed)
    code = run_folder.run_script(lambda: script.main(script.parse_args(argv)))
    captured = capsys.readouterr()
    assert code == 2
    assert expected in captured.err.strip().splitlines()[-1]
    assert files_of(tmp_path) == before  # nothing is lost or left behind


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but Python's compiled rewards."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, processes find each other")
@pytest.mark.parametrize("script", [train_flowgrpo, train_nft, rollout])
def test_processes_of_a_gpu_launch_do_not_run_side_by_side_on_a_cpu(tmp_path, monkeypatch, capsys, script):
    """fsdp2.yaml on a machine without a GPU: every process would be a run of its own, in the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rollout, "load_models", None)
    reset_accelerate()
    demo = train_flowgrpo.HERE / "assets/demo_pipeline"
    values = options_of({"output_dir": tmp_path / "out"})
    if script is rollout:
        values += ["--pretrained_model_name_or_path", str(demo), "--prompts", write_prompts(tmp_path)]
        values += ["--reward_funcs", "jpeg_compressibility"]
    before = files_of(tmp_path)
    assert run_folder.run_script(lambda: script.main(script.parse_args(values))) == 2
    assert "started 2 processes (WORLD_SIZE), but this one finds 1 (device cpu)" in capsys.readouterr().err
    assert files_of(tmp_path) == before
    reset_accelerate()


def test_a_world_size_that_accelerate_sets_itself_is_not_the_launchers(monkeypatch):
    """As under mpirun: the script has dealt its batches to one process by then."""

    def accelerator_under_mpi(**kwargs):
        monkeypatch.setenv("WORLD_SIZE", "2")
        return SimpleNamespace(num_processes=2, device=torch.device("cpu"))

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sharding, "Accelerator", accelerator_under_mpi)
    with pytest.raises(ValueError, match=r"started 1 processes .WORLD_SIZE., but this one finds 2 .device cpu."):
        sharding.make_accelerator()


def test_there_are_enough_cases():
    assert len(CASES) >= 60


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("long.txt", "x" * 2**20 + "\n", 1),
        ("twice.txt", "a cat\na cat\n", 2),
        ("unicode.txt", "﻿ein Fähnchen\r\n一只猫\r\n🐈‍⬛\r\n", 3),
    ],
)
def test_odd_prompts_are_accepted(tmp_path, tiny_pipeline_folder, name, content, count):
    path = write(tmp_path / name, content)
    values = {"prompts": path, "eval_epochs": 0, "num_train_epochs": 1, "checkpointing_steps": 0}
    folder = run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **OWN[train_flowgrpo], **values)
    assert (folder / "pytorch_lora_weights.safetensors").is_file()
    (cache_folder,) = (folder / "trajectories").iterdir()
    assert len(set(open_cache(cache_folder).prompt_ids)) == count
