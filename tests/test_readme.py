"""Every command of the README parses, and every option is explained: python -m pytest tests/test_readme.py"""

import argparse
import inspect
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import smoke
import torch
from script_runs import options_of, reset_accelerate

import evaluation
import option_checks
import rollout
import train_flowgrpo
import train_nft
import trajectory_cache

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.strip().splitlines()
]
SCRIPTS = {
    "train_flowgrpo.py": train_flowgrpo,
    "train_nft.py": train_nft,
    "rollout.py": rollout,
    "tests/smoke.py": smoke,
    "evaluation.py": evaluation,
}


def test_the_first_command_stands_within_15_lines():
    assert any("accelerate launch train_flowgrpo.py" in line for line in README.splitlines()[:15])


def test_the_file_list_is_complete():
    files = README.split("## Files")[1].split("## ")[0]
    listed = {line.split()[0] for line in files.splitlines() if line.startswith("    ") and ".py " in line}
    assert listed == {path.name for path in ROOT.glob("*.py")}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    """And those of the training scripts are options that a run could have."""
    words = shlex.split(command)
    scripts = [word for word in words if word.endswith(".py") and word in SCRIPTS]
    for word in words:
        if word.startswith(("accelerate_configs/", "assets/", "examples/", "benchmarks/", "requirements")):
            assert (ROOT / word).exists(), word
    if scripts:
        script = SCRIPTS[scripts[0]]
        args = script.parse_args(words[words.index(scripts[0]) + 1 :])
        if script in (train_flowgrpo, train_nft):
            ranks = int(words[words.index("--num_processes") + 1]) if "--num_processes" in words else 1
            option_checks.check_training_options(vars(args), world_size=16 if "--machine_rank" in words else ranks)
            script.check_args(args)
    else:
        assert words[0] in ("pip", "python"), command


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft, rollout, evaluation])
def test_every_option_is_in_the_readme_or_a_test(script, monkeypatch):
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, argv=None: parsers.append(self))
    known = [argparse.Namespace(pretrained_model_name_or_path="x")]
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", lambda self, argv=None: known)
    script.parse_args([])
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    for action in parsers[0]._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--") and flag != "--help"]
        assert not flags or any(flag in README or flag in tests for flag in flags), action.dest


@pytest.mark.parametrize("script", ["train_flowgrpo.py", "train_nft.py", "rollout.py", "trajectory_cache.py"])
def test_help_runs_as_a_script(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_no_flag_means_no_staging(tmp_path, capsys):
    """The flag switches the iterator; checked by what the banner says."""
    banners = []
    for number, flags in enumerate(([], ["--enable_timestep_staging"])):
        small = {"num_train_epochs": 1, "eval_epochs": 0, "num_prompts_per_epoch": 1, "num_updates_per_epoch": 1}
        reset_accelerate()
        options = [*options_of(small), *flags, "--output_dir", str(tmp_path / str(number))]
        train_flowgrpo.main(train_flowgrpo.parse_args(options))
        output = capsys.readouterr().out
        banners.append(next(line for line in output.splitlines() if line.startswith("timestep staging")))
    assert banners[0].split()[2] == "off"
    assert banners[1].split()[2] == "on"


def test_the_recipe_of_another_loss():
    """At v = v_old: -A, and the gradient A (v - target), here with target (.3, .4) and v (.1, .4)."""
    (recipe,) = re.findall(r"```python\n(def nft_loss.*?)```", README, re.DOTALL)
    scope = {"torch": torch}
    exec(recipe, scope)
    signatures = [inspect.signature(loss) for loss in (scope["nft_loss"], train_nft.nft_loss)]
    assert list(signatures[0].parameters) == list(signatures[1].parameters)
    x0, noise, velocity = (torch.tensor([[value]] * 3) for value in ([0.2, -0.3], [0.5, 0.1], [0.1, 0.4]))
    velocity.requires_grad_()
    probability = torch.tensor([1.0, 0.0, 0.5])
    inputs = velocity, velocity.detach(), x0, 0.4 * x0 + 0.6 * noise, torch.full((3, 1, 1), 0.6), probability
    losses = scope["nft_loss"](*inputs, nft_beta=0.1, adv_clip_max=5.0)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.tensor([-5.0, 5.0, 0.0]))
    torch.testing.assert_close(velocity.grad[:, 0], torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))


def test_the_check_command_of_the_readme_exists():
    assert callable(trajectory_cache.main)


def test_the_memory_table_is_that_of_the_results():
    """Every number of the README's peaks stands in benchmarks/results/staging_grid.json."""
    cases = json.loads((ROOT / "benchmarks/results/staging_grid.json").read_text())["cases"]
    names = {"FlowGRPO": "flow_grpo", "DiffusionNFT": "diffusion_nft"}
    rows = re.findall(r"^\| (FSDP2?) (\w+), T = (\d+) \|(.+)\|[^|]*\|$", README, flags=re.MULTILINE)
    assert len(rows) >= 9
    for profile, algorithm, timesteps, cells in rows:
        wanted = {"profile": profile.lower(), "algorithm": names[algorithm], "timesteps": int(timesteps)}
        wanted |= {"pass": "memory", "cfg": "two_pass", "lora_dtype": "float32", "noise": "per_step"}
        (case,) = (case for case in cases if wanted.items() <= case.items())
        shown = [cell.strip(" *") for cell in cells.split("|")]
        assert shown == [f"{case['arms'][arm]['peak_mib']:.2f}" for arm in ("M", "A", "AB", "AB1")]


def test_the_full_size_tables_are_those_of_the_results():
    """Every number of the README's speeds and peaks stands in benchmarks/results/full_size.json."""
    files = json.loads((ROOT / "benchmarks/results/full_size.json").read_text())["configurations"]
    rows = [row for file in files for row in file["rows"]]
    speeds = re.findall(r"^\| (\d+) px, batch (\d+): (.+?) \|(.+)\|$", README, flags=re.MULTILINE)
    assert len(speeds) >= 10
    for resolution, batch_size, arm, cells in speeds:
        shown = [cell.strip().replace(" %", "%") for cell in cells.split("|")]
        del shown[2]  # the ratio to the first arm of its run
        wanted = {"resolution": int(resolution), "batch_size": int(batch_size), "arm": arm}
        assert shown in [
            [
                f"{row['rollout_s_per_image']:.3f}",
                f"{row['update_s_per_sample_timestep']:.3f}",
                f"{row['images_per_gpu_s']:.3f}",
                f"{row['model_share']:.0%}, {row['hardware_share']:.0%}",
                f"{max(row['rollout_peak_gib'], row['update_peak_gib']):.1f}",
            ]
            for row in rows
            if wanted.items() <= row.items() and "rollout_s_per_image" in row
        ], (arm, shown)
    peaks = re.findall(r"^\| T = (\d+), batch (\d+) \| ([\d.]+) \| ([\d.]+) \|", README, flags=re.MULTILINE)
    assert peaks
    for timesteps, batch_size, kept, released in peaks:
        for staged, keeps, shown in ((False, True, kept), (True, False, released)):
            wanted = {"timesteps": int(timesteps), "batch_size": int(batch_size), "staged": staged, "kept": keeps}
            assert shown in [f"{row['update_peak_gib']:.2f}" for row in rows if wanted.items() <= row.items()]
