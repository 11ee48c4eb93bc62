"""Prompt tables, and which rank samples which prompt.

One epoch samples P prompts x G images = N samples, numbered 0 .. N-1 with the images of a prompt side by side. B
consecutive samples are a batch, the unit of rollout and update. Batches stand in a table of U rows (the updates of the
epoch) by K columns; a rank owns every world_size-th column. So which samples make an update does not depend on the
number of ranks, and no trajectory ever moves from the rank that made it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Audio, Dataset, Image, Video, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

Size = tuple[int, int]  # height, width in pixels
MEDIA = (Audio, Image, Video)  # of a table; decoding them would take minutes and memory
TABLE_KINDS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


def load_prompts(name_or_path: str, *, column: str = "prompt", option: str = "--prompts") -> list[dict[str, Any]]:
    """Read prompts as dicts that hold at least "prompt"; what else a row has is metadata for the rewards.

    A .txt file has one prompt a line, a .jsonl file one object a line; any other path or name is given to `datasets`,
    with the split after a colon, if not `train`. Images, sound and video of a table are left out.
    Raises ValueError that names the file and the line, or the `option` that gave it.
    """
    if not name_or_path:
        raise ValueError(f"{option} is empty: name a file, a folder or a data set")
    path = Path(name_or_path)
    if path.is_file() and path.suffix == ".txt":
        rows, column = [(number, {"prompt": line.strip()}) for number, line in text_lines(path)], "prompt"
    elif path.is_file() and path.suffix == ".jsonl":
        rows = [(number, json_object(path, number, line)) for number, line in text_lines(path)]
    else:
        table = load_table(name_or_path, option)
        if column not in table.column_names:
            raise ValueError(
                f"{name_or_path} has no column {column!r} but {', '.join(table.column_names)}: --prompt_column"
            )
        text = [name for name, feature in table.features.items() if not isinstance(feature, MEDIA)]
        rows = [(number, dict(row)) for number, row in enumerate(table.select_columns(text), start=1)]

    prompts = []
    for number, row in rows:
        prompt = row.get(column)
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{name_or_path} row {number} has no text in {column!r}: {str(row)[:80]}")
        prompts.append({key: value for key, value in row.items() if key != column} | {"prompt": prompt})
    if not prompts:
        raise ValueError(f"{name_or_path} holds no prompt: write one a line")
    return prompts


def text_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a utf-8 file that are not blank, with their numbers. Raises ValueError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also cut at rarer marks
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not utf-8 text ({error.reason} at byte {error.start}): save it as utf-8"
        ) from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    """One line of a .jsonl file. Raises ValueError."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is not json: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} line {number} is a json {type(row).__name__}: write one object a line")
    return row


def load_table(name_or_path: str, option: str) -> Dataset:
    """A table in a file or folder, or a data set by name, as `datasets` reads it. Raises ValueError."""
    path = Path(name_or_path)
    try:
        if (path / "dataset_info.json").is_file() or (path / "state.json").is_file():
            return load_from_disk(name_or_path)
        if not path.is_file():
            return load_split(name_or_path, option)
        if path.suffix not in TABLE_KINDS:
            raise ValueError(f"{option} {path}: give a .txt, .jsonl, {', '.join(TABLE_KINDS)} file or a folder")
        return load_dataset(TABLE_KINDS[path.suffix], data_files=str(path), split="train")
    except (DatasetGenerationError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {name_or_path} cannot be read as a table: {error.__cause__ or error}") from error
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"{option} {name_or_path} is no file and no data set that `datasets` finds: give a .txt or .jsonl file, a "
            "data set's folder or its name"
        ) from error


def load_split(name: str, option: str) -> Dataset:
    """A folder or a data set of the hub, `name` or `name:split`. Raises ValueError for an unknown split."""
    name, _, split = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        return load_dataset(name, split=split or "train")
    except ValueError as error:
        raise ValueError(f"{option} {name}, split {split or 'train'}: {error}; write NAME:SPLIT") from error


def parse_size(text: str) -> Size:
    """`512` or `WIDTHxHEIGHT` to (height, width). Raises ValueError."""
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 512, or WIDTHxHEIGHT such as 768x512")
    width, height = int(match[1]), int(match[2] or match[1])
    return height, width


def size_name(size: Size) -> str:
    """What parse_size reads."""
    height, width = size
    return f"{width}" if height == width else f"{width}x{height}"


