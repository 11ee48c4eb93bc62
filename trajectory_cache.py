"""Trajectories as memory-mapped `datasets` tables on the CPU: write, open, check, read micro-batches.

    python trajectory_cache.py DIR        describe a cache and verify its checksums

A cache is a folder of shards, one a rank. A shard is three Arrow files and a manifest:

    trajectories-00000.arrow    one row a trajectory: its tensors, sample_index, prompt_id, any plain value
    prompts-00000.arrow         one row a distinct prompt: its embedding (S, D); prompt_id -1 is the negative one
    values-00000.arrow          what is known only after all ranks have finished: rewards, advantages
    manifest-00000.json         schema version, dtypes, the rollout's facts (sigmas, size, model ...), rows, checksums

Tensors are flat typed lists beside a `<name>_shape` column; bf16 and fp16 are stored as int16 bits and bool as uint8,
since Arrow would convert them. Reading one gives a view of the memory-mapped file: no bytes move until they are used,
and only the pages that are touched. The views are READ-ONLY: an in-place operation on one kills the process.

Shapes: B samples of a micro-batch, W trained timesteps, L image tokens, C channels, S text tokens, D embedding width.
"""

import argparse
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from datasets import Dataset, Features, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from torch import Tensor

SCHEMA_VERSION = 1
TABLES = ("trajectories", "prompts", "values")
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # what closes a whole Arrow stream
NEGATIVE_PROMPT_ID = -1
STORED_AS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.bool: torch.uint8}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *STORED_AS,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
}
PLAIN_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


# ----- Writing -----------------------------------------------------------------------------------------------------


@contextmanager
def table_writer(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Give a function that appends one row of tensors and plain values; the file appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    writer = None

    def write(row: Mapping[str, Any]) -> None:
        nonlocal writer
        table = row_table(row)
        if writer is None:
            writer = ArrowWriter(features=Features.from_arrow_schema(table.schema), path=str(temporary))
        writer.write_table(table)  # one record batch a row: larger ones overflow Arrow's 2 GB offsets and cost memory

    try:
        yield write
        if writer is None:
            raise ValueError(f"{path}: there is no row to write")
        writer.finalize()
        writer = None
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        try:
            if writer is not None:
                writer.close()  # on a full disk it fails once more
        finally:
            temporary.unlink(missing_ok=True)


def row_table(row: Mapping[str, Any]) -> pa.Table:
    """One row as an Arrow table over the tensors' own memory: flat lists of stored bits, shapes, dtype names."""
    columns: dict[str, pa.Array] = {}
    for name, value in row.items():
        if isinstance(value, Tensor):
            bits = value.detach().contiguous().view(STORED_AS.get(value.dtype, value.dtype)).flatten().numpy()
            columns[name] = pa.ListArray.from_arrays(pa.array([0, bits.size], pa.int32()), pa.array(bits))
            columns[f"{name}_shape"] = pa.array([list(value.shape)], pa.list_(pa.int32()))
            columns[f"{name}_dtype"] = pa.array([str(value.dtype).removeprefix("torch.")])
        else:
            columns[name] = pa.array([value], PLAIN_TYPES[type(value)])
    return pa.table(columns)


def table_bytes(row: Mapping[str, Any], *, num_rows: int, num_shards: int = 1) -> int:
    """Exact bytes on disk of `num_rows` rows like `row` in `num_shards` files: some are written to count them."""
    sizes = []
    for count in (1, 2):  # the second row costs what every further one does
        stream, table = pa.MockOutputStream(), row_table(row)
        writer = ArrowWriter(features=Features.from_arrow_schema(table.schema), stream=stream)
        for _ in range(count):
            writer.write_table(table)
        writer.finalize()
        sizes.append(stream.size())
    first, second = sizes
    return num_shards * first + (num_rows - num_shards) * (second - first)


def write_manifest(folder: Path, shard: int, facts: Mapping[str, Any]) -> None:
    """Finish a shard: its manifest is written last, so a shard without one is known to be unfinished."""
    manifest = dict(facts) | {"schema_version": SCHEMA_VERSION, "shard": shard, "files": {}}
    for path in sorted(folder.glob(f"*-{shard:05d}.arrow")):
        rows = Dataset.from_file(str(path)).num_rows
        manifest["files"][path.name] = {"rows": rows, "bytes": path.stat().st_size, "crc32": file_crc32(path)}
    temporary = folder / f"manifest-{shard:05d}.tmp"
    with open(temporary, "w") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / f"manifest-{shard:05d}.json")


def file_crc32(path: Path) -> int:
    """CRC-32 of a file, read in pieces."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


# ----- Opening -----------------------------------------------------------------------------------------------------


class TrajectoryCache(NamedTuple):
    """An open cache: memory-mapped tables in arrow format, all of them in the order of the shards' rows."""

    facts: dict[str, Any]  # the manifest of the first opened shard
    trajectories: Dataset
    prompts: Dataset
    sample_indices: list[int]  # of each row of trajectories
    prompt_ids: list[int]  # likewise
    prompt_rows: dict[int, int]  # prompt_id -> row of prompts
    values: Dataset | None  # None until the rewards of all ranks are known
    fields: frozenset[str]  # names of the trajectories' tensors


def open_cache(
    folder: str | Path, *, shards: Sequence[int] | None = None, verify_checksums: bool = False
) -> TrajectoryCache:
    """Open all shards of a cache, or those named, without copying a byte; sizes and row counts are always checked.

    `verify_checksums` reads every byte (about 4 GiB/s): wanted for a cache of another run. Raises ValueError that
    names the file at fault.
    """
    folder = Path(folder)
    if shards is None:
        facts = [read_manifest(path) for path in sorted(folder.glob("manifest-*.json"))]
        if not facts:
            raise ValueError(
                f"{folder} holds no manifest-*.json: it is no trajectory cache, or its rollout did not finish"
            )
        present = [fact["shard"] for fact in facts]
        if len(present) != facts[0]["num_shards"] or present != list(range(len(present))):
            raise ValueError(
                f"{folder} has shards {present} of {facts[0]['num_shards']}: a rank did not finish, roll out again"
            )
    else:
        facts = [read_manifest(folder / f"manifest-{shard:05d}.json") for shard in shards]
    tables: dict[str, list[Dataset]] = {name: [] for name in TABLES}
    for fact in facts:
        for name, file_facts in fact["files"].items():
            tables[name.partition("-")[0]].append(open_table(folder / name, file_facts, verify_checksums))
    trajectories, prompts = (
        concatenate_datasets(tables[name]).with_format("arrow") for name in ("trajectories", "prompts")
    )
    values = concatenate_datasets(tables["values"]) if len(tables["values"]) == len(facts) else None
    for table, column in ((trajectories, "sample_index"), (trajectories, "prompt_id"), (prompts, "prompt_id")):
        if column not in table.column_names or table.features[column].dtype != "int64":
            raise ValueError(
                f"{folder} has a table without a column {column} of integers: see the docstring of trajectory_cache.py"
            )
        if table.data.column(column).null_count:
            raise ValueError(f"{folder} has a row without {column}: write a number in each")
    sample_indices, prompt_ids = (trajectories.data.column(name).to_pylist() for name in ("sample_index", "prompt_id"))
    prompt_rows = {prompt_id: row for row, prompt_id in enumerate(prompts.data.column("prompt_id").to_pylist())}
    columns = trajectories.column_names
    fields = frozenset(name for name in columns if f"{name}_shape" in columns)
    return TrajectoryCache(facts[0], trajectories, prompts, sample_indices, prompt_ids, prompt_rows, values, fields)


