"""Tests of scorer.py, its worker processes, and GDPO: python -m pytest tests/test_scorer.py"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from script_runs import run, values_of

import train_flowgrpo
import train_nft
from rewards import combine_rewards, group_advantages, has_signal
from scorer import Scorer, serve_scores
from trajectory_cache import open_cache

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = """
import os, signal, time

def red(images, prompts, metadata):
    return images[:, 0].mean(dim=(1, 2))

def slow_first(images, prompts, metadata):
    time.sleep(0.3 if metadata[0]["n"] == 0 else 0)
    return [row["n"] + len(prompt) / 100 for row, prompt in zip(metadata, prompts)]

def fails(images, prompts, metadata):
    bad = {"raises": 1 / len(prompts), "nan": float("nan"), "none": None, "text": "1"}
    if any(row["n"] == 5 for row in metadata):
        if prompts[0] == "raises":
            raise KeyError("who")
        if prompts[0] == "count":
            return [1.0]
        if prompts[0] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompts[0] == "hangs":
            time.sleep(60)
        return [bad[prompts[0]] if row["n"] == 5 else 1.0 for row in metadata]
    return [1.0] * len(prompts)

def process(images, prompts, metadata):
    return [os.getpid()] * len(prompts)

def waits(images, prompts, metadata):
    while not os.path.exists(prompts[0]):
        time.sleep(0.01)
    return [1.0] * len(prompts)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return {name: f"{path}:{name}" for name in ("red", "slow_first", "fails", "process", "waits")}


def submit(scorer, labels, batches, prompt="a"):
    """Batches of samples whose image i has red i / 20."""
    for batch in batches:
        images = torch.zeros(len(batch), 3, 4, 4)
        images[:, 0] = torch.tensor(batch, dtype=torch.float32).view(-1, 1, 1) / 20
        scorer.submit(labels, images, [prompt] * len(batch), [{"n": n} for n in batch], batch)


BATCHES = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


@pytest.fixture(scope="module")
def scorers(functions):
    """One without workers and one with two."""
    scorers = [Scorer(functions, num_workers=number) for number in (0, 2)]
    yield scorers
    for scorer in scorers:
        scorer.close()


@pytest.mark.parametrize("which", [0, 1])
def test_results_are_in_the_order_of_the_batches(scorers, which):
    scorer = scorers[which]
    scorer.to("cpu", ["red"])
    submit(scorer, ["red", "slow_first"], BATCHES)
    scorer.to("cpu", ["red"])  # after a rollout, before its results are asked for
    scores = scorer.results()
    assert scores["red"] == pytest.approx([n / 20 for n in range(9)])
    assert scores["slow_first"] == pytest.approx([n + 0.01 for n in range(9)])
    assert scorer.results() == {}
    submit(scorer, ["red"], [[3]])
    assert scorer.results() == {"red": [pytest.approx(0.15)]}


def test_batches_go_to_processes_of_their_own_by_turns(scorers):
    submit(scorers[1], ["process"], BATCHES)
    pids = scorers[1].results()["process"]
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert pids[0] == pids[1] == pids[4] == pids[8] != pids[2]
    submit(scorers[0], ["process"], [[0]])
    assert scorers[0].results()["process"] == [os.getpid()]


def test_the_caller_goes_on_while_a_worker_scores(scorers, tmp_path):
    """The reward ends when a file appears, which is made after submitting and, by a timer, while its result is due."""
    scorers[1].take_seconds_waited()
    submit(scorers[1], ["waits"], [[0], [1]], str(tmp_path / "go"))
    started, timer = time.perf_counter(), threading.Timer(0.4, (tmp_path / "go").touch)
    timer.start()
    assert scorers[1].results() == {"waits": [1.0, 1.0]}
    elapsed = time.perf_counter() - started
    timer.join()
    assert 0.1 < scorers[1].take_seconds_waited() <= elapsed
    assert scorers[1].take_seconds_waited() == 0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", r"reward fails on samples 4 to 5 raised KeyError: 'who' \(functions.py line \d+\)"),
        ("nan", "reward fails is nan for sample 5"),
        ("none", "reward fails is None for sample 5"),
        ("text", "reward fails is 1 for sample 5"),
        ("count", "reward fails on samples 4 to 5 returned 1 values for 2 images"),
    ],
)
def test_a_failure_is_one_line_that_names_the_sample(scorers, which, kind, message):
    def score():
        submit(scorers[which], ["red", "fails"], BATCHES, kind)
        return scorers[which].results()

    with pytest.raises(ValueError, match=message) as error:
        score()
    assert "\n" not in str(error.value)
    while scorers[which].waiting:  # a run would have ended
        scorers[which].receive()
    scorers[which].finished.clear()


