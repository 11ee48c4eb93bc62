"""`accelerate launch` without its imports: launcher and ranks are forked from a server that has imported everything.

The launcher's own code reads the yaml, sets the environment, and meets other machines; of torchrun only the way to
start a rank is changed, from a new interpreter to a fork. A launch of two ranks takes a third of the time.
"""

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

from faults import CONTEXT
from script_runs import launch_words

ROOT = Path(__file__).resolve().parent.parent


def launch(folder: Path, *launches: list[str], timeout: float = 300) -> list[str]:
    """Several `accelerate launch` with these words, side by side, until their end, which must be a good one; returns
    what each printed, which lies in files of the folder too."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "1"}
    logs = [folder / f"launch-{number}.log" for number in range(len(launches))]
    processes = [
        CONTEXT.Process(target=run_launcher, args=(log, words, environment))
        for log, words in zip(logs, launches, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for process, log in zip(processes, logs, strict=True):
            process.join(timeout)
            assert process.exitcode == 0, log.read_text()[-4000:]
    finally:
        for process in processes:
            process.terminate()  # torchrun ends its ranks
    return [log.read_text() for log in logs]


def launch_machines(folder: Path, config: str, *words: str, machines: int = 2, ranks: int = 4) -> list[str]:
    """One launch a machine, all of them this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ("--main_process_ip", "127.0.0.1", "--main_process_port", port, "--num_machines", str(machines))
    flags += ("--parallelism_config_dp_replicate_size", str(machines))
    flags += ("--parallelism_config_dp_shard_size", str(ranks // machines))
    launches = [
        launch_words(config, *words, ranks=ranks, flags=(*flags, "--machine_rank", str(machine)))
        for machine in range(machines)
    ]
    return launch(folder, *launches)


def run_launcher(log: Path, words: list[str], environment: dict[str, str]) -> None:
    """In a forked process: what `accelerate launch` followed by words does; all ranks print into the log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= environment
    os.chdir(ROOT)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed import run as torchrun

    config_from_args = torchrun.config_from_args

    def forking(args):
        config, _, arguments = config_from_args(args)
        config.start_method = "fork"
        return config, run_rank, arguments[arguments.index("-u") + 1 :]

    torchrun.config_from_args = forking
    try:
        launch_command(launch_command_parser().parse_args(words))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def run_rank(script: str, *words: str) -> None:
    """In a forked rank: the script as __main__, with our own modules imported anew."""
    import torch

    torch.set_num_threads(1)
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == ROOT:
            del sys.modules[name]
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise
