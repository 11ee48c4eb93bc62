"""trajectory_cache.py: bits come back as written, damage is named, reading moves no bytes.

    python -m pytest tests/test_trajectory_cache.py

One fixture writes 512 MiB into pytest's temporary folder and deletes it.

Shapes: W trained timesteps, L tokens, C channels, S text tokens, D embedding width.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trajectory_cache import (
    END_OF_STREAM,
    NEGATIVE_PROMPT_ID,
    main,
    open_cache,
    read_embeddings,
    read_micro_batch,
    read_prompt_embeds,
    read_tensors,
    table_writer,
    write_manifest,
)

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 2**20


def write_table(path, rows):
    with table_writer(path) as write:
        for row in rows:
            write(row)


def write_shard(folder, shard=0, num_shards=1, samples=(0, 1, 2), *, values=True):
    """A small shard whose tensors hold their sample's number or their prompt's; prompt p has samples 2p and 2p + 1."""
    folder.mkdir(exist_ok=True)
    prompt_ids = sorted({sample // 2 for sample in samples})
    write_table(
        folder / f"prompts-{shard:05d}.arrow",
        [
            {"prompt_id": prompt_id, "prompt_embeds": torch.full((3, 4), float(prompt_id), dtype=torch.bfloat16)}
            for prompt_id in (NEGATIVE_PROMPT_ID, *prompt_ids)
        ],
    )
    write_table(folder / f"trajectories-{shard:05d}.arrow", [trajectory(sample) for sample in samples])
    if values:
        write_table(folder / f"values-{shard:05d}.arrow", [{"advantage": sample / 2} for sample in samples])
    write_manifest(folder, shard, {"num_shards": num_shards, "resolution": 64})
    return folder


def trajectory(sample):
    return {
        "sample_index": sample,
        "prompt_id": sample // 2,
        "all_latents": torch.full((4, 16, 8), float(sample)),
        "sigmas": torch.tensor([1.0, 0.9, 0.5, 0.1]) + sample,
        "sigma_max": torch.tensor(0.9),
    }


def edit_manifest(folder, edit, shard=0):
    path = folder / f"manifest-{shard:05d}.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    return path


def assert_refused(path, words, folder, **options):
    """Opening raises one line that names the file (or folder) and says what is wrong with it."""
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} .*{words}") as error:
        open_cache(folder, **options)
    assert "\n" not in str(error.value)


def round_trip(folder, *rows):
    write_table(folder / "embeddings.arrow", [row | {"prompt_id": number} for number, row in enumerate(rows)])
    return read_embeddings(folder / "embeddings.arrow")


# ----- Bits --------------------------------------------------------------------------------------------------------

ALL_16_BITS = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
# -0, both infinities, quiet and signalling NaNs with payloads of either sign, the smallest numbers, and random bits
FP32_BITS = [-(2**31), 0x7F800000, -0x00800000, 0x7FC00001, 0x7F812345, -0x00000001, -0x003EDCBB, 1, 0x007FFFFF]
RANDOM_32_BITS = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
INT64_ENDS = torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1, 0, -1])
SAMPLES = {
    torch.bfloat16: ALL_16_BITS.view(torch.bfloat16),
    torch.float16: ALL_16_BITS.view(torch.float16),
    torch.float32: torch.cat([torch.tensor(FP32_BITS), RANDOM_32_BITS]).to(torch.int32).view(torch.float32),
    torch.float64: torch.tensor([-0.0, float("inf"), 5e-324, 0.1]),
    torch.bool: torch.tensor([True, False, False, True]),
    torch.int64: INT64_ENDS,
    torch.int32: torch.tensor([-(2**31), 2**31 - 1, 0, -1], dtype=torch.int32),
    torch.uint8: torch.arange(256).to(torch.uint8),
}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", SAMPLES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_bits_and_dtype_survive(tmp_path, dtype):
    written = SAMPLES[dtype].to(dtype)
    read = round_trip(tmp_path, {"prompt_embeds": written.view(1, -1)}, {"prompt_embeds": written.flip(0).view(-1, 1)})
    for row, expected in zip(read.values(), (written.view(1, -1), written.flip(0).view(-1, 1)), strict=True):
        assert row.dtype == dtype
        assert row.shape == expected.shape
        assert torch.equal(bits(row), bits(expected))


def test_every_bfloat16_is_told_apart(tmp_path):
    read = round_trip(tmp_path, {"prompt_embeds": SAMPLES[torch.bfloat16]})[0].view(torch.int16)
    assert read.unique().numel() == 2**16
    assert torch.equal(read, ALL_16_BITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 3, 4), (1, 1, 1), (0, 3)])
def test_shapes_survive(tmp_path, dtype, shape):
    written = (torch.randn(shape) * 3).to(dtype)
    read = round_trip(tmp_path, {"prompt_embeds": torch.zeros(5, dtype=dtype)}, {"prompt_embeds": written})[1]
    assert read.shape == written.shape
    assert read.dtype == dtype
    assert torch.equal(read, written)


def test_strided_and_trained_tensors_are_written_by_value(tmp_path):
    written = torch.arange(24.0, requires_grad=True).view(4, 6)[:, ::2].t()
    read = round_trip(tmp_path, {"prompt_embeds": written})[0]
    assert torch.equal(read, written)
    assert not read.requires_grad


def test_plain_values_survive(tmp_path):
    rows = [
        {"sample_index": 2**62 + 1, "prompt_id": -1, "prompt": "ein Füchslein 🦊\n", "reward": 0.1, "kept": True},
        {"sample_index": 0, "prompt_id": 7, "prompt": "", "reward": -0.0, "kept": False},
    ]
    tensor = {"x": torch.zeros(2)}
    write_table(tmp_path / "trajectories-00000.arrow", [row | tensor for row in rows])
    write_table(tmp_path / "prompts-00000.arrow", [{"prompt_id": 7} | tensor])
    write_manifest(tmp_path, 0, {"num_shards": 1})
    cache = open_cache(tmp_path, verify_checksums=True)
    columns = {name: cache.trajectories.data.column(name).to_pylist() for name in rows[0]}
    assert columns == {name: [row[name] for row in rows] for name in rows[0]}
    assert [type(value[0]) for value in columns.values()] == [int, int, str, float, bool]
    assert read_tensors(cache.trajectories, 0).keys() == {"x"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_file_is_no_larger_than_its_payload(tmp_path, dtype):
    payload = torch.zeros(16, 1024, 64, dtype=dtype)
    write_table(tmp_path / "table.arrow", [{"x": payload}] * 2)
    assert 1 <= (tmp_path / "table.arrow").stat().st_size / (2 * payload.nbytes) <= 1.05


# ----- Writing -----------------------------------------------------------------------------------------------------


def fail_before_a_row(write):
    raise RuntimeError("the reward failed")


def fail_after_two_rows(write):
    write(trajectory(0))
    write(trajectory(1))
    raise RuntimeError("the reward failed")


def fail_with_a_value_of_no_known_type(write):
    write({"sample_index": [1, 2]})


def fail_with_another_column(write):
    write(trajectory(0))
    write(trajectory(1) | {"more": 1})


@pytest.mark.parametrize(
    "fail", [fail_before_a_row, fail_after_two_rows, fail_with_a_value_of_no_known_type, fail_with_another_column]
)
def test_an_error_while_writing_leaves_no_file(tmp_path, fail):
    with pytest.raises(Exception, match=r"."), table_writer(tmp_path / "table.arrow") as write:
        fail(write)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "table.arrow"
    write_table(path, [trajectory(0)])
    before = path.read_bytes()
    with pytest.raises(RuntimeError), table_writer(path) as write:
        fail_after_two_rows(write)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_table_is_seen_only_when_it_is_whole(tmp_path):
    path = tmp_path / "table.arrow"
    with table_writer(path) as write:
        write(trajectory(0))
        assert not path.exists()
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_table_is_refused(tmp_path):
    path = tmp_path / "table.arrow"
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*no row"), table_writer(path):
        pass
    assert list(tmp_path.iterdir()) == []


# ----- Damage ------------------------------------------------------------------------------------------------------

TABLES = ("trajectories-00000.arrow", "prompts-00000.arrow", "values-00000.arrow")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "keep", [lambda size: size - 1, lambda size: size - 8, lambda size: size // 2, lambda size: 0]
)
def test_truncated_files_are_named(tmp_path, name, keep):
    path = write_shard(tmp_path) / name
    whole = path.read_bytes()
    path.write_bytes(whole[: keep(len(whole))])
    assert_refused(path, f"{keep(len(whole))} bytes.*{len(whole)}", tmp_path)


@pytest.mark.parametrize("manifest_follows", [False, True])
def test_a_file_cut_at_a_batch_boundary_is_named(tmp_path, manifest_follows):
    path = write_shard(tmp_path) / TABLES[0]
    write_table(path, [trajectory(0), trajectory(1)])  # a good file, of two of its three rows
    if manifest_follows:  # then only the number of rows can tell
        edit_manifest(tmp_path, lambda manifest: manifest["files"][TABLES[0]].update(bytes=path.stat().st_size))
    assert_refused(path, "2 rows.*3" if manifest_follows else "bytes", tmp_path)


def test_a_flipped_byte_is_named_when_checksums_are_verified(tmp_path):
    path = write_shard(tmp_path) / TABLES[0]
    contents = bytearray(path.read_bytes())
    place = contents.index(torch.full((8,), 2.0).numpy().tobytes()) + 5
    contents[place] ^= 1
    path.write_bytes(contents)
    changed = read_tensors(open_cache(tmp_path).trajectories, 2)["all_latents"]
    assert (changed != 2).sum() == 1
    assert_refused(path, "checksum", tmp_path, verify_checksums=True)


@pytest.mark.parametrize("name", TABLES)
def test_missing_files_are_named(tmp_path, name):
    (write_shard(tmp_path) / name).unlink()
    assert_refused(tmp_path / name, "missing", tmp_path)


def test_files_that_are_no_arrow_stream_are_named(tmp_path):
    path = write_shard(tmp_path) / TABLES[1]
    size = path.stat().st_size
    path.write_bytes(b"x" * size)
    assert_refused(path, "no end mark", tmp_path)
    path.write_bytes(b"x" * (size - 8) + END_OF_STREAM)
    assert_refused(path, "no Arrow stream", tmp_path)


def test_a_damaged_header_is_named(tmp_path):
    path = write_shard(tmp_path) / TABLES[0]
    contents = bytearray(path.read_bytes())
    contents[8] ^= 0xFF
    path.write_bytes(contents)
    assert_refused(path, "no Arrow stream", tmp_path)


def test_a_folder_without_manifest_is_named(tmp_path):
    (write_shard(tmp_path) / "manifest-00000.json").unlink()
    assert_refused(tmp_path, "no manifest", tmp_path)
    assert_refused(tmp_path / "manifest-00000.json", "missing", tmp_path, shards=[0])
    assert_refused(tmp_path / "nowhere", "no manifest", tmp_path / "nowhere")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named(tmp_path, missing):
    for shard in range(3):
        write_shard(tmp_path, shard, 3, [shard])
    open_cache(tmp_path)
    (tmp_path / f"manifest-0000{missing}.json").unlink()
    assert_refused(tmp_path, "shards .* of 3", tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_foreign_schema_versions_are_named(tmp_path, version):
    path = edit_manifest(write_shard(tmp_path), lambda manifest: manifest.update(schema_version=version))
    assert_refused(path, f"schema version {version}.* 1", tmp_path)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "not json"),
        (b'{"schema_version": 1, "shard', "not json"),
        (b"\xff\xfe\x00", "not json"),
        (b"[]", "schema version None"),
        (b'{"schema_version": 1, "shard": 0}', "does not list the shard.s tables"),
        (b'{"schema_version": 1, "shard": 0, "num_shards": 1, "files": {}}', "does not list the shard.s tables"),
    ],
)
def test_damaged_manifests_are_named(tmp_path, contents, words):
    path = write_shard(tmp_path) / "manifest-00000.json"
    path.write_bytes(contents)
    assert_refused(path, words, tmp_path)


def test_the_command_describes_and_verifies(tmp_path, capsys):
    command = [sys.executable, str(REPOSITORY / "trajectory_cache.py"), str(write_shard(tmp_path))]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert re.search(r"3 trajectories, 3 prompts\n(.*\n)*all_latents +\(4, 16, 8\) float32\n", good.stdout)
    (tmp_path / TABLES[1]).unlink()
    assert main(command[2:]) == 2
    damaged = capsys.readouterr()
    assert damaged.out == ""
    assert re.fullmatch(rf"{re.escape(str(tmp_path / TABLES[1]))} is missing.*\n", damaged.err)


def test_the_command_reads_every_byte(tmp_path, capsys):
    path = write_shard(tmp_path) / TABLES[2]
    assert main([str(tmp_path)]) == 0
    contents = path.read_bytes()
    path.write_bytes(contents[:-20] + bytes([contents[-20] ^ 1]) + contents[-19:])
    capsys.readouterr()
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(rf"{re.escape(str(path))} has checksum .*\n", capsys.readouterr().err)


# ----- Shards and micro-batches ------------------------------------------------------------------------------------


def test_shards_opened_together_keep_the_order(tmp_path):
    write_shard(tmp_path, 1, 2, [6, 2])
    write_shard(tmp_path, 0, 2, [4, 0, 1])
    cache = open_cache(tmp_path, verify_checksums=True)
    assert cache.sample_indices == [4, 0, 1, 6, 2]
    assert cache.prompt_ids == [2, 0, 0, 3, 1]
    assert cache.values["advantage"] == [2, 0, 0.5, 3, 1]
    assert cache.facts["resolution"] == 64
    for row, sample in enumerate(cache.sample_indices):
        assert read_tensors(cache.trajectories, row)["all_latents"].unique() == sample
    for prompt_id in (NEGATIVE_PROMPT_ID, 0, 1, 2, 3):
        assert torch.equal(read_prompt_embeds(cache, prompt_id), torch.full((3, 4), prompt_id, dtype=torch.bfloat16))


def test_one_shard_does_not_need_the_others(tmp_path):
    write_shard(tmp_path, 1, 2, [6, 2])
    cache = open_cache(tmp_path, shards=[1])
    assert cache.sample_indices == [6, 2]
    assert read_prompt_embeds(cache, 3).unique() == 3
    write_shard(tmp_path, 0, 2, [4])
    assert open_cache(tmp_path, shards=[1, 0]).sample_indices == [6, 2, 4]
    assert open_cache(tmp_path, shards=[1]).sample_indices == [6, 2]


def test_values_count_only_when_every_shard_has_them(tmp_path):
    write_shard(tmp_path, 0, 2, [0])
    write_shard(tmp_path, 1, 2, [1], values=False)
    assert open_cache(tmp_path).values is None
    assert open_cache(tmp_path, shards=[0]).values["advantage"] == [0]


def test_micro_batches_stack_small_fields_and_list_the_rest(tmp_path):
    cache = open_cache(write_shard(tmp_path, samples=[5, 3, 4, 9]))
    batch = read_micro_batch(cache, [3, 0])
    assert batch["sigma_max"].shape == (2,)
    assert torch.equal(batch["sigmas"], torch.tensor([1.0, 0.9, 0.5, 0.1]) + torch.tensor([[9.0], [5.0]]))
    assert isinstance(batch["all_latents"], list)
    assert [row.unique().item() for row in batch["all_latents"]] == [9, 5]
    assert [row.shape for row in batch["all_latents"]] == [(4, 16, 8)] * 2
    assert batch.keys() == {"all_latents", "sigmas", "sigma_max"}
