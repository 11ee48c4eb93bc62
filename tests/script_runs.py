"""Run a training script inside the test process, on the tiny pipeline and a few prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState

import rollout

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [f"a picture of {subject}" for subject in ("one", "three cats", "rain", "an old clock")]
SMALL = {
    "resolution": 64,
    "num_inference_steps": 4,
    "true_cfg_scale": 2,
    "num_prompts_per_epoch": 4,
    "num_images_per_prompt": 4,
    "train_batch_size": 4,
    "num_updates_per_epoch": 2,
    "num_train_epochs": 2,
    "rank": 4,
    "lora_alpha": 8,
    "learning_rate": 3e-3,
    "eval_epochs": 2,
    "eval_num_inference_steps": 4,
    "checkpointing_steps": 2,
    "reward_funcs": "jpeg_compressibility",
}
ROLLOUT_OPTIONS = (
    "resolution", "num_inference_steps", "true_cfg_scale", "num_prompts_per_epoch", "num_images_per_prompt",
    "train_batch_size", "reward_funcs",
)  # fmt: skip
SMALL_ROLLOUT = {name: SMALL[name] for name in ROLLOUT_OPTIONS} | {"sde_window_range": (0, 3)}


def options_of(values: dict) -> list[str]:
    """{"a": 1, "b": (2, 3)} to ["--a", "1", "--b", "2", "3"]."""
    words = []
    for name, value in values.items():
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def reset_accelerate() -> None:
    """Let the next Accelerator of this process read the environment anew."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def write_prompts(folder: Path) -> str:
    """A prompts file in the folder, whole at any time, since several ranks write and read it; returns its path."""
    path, temporary = folder / "prompts.txt", folder / f"prompts-{os.getpid()}.tmp"
    temporary.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    os.replace(temporary, path)
    return str(path)


def run(script, output_dir: Path, model: Path, *options: str, **values) -> Path:
    """script.main with SMALL's options, changed by `values`, then `options`; returns the run folder."""
    reset_accelerate()
    prompts = write_prompts(output_dir.parent)
    named = {"pretrained_model_name_or_path": model, "prompts": prompts, "eval_prompts": prompts}
    named["output_dir"] = output_dir
    script.main(script.parse_args([*options_of(SMALL | named | values), *options]))
    return output_dir


def roll_out(output_dir: Path, model: Path, *options: str) -> Path:
    """rollout.main with the options of SMALL that it has, then `options`; returns the cache's folder."""
    reset_accelerate()
    named = {"pretrained_model_name_or_path": model, "prompts": write_prompts(output_dir.parent)}
    rollout.main(rollout.parse_args([*options_of(SMALL_ROLLOUT | named | {"output_dir": output_dir}), *options]))
    return output_dir


def launch_words(config: str, *words: str, ranks: int = 2, precision: str = "no", flags: tuple = ()) -> list[str]:
    """What follows `accelerate launch` for a script and its options on CPU ranks, under accelerate_configs/."""
    options = ["--config_file", f"accelerate_configs/{config}.yaml", "--mixed_precision", precision]
    options += ["--num_processes", str(ranks), *(flags or ("--main_process_port", "0"))]
    return [*options, "--num_cpu_threads_per_process", "1", "tests/run_on_cpu_ranks.py", *words]


def launch(config: str, *words: str, timeout: float = 300, **how) -> str:
    """Launch them until their end, which must be a good one; returns what was printed."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch_words(config, *words, **how)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output


def metrics_of(folder: Path) -> list[dict]:
    """metrics.jsonl without what a machine's speed decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def values_of(folder: Path, name: str) -> list[float]:
    """One metric's values in order."""
    return [line[name] for line in metrics_of(folder) if name in line]


def adapter_bytes(folder: Path) -> bytes:
    """The exported adapter's file."""
    return (folder / "pytorch_lora_weights.safetensors").read_bytes()
