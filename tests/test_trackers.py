"""What is logged reaches the tracker: python -m pytest tests/test_trackers.py

wandb and trackio are tried where they are installed: python -m pytest -m slow tests/test_trackers.py
"""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial

import pytest
from script_runs import SMALL, options_of, write_prompts
from script_runs import run as run_any
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import option_checks
import rollout
import run_folder
import train_flowgrpo

run = partial(run_any, train_flowgrpo, sde_window_range=(0, 3))


def logged_metrics(folder):
    """(name, step) -> last value of metrics.jsonl, times too."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(name, line["step"]): value for line in lines for name, value in line.items() if name != "step"}


def test_tensorboard_holds_every_metric(tmp_path, tiny_pipeline_folder):
    folder = run(tmp_path / "run", tiny_pipeline_folder, report_to="tensorboard", num_train_epochs=1)
    (events,) = (folder / "logs").glob("*/events.out.tfevents*")  # accelerate writes the options one folder deeper
    events = EventAccumulator(str(events)).Reload()
    found = {(name, point.step): point.value for name in events.Tags()["scalars"] for point in events.Scalars(name)}
    expected = logged_metrics(folder)
    assert len(expected) > 20
    assert found == pytest.approx(expected)


@pytest.mark.slow  # a process of its own, since wandb leaves a service behind; skipped where it is not installed
def test_wandb_offline_holds_every_metric(tmp_path, tiny_pipeline_folder):
    pytest.importorskip("wandb")
    folder = run_reporting(tmp_path, tiny_pipeline_folder, "wandb", WANDB_MODE="offline")
    (record,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    written = record.read_bytes()
    for (name, _), value in logged_metrics(folder).items():
        assert name.encode() in written, name
        assert repr(value).encode() in written or json.dumps(value).encode() in written, (name, value)


@pytest.mark.slow
def test_trackio_holds_every_metric(tmp_path, tiny_pipeline_folder):
    pytest.importorskip("trackio")
    folder = run_reporting(tmp_path, tiny_pipeline_folder, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    with closing(sqlite3.connect(tmp_path / "trackio/flowgrpo.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by rowid").fetchall()
    assert {row[0] for row in rows} == {"run"}
    found = {(name, step): value for _, step, text in rows for name, value in json.loads(text).items()}
    assert found == pytest.approx(logged_metrics(folder))


def run_reporting(folder, model, tracker, **environment):
    """train_flowgrpo.py with a tracker, as a command; returns its run folder."""
    named = {"pretrained_model_name_or_path": model, "prompts": write_prompts(folder), "output_dir": folder / "run"}
    own = {"report_to": tracker, "num_train_epochs": 1, "sde_window_range": (0, 3)}
    command = [sys.executable, train_flowgrpo.__file__, *options_of(SMALL | named | own)]
    subprocess.run(command, env=os.environ | environment, check=True, cwd=folder)
    return folder / "run"


@pytest.mark.parametrize("tracker", train_flowgrpo.TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused(tmp_path, tiny_pipeline_folder, monkeypatch, capsys, tracker):
    monkeypatch.setattr(option_checks, "find_spec", lambda name: None)
    monkeypatch.setattr(rollout, "load_models", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, report_to=tracker)) == 2
    assert f"pip install {tracker}" in capsys.readouterr().err
