"""What a run's folder keeps and how its files appear: python -m pytest tests/test_run_folder.py"""

import json
import os
import shutil

import pytest
import torch
from safetensors import SafetensorError

import run_folder


def test_a_resumed_run_keeps_how_it_began(tmp_path):
    folder = tmp_path / "run"
    run_folder.create_run_folder(folder, {"num_train_epochs": 4, "seed": 0})
    began = (folder / "args.json").read_bytes()
    assert run_folder.note_resume(folder, {"num_train_epochs": 4, "seed": 0}, 2) == []
    assert not list(folder.glob("code-*"))
    (folder / "code/staging.py").write_text("# as it was before an edit\n")
    changes = run_folder.note_resume(folder, {"num_train_epochs": 8, "seed": 0}, 3)
    assert changes[0] == "num_train_epochs: 4 -> 8"
    assert changes[1].startswith("code: staging.py edited, see ")
    assert (folder / "args.json").read_bytes() == began
    assert (folder / "code/staging.py").read_text() == "# as it was before an edit\n"
    assert json.loads((folder / "args-epoch-00003.json").read_text())["args"]["num_train_epochs"] == 8
    assert (folder / "code-epoch-00003/staging.py").read_text() == (run_folder.HERE / "staging.py").read_text()
    assert len(run_folder.note_resume(folder, {"num_train_epochs": 8, "seed": 0}, 4)) == 1  # the code is as of epoch 3


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"args": 3}', None])
def test_damaged_args_do_not_stop_a_resume(tmp_path, content):
    if content is not None:
        (tmp_path / "args.json").write_text(content)
    (line,) = run_folder.changed_options(tmp_path, {"seed": 0})
    assert "args.json cannot be compared with this command" in line


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path, monkeypatch):
    run_folder.write_text(tmp_path / "a.json", "old")
    run_folder.save_tensors({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()

    def stop(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        run_folder.write_text(tmp_path / "a.json", "new")
    with pytest.raises(KeyboardInterrupt):
        run_folder.save_tensors({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    assert (tmp_path / "a.json").read_text() == "old\n"
    assert (tmp_path / "a.safetensors").read_bytes() == before


def test_a_disk_that_refuses_tensors_is_one_line(tmp_path, monkeypatch):
    def refuse(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(run_folder, "save_file", refuse)
    with pytest.raises(RuntimeError, match=r"x\.safetensors cannot be written: I/O error: No space left.*resume"):
        run_folder.save_tensors({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_loses_its_name_before_it_is_deleted(tmp_path, monkeypatch):
    folder, seen = tmp_path / "checkpoints/epoch-00001", []
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    rmtree = shutil.rmtree

    def noting(path, **options):
        seen.append(folder.exists())
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", noting)
    run_folder.delete_folder(folder)
    assert seen[-1] is False
    assert list(folder.parent.iterdir()) == []


def test_without_git_a_run_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run_folder.create_run_folder(tmp_path / "run", {"seed": 0})
    assert json.loads((tmp_path / "run/args.json").read_text())["git_commit"] is None


def test_metrics_are_strict_json(tmp_path):
    run_folder.append_metrics(tmp_path, {"epoch": 1, "a": float("nan"), "b": float("inf"), "c": 0.5})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"epoch": 1, "a": None, "b": None, "c": 0.5}