def prompt_sizes(
    prompts: Sequence[Mapping[str, Any]], resolutions: Sequence[Size], column: str | None, *, epoch: int = 0
) -> list[Size]:
    """Each prompt's image size: of its own column, or of the run's resolutions by turns, which move on every epoch.

    Raises ValueError that names the row.
    """
    if column is None:
        return [resolutions[(index + epoch) % len(resolutions)] for index in range(len(prompts))]
    sizes = []
    for number, row in enumerate(prompts, start=1):
        if column not in row:
            raise ValueError(f"--resolution_column {column}: prompt {number} has none of that name, but {sorted(row)}")
        try:
            sizes.append(parse_size(row[column]))
        except ValueError as error:
            raise ValueError(f"--resolution_column {column}: prompt {number}: {error}") from error
    return sizes


def check_batch_arithmetic(
    *, num_prompts: int, images_per_prompt: int, batch_size: int, world_size: int, num_updates: int
) -> int:
    """Return K, the batches of one update over all ranks. Raises ValueError with the nearest number of prompts that
    makes prompts x images = updates x accumulation x ranks x batch size come out even."""
    samples, unit = num_prompts * images_per_prompt, batch_size * world_size * num_updates
    if samples % unit:
        step = unit // int(np.gcd(unit, images_per_prompt))
        nearest = max(step, round(num_prompts / step) * step)
        raise ValueError(
            f"{num_prompts} prompts x {images_per_prompt} images = {samples} samples cannot be dealt to {num_updates} "
            f"updates x {world_size} ranks x batches of {batch_size} = {unit}: the nearest is "
            f"--num_prompts_per_epoch {nearest}"
        )
    return samples // (batch_size * num_updates)


def epoch_prompt_ids(num_prompts: int, prompts_per_epoch: int, *, seed: int, epoch: int) -> list[int]:
    """The prompts of an epoch: the table is gone through in a new order each pass, none twice before all once."""
    ids = []
    for position in range(epoch * prompts_per_epoch, (epoch + 1) * prompts_per_epoch):
        table_pass, place = divmod(position, num_prompts)
        if not ids or place == 0:
            order = np.random.default_rng((seed, 1, table_pass)).permutation(num_prompts)
        ids.append(int(order[place]))
    return ids


def epoch_samples(
    num_prompts: int, prompts_per_epoch: int, images_per_prompt: int, *, seed: int, epoch: int
) -> list[int]:
    """The prompt id of each of an epoch's N samples, the images of a prompt side by side."""
    ids = epoch_prompt_ids(num_prompts, prompts_per_epoch, seed=seed, epoch=epoch)
    return [prompt_id for prompt_id in ids for _ in range(images_per_prompt)]


def batch_samples(batch: int, batch_size: int) -> list[int]:
    """The sample numbers of a batch."""
    return list(range(batch * batch_size, (batch + 1) * batch_size))


def rank_batches(num_updates: int, batches_per_update: int, *, rank: int, world_size: int) -> list[int]:
    """The batches a rank samples and trains on: columns rank, rank + world_size, ... of the U x K table."""
    return [
        update * batches_per_update + column
        for update in range(num_updates)
        for column in range(rank, batches_per_update, world_size)
    ]


def plan_updates(
    num_updates: int, batches_per_update: int, *, rank: int, world_size: int, seed_words: Sequence[int]
) -> list[list[int]]:
    """A rank's batches for each update of an inner epoch: every column is shuffled over the updates by itself."""
    table = np.arange(num_updates * batches_per_update).reshape(num_updates, batches_per_update)
    table = np.random.default_rng(tuple(seed_words)).permuted(table, axis=0)
    return table[:, rank::world_size].tolist()


def fill_batches(plans: Sequence[Sequence[int]], wanted: Mapping[int, bool], rank: int) -> list[int]:
    """Of each rank's batches of one update, run the wanted ones, and fill up so that all ranks run the same number.

    plans[r] lists rank r's batches, wanted[b] says whether batch b is of use. Returns this rank's batches in order.
    """
    number = max(sum(wanted[batch] for batch in plan) for plan in plans)
    ranked = sorted(plans[rank], key=lambda batch: not wanted[batch])[:number]
    return [batch for batch in plans[rank] if batch in ranked]
