"""The ring of buffers that copies steps ahead, without a device and on one.

python -m pytest tests/test_staging_ring.py           on a CPU: its order, with torch.cuda written down
python -m pytest tests/test_staging_ring.py -m gpu    on a CUDA device
"""

from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest
import torch
from staging_batches import (
    CPU,
    B,
    assert_same_step,
    direct_steps,
    make_batch,
    numbered,
)

import staging
from staging import FLOWGRPO_FIELDS, StepFields, iterate_timesteps


class Recorder:
    """Stands for torch.cuda: its streams and events write down what they are asked, and copies happen at once."""

    def __init__(self):
        self.log, self.events = [], 0

    def part(self, name, *verbs):
        def noting(verb):
            return lambda *what: self.log.append((name, verb, *(each.name for each in what)))

        return SimpleNamespace(name=name, **{verb: noting(verb) for verb in verbs})

    def stream(self, name):
        return self.part(name, "wait_stream", "wait_event")

    def event(self):
        self.events += 1
        slot, kind = divmod(self.events - 1, 2)
        return self.part(f"{('copied', 'computed')[kind]} {slot}", "synchronize", "record")


@pytest.fixture
def recorder(monkeypatch):
    """The ring on the CPU, with plain memory for pinned and device buffers."""
    recorder, empty = Recorder(), torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: recorder.stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder.stream("computes"))
    monkeypatch.setattr(torch.cuda, "Event", recorder.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    return recorder


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize(("chunk", "prefetch"), [(1, 1), (1, 3), (2, 1), (1, 9)])
def test_the_rings_slots_hold_the_steps_in_order(recorder, listed, chunk, prefetch):
    """Each step's values are its own until the next is asked for, though later ones have been copied meanwhile."""
    batch, windows = make_batch(5, listed=listed), FLOWGRPO_FIELDS.per_step
    chunks = [(start, min(start + chunk, 5)) for start in range(0, 5, chunk)]
    steps, expected = staging.prefetched_steps(batch, windows, chunks, CPU, prefetch), direct_steps(batch, 5, chunk)
    pointers, buffers = [], {}
    for step, wanted in zip(steps, expected, strict=True):
        assert_same_step(step, {name: wanted[name] for name in windows})
        pointers.append(step["all_latents"].data_ptr())
        buffers |= {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in step.values()}
    planned = staging.step_input_bytes(batch, FLOWGRPO_FIELDS, staged=True, chunk=chunk, prefetch=prefetch)
    assert sum(buffers.values()) == planned
    assert len(set(pointers)) == min(prefetch + 1, len(chunks))  # so many buffers, used by turns
    assert pointers == [pointers[number % len(set(pointers))] for number in range(len(chunks))]


def test_the_ring_waits_for_copies_and_for_what_reads_them(recorder):
    """Two slots, three steps: in the log is what each stream waits for, and what the host waits for."""
    batch = {"all_timesteps": numbered(B, 3)}
    steps = staging.prefetched_steps(batch, {"all_timesteps": 1}, [(0, 1), (1, 2), (2, 3)], CPU, 1)

    def copy(slot):
        return [(f"copied {slot}", "synchronize"), ("copies", "wait_event", f"computed {slot}"),
                (f"copied {slot}", "record", "copies")]  # fmt: skip

    def use(slot):
        return [("computes", "wait_event", f"copied {slot}")]

    done = [("computed 0", "record", "computes"), ("computed 1", "record", "computes")]
    expected = [("copies", "wait_stream", "computes"), *copy(0), *copy(1), *use(0)]
    next(steps)
    assert recorder.log == expected
    next(steps)  # the first slot is written again, once what was computed from it is marked
    assert recorder.log == (expected := [*expected, done[0], *copy(0), *use(1)])
    next(steps)
    assert recorder.log == (expected := [*expected, done[1], *use(0)])
    steps.close()  # also where the consumer stops early
    assert recorder.log == [*expected, ("computes", "wait_stream", "copies")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize(("chunk", "prefetch"), [(1, 1), (1, 3), (3, 1)])
def test_prefetched_steps_hold_their_own_index(listed, chunk, prefetch):
    """Entries hold their index along time, at 1024 px and 8 samples. Before some steps the device sleeps, so that a
    buffer that is written too early shows; the steps after it have no slack, so that one read too soon shows."""
    num_timesteps, device = 8, torch.device("cuda")
    index = torch.arange(num_timesteps + 1, dtype=torch.float32)
    batch = {
        "all_latents": index.view(1, -1, 1, 1).expand(8, -1, 4096, 64).contiguous(),
        "all_timesteps": index[:-1].expand(8, -1).contiguous(),
    }
    if listed:
        batch = {name: list(field) for name, field in batch.items()}
    fields = StepFields(shared=(), per_step={"all_latents": 2, "all_timesteps": 1})
    on_device, wrong = index.to(device), torch.zeros((), dtype=torch.int64, device=device)
    for round_number in range(200):
        steps = iterate_timesteps(batch, fields, device, staged=True, chunk=chunk, prefetch=prefetch)
        with closing(steps):
            for number, step in enumerate(steps):
                if number % (2 + round_number % 4) == 0:  # about 5 ms, in which the host fills what it can
                    torch.cuda._sleep(10_000_000)
                first, latents, timesteps = number * chunk, step["all_latents"], step["all_timesteps"]
                wrong += (latents != on_device[first : first + latents.shape[1]].view(1, -1, 1, 1)).sum()
                wrong += (timesteps != on_device[first : first + timesteps.shape[1]]).sum()
                del latents, timesteps
    assert wrong.item() == 0