def test_a_worker_that_hangs_or_dies_is_one_line(functions):
    scorer = Scorer(functions, num_workers=2, timeout=2.0)
    submit(scorer, ["fails"], [[1], [2]], "hangs")
    assert scorer.results() == {"fails": [1.0, 1.0]}
    for worker in scorer.workers:
        os.kill(worker.process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal
    submit(scorer, ["fails"], [[5]], "hangs")
    submit(scorer, ["fails"], [[5, 6]], "dies")
    started = time.perf_counter()
    for message in ("5 to 5: no answer within 2 s; mend it or raise", "5 to 6: its worker ended with exit code -9"):
        with pytest.raises(ValueError, match=f"reward fails on samples {message}"):
            scorer.results()
    assert time.perf_counter() - started < 30  # the reward sleeps for 60
    submit(scorer, ["fails"], [[2]])
    with pytest.raises(ValueError, match="on samples 2 to 2: its worker ended"):
        scorer.results()
    scorer.close()
    assert not any(worker.process.is_alive() for worker in scorer.workers)


def test_a_worker_that_cannot_load_its_rewards_says_so():
    (ours, theirs), answers = multiprocessing.Pipe(), []

    def caller():
        answers.append(ours.recv())
        ours.close()

    before, thread = signal.getsignal(signal.SIGINT), threading.Thread(target=caller)
    thread.start()
    try:
        serve_scores(theirs, {"mine": "nowhere.py:mine"})
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert answers == [("error", "reward 'nowhere.py:mine': there is no file nowhere.py")]


def test_workers_end_with_the_script_even_when_it_is_killed(functions):
    code = f"""
import os, signal
from scorer import Scorer
if __name__ == "__main__":
    scorer = Scorer({{"process": {functions["process"]!r}}}, num_workers=1)
    scorer.to("cpu", [])
    print(scorer.workers[0].process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == -signal.SIGKILL
    worker, stop = int(result.stdout), time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < stop
        time.sleep(0.05)


# ----- GDPO --------------------------------------------------------------------------------------------------------

TABLE = torch.tensor([[0.0, 4.0], [1.0, 4.0], [0.0, 4.0], [3.0, 2.0]], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 2, 2])


def test_gdpo_golden():
    """By hand: each reward by its group, std + 1e-4: -+.9998, -+.99993334 and 0 0, +-.9999; weights 1 and 1/2."""
    totals, got = combine_rewards(TABLE, torch.tensor([1, 0.5]), GROUPS, aggregation="gdpo", global_std=True)
    assert totals.tolist() == [2, 3, 2, 4]
    summed = np.array([-0.99980004, 0.99980004, -0.49998333, 0.49998333])
    assert got.tolist() == pytest.approx((summed / (np.sqrt((summed**2).mean()) + 1e-4)).tolist(), abs=1e-6)
    assert got.tolist() == pytest.approx([-1.264709, 1.264709, -0.632460, 0.632460], abs=1e-5)
    assert got.dtype == torch.float32


def test_the_sum_is_normalised_as_before():
    for global_std in (True, False):
        totals, got = combine_rewards(TABLE, torch.tensor([1, 0.5]), GROUPS, aggregation="sum", global_std=global_std)
        assert torch.equal(got, group_advantages(totals, GROUPS, global_std=global_std))


def test_with_gdpo_the_scale_of_a_reward_does_not_matter():
    table, weights = torch.rand(12, 2, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0.3, 0.7])
    groups = torch.arange(12) // 4
    scaled = table * torch.tensor([100.0, 1.0])
    for aggregation, same in (("gdpo", True), ("sum", False)):
        how = {"aggregation": aggregation, "global_std": False}
        first, second = (combine_rewards(each, weights, groups, **how)[1] for each in (table, scaled))
        assert torch.allclose(first, second, atol=2e-3) is same
        assert abs(first.mean().item()) < 1e-6


def test_a_group_without_spread_in_any_reward_has_no_signal():
    table = torch.tensor([[0.1, 7.0], [0.1, 7.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    totals, got = combine_rewards(table, torch.tensor([1.0, 2.0]), GROUPS, aggregation="gdpo", global_std=True)
    assert got[:2].tolist() == [0, 0]
    assert has_signal(got, GROUPS).tolist() == [False, False, True, True]
    assert torch.equal(has_signal(totals, GROUPS), has_signal(got, GROUPS))


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_a_run_with_several_rewards_and_gdpo(tmp_path, tiny_pipeline_folder, functions, script):
    names = "jpeg_compressibility", functions["red"]
    values = {"reward_funcs": names, "reward_weights": (1, 0.5), "num_train_epochs": 1, "eval_epochs": 0}
    if script is train_flowgrpo:
        values["sde_window_range"] = (0, 3)
    folder = run(script, tmp_path / "run", tiny_pipeline_folder, "--reward_aggregation", "gdpo", **values)
    cached = open_cache(folder / "trajectories/epoch-00000").values.to_dict()
    labels = "jpeg_compressibility", "red"
    table = torch.tensor([cached[f"reward_{label}"] for label in labels], dtype=torch.float64).T
    groups = torch.tensor(cached["prompt_id"])
    expected = combine_rewards(table, torch.tensor([1, 0.5]), groups, aggregation="gdpo", global_std=True)
    torch.testing.assert_close(torch.tensor(cached["reward"], dtype=torch.float64), expected[0])
    torch.testing.assert_close(torch.tensor(cached["advantage"], dtype=torch.float32), expected[1])
    for column, name in enumerate(labels):
        assert values_of(folder, f"rollout/{name}_mean") == [pytest.approx(table[:, column].mean().item())]
        assert values_of(folder, f"rollout/{name}_std") == [pytest.approx(table[:, column].std(correction=0).item())]
