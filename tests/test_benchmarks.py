"""The benchmarks themselves, small and on the CPU: python -m pytest tests/test_benchmarks.py"""

import json
import sys
from pathlib import Path

import full_size
import learning
import pytest
import staging_grid
from forked_launch import launch
from PIL import Image
from script_runs import launch_words

import train_flowgrpo
import train_nft

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The fsdp2 profiles on two CPU ranks: every arm's losses, gradients, weights and forward-only outputs."""
    folder = tmp_path_factory.mktemp("grid")
    words = ["--device", "cpu", "--passes", "equality", "--timesteps", "1", "2", "--output_dir", str(folder / "cases")]
    (output,) = launch(folder, launch_words("fsdp2", str(ROOT / "benchmarks/staging_grid.py"), *words))
    assert "staging grid complete: 8 of 8 cases of fsdp2" in output
    return folder / "cases"


def test_all_arms_of_the_grid_are_equal_bit_for_bit(grid):
    cases = [json.loads(path.read_text()) for path in grid.glob("*.json")]
    assert len(cases) == 8
    assert {case["noise"] for case in cases} == {"per_step", "shared", "on_demand"}
    for case in cases:
        assert set(case["arms"]) == {"M", "A", "AB", "AB1"}
        assert case["arms"]["A"]["compared"] > 100
        assert [arm["largest_difference"] for arm in case["arms"].values()] == [0.0] * 4


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_step_inputs_are_one_step_staged_and_all_otherwise(grid, algorithm):
    """16 tokens of 64 channels in fp32, micro-batch 2: a latent of 8 KiB, 2 timesteps; small fields aside."""
    (path,) = grid.glob(f"fsdp2-{algorithm}-float32-two_pass-per_step-2-equality.json")
    inputs = {arm: figures["step_input_mib"] * 1024 for arm, figures in json.loads(path.read_text())["arms"].items()}
    latents = {"flow_grpo": (3, 2), "diffusion_nft": (2, 1)}[algorithm]  # not staged, staged
    for arm, count in {"M": latents[0], "A": latents[0], "AB": latents[1], "AB1": latents[1]}.items():
        assert inputs[arm] == pytest.approx(8 * count, rel=0.02)


def test_the_grid_plans_every_profile():
    fields = ("profile", "algorithm", "lora_dtype")
    cases = [
        case
        for profile in ("fsdp", "fsdp2")
        for case, kind in staging_grid.planned_cases(
            profile, (1, 8, 32), ["flow_grpo", "diffusion_nft"], ["memory", "equality", "timing"]
        )
        if kind == "memory"
    ]
    assert {tuple(getattr(case, field) for field in fields) for case in cases} == {
        ("fsdp", "flow_grpo", "float32"),
        ("fsdp", "diffusion_nft", "float32"),
        ("fsdp2", "flow_grpo", "float32"),
        ("fsdp2", "diffusion_nft", "float32"),
        ("fsdp2", "diffusion_nft", "bfloat16"),
    }
    assert {case.timesteps for case in cases} == {1, 8, 32}
    assert {case.noise for case in cases} == {"per_step", "shared", "on_demand"}


@pytest.mark.parametrize("algorithm", ["flowgrpo", "nft"])
def test_the_full_size_benchmark_runs_small(algorithm, tmp_path, monkeypatch, capsys):
    """Eager and compiled arms by turns; shares follow from counted FLOPs."""
    words = ["--tiny", "--num_layers", "2", "--resolutions", "64", "--batch_sizes", "2", "--repeats", "1"]
    words += ["--text_tokens", "8", "--backend", "eager", "--arms", "0", "3", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["full_size.py", "--algorithm", algorithm, *words])
    full_size.main()
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        assert row["update_s"] > 0
        assert 0 < row["model_share"] < row["hardware_share"]
        seconds = row["rollout_s"] / 2 + {"flowgrpo": 2, "nft": 10}[algorithm] * row["update_s"] / 4
        assert row["images_per_gpu_s"] == pytest.approx(1 / seconds)
    full_size.merge(tmp_path, tmp_path / "merged")
    printed = capsys.readouterr().out
    assert "| s per image |" in printed
    assert ("ratio within" in printed) == (algorithm == "flowgrpo")


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--arms", "9"], ["--arms", "-1"]])
def test_a_full_size_run_of_nothing_is_refused(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["full_size.py", *words])
    monkeypatch.setattr(full_size, "build", None)
    with pytest.raises(SystemExit, match="give at least 1, and 0 to 7"):
        full_size.main()


def test_learning_curves_are_drawn_from_their_results(tmp_path, monkeypatch, capsys):
    row = {"kind": "long", "algorithm": "nft", "label": "long", "seed": 0, "options": [], "epochs": [0, 2]}
    row |= {
        "images": [0, 256],
        "seconds": [0.0, 9.5],
        "accuracy": [0.5, 0.75],
        "held_out": [1.9, 2.0],
        "reward": [1.0],
    }
    (tmp_path / "learning.json").write_text(json.dumps({"runs": [row]}))
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--show", "--results", str(tmp_path / "learning.json")])
    learning.main()
    assert "| nft, 2 epochs, seed 0 | 50.0 % | 75.0 % | 75.0 % | 1.900 | 2.000 | 10 |" in capsys.readouterr().out
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_the_grids_of_the_long_runs_are_one_picture(tmp_path):
    """Drawn from the last grid of each; not before all have one."""
    jobs = [job for job in learning.planned_jobs(("long",)) if job.seed == 0]
    for job in jobs:
        assert not (tmp_path / "grids.png").exists()
        learning.draw_grids(tmp_path, tmp_path / "grids.png")
        folder = job.folder(tmp_path) / "grids"
        folder.mkdir(parents=True)
        Image.new("RGB", (536, 264), "red").save(folder / "epoch-00002.png")
        Image.new("RGB", (536, 264), "blue").save(folder / "epoch-00010.png")
    learning.draw_grids(tmp_path, tmp_path / "grids.png")
    colours = {colour for _, colour in Image.open(tmp_path / "grids.png").convert("RGB").getcolors(1 << 20)}
    assert (0, 0, 255) in colours
    assert (255, 0, 0) not in colours


def test_every_learning_run_has_options_of_its_script():
    jobs = learning.planned_jobs(("long", "choice"))
    assert len({job.folder(Path("runs")) for job in jobs}) == len(jobs)
    for job in jobs:
        script = {"flowgrpo": train_flowgrpo, "nft": train_nft}[job.algorithm]
        script.check_args(script.parse_args([option for option in job.options if option != "--no-staging"]))
