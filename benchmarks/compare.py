"""First, last and best metrics of runs side by side, what their options differ in, and a figure.

    python benchmarks/compare.py runs/a runs/b
    python benchmarks/compare.py runs/a runs/b --metrics eval/glyph_accuracy --x seconds --output compare.png

Seconds are those of rollouts and updates. Best is the largest: rewards are what one compares.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

AXES = ("epoch", "step", "seconds")


class Run(NamedTuple):
    """What a run folder tells; every line of metrics has `seconds` besides, the time up to it."""

    name: str
    args: dict[str, Any]
    lines: list[dict[str, float]]


def read_run(folder: Path) -> Run:
    """Read args.json and metrics.jsonl. Raises ValueError where it is no run folder."""
    try:
        args = json.loads((folder / "args.json").read_text())["args"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is no run folder: {type(error).__name__} {error}") from error
    seconds = 0.0
    for line in lines:
        seconds += sum(value for name, value in line.items() if name.startswith("time/"))
        line["seconds"] = seconds
    return Run(str(folder), args, lines)


def series(run: Run, metric: str, x: str) -> tuple[list[float], list[float]]:
    """Where on the x axis a metric was logged, and its values."""
    lines = [line for line in run.lines if metric in line]
    return [line[x] for line in lines], [line[metric] for line in lines]


def summary(run: Run, metric: str) -> str:
    """Evaluations and rewards: first, last and best with its epoch; the rest: the mean over the last epoch's lines."""
    epochs, values = series(run, metric, "epoch")
    if not values:
        return ""
    if metric.startswith("eval/") or metric == "rollout/reward_mean":
        best = max(range(len(values)), key=values.__getitem__)
        return f"{values[0]:.4g} → {values[-1]:.4g}, best {values[best]:.4g} at {epochs[best]}"
    last = [value for epoch, value in zip(epochs, values, strict=True) if epoch == epochs[-1]]
    return f"{sum(last) / len(last):.4g}"


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Names of the options that are not the same in all runs, the run's own folder aside."""
    names = sorted({name for run in runs for name in run.args} - {"output_dir", "resume_from_checkpoint"})
    return [name for name in names if any(run.args.get(name) != runs[0].args.get(name) for run in runs)]


def table(runs: Sequence[Run], metrics: Sequence[str] | None) -> str:
    """A markdown table: options that differ (blank where a script has none of the name), epochs, steps, seconds, then
    the metrics, all if none are named."""
    logged = {name for run in runs for line in run.lines for name in line} - set(AXES)
    shown = metrics or [name for group in ("eval/", "rollout/", "train/") for name in sorted(logged) if group in name]
    rows = [["", *(run.name for run in runs)], ["---"] * (len(runs) + 1)]
    rows += [[f"--{name}", *(str(run.args.get(name, "")) for run in runs)] for name in differing_options(runs)]
    for x in AXES:
        rows.append([x, *(f"{max((line[x] for line in run.lines), default=0):.6g}" for run in runs)])
    rows += [[metric, *(summary(run, metric) for run in runs)] for metric in shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(runs: Sequence[Run], metrics: Sequence[str], x: str, path: Path) -> None:
    """One picture with an axis for every metric and a line for every run."""
    from matplotlib.figure import Figure  # only here, since nothing else draws

    figure = Figure(figsize=(6 * len(metrics), 4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for run in runs:
            axes.plot(*series(run, metric, x), label=run.name, marker=".")
        axes.set(xlabel=x, ylabel=metric)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, draw the figure if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument(
        "--metrics", nargs="+", help="of the table and the figure; none: all, and eval/* in the figure"
    )
    parser.add_argument("--x", choices=AXES, default="epoch", help="horizontal axis of the figure")
    parser.add_argument("--output", type=Path, help="picture to draw, .png or .svg")
    args = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in args.runs]
    except ValueError as error:
        parser.error(str(error))
    logged = {name for run in runs for line in run.lines for name in line}
    for metric in args.metrics or []:
        if metric not in logged:
            parser.error(f"no run has logged {metric}: choose from {', '.join(sorted(logged))}")
    print(table(runs, args.metrics))
    if args.output is not None:
        if find_spec("matplotlib") is None:
            parser.error("--output needs matplotlib: pip install matplotlib")
        drawn = args.metrics or sorted(n for n in logged if n.startswith("eval/")) or ["rollout/reward_mean"]
        plot(runs, drawn, args.x, args.output)


if __name__ == "__main__":
    sys.exit(main())
