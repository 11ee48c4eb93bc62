"""trajectory_cache.py: reading moves no bytes: python -m pytest tests/test_zero_copy.py

One fixture writes 512 MiB into pytest's temporary folder and deletes it.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trajectory_cache import open_cache, read_tensors, table_writer, write_manifest

REPOSITORY = Path(__file__).resolve().parents[1]

NUM_ROWS, ROW_SHAPE = 8, (32, 8192, 64)  # 32 steps of 2 MiB a row: 64 MiB, a step of all rows is 16 MiB

MEASURE = """
import sys
import torch
from trajectory_cache import open_cache, read_micro_batch

def anonymous_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before = anonymous_kib()
cache = open_cache(sys.argv[1])
rows = read_micro_batch(cache, range(8))["all_latents"]
opened = anonymous_kib()
step = torch.stack([row[5] for row in rows])
used = anonymous_kib()
assert [sample.unique().item() for sample in step] == [5 + sample for sample in range(8)]
print(opened - before, used - before, step.nbytes // 1024)
"""


@pytest.fixture(scope="module")
def large_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    steps = torch.arange(ROW_SHAPE[0], dtype=torch.float32).view(-1, 1, 1).expand(ROW_SHAPE)
    with table_writer(folder / "trajectories-00000.arrow") as write:
        for sample in range(NUM_ROWS):
            write({"sample_index": sample, "prompt_id": 0, "all_latents": steps + sample})
    with table_writer(folder / "prompts-00000.arrow") as write:
        write({"prompt_id": 0, "prompt_embeds": torch.zeros(3, 4)})
    write_manifest(folder, 0, {"num_shards": 1})
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process's memory")
def test_reading_a_step_takes_the_memory_of_that_step(large_cache):
    command = [sys.executable, "-c", MEASURE, str(large_cache)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    opened, used, step = (int(word) for word in result.stdout.split())
    assert opened < step  # of 512 MiB in all
    assert used < 2 * step


def best_of_three(copy):
    seconds = []
    for _ in range(3):
        start = time.thread_time()  # of this thread alone: other tests run beside it
        copy()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def test_warm_reads_are_at_least_half_as_fast_as_memory(large_cache):
    cache = open_cache(large_cache)
    in_memory = [read_tensors(cache.trajectories, row)["all_latents"].clone() for row in range(NUM_ROWS)]
    target = torch.zeros(ROW_SHAPE)

    def copy_from_memory():
        for tensor in in_memory:
            target.copy_(tensor)

    def copy_from_cache():
        for row in range(NUM_ROWS):
            target.copy_(read_tensors(cache.trajectories, row)["all_latents"])

    assert best_of_three(copy_from_cache) <= 2 * best_of_three(copy_from_memory)
