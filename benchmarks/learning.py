"""Learning curves of both algorithms on the demo, and what the choices that users ask about do to them.

    python benchmarks/learning.py --jobs 2          # hours of one core; finished runs are not run again
    python benchmarks/learning.py --show            # tables and figures from benchmarks/results/learning.json

Every run is one of the scripts' own commands on one thread, evaluated on 256 held-out prompts by an ODE from fixed
seeds. `glyph_accuracy` is of the trained reward, jpeg_incompressibility is never trained on. Seconds are those of
rollouts and updates.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare import read_run, series

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
TRAINED, HELD_OUT = "eval/glyph_accuracy", "eval/jpeg_incompressibility"
LONG = {  # the curves; FlowGRPO's noise at a constant learning rate keeps it below 90 %
    "flowgrpo": ["--num_train_epochs", "100", "--lr_scheduler", "cosine"],
    "nft": ["--num_train_epochs", "60"],
}
SHORT = {"flowgrpo": 30, "nft": 20}  # epochs of the comparisons, the demo's own
SEEDS = {"long": (0, 1, 2)}  # the comparisons run seed 0
CHOICES = {
    "flowgrpo": {
        "default: sde, window 2, clip 1e-3, global std": [],
        "not staged": ["--no-staging"],
        "all steps but the last trained": ["--sde_window_size", "0"],
        "progressive window": ["--sde_window_schedule", "progressive", "--sde_window_epochs", "5"],
        "cps": ["--sde_type", "cps"],
        "dance, noise level 0.3": ["--sde_type", "dance", "--noise_level", "0.3"],
        "std of each group": ["--no-global_std"],
        "clip range 1e-4": ["--clip_range", "1e-4"],
        "clip range 1e-2": ["--clip_range", "1e-2"],
        "GRPO-Guard": ["--policy_loss", "grpo_guard"],
        "Flow-DPPO": ["--policy_loss", "flow_dppo"],
        "KL 0.01": ["--kl_beta", "0.01"],
        "two timesteps a forward": ["--timesteps_per_forward", "2"],
    },
    "nft": {
        "default: beta 1, decay to 0.5, no KL": [],
        "not staged": ["--no-staging"],
        "beta 0.1": ["--nft_beta", "0.1"],
        "old policy copied each epoch": ["--old_policy_decay", "copy"],
        "decay of the recipe": ["--old_policy_decay", "delayed_linear_to_0_999"],
        "KL 0.01": ["--ref_kl_coef", "0.01"],
        "std of each group": ["--no-global_std"],
        "half of the timesteps": ["--timestep_fraction", "0.5"],
        "five timesteps a forward": ["--timesteps_per_forward", "5"],
    },
}


class Job(NamedTuple):
    """One run."""

    kind: str  # long or choice
    algorithm: str
    label: str
    seed: int
    options: list[str]

    def folder(self, runs_dir: Path) -> Path:
        """Its run folder."""
        words = "".join(c if c.isalnum() else "_" for c in self.label)
        return runs_dir / f"{self.kind}-{self.algorithm}-{words}-seed{self.seed}"


def planned_jobs(kinds: Sequence[str]) -> list[Job]:
    """All runs, the long ones first."""
    jobs = []
    if "long" in kinds:
        for seed in SEEDS["long"]:
            for algorithm, options in LONG.items():
                jobs.append(Job("long", algorithm, "long", seed, options))
    if "choice" in kinds:
        for algorithm, choices in CHOICES.items():
            for label, options in choices.items():
                epochs = ["--num_train_epochs", str(SHORT[algorithm])]
                jobs.append(Job("choice", algorithm, label, 0, [*epochs, *options]))
    return jobs


def run_job(job: Job, runs_dir: Path) -> None:
    """Run the script unless its adapter is there; a run that was cut off starts anew."""
    folder = job.folder(runs_dir)
    if (folder / "pytorch_lora_weights.safetensors").exists():
        return
    options = [option for option in job.options if option != "--no-staging"]
    staging = [] if "--no-staging" in job.options else ["--enable_timestep_staging"]
    command = [sys.executable, str(ROOT / f"train_{job.algorithm}.py"), *staging, *options, "--seed", str(job.seed)]
    command += ["--checkpointing_steps", "0", "--output_dir", str(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    print(" ".join(command[1:]), flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    log = folder.with_suffix(".log")
    with open(log, "w") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{folder} failed: see {log}")


def collect(jobs: Sequence[Job], runs_dir: Path) -> list[dict[str, Any]]:
    """What the finished runs logged, as plain numbers."""
    rows = []
    for job in jobs:
        folder = job.folder(runs_dir)
        if not (folder / "pytorch_lora_weights.safetensors").exists():
            continue
        run = read_run(folder)
        args = run.args
        epochs, accuracy = series(run, TRAINED, "epoch")
        images = args["num_prompts_per_epoch"] * args["num_images_per_prompt"]
        rows.append(
            {
                "kind": job.kind, "algorithm": job.algorithm, "label": job.label, "seed": job.seed,
                "options": job.options, "epochs": epochs, "images": [epoch * images for epoch in epochs],
                "seconds": [round(value, 1) for value in series(run, TRAINED, "seconds")[0]],
                "accuracy": accuracy, "held_out": series(run, HELD_OUT, "epoch")[1],
                "reward": series(run, "rollout/reward_mean", "epoch")[1],
            }
        )  # fmt: skip
    return rows


# ----- Tables and figures ------------------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables in Markdown and draw learning.png."""
    print("| | accuracy before | after | best | held-out before | after | s |\n|---|---|---|---|---|---|---|")
    for row in rows:
        if row["kind"] == "long":
            print(f"| {row['algorithm']}, {row['epochs'][-1]} epochs, seed {row['seed']} | {cells(row)} |")
    for algorithm in CHOICES:
        print(f"\n{algorithm}, {SHORT[algorithm]} epochs, seed 0:\n")
        print("| | accuracy before | after | best | held-out before | after | s |\n|---|---|---|---|---|---|---|")
        for row in rows:
            if row["kind"] == "choice" and row["algorithm"] == algorithm:
                print(f"| {row['label']} | {cells(row)} |")
    draw([row for row in rows if row["kind"] == "long"], RESULTS / "learning.png")


