"""A run's folder: args.json, a copy of the code, metrics.jsonl, checkpoints, kept outputs. No collectives, no pickle.

A LoRA checkpoint is a folder checkpoints/epoch-NNNNN of adapter.safetensors, optimizer.safetensors and state.json
(counters and schedule), written under a temporary name and renamed, so one that has its name is whole.
"""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WHEN_REFUSED = "free or name another disk, then --resume_from_checkpoint latest"
HERE = Path(__file__).resolve().parent
PATH_OPTIONS = (
    "pretrained_model_name_or_path", "prompts", "eval_prompts", "trajectory_cache", "resume_from_checkpoint",
    "output_dir",
)  # fmt: skip
REWARD_OPTIONS = {"reward_funcs", "eval_reward_funcs"}


def create_run_folder(output_dir: Path, args: Mapping[str, Any]) -> None:
    """Write args.json with the git commit, and a copy of the scripts that run. Raises ValueError over another run."""
    make_folder(output_dir)
    found = {path.name for path in output_dir.iterdir()} - {"args.json", "args.json.tmp", "code", "STOP"}
    # A run that died while loading has left its embeddings, which are made again.
    found = sorted(name for name in found if not name.startswith(("prompt_embeds-", "eval_prompt_embeds-")))
    if found:
        raise ValueError(
            f"--output_dir {output_dir} is not empty ({found[0]}): go on with --resume_from_checkpoint latest, name "
            "another folder, or delete it"
        )
    make_folder(output_dir / "code")
    (output_dir / "STOP").unlink(missing_ok=True)
    for path in HERE.glob("*.py"):
        shutil.copy(path, output_dir / "code")
    write_args(output_dir / "args.json", args)


def write_args(path: Path, args: Mapping[str, Any]) -> None:
    """The options of a run and its git commit."""
    write_text(path, json.dumps({"git_commit": git_commit(), "args": dict(args)}, indent=1, sort_keys=True))


def note_resume(output_dir: Path, args: Mapping[str, Any], epoch: int) -> list[str]:
    """Keep args.json and code/ as they began, and beside them args-epoch-NNNNN.json and, where the scripts have been
    edited since, code-epoch-NNNNN/. Returns what differs, one text each."""
    changes = changed_options(output_dir, args)
    write_args(output_dir / f"args-epoch-{epoch:05d}.json", args)
    scripts = sorted(HERE.glob("*.py"))
    before = sorted(output_dir.glob("code*"))[-1:]  # the latest
    edited = [
        path.name
        for path in scripts
        if not before or not (old := before[0] / path.name).is_file() or old.read_bytes() != path.read_bytes()
    ]
    if edited:
        code = output_dir / f"code-epoch-{epoch:05d}"
        code.mkdir(exist_ok=True)
        for path in scripts:
            shutil.copy(path, code)
        changes.append(f"code: {', '.join(edited)} edited, see {code}")
    return changes


def write_text(path: Path, text: str) -> None:
    """A small text file that appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file that appears whole or not at all; RuntimeError where the disk refuses it."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        save_file(dict(tensors), temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:  # how that library tells a full disk
        temporary.unlink(missing_ok=True)
        raise RuntimeError(f"{path} cannot be written: {error}: {WHEN_REFUSED}") from error


def delete_folder(folder: Path) -> None:
    """Delete a folder of ours, which loses its name first: what is half deleted is never taken for whole."""
    if folder.is_symlink():
        folder.unlink()  # where it leads is not ours
        return
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    os.replace(folder, temporary)
    shutil.rmtree(temporary)


def git_commit() -> str | None:
    """The commit of this repository; None where it is no repository or git is not installed."""
    if shutil.which("git") is None:
        return None
    git = subprocess.run(["git", "-C", HERE, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


def make_folder(folder: Path) -> None:
    """Make the folder if it is not there; raises ValueError where it is none or no file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--output_dir: {folder} cannot be written ({error}); name another folder") from error


def changed_options(output_dir: Path, args: Mapping[str, Any]) -> list[str]:
    """The options of a resumed run that differ from its args.json, as `name: before -> now`."""
    path = output_dir / "args.json"
    try:
        before = json.loads(path.read_text())["args"]
        before = dict(before)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path} cannot be compared with this command: {type(error).__name__}: {error}"]
    now = json.loads(json.dumps(dict(args)))
    skipped = {"resume_from_checkpoint", "output_dir"}
    return [f"{n}: {before.get(n)} -> {v}" for n, v in now.items() if n not in skipped and before.get(n) != v]


def append_metrics(output_dir: Path, metrics: Mapping[str, float]) -> None:
    """One line of metrics.jsonl; json has no NaN and no infinity, there they are null."""
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with open(output_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(numbers) + "\n")


def cut_metrics(output_dir: Path, num_bytes: int) -> None:
    """Drop the lines of metrics.jsonl that were written after a checkpoint."""
    with open(output_dir / "metrics.jsonl", "rb+") as file:
        file.truncate(num_bytes)


