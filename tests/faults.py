"""Run a training script in a process that is killed, refused a disk, or left alone, at a named moment.

Child processes are forked from a server that has imported everything, so each costs its run and no more.
"""

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["conftest", "faults", "train_flowgrpo", "train_nft", "script_runs", "forked_launch", "accelerate.commands.launch",
     "torch.distributed.run"]
)  # fmt: skip


def in_child(function: Callable[..., None], *arguments, timeout: float = 300) -> int:
    """The function in a process of its own; its exit code, which is minus the signal that killed it."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(timeout)
    assert process.exitcode is not None, "the process did not end"
    return process.exitcode


def run_child(
    name: str, folder: Path, model: Path, options: tuple[str, ...], values: dict, moment: tuple | None = None
) -> None:
    """Run the script `name`; its output goes to <folder>.log. moment: of `strike_at`."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    from script_runs import run

    import run_folder

    torch.set_num_threads(1)
    if moment is not None:
        strike_at(*moment)
    sys.exit(run_folder.run_script(lambda: run(importlib.import_module(name), folder, model, *options, **values)))


def strike_at(place: str, number: int, when: str = "before", words: str = "") -> None:
    """kill -9 this process at the `number`-th call of `module.function` whose arguments contain `words`.

    when: before the call, after it, or with half of its work done (a line half written, a folder half deleted).
    """
    module_name, _, function_name = place.rpartition(".")
    module = importlib.import_module(module_name)
    function, calls = getattr(module, function_name), []

    def struck(*arguments, **options):
        if words in str(arguments):
            calls.append(1)
        if len(calls) != number or words not in str(arguments):
            return function(*arguments, **options)
        if when == "after":
            function(*arguments, **options)
        elif when == "half":
            HALVES[place](*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    setattr(module, function_name, struck)


def half_a_line(output_dir: Path, metrics) -> None:
    with open(output_dir / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "tra')


def half_a_folder(folder: Path) -> None:
    next(path for path in sorted(folder.iterdir()) if path.is_file()).unlink()


def half_a_file(tensors, path: Path) -> None:
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")


HALVES = {
    "run_folder.append_metrics": half_a_line,
    "shutil.rmtree": half_a_folder,
    "run_folder.save_file": half_a_file,
}


def copy_tree(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))
