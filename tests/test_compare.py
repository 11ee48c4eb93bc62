"""benchmarks/compare.py: tables and figures of run folders: python -m pytest tests/test_compare.py"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

COMPARE = Path(__file__).resolve().parent.parent / "benchmarks/compare.py"
EVALUATIONS = {"a": [0.5, 0.9, 0.7], "b": [0.5, 0.6, 0.8]}


def write_run(folder: Path, name: str, learning_rate: float) -> Path:
    """A run folder of two epochs with two updates each."""
    run = folder / name
    run.mkdir()
    options = {"learning_rate": learning_rate, "rank": 4, "output_dir": str(run), "revision": None}
    options |= {"kl_beta": 0.0} if name == "a" else {"nft_beta": None}  # as of two scripts
    (run / "args.json").write_text(json.dumps({"git_commit": None, "args": options}))
    lines = [{"epoch": 0, "step": 0, "eval/score": EVALUATIONS[name][0]}]
    for epoch in range(2):
        lines += [{"epoch": epoch, "step": 2 * epoch + i, "train/grad_norm": 10.0 * epoch + i} for i in (1, 2)]
        lines += [{"epoch": epoch, "step": 2 * epoch + 2, "rollout/reward_mean": 0.25 * epoch, "time/rollout_s": 2.0,
                   "time/update_s": 1.5}]  # fmt: skip
        lines += [{"epoch": epoch + 1, "step": 2 * epoch + 2, "eval/score": EVALUATIONS[name][epoch + 1]}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path, "a", 1e-3), write_run(tmp_path, "b", 3e-3)]


def compare(*words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, COMPARE, *map(str, words)], capture_output=True, text=True, check=False)


def rows_of(result) -> dict[str, list[str]]:
    """First cell of each row of the table to the others."""
    assert result.returncode == 0, result.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_the_table_has_options_times_and_metrics(runs):
    rows = rows_of(compare(*runs))
    assert rows == {
        "": list(map(str, runs)),
        "---": ["---"] * 2,
        "--kl_beta": ["0.0", ""],
        "--learning_rate": ["0.001", "0.003"],  # rank is the same, output_dir always differs
        "epoch": ["2", "2"],
        "step": ["4", "4"],
        "seconds": ["7", "7"],
        "eval/score": ["0.5 → 0.7, best 0.9 at 1", "0.5 → 0.8, best 0.8 at 2"],
        "rollout/reward_mean": ["0 → 0.25, best 0.25 at 1"] * 2,
        "train/grad_norm": ["11.5"] * 2,  # the mean of the last epoch's 11 and 12
    }


def test_metrics_are_chosen_and_drawn(runs, tmp_path):
    picture = tmp_path / "picture.png"
    metrics = ["eval/score", "rollout/reward_mean"]
    rows = rows_of(compare(*runs, "--metrics", *metrics, "--x", "seconds", "--output", picture))
    assert [name for name in rows if "/" in name] == metrics
    assert Image.open(picture).size == (1200, 400)
    assert len(Image.open(picture).convert("RGB").getcolors(1 << 20)) > 10  # lines, text, grid


def test_seconds_are_those_up_to_the_line(runs, monkeypatch):
    monkeypatch.syspath_prepend(COMPARE.parent)
    from compare import read_run, series

    assert series(read_run(runs[0]), "eval/score", "seconds") == ([0.0, 3.5, 7.0], EVALUATIONS["a"])


def test_what_cannot_be_compared_is_one_error(runs, tmp_path):
    assert "is no run folder" in compare(runs[0], tmp_path / "nothing").stderr.splitlines()[-1]
    assert "no run has logged eval/other: choose from" in compare(*runs, "--metrics", "eval/other").stderr
