"""What only several processes can show, on GPUs or CPU ranks, through the training scripts' own main.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml tests/smoke.py train_flowgrpo train_nft
    accelerate launch --config_file accelerate_configs/fsdp.yaml tests/smoke.py --phases all train_flowgrpo train_nft

A phase runs in new processes, forked from these, which have imported everything: that is half a minute less for each.
All phases use the tiny pipeline under torch's deterministic algorithms. A table of every check comes last.

train          5 epochs, 10 updates, of each script with fp32 and bf16 adapters. The export is what is gathered; the
               policy, the export in a new pipeline and the gathered tensors in a new model predict the same; the
               adapter moves and nothing else does; what is of which dtype and trains stays so.
resume         each run from its checkpoint after update 2: updates 3 and 4 are those of the whole run.
one_process    the same in one process, without sharding.
kill           the last rank is killed within update 4: the others end with an error within --ddp_timeout.
after_kill     that run is resumed and is the whole run.
full           --no-use_lora: trains, exports, resumes.
offload        fsdp_offload_params: the same losses as without, and resume.
"""

import os

# Before torch is imported: the first is what cuBLAS needs to be deterministic, the second lets a process that has
# asked how many GPUs there are fork others that use them.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # a timed out rank ends after 4 of these, not a minute

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from smoke_checks import (
    RANK,
    SCRIPTS,
    TOLERANCE,
    WORLD_SIZE,
    Row,
    check_run,
    compare,
    copy_for_resume,
    moved_on_any_rank,
    new_model_probe,
    probe,
    run_case,
)
from smoke_processes import judge, run_everywhere, wait_for, write_rows

import qwen_image

DTYPES = ("float32", "bfloat16")
REWARD = "def mean_red(images, prompts, metadata):\n    return images[:, 0].mean(dim=(1, 2))\n"


# ----- Phases ------------------------------------------------------------------------------------------------------


def phase_train(work: Path, cases: Sequence[str]) -> list[Row]:
    rows = []
    for case in cases:
        seen, folder = run_case(work, case)
        rows += check_run(seen, folder, work / "inputs/pipeline", case)
        if seen.accelerator.is_main_process:
            for what in ("resumed", "one"):
                copy_for_resume(folder, work / f"{folder.name}-{what}")
    return rows


def phase_resume(work: Path, cases: Sequence[str]) -> list[Row]:
    rows = []
    for case in cases:
        whole = work / case.replace(" ", "-")
        _, folder = run_case(work, case, "--resume_from_checkpoint", "latest", folder=f"{whole.name}-resumed")
        rows.append(compare(case, "updates 3 and 4, new process", folder, whole, 1e-6))
    return rows


def phase_one_process(work: Path, cases: Sequence[str]) -> list[Row]:
    if RANK > 0:
        return []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    rows = []
    for case in cases:
        whole = work / case.replace(" ", "-")
        seen, folder = run_case(work, case, "--resume_from_checkpoint", "latest", folder=f"{whole.name}-one")
        exact = seen.accelerator.mixed_precision == "no" and "float32" in case.split()
        what = f"updates 3 and 4, {WORLD_SIZE} ranks to {seen.accelerator.num_processes}"
        rows.append(compare(case, what, folder, whole, 1e-4 if exact else 2e-2))
    return rows


def phase_kill(work: Path, cases: Sequence[str]) -> list[Row]:
    run_case(work, cases[0], folder="killed", kill_at=4, ddp_timeout=20)
    return [Row(cases[0], "a killed rank ends the run", "it went on", False)]


def phase_after_kill(work: Path, cases: Sequence[str]) -> list[Row]:
    _, folder = run_case(work, cases[0], "--resume_from_checkpoint", "latest", folder="killed", ddp_timeout=20)
    whole = work / cases[0].replace(" ", "-")
    return [compare(cases[0], "after a killed rank, all updates", folder, whole, 1e-6, steps=slice(0, None))]


def phase_full(work: Path, cases: Sequence[str]) -> list[Row]:
    rows = []
    for case in dict.fromkeys(f"{case.split()[0]} full" for case in cases):
        if case.startswith("train_nft") and os.environ.get("FSDP_VERSION") == "1":
            continue  # refused
        seen, folder = run_case(work, case, num_train_epochs=2)
        census = seen.census[0]
        trained = [name for name, parameter in seen.policy.transformer.named_parameters() if parameter.requires_grad]
        num_moved = moved_on_any_rank(seen, trained)
        rows.append(Row(case, "weights that moved", f"{num_moved} of {len(trained)}", num_moved == len(trained)))
        rows.append(Row(case, "census", census, len(set(seen.census)) == 1))
        predict = seen.policy.predictors.current if case.startswith("train_nft") else seen.policy.predict
        velocity = probe(predict, seen.accelerator.device)
        if seen.accelerator.is_main_process:
            copy_for_resume(folder, work / f"{folder.name}-resumed")
            exported = work / "inputs/pipeline-full"
            shutil.copytree(work / "inputs/pipeline", exported, dirs_exist_ok=True)
            shutil.rmtree(exported / "transformer")
            shutil.copytree(folder / "transformer", exported / "transformer")
            base, again = (new_model_probe(seen, m, None, case) for m in (work / "inputs/pipeline", exported))
            error, effect = (((velocity - other).abs().max() / base.abs().max()).item() for other in (again, base))
            tolerance = TOLERANCE[seen.accelerator.mixed_precision]
            ok = error < tolerance < effect / 3
            rows.append(Row(case, "policy = exported transformer", f"{error:.1e} of {effect:.1e} trained", ok))
        seen.accelerator.wait_for_everyone()
        options = {"folder": f"{folder.name}-resumed", "num_train_epochs": 2}
        _, resumed = run_case(work, case, "--resume_from_checkpoint", "latest", **options)
        rows.append(compare(case, "updates 3 and 4, resumed", resumed, folder, 1e-6))
    return rows