def cells(row: Mapping[str, Any]) -> str:
    """One run's numbers as cells of a table."""
    accuracy, held_out = row["accuracy"], row["held_out"]
    shares = " | ".join(f"{100 * value:.1f} %" for value in (accuracy[0], accuracy[-1], max(accuracy)))
    return f"{shares} | {held_out[0]:.3f} | {held_out[-1]:.3f} | {row['seconds'][-1]:.0f}"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy and the held-out reward against images and seconds, a line for each run."""
    from matplotlib.figure import Figure  # only here, so that the runs do not need it

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    colours = {"flowgrpo": "tab:blue", "nft": "tab:orange"}
    names = {"accuracy": "accuracy, held-out prompts", "held_out": "KiB of a JPEG, never trained on"}
    for line, (key, label) in zip(figure.subplots(2, 2), names.items(), strict=True):
        for axes, x in zip(line, ("images", "seconds"), strict=True):
            for row in rows:
                title = row["algorithm"] if row["seed"] == 0 else None
                axes.plot(row[x], row[key], color=colours[row["algorithm"]], label=title, marker=".", alpha=0.7)
            axes.set(xlabel={"images": "sampled images", "seconds": "seconds on one core"}[x], ylabel=label)
            axes.grid(alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=90)


def draw_grids(runs_dir: Path, path: Path) -> None:
    """The last grid of the long runs of seed 0, base model left, trained one right, in one figure."""
    from matplotlib.figure import Figure
    from PIL import Image

    names = {"flowgrpo": "FlowGRPO", "nft": "DiffusionNFT"}
    jobs = [job for job in planned_jobs(("long",)) if job.seed == 0]
    grids = [sorted(job.folder(runs_dir).glob("grids/*.png")) for job in jobs]
    if not all(grids):
        return
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    for axes, job, paths in zip(figure.subplots(1, len(jobs)), jobs, grids, strict=True):
        axes.imshow(Image.open(paths[-1]))
        axes.set_title(f"{names[job.algorithm]}: before, after {int(paths[-1].stem.split('-')[1])} epochs", fontsize=9)
        axes.axis("off")
    figure.savefig(path, dpi=90)


def main() -> None:
    """Run what is missing, write the results, show them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kinds", nargs="+", choices=("long", "choice"), default=["long", "choice"], help="which runs"
    )
    parser.add_argument("--algorithms", nargs="+", choices=CHOICES, default=list(CHOICES), help="whose runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--runs_dir", type=Path, default=Path("runs/learning"), help="run folders")
    parser.add_argument("--results", type=Path, default=RESULTS / "learning.json", help="json of all curves")
    parser.add_argument("--collect", action="store_true", help="run nothing, collect what is finished")
    parser.add_argument("--show", action="store_true", help="run nothing, show the results that are there")
    options = parser.parse_args()
    if not options.show:
        jobs = [job for job in planned_jobs(options.kinds) if job.algorithm in options.algorithms]
        options.runs_dir.mkdir(parents=True, exist_ok=True)
        if not options.collect:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(lambda job: run_job(job, options.runs_dir), jobs))
        rows = collect(planned_jobs(("long", "choice")), options.runs_dir)
        draw_grids(options.runs_dir, RESULTS / "learning_grids.png")
        options.results.write_text(json.dumps({"hardware": "one CPU core a run", "runs": rows}, indent=1) + "\n")
    show(json.loads(options.results.read_text())["runs"])


if __name__ == "__main__":
    main()
