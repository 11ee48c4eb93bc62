"""Phases of tests/smoke.py in new processes, forked from the launcher's ranks, which have imported everything."""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from smoke_checks import RANK, WORLD_SIZE, Row

PATIENCE = 240  # seconds until a phase is given up
GRACE = 60  # seconds that a rank may go on after another has failed


def run_everywhere(
    phase: str, work: Path, phases: Mapping[str, Callable], cases: Sequence[str], arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """Run a phase on every rank, each in a new process; returns all ranks' exit codes, rows and times of their end.

    arguments: of this program, for the case that it must start again rather than fork.
    """
    port = work / f"{phase}.port"  # its own, so that no phase finds the last one's rendezvous
    if RANK == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            write_json(port, free.getsockname()[1])
    wait_for(port)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.read_text()}
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 keeps the store itself
            torch.set_num_threads(1)  # makes the pool anew, which two autograd threads would find missing after a fork
            os.environ["FORK_LAUNCHED"] = "1"  # accelerate's end_training() leaves the process group to the next case
            if torch.cuda._is_in_bad_fork():  # something used a GPU while it was imported
                os.execv(sys.executable, [sys.executable, *arguments])
            write_rows(phase, work, phases[phase](work, cases))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = wait_for_process(pid, work, phase)
    rows = work / f"{phase}-{RANK}.rows"
    result = {"code": code, "rows": json.loads(rows.read_text()) if rows.exists() else [], "ended": time.time()}
    write_json(work / f"{phase}-{RANK}.result", result)
    results = []
    for rank in range(WORLD_SIZE):
        wait_for(work / f"{phase}-{rank}.result")
        results.append(json.loads((work / f"{phase}-{rank}.result").read_text()))
    return results


def write_rows(phase: str, work: Path, rows: Sequence[Row]) -> None:
    """A phase's rows of this rank."""
    write_json(work / f"{phase}-{RANK}.rows", rows)


def wait_for_process(pid: int, work: Path, phase: str) -> int:
    """The exit code of a child; it is killed when it takes too long, or outlives another rank's failure."""
    started = failed = time.time()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        results = (json.loads(path.read_text()) for path in work.glob(f"{phase}-*.result"))
        if not any(result["code"] for result in results):
            failed = time.time()
        if time.time() - started > PATIENCE or time.time() - failed > GRACE:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def wait_for(path: Path) -> None:
    """Until another rank has written the path."""
    started = time.time()
    while not path.exists():
        if time.time() - started > PATIENCE + GRACE:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.05)


def write_json(path: Path, value: Any) -> None:
    """Written whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


def judge(phase: str, results: Sequence[Mapping[str, Any]], case: str) -> list[Row]:
    """A phase's rows, right where every rank finds them right, and whether its processes ended as they should."""
    codes = [result["code"] for result in results]
    if phase == "kill":
        *others, killed = results
        seconds = max(result["ended"] for result in others) - killed["ended"]
        ok = codes[-1] == -signal.SIGKILL and all(codes[:-1]) and seconds < GRACE
        return [Row(case, "one rank killed: exit codes, seconds", f"{codes}, {seconds:.1f}", ok)]
    rows: dict[tuple[str, str], Row] = {}
    for result in results:
        for row in (Row(*row) for row in result["rows"]):
            first = rows.setdefault((row.case, row.check), row)
            rows[row.case, row.check] = first._replace(ok=first.ok and row.ok)
    ended = [] if not any(codes) else [Row(phase, "exit codes", str(codes), False)]
    return [*rows.values(), *ended]
