"""What a run's folder keeps and how its files appear: python -m pytest tests/test_run_folder.py"""

import errno
import json
import os
import shutil
import signal

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


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            KeyboardInterrupt(),
            130,
            "stopped at once; --resume_from_checkpoint latest goes on from the last checkpoint",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device: free or name another disk"),
        (OSError(errno.EROFS, "Read-only file system"), 2, "Read-only file system: free or name another disk"),
    ],
)
def test_what_stops_a_script_from_outside_is_one_line(capsys, error, code, text):
    def main():
        raise error

    assert run_folder.run_script(main) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.parametrize(
    "error", [ValueError("of a library"), RuntimeError("too"), FileNotFoundError(errno.ENOENT, "x")]
)
def test_other_errors_keep_their_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)) as raised:
        run_folder.run_script(main)
    assert raised.value is error
    assert run_folder.run_script(lambda: None) == 0


def test_the_first_ctrl_c_is_a_request_and_the_second_stops_at_once(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    try:
        requests = run_folder.stop_on_interrupt()
        assert not run_folder.stop_requested(tmp_path, requests)
        signal.raise_signal(signal.SIGINT)
        assert run_folder.stop_requested(tmp_path, requests)
        assert "Ctrl-C again stops at once" in capsys.readouterr().out
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_file_stop_is_a_request(tmp_path):
    assert not run_folder.stop_requested(tmp_path, [])
    (tmp_path / "STOP").touch()
    assert run_folder.stop_requested(tmp_path, [])


def test_peak_memory_is_that_since_the_last_call(monkeypatch):
    """torch.cuda answers as on a GPU that has had 1.5 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_folder.peak_memory("update") == {}
    resets = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    assert run_folder.peak_memory("update") == {"memory/update_peak_gib": 1.5}
    assert resets == [1]


def test_a_checkpoint_replaces_one_of_its_name(tmp_path):
    """As when a run that was killed after its checkpoint goes on from an older one."""
    for content in ("first", "second"):
        temporary = tmp_path / "checkpoints/epoch-00001.tmp"
        temporary.mkdir(parents=True)
        (temporary / content).touch()
        run_folder.finish_checkpoint(temporary, tmp_path / "checkpoints/epoch-00001", 1)
    assert [path.name for path in (tmp_path / "checkpoints/epoch-00001").iterdir()] == ["second"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-00001"]


def test_a_checkpoint_of_another_run_or_of_none_is_refused(tmp_path):
    folder = tmp_path / "other/checkpoints/epoch-00001"
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"is another run's: resume with --output_dir {tmp_path / 'other'}"):
        run_folder.find_checkpoint(tmp_path / "run", str(folder))
    with pytest.raises(ValueError, match=r"holds no state\.json: it is no checkpoint"):
        run_folder.find_checkpoint(tmp_path / "other", "latest")
    (folder / "state.json").touch()
    for name in ("latest", str(folder)):
        assert run_folder.find_checkpoint(tmp_path / "other", name) == folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"state\.json is not json"),
        ('{"epoch": 1, "global_step": 2, "metrics_bytes": 0, "lr_scheduler": {"last_epoch": 2, "_last_lr": []}}',
         r"state\.json is damaged \(_last_lr \[\]\)"),
    ],
)  # fmt: skip
def test_a_damaged_state_is_named(tmp_path, text, message):
    folder = tmp_path / "checkpoints/epoch-00001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)
    with pytest.raises(ValueError, match=f"{message}.*: resume from an older checkpoint"):
        run_folder.read_state(folder, {}, {})


@pytest.mark.parametrize("content", [None, b"x" * 20])
def test_tensors_that_cannot_be_read_are_named(tmp_path, content):
    if content is not None:
        (tmp_path / "optimizer.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"optimizer\.safetensors cannot be read .*: resume from an older checkpoint"):
        run_folder.read_checkpoint(tmp_path, "optimizer")