def read_manifest(path: Path) -> dict[str, Any]:
    """Load one manifest; raises ValueError where it is no manifest of this version."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the cache is incomplete, roll out again")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not json ({error}): the cache is damaged, roll out again") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version") if isinstance(manifest, dict) else None
        raise ValueError(f"{path} has schema version {found}, this code reads {SCHEMA_VERSION}: roll out again")
    shard, files = manifest.get("shard"), manifest.get("files")
    whole = isinstance(shard, int) and isinstance(manifest.get("num_shards"), int) and isinstance(files, dict)
    names = {f"{table}-{shard:05d}.arrow" for table in TABLES} if whole else set()
    if not whole or not names - {f"values-{shard:05d}.arrow"} <= files.keys() <= names:
        raise ValueError(f"{path} does not list the shard's tables: the cache is damaged, roll out again")
    for name, facts in files.items():
        if not isinstance(facts, dict) or not all(
            isinstance(facts.get(key), int) for key in ("rows", "bytes", "crc32")
        ):
            raise ValueError(
                f"{path} does not tell rows, bytes and crc32 of {name}: the cache is damaged, roll out again"
            )
    return manifest


def open_table(path: Path, facts: Mapping[str, int], verify_checksum: bool) -> Dataset:
    """Memory-map one Arrow file after checking what its manifest says of it."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the cache is incomplete, roll out again")
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise ValueError(
            f"{path} has {size} bytes, its manifest says {facts['bytes']}: the cache is damaged, roll out again"
        )
    if verify_checksum and (checksum := file_crc32(path)) != facts["crc32"]:
        raise ValueError(
            f"{path} has checksum {checksum}, its manifest says {facts['crc32']}: the cache is damaged, roll out again"
        )
    with open(path, "rb") as file:
        file.seek(-min(size, len(END_OF_STREAM)), os.SEEK_END)
        if file.read() != END_OF_STREAM:
            raise ValueError(f"{path} has no end mark: the cache is damaged, roll out again")
    try:
        table = Dataset.from_file(str(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Arrow stream ({error}): the cache is damaged, roll out again") from error
    if table.num_rows != facts["rows"]:
        raise ValueError(
            f"{path} has {table.num_rows} rows, its manifest says {facts['rows']}: the cache is damaged, roll "
            "out again"
        )
    return table


# ----- Reading -----------------------------------------------------------------------------------------------------


def read_tensors(table: Dataset, row: int) -> dict[str, Tensor]:
    """All tensors of one row as READ-ONLY views of the mapped file; plain columns are left out. Raises ValueError
    naming a column whose shape or dtype does not describe it."""
    columns = table[row]
    tensors = {}
    for name in columns.column_names:
        if f"{name}_shape" in columns.column_names:
            bits = torch.from_dlpack(columns[name].chunk(0).flatten())
            shape, dtype = (columns[f"{name}_{what}"][0].as_py() for what in ("shape", "dtype"))
            try:
                tensors[name] = bits.view(DTYPES[dtype]).view(shape)
            except (KeyError, RuntimeError) as error:
                raise ValueError(
                    f"row {row} of a table has {bits.numel()} entries of {name} in {bits.dtype}, which are no "
                    f"{shape} {dtype}: write it with table_writer"
                ) from error
    return tensors


def read_micro_batch(cache: TrajectoryCache, rows: Sequence[int]) -> dict[str, Tensor | list[Tensor]]:
    """The tensors of some trajectories: what has at most one dimension a row is stacked (B, ...), the rest stays a
    list of B views of the mapped file."""
    samples = [read_tensors(cache.trajectories, row) for row in rows]
    return {
        name: torch.stack([sample[name] for sample in samples])
        if first.ndim <= 1
        else [sample[name] for sample in samples]
        for name, first in samples[0].items()
    }


def read_prompt_embeds(cache: TrajectoryCache, prompt_id: int) -> Tensor:
    """The embedding (S, D) of one prompt, a read-only view."""
    return read_tensors(cache.prompts, cache.prompt_rows[prompt_id])["prompt_embeds"]


def read_rewards(cache: TrajectoryCache) -> tuple[Tensor, Tensor]:
    """Rewards (N,) float64 and prompt ids (N,) of all samples, by sample number."""
    rewards = dict(zip(cache.values["sample_index"][:], cache.values["reward"][:], strict=True))
    groups = dict(zip(cache.sample_indices, cache.prompt_ids, strict=True))
    samples = sorted(groups)
    return torch.tensor([rewards[s] for s in samples], dtype=torch.float64), torch.tensor([groups[s] for s in samples])


def read_embeddings(path: Path) -> dict[int, Tensor]:
    """Embeddings (S, D) by prompt_id of a table that table_writer wrote; read-only views."""
    table = Dataset.from_file(str(path)).with_format("arrow")
    prompt_ids = table.data.column("prompt_id").to_pylist()
    return {prompt_id: read_tensors(table, row)["prompt_embeds"] for row, prompt_id in enumerate(prompt_ids)}


def main(argv: Sequence[str] | None = None) -> int:
    """Describe a cache, verify its checksums; the exit code is 2 and the message one line where it is damaged."""
    parser = argparse.ArgumentParser(description="Describe a trajectory cache and verify its checksums.")
    parser.add_argument("folder", help="folder with manifest-*.json")
    args = parser.parse_args(argv)
    try:
        cache = open_cache(args.folder, verify_checksums=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name, value in sorted(cache.facts.items()):
        if name not in ("files", "shard", "schema_version"):
            print(f"{name:22} {value}")
    print(f"{'rows':22} {cache.trajectories.num_rows} trajectories, {cache.prompts.num_rows} prompts")
    for table in (cache.trajectories, cache.prompts):
        for name, tensor in read_tensors(table, 0).items():
            print(f"{name:22} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
    if cache.values is not None:
        print(f"{'values':22} {', '.join(cache.values.column_names)}")
    print("all checksums agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
