"""No pickle, no code of a model's folder, no file outside the run's: python -m pytest tests/test_security.py"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script_runs import SMALL, SMALL_ROLLOUT, options_of, reset_accelerate, run, write_prompts

import rollout
import run_folder
import train_flowgrpo
import train_nft
from qwen_image import load_pipeline

ROOT = Path(__file__).resolve().parent.parent
OWN = {train_flowgrpo: {"sde_window_range": (0, 3)}, train_nft: {"old_policy_decay": "copy"}}


class Bomb:
    """Makes the file `marker` when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def code_that_marks(marker: Path) -> str:
    return f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Mine: pass\n"


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("subfolder", ["transformer", "vae", "text_encoder"])
def test_pickled_weights_are_not_loaded(tmp_path, tiny_pipeline_folder, capsys, subfolder):
    model, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(tiny_pipeline_folder, model)
    (weights,) = (model / subfolder).glob("*.safetensors")
    weights.rename(weights.with_name(weights.name.replace(".safetensors", ".kept")))
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin"):
        (model / subfolder / name).write_bytes(pickle.dumps(Bomb(marker)))
    for script in (train_flowgrpo, train_nft):
        assert run_folder.run_script(lambda s=script: run(s, tmp_path / "run", model, **OWN[s])) == 2
        assert f"{weights} is missing" in capsys.readouterr().err
    with pytest.raises(OSError, match="safetensors"):  # nor by the loader itself
        load_pipeline(model, dtype=torch.float32)
    assert not marker.exists()


def test_a_pickled_adapter_is_not_loaded(tmp_path, tiny_pipeline_folder, capsys):
    marker, lora = tmp_path / "marker", tmp_path / "lora"
    lora.mkdir()
    values = SMALL_ROLLOUT | {
        "pretrained_model_name_or_path": tiny_pipeline_folder,
        "prompts": write_prompts(tmp_path),
    }
    argv = options_of(values | {"lora": lora, "output_dir": tmp_path / "cache"})
    for name in ("pytorch_lora_weights.bin", "pytorch_lora_weights.safetensors"):
        (lora / name).write_bytes(pickle.dumps(Bomb(marker)))
        reset_accelerate()
        assert run_folder.run_script(lambda: rollout.main(rollout.parse_args(argv))) == 2
        assert "pytorch_lora_weights.safetensors" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "tokenizer", "scheduler", "pipeline"])
def test_code_of_a_models_folder_is_not_run(tmp_path, tiny_pipeline_folder, capsys, part):
    model, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(tiny_pipeline_folder, model)
    code = model / "mine.py" if part == "pipeline" else model / part / "mine.py"
    code.write_text(code_that_marks(marker))
    index = json.loads((model / "model_index.json").read_text())
    index["_class_name" if part == "pipeline" else part] = ["mine", "Mine"]
    (model / "model_index.json").write_text(json.dumps(index))
    for script in (train_flowgrpo, train_nft):
        assert run_folder.run_script(lambda s=script: run(s, tmp_path / "run", model, **OWN[s])) == 2
        assert "mine" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not marker.exists()


def test_code_that_configurations_point_to_is_not_run(tmp_path, tiny_pipeline_folder):
    model, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(tiny_pipeline_folder, model)
    for path in ("text_encoder/config.json", "tokenizer/tokenizer_config.json", "transformer/config.json"):
        (model / path).parent.joinpath("mine.py").write_text(code_that_marks(marker))
        config = json.loads((model / path).read_text())
        config["auto_map"] = dict.fromkeys(("AutoModel", "AutoConfig", "AutoTokenizer"), "mine.Mine")
        (model / path).write_text(json.dumps(config))
    run(train_flowgrpo, tmp_path / "run", model, **OWN[train_flowgrpo], num_train_epochs=1, eval_epochs=0)
    assert not marker.exists()


def test_links_in_a_run_folder_lead_no_deletion_outside(tmp_path, tiny_pipeline_folder):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep/file").write_text("kept")
    values = OWN[train_flowgrpo] | {"eval_epochs": 0, "checkpointing_steps": 1, "checkpoints_total_limit": 1}
    folder = run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values)
    for link in (
        "checkpoints/epoch-00001",
        "checkpoints/epoch-00009",
        "trajectories/epoch-00000",
        "trajectories/epoch-00007",
    ):
        (folder / link).symlink_to(outside)
    options = ("--resume_from_checkpoint", str(folder / "checkpoints/epoch-00002"))
    run(train_flowgrpo, folder, tiny_pipeline_folder, *options, **values | {"num_train_epochs": 3})
    assert (outside / "deep/file").read_text() == "kept"
    assert not [path for path in folder.rglob("*") if path.is_symlink()]


# ----- What is written ---------------------------------------------------------------------------------------------

WATCHED = """
import os, runpy, sys
written = open(sys.argv.pop(1), "w")
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if isinstance(path, int) or not writes:
            return
    elif event not in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate", "os.symlink"):
        return
    for path in arguments[: 2 if event == "os.rename" else 1]:
        path, folder = os.fsdecode(path), arguments[-1]  # rmtree names files within an open folder
        if event in ("os.remove", "os.rmdir", "os.mkdir") and folder != -1:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        written.write(f"{event} {os.path.abspath(path)}\\n")
        written.flush()
sys.addaudithook(watch)
script = sys.argv[1]
sys.path.insert(0, os.path.dirname(script))
sys.argv = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("script", [train_flowgrpo, pytest.param(train_nft, marks=pytest.mark.slow)])
def test_nothing_outside_the_run_folder_is_written_or_deleted(tmp_path, tiny_pipeline_folder, script):
    folders = {name: tmp_path / name for name in ("home", "scratch", "here", "input")}
    for folder in folders.values():
        folder.mkdir()
    prompts, folder = write_prompts(folders["input"]), tmp_path / "run"
    values = SMALL | OWN[script] | {"pretrained_model_name_or_path": tiny_pipeline_folder, "prompts": prompts}
    values |= {"eval_prompts": prompts, "output_dir": folder, "num_train_epochs": 2, "checkpointing_steps": 1}
    values |= {"checkpoints_total_limit": 1}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "TORCH", "COVERAGE"))
    }
    environment |= {"HOME": str(folders["home"]), "TMPDIR": str(folders["scratch"]), "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    log = tmp_path / "written"
    command = [sys.executable, "-c", WATCHED, log, script.__file__, *options_of(values)]
    before = {path: path.read_bytes() for path in tiny_pipeline_folder.rglob("*") if path.is_file()}
    result = subprocess.run(
        command, cwd=folders["here"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    paths = {line.partition(" ")[2] for line in log.read_text().splitlines()}
    assert any(path.startswith(f"{folder}/") for path in paths)
    elsewhere = sorted(
        path for path in paths if not path.startswith((f"{folder}/", "/dev/", "/proc/")) and path != str(folder)
    )
    elsewhere = [path for path in elsewhere if not path.startswith(f"{folders['scratch']}/")]  # gone again, see below
    assert elsewhere == []
    assert {path: path.read_bytes() for path in before} == before
    shutil.rmtree(folders["home"] / ".cache/Microsoft", ignore_errors=True)  # onnxruntime's, if it is installed
    for name in ("home", "here"):
        assert [path for path in folders[name].rglob("*") if path.name != ".cache"] == [], name
    assert [path.name for path in folders["input"].iterdir()] == ["prompts.txt"]
