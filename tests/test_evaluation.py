"""Tests of evaluation.py: intervals, batches, grids, the script: python -m pytest tests/test_evaluation.py"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from script_runs import PROMPTS, SMALL, options_of, reset_accelerate, run, values_of

import evaluation
import run_folder
import train_flowgrpo
from evaluation import evaluation_batches, evaluation_metrics, save_grid, summarize

ROOT = Path(__file__).resolve().parent.parent


def test_intervals_golden():
    """1 2 3 4: mean 2.5, sample std 1.290994, 1.96 x that / sqrt(4) = 1.265174."""
    scores = torch.tensor([[1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [4.0, 7.0]], dtype=torch.float64)
    metrics = evaluation_metrics(scores, ["a", "b"])
    assert metrics == {"eval/a": 2.5, "eval/a_ci95": pytest.approx(1.265174, abs=1e-6), "eval/b": 7, "eval/b_ci95": 0}
    assert evaluation_metrics(scores[:1], ["a", "b"]) == {"eval/a": 1, "eval/b": 7}


def test_a_difference_is_taken_prompt_by_prompt():
    base = torch.tensor([[1.0], [5.0], [9.0]], dtype=torch.float64)
    summary = summarize({"base": base, "trained": base + 0.5}, ["a"])["a"]
    assert summary["difference"] == 0.5
    assert summary["difference_ci95"] == 0
    assert summary["base_ci95"] > 4
    assert "difference" not in summarize({"base": base}, ["a"])["a"]


def test_batches_have_one_size_and_hold_each_prompt_once():
    small, large = (64, 64), (96, 64)
    assert evaluation_batches([small] * 5, 2) == [[0, 1], [2, 3], [4, 4]]
    assert evaluation_batches([small, large, small, small], 2) == [[0, 2], [3, 3], [1, 1]]
    assert evaluation_batches([small], 3) == [[0, 0, 0]]


def test_a_grid_stands_to_the_right_of_the_base_models(tmp_path):
    black, white = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.full((4, 3, 32, 32), 255, dtype=torch.uint8)
    save_grid(black, tmp_path / "base.png", title="base")
    save_grid(white, tmp_path / "both.png", title="epoch 3", base=tmp_path / "base.png")
    save_grid(white, tmp_path / "alone.png", title="epoch 3", base=tmp_path / "missing.png")
    base, both, alone = (Image.open(tmp_path / f"{name}.png") for name in ("base", "both", "alone"))
    assert (alone.size, both.height) == (base.size, base.height)
    assert 2 * base.width < both.width < 2.1 * base.width
    assert np.array_equal(np.array(both)[:, : base.width], np.array(base))
    assert np.array_equal(np.array(both)[:, -base.width :], np.array(alone))
    title = np.array(alone)[: alone.height - alone.width]
    assert (title < 128).any()  # letters, on white
    assert (title == 255).mean() > 0.5


def options_for(folder, model, prompts, **values):
    names = ("resolution", "true_cfg_scale", "train_batch_size", "eval_num_inference_steps")
    values = {name: SMALL[name] for name in names} | {"pretrained_model_name_or_path": model} | values
    return options_of(values | {"eval_prompts": prompts, "output_dir": folder})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_pipeline_folder):
    """A run of two epochs whose evaluation holds a reward out."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "reward.py").write_text("def red(images, *_):\n    return images[:, 0].mean(dim=(1, 2))\n")
    values = {"sde_window_range": (0, 3), "clip_range": 1e-3, "eval_reward_funcs": f"{folder}/reward.py:red"}
    return run(train_flowgrpo, folder / "run", tiny_pipeline_folder, **values)


def test_the_script_gives_the_figures_of_the_training_run(trained, tmp_path, tiny_pipeline_folder, capsys):
    names = ["jpeg_compressibility", "red"]
    options = options_for(tmp_path / "e", tiny_pipeline_folder, trained.parent / "prompts.txt", lora=trained)
    reset_accelerate()
    rewards = ["jpeg_compressibility", f"{trained.parent}/reward.py:red"]
    evaluation.main(evaluation.parse_args([*options, "--reward_funcs", *rewards]))
    assert "4 prompts" in capsys.readouterr().out
    results = json.loads((tmp_path / "e/evaluation.json").read_text())["rewards"]
    for name in names:
        for suffix in ("", "_ci95"):
            before, after = values_of(trained, f"eval/{name}{suffix}")
            assert results[name][f"base{suffix}"] == pytest.approx(before, rel=1e-6)
            assert results[name][f"trained{suffix}"] == pytest.approx(after, rel=1e-6)
        assert results[name]["difference"] == pytest.approx(results[name]["trained"] - results[name]["base"])
    rows = [json.loads(line) for line in (tmp_path / "e/rewards.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    for model in ("base", "trained"):
        assert np.mean([row[model][names[0]] for row in rows]) == pytest.approx(results[names[0]][model])
    assert {path.name for path in (tmp_path / "e/grids").iterdir()} == {"base.png", "base_and_trained.png"}
    assert {path.name for path in (tmp_path / "e").iterdir()} == {"evaluation.json", "rewards.jsonl", "grids"}
    first, last = (Image.open(trained / f"grids/epoch-0000{epoch}.png") for epoch in (0, 2))
    assert last.width > 2 * first.width


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval_prompts": "nowhere.txt"}, "--eval_prompts nowhere.txt is no file"),
        ({"reward_funcs": "ocr"}, "--eval_prompts, prompt 1: ocr needs text in double quotes"),
        ({"lora": "nowhere"}, "--lora nowhere holds no"),
        ({"resolution": 70}, "nearest is 64"),
        ({"train_batch_size": 0}, "--train_batch_size is 0"),
        ({"reward_workers": -1}, "--reward_workers is -1"),
    ],
)
def test_refusals_are_one_line(trained, tmp_path, tiny_pipeline_folder, monkeypatch, capsys, values, message):
    monkeypatch.setattr(evaluation, "load_models", None)
    values = {"reward_funcs": "jpeg_compressibility"} | values
    prompts = values.pop("eval_prompts", trained.parent / "prompts.txt")
    options = options_for(tmp_path / "e", tiny_pipeline_folder, prompts, **values)
    assert run_folder.run_script(lambda: evaluation.main(evaluation.parse_args(options))) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "e").exists()


@pytest.mark.slow  # three processes that import torch
def test_two_ranks_give_the_same_figures(trained, tmp_path, tiny_pipeline_folder):
    results = []
    for ranks in (1, 2):
        options = options_for(
            tmp_path / str(ranks), tiny_pipeline_folder, trained.parent / "prompts.txt", lora=trained
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += ["evaluation.py", *options, "--train_batch_size", "1", "--reward_funcs", "jpeg_compressibility"]
        environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
        found = [tmp_path / str(ranks) / name for name in ("rewards.jsonl", "grids/base_and_trained.png")]
        results.append([path.read_bytes() for path in found])
    assert results[0] == results[1]