def write_outputs(folder: Path, step: int, rank: int, outputs: Sequence[Mapping[str, Tensor]]) -> None:
    """What --return_model_output kept of one update, a safetensors file per rank: <micro-batch>.<name> (B, T, ...)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{i}.{name}": tensor.cpu() for i, output in enumerate(outputs) for name, tensor in output.items()}
    save_tensors(tensors, folder / f"step-{step:06d}-rank-{rank:05d}.safetensors")


def public_name(reward: str) -> str:
    """A reward's name or label without folders and addresses: my_reward.py:score, clip:model, http."""
    return "http" if reward.startswith("http:") else ":".join(Path(part).name for part in reward.split(":"))


def write_model_card(output_dir: Path, algorithm: str, args: Mapping[str, Any]) -> None:
    """README.md of a finished LoRA run: base model, first and last rewards, commit, options, how to load it. Paths of
    this machine are left out: a card is there to be uploaded."""
    model = args["pretrained_model_name_or_path"]
    on_hub = model is not None and not Path(model).exists()
    model = Path(model or "demo_pipeline").name if not on_hub else model
    source = model if on_hub else f"your folder {model}"
    data = ModelCardData(
        base_model=model if on_hub else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["lora", "qwen-image", "reinforcement-learning", algorithm.lower()],
    )
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    names = sorted({n for line in lines for n in line if n.startswith("eval/") or n == "rollout/reward_mean"})
    table = ["| mean reward | first | last |", "|---|---|---|"] if names else []
    for name in names:
        values = [line[name] for line in lines if name in line]
        phase, _, label = name.partition("/")
        table.append(f"| {phase}/{public_name(label)} | {values[0]:.4g} | {values[-1]:.4g} |")
    options = {n: v for n, v in sorted(args.items()) if v is not None and n not in PATH_OPTIONS}
    for name in REWARD_OPTIONS & options.keys():
        options[name] = [public_name(reward) for reward in options[name]]
    text = f"""# LoRA for {model}, trained with {algorithm}

{max(line["step"] for line in lines)} optimizer steps. Git commit of the code: {git_commit() or "unknown"}.

{chr(10).join(table)}

```python
from diffusers import QwenImagePipeline

pipe = QwenImagePipeline.from_pretrained("{source}")
pipe.load_lora_weights("this folder or repository")
```

Options:

```json
{json.dumps(options, indent=1)}
```
"""
    write_text(output_dir / "README.md", str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")))


def trajectory_folder(output_dir: Path, epoch: int) -> Path:
    """Where an epoch's trajectory cache lies."""
    return output_dir / f"trajectories/epoch-{epoch:05d}"


def delete_trajectories(output_dir: Path, *, first: int = 0, stop: int | None = None) -> None:
    """Delete the caches of epochs first to stop - 1, or of all from first on."""
    for path in (output_dir / "trajectories").glob("epoch-?????"):
        epoch = int(path.name.removeprefix("epoch-"))
        if epoch >= first and (stop is None or epoch < stop):
            if path.is_symlink():
                path.unlink(missing_ok=True)  # where it leads is not ours
            shutil.rmtree(path, ignore_errors=True)  # another node may be deleting it too


def peak_memory(phase: str) -> dict[str, float]:
    """Peak of the allocated device memory in GiB since the last call; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return {f"memory/{phase}_peak_gib": round(peak, 3)}


OUT_OF_MEMORY = {  # what to change where memory ran out, the cheapest first
    "encoding of prompts": "free the device of other processes (the text encoder, 16 GB of Qwen-Image in bf16, is "
    "alone on it then), or train from a --trajectory_cache, which needs none",
    "loading": "shard the model with accelerate_configs/fsdp2.yaml",
    "rollout": "lower --train_batch_size, leave --gathered_rollout out, or use --no-cfg_batched",
    "evaluation": "lower --train_batch_size, leave --gathered_rollout out, or use --no-cfg_batched",
    "update": "leave --return_model_output and --checkpointed_blocks out, use --gradient_checkpointing, "
    "--enable_timestep_staging where step inputs are large (see the banner), a lower --train_batch_size or "
    "--timesteps_per_forward, or --no-cfg_batched; or shard with accelerate_configs/fsdp2.yaml",
}


@contextmanager
def memory_of(phase: str, planned: str = "") -> Iterator[None]:
    """Also a decorator: where the device's memory runs out, raise RuntimeError with the phase, what was planned for it
    and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = str(error).splitlines()[0]
        raise RuntimeError(f"no memory left in the {phase}: {found} {planned}{OUT_OF_MEMORY[phase]}") from error


def stop_on_interrupt() -> list[int]:
    """From now on Ctrl-C adds to the returned list, for the loop to look at; a second one raises KeyboardInterrupt.

    A launcher of several processes gives them some seconds only: there, `stop_requested` looks for a file.
    """
    requests: list[int] = []

    def request_stop(signal_number: int, frame: Any) -> None:
        if requests:
            raise KeyboardInterrupt
        requests.append(signal_number)
        print("stopping after this epoch's update and a checkpoint; Ctrl-C again stops at once", flush=True)

    signal.signal(signal.SIGINT, request_stop)
    return requests


def stop_requested(output_dir: Path, requests: Sequence[int]) -> bool:
    """True after Ctrl-C, or when somebody has made a file STOP in the run folder, which any launcher honours."""
    return bool(requests) or (output_dir / "STOP").exists()


def run_script(main: Callable[[], None]) -> int:
    """Run main and return the exit code. An error that this repository raises is one line on stderr and code 2; any
    other keeps its traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped at once; --resume_from_checkpoint latest goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]  # a library's C++ code leaves our own line as the last
        if Path(frame.filename).parent != HERE or not frame.line.startswith("raise"):
            raise
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"{Path(sys.argv[0]).name}: {error}: {WHEN_REFUSED}", file=sys.stderr)
        return 2
    return 0


# ----- Checkpoints -------------------------------------------------------------------------------------------------


def checkpoint_folder(output_dir: Path, epoch: int) -> Path:
    """Where the checkpoint after `epoch` epochs lies."""
    return output_dir / f"checkpoints/epoch-{epoch:05d}"


def write_checkpoint(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write <name>.safetensors for each group of tensors and state.json into an unfinished checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, group in tensors.items():
        save_tensors(group, folder / f"{name}.safetensors")
    write_text(folder / "state.json", json.dumps(state, indent=1, sort_keys=True))
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def finish_checkpoint(temporary: Path, folder: Path, total_limit: int) -> None:
    """Give a written checkpoint its name and delete the oldest beyond the limit."""
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)
    for old in sorted(folder.parent.glob("epoch-?????"))[:-total_limit]:
        delete_folder(old)


def delete_checkpoints(output_dir: Path, *, first: int) -> None:
    """Delete the checkpoints of epochs `first` and later: a run that goes on from an older one replaces them."""
    for path in (output_dir / "checkpoints").glob("epoch-?????"):
        if int(path.name.removeprefix("epoch-")) >= first:
            delete_folder(path)
    for path in (output_dir / "checkpoints").glob("epoch-?????.tmp"):
        shutil.rmtree(path)  # a killed run had not finished it


def find_checkpoint(output_dir: Path, resume_from_checkpoint: str) -> Path:
    """`latest` or a path to a checkpoint's folder. Raises ValueError where there is none or it is not whole."""
    if resume_from_checkpoint == "latest":
        found = sorted((output_dir / "checkpoints").glob("epoch-?????"))
        if not found:
            raise ValueError(
                f"--resume_from_checkpoint latest: {output_dir} holds no checkpoint; start without it in a new "
                "--output_dir"
            )
        folder = found[-1]
    else:
        folder = Path(resume_from_checkpoint)
        if not folder.is_dir():
            raise ValueError(
                f"--resume_from_checkpoint {folder} does not exist: name a checkpoint's folder, or latest"
            )
        if folder.resolve().parent.parent != output_dir.resolve():
            run = folder.resolve().parent.parent
            raise ValueError(f"--resume_from_checkpoint {folder} is another run's: resume with --output_dir {run}")
    if not (folder / "state.json").is_file():
        raise ValueError(f"--resume_from_checkpoint {folder} holds no state.json: it is no checkpoint of this script")
    return folder


def read_state(folder: Path, expected: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """A checkpoint's state.json, which holds values of `kinds` too; raises ValueError where it is damaged, belongs to
    another algorithm, model or kind of adapter, or where metrics.jsonl has lost lines since."""
    try:
        state = json.loads((folder / "state.json").read_text())
        state = state if isinstance(state, dict) else {}
    except ValueError as error:
        raise ValueError(f"{folder}/state.json is not json ({error}): resume from an older checkpoint") from error
    numbers = {name: state.get(name) for name in ("epoch", "global_step", "metrics_bytes")}
    wrong = [f"{n} {v}" for n, v in numbers.items() if type(v) is not int or v < 0]
    schedule = state.get("lr_scheduler")
    if not isinstance(schedule, dict) or type(schedule.get("last_epoch")) is not int:
        wrong.append(f"lr_scheduler {schedule}")
    elif not (rates := schedule.get("_last_lr")) or not all(isinstance(rate, int | float) for rate in rates):
        wrong.append(f"_last_lr {rates}")
    wrong += [f"{name} {state.get(name)}" for name, kind in kinds.items() if not isinstance(state.get(name), kind)]
    if wrong or folder.name != f"epoch-{numbers['epoch']:05d}":
        raise ValueError(
            f"{folder}/state.json is damaged ({', '.join(wrong) or numbers}): resume from an older checkpoint"
        )
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(
                f"{folder} was made with {name} {state.get(name)}, this run has {value}: resume with the same, or "
                "start a new run"
            )
    metrics = folder.parent.parent / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_size < state["metrics_bytes"]:
        raise ValueError(
            f"{metrics} is shorter than the {state['metrics_bytes']} bytes it had at the checkpoint: restore it first"
        )
    return state


def read_checkpoint(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors <name>.safetensors of a checkpoint; raises ValueError that names a missing or damaged file."""
    path = folder / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): resume from an older checkpoint") from error