def phase_offload(work: Path, cases: Sequence[str]) -> list[Row]:
    os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
    rows = []
    for case in cases:
        whole = work / case.replace(" ", "-")
        seen, folder = run_case(work, case, folder=f"{whole.name}-offload", num_train_epochs=2)
        devices = {parameter.device.type for parameter in seen.policy.transformer.parameters()}
        if seen.accelerator.is_main_process:
            copy_for_resume(folder, work / f"{folder.name}-resumed")
        seen.accelerator.wait_for_everyone()
        rows.append(Row(case, "offloaded parameters are on", ", ".join(sorted(devices)), "cpu" in devices))
        # Adam on the CPU rounds otherwise, which bf16 weights magnify from the second update on.
        exact = seen.accelerator.mixed_precision == "no"
        rows.append(compare(case, "offloaded, update 1", folder, whole, 1e-4, steps=slice(0, 1)))
        rows.append(
            compare(case, "offloaded, updates 2 to 4", folder, whole, 1e-4 if exact else 2e-2, steps=slice(1, 4))
        )
        options = {"folder": f"{folder.name}-resumed", "num_train_epochs": 2}
        _, resumed = run_case(work, case, "--resume_from_checkpoint", "latest", **options)
        rows.append(compare(case, "offloaded, updates 3 and 4, resumed", resumed, folder, 1e-6))
    return rows


PHASES = {
    "train": phase_train,
    "resume": phase_resume,
    "one_process": phase_one_process,
    "kill": phase_kill,
    "after_kill": phase_after_kill,
    "full": phase_full,
    "offload": phase_offload,
}


# ----- The program ---------------------------------------------------------------------------------------------------


def make_inputs(work: Path) -> None:
    """The tiny pipeline, the reward and prompts."""
    shutil.rmtree(work, ignore_errors=True)
    temporary = work / "inputs.tmp"
    qwen_image.tiny_pipeline(0).save_pretrained(temporary / "pipeline")
    (temporary / "reward.py").write_text(REWARD)
    (temporary / "prompts.txt").write_text("".join(f"a picture of {s}\n" for s in ("one", "three cats", "rain", "it")))
    os.replace(temporary, work / "inputs")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Which scripts, phases and adapters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*SCRIPTS, *(f"{script}:{dtype}" for script in SCRIPTS for dtype in DTYPES)]
    parser.add_argument("cases", nargs="+", choices=names, help="a script, with adapters of one dtype or of both")
    parser.add_argument("--phases", default="train", help="comma-separated, of those above, or `all`")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # of a phase that could not be forked
    return parser.parse_args(argv)


def main() -> int:
    """All phases one after the other; returns the exit code."""
    options = parse_args()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    cases = []
    for name, _, dtype in (case.partition(":") for case in options.cases):
        cases += [f"{name} {dtype}" for dtype in ([dtype] if dtype else DTYPES)]
    phases = list(PHASES) if options.phases == "all" else options.phases.split(",")
    if options.work is not None:
        write_rows(phases[0], options.work, PHASES[phases[0]](options.work, cases))
        return 0
    work = Path(tempfile.gettempdir()) / f"smoke-{os.environ.get('MASTER_PORT', '')}-{os.getppid()}"
    if RANK == 0:
        make_inputs(work)
    wait_for(work / "inputs")
    rows, started = [], time.time()
    for phase in phases:
        arguments = [__file__, *options.cases, "--phases", phase, "--work", str(work)]
        results = run_everywhere(phase, work, PHASES, cases, arguments)
        rows += judge(phase, results, cases[0])
        if RANK == 0:
            print(f"----- {phase}: {time.time() - started:.0f} s since the start", flush=True)
    failed = sum(not row.ok for row in rows)
    (work / f"rank-{RANK}.done").touch()
    if RANK == 0:
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            cells = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True))
            print(f"{cells}  {'ok' if row.ok else 'FAILED'}", flush=True)
        print(f"{len(rows)} checks on {WORLD_SIZE} process(es), {failed} failed", flush=True)
        for rank in range(WORLD_SIZE):  # none reads there any more
            wait_for(work / f"rank-{rank}.done")
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
