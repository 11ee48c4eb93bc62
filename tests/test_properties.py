"""Random field maps, shapes, dtypes and options against plain indexing: python -m pytest tests/test_properties.py"""

import math
import tempfile
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from torch import nn

import train_flowgrpo
import train_nft
from prompts import plan_updates, rank_batches
from qwen_image import SDE_TYPES
from staging import StepFields, iterate_timesteps, nft_fields, step_input_bytes, validate_batch
from train_nft import NOISE_LAYOUTS, Predictors
from trajectory_cache import DTYPES, open_cache, read_micro_batch, read_tensors, table_writer, write_manifest

CPU = torch.device("cpu")
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
FEW = settings(max_examples=20, deadline=None, derandomize=True)
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
SEEDS = st.integers(0, 2**31)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits of the dtype, NaN with payloads, infinities and -0 among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (max(1, math.prod(shape)) * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)[: math.prod(shape)].view(shape).clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(found), bits(expected))


@st.composite
def micro_batches(draw) -> tuple[dict, StepFields, int]:
    """A micro-batch of random fields, its field map and T."""
    num_samples, num_timesteps = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    batch, shared, per_step, optional = {}, [], {}, set()
    for number in range(draw(st.integers(1, 6))):
        name, trailing, dtype = f"field{number}", draw(SHAPES), draw(st.sampled_from(list(DTYPES.values())))
        shape = (num_samples, *trailing)
        if number == 0 or draw(st.booleans()):
            per_step[name] = draw(st.integers(1, 3))
            shape = (num_samples, num_timesteps + per_step[name] - 1, *trailing)
        else:
            shared.append(name)
        if number and draw(st.booleans()):
            optional.add(name)
            if draw(st.booleans()):
                continue  # it is optional and not there
        field = random_bits(shape, dtype, draw(SEEDS))
        if draw(st.booleans()):  # not contiguous
            field = field.transpose(0, 1).contiguous().transpose(0, 1) if field.ndim > 1 else field
        batch[name] = list(field) if draw(st.booleans()) else field
    batch["nobody reads"] = "anything"
    return batch, StepFields(tuple(shared), per_step, frozenset(optional)), num_timesteps


@EXAMPLES
@given(micro_batches(), st.booleans(), st.integers(1, 8), st.integers(0, 3))
def test_every_mode_is_plain_indexing(given_batch, staged, chunk, prefetch):
    batch, fields, num_timesteps = given_batch
    assert validate_batch(batch, fields) == num_timesteps
    whole = {name: torch.stack(list(batch[name])) for name in batch if name != "nobody reads"}
    start = 0
    for step in iterate_timesteps(batch, fields, CPU, staged=staged, chunk=chunk, prefetch=prefetch):
        stop = min(start + chunk, num_timesteps)
        assert step.keys() == whole.keys()
        for name, tensor in step.items():
            window = fields.per_step.get(name)
            assert_same_bits(tensor, whole[name] if window is None else whole[name][:, start : stop + window - 1])
        start = stop
    assert start == num_timesteps


@EXAMPLES
@given(micro_batches(), st.booleans(), st.integers(1, 8))
def test_planned_bytes_are_those_of_the_largest_step(given_batch, staged, chunk):
    batch, fields, _ = given_batch
    del batch["nobody reads"]
    steps = iterate_timesteps(batch, fields, CPU, staged=staged, chunk=chunk)
    held = max(sum(step[name].nbytes for name in fields.per_step if name in step) for step in steps)
    planned = step_input_bytes(batch, fields, staged=staged, chunk=chunk)
    if staged:
        assert planned == held
    else:  # a step is a view of all there is
        assert planned == sum(torch.stack(list(batch[name])).nbytes for name in fields.per_step if name in batch)


@EXAMPLES
@given(
    st.integers(1, 3), st.integers(1, 5), st.sampled_from(["on_demand", "per_step", "shared"]), SEEDS, st.booleans()
)
def test_noise_layouts_are_staged_as_they_say(num_samples, num_timesteps, layout, seed, listed):
    x0 = random_bits((num_samples, 3, 2), torch.float32, seed)
    batch = {
        "prompt_embeds": x0.bfloat16(),
        "latents_clean": x0,
        "train_timesteps": torch.rand(num_samples, num_timesteps),
    }
    batch["reward_prob"] = torch.rand(num_samples, num_timesteps)
    shape = {"per_step": (num_samples, num_timesteps, 3, 2), "shared": (num_samples, 3, 2)}.get(layout)
    if shape is not None:
        noise = random_bits(shape, torch.float32, seed + 1)
        batch["forward_noise"] = list(noise) if listed else noise
    for number, step in enumerate(iterate_timesteps(batch, nft_fields(batch), CPU, staged=True)):
        assert ("forward_noise" in step) == (layout != "on_demand")
        if layout == "per_step":
            assert_same_bits(step["forward_noise"], noise[:, number : number + 1])
        elif layout == "shared":
            assert_same_bits(step["forward_noise"], noise)


# ----- The cache ---------------------------------------------------------------------------------------------------

TENSORS = st.tuples(SHAPES, st.sampled_from(list(DTYPES.values())), SEEDS)
PLAIN = st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False), st.text())


@FEW
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), TENSORS, min_size=1), min_size=1, max_size=3), PLAIN)
def test_the_cache_keeps_every_bit(rows, plain):
    names = rows[0].keys()  # a table has the columns, and per column the dtype, of its first row
    rows = [
        {
            name: random_bits(row.get(name, rows[0][name])[0], rows[0][name][1], rows[0][name][2] + number)
            for name in names
        }
        for number, row in enumerate(rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with table_writer(path / "trajectories-00000.arrow") as write:
            for number, row in enumerate(rows):
                write({"sample_index": number, "prompt_id": 0, "plain": plain, **row})
        with table_writer(path / "prompts-00000.arrow") as write:
            write({"prompt_id": 0, "prompt_embeds": torch.zeros(1, 1)})
        write_manifest(path, 0, {"num_shards": 1})
        cache = open_cache(path, verify_checksums=True)
        assert cache.fields == set(names)
        assert cache.trajectories.data.column("plain").to_pylist() == [plain] * len(rows)
        for number, row in enumerate(rows):
            for name, tensor in read_tensors(cache.trajectories, number).items():
                assert_same_bits(tensor, row[name])
        if all(len({tuple(row[name].shape) for row in rows}) == 1 for name in names):
            batch = read_micro_batch(cache, range(len(rows)))
            for name in names:
                assert_same_bits(torch.stack(list(batch[name])), torch.stack([row[name] for row in rows]))


# ----- Which rank trains on what -----------------------------------------------------------------------------------


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), SEEDS)
def test_an_update_is_the_same_batches_on_any_number_of_ranks(num_updates, columns, world_size, seed):
    per_update = columns * world_size

    def plans(ranks: int) -> list[list[list[int]]]:
        words = (seed, 3, 0, 0)
        return [
            plan_updates(num_updates, per_update, rank=r, world_size=ranks, seed_words=words) for r in range(ranks)
        ]

    one, many = plans(1), plans(world_size)
    for update in range(num_updates):
        assert sorted(one[0][update]) == sorted(batch for plan in many for batch in plan[update])
    for rank, plan in enumerate(many):
        own = rank_batches(num_updates, per_update, rank=rank, world_size=world_size)
        assert sorted(batch for update in plan for batch in update) == sorted(own)


# ----- Whole updates -----------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """A policy of two numbers: quick, and every input reaches its velocity."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, latents, timesteps, prompt_embeds, **conditions):
        lean = (
            self.weight[1] * torch.sin(timesteps)[:, None, None]
            + prompt_embeds.float().mean(dim=(1, 2))[:, None, None]
        )
        return self.weight[0] * latents + lean


@cache
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def draw_batch(algorithm: str, num_samples: int, num_timesteps: int, layout: str, listed: bool, seed: int) -> dict:
    """A micro-batch of either algorithm on a random schedule."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, 3, 4)
    batch = {"prompt_embeds": torch.randn(num_samples, 2, 3, generator=generator).bfloat16()}
    batch |= {"sample_index": list(range(num_samples)), "noise_words": (seed % 1000, 0, 0)}
    if algorithm == "flowgrpo":
        sigmas = torch.rand(num_timesteps + 1, generator=generator).sort(descending=True).values * 0.8 + 0.1
        batch["all_latents"] = torch.randn(num_samples, num_timesteps + 1, 3, 4, generator=generator)
        batch |= {"sigmas": sigmas.expand(num_samples, -1), "sigma_max": torch.full((num_samples,), 0.95)}
        batch["all_timesteps"] = 1000 * batch["sigmas"][:, :-1]
        for name in ("advantages", "old_log_probs"):
            batch[name] = torch.randn(num_samples, num_timesteps, generator=generator)
    else:
        batch["latents_clean"] = torch.randn(*shape, generator=generator)
        batch["train_timesteps"] = 1000 * torch.rand(num_samples, num_timesteps, generator=generator)
        batch["reward_prob"] = torch.rand(num_samples, num_timesteps, generator=generator)
        sizes = {"per_step": (num_samples, num_timesteps, 3, 4), "shared": shape}
        if layout != "on_demand":
            batch["forward_noise"] = torch.randn(*sizes[layout], generator=generator)
    big = ("all_latents", "latents_clean", "forward_noise")
    return {name: list(field) if listed and name in big else field for name, field in batch.items()}


def toy_update(algorithm: str, batches: list[dict], *flags: str) -> tuple[dict, torch.Tensor]:
    """Metrics and weights of one update of the toy policy."""
    script = train_flowgrpo if algorithm == "flowgrpo" else train_nft
    limits = ["--divergence_limit", "inf", *(["--log_ratio_limit", "inf"] if algorithm == "flowgrpo" else [])]
    args = script.parse_args([*limits, "--max_grad_norm", "1e9", *flags])
    policy, other = Toy(), Toy().requires_grad_(False)
    other.weight.mul_(1.5)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    predict = policy if algorithm == "flowgrpo" else Predictors(policy, other, other)
    metrics, _ = script.train_batch(
        args, accelerator(), policy, predict, optimizer, list(policy.parameters()), batches
    )
    return metrics, policy.weight.detach()


@pytest.mark.parametrize("algorithm", ["flowgrpo", "nft"])
@FEW
@given(st.data())
def test_an_update_is_the_same_staged_and_not(algorithm, data):
    num_timesteps, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    layout, chunk = data.draw(st.sampled_from(NOISE_LAYOUTS)), data.draw(st.integers(1, 7))
    flags = ["--timesteps_per_forward", str(chunk)]
    if algorithm == "flowgrpo":
        flags += ["--sde_type", data.draw(st.sampled_from(SDE_TYPES))]
        flags += ["--clip_range", data.draw(st.sampled_from(("0.5", "1e9")))]
    batches = [
        draw_batch(algorithm, data.draw(st.integers(1, 3)), num_timesteps, layout, data.draw(st.booleans()), seed)
        for seed in data.draw(st.lists(SEEDS, min_size=count, max_size=count))
    ]
    metrics, weight = toy_update(algorithm, batches, *flags)
    staged, same = toy_update(algorithm, batches, *flags, "--enable_timestep_staging")
    assert staged == metrics
    assert torch.equal(same, weight)
    if "0.5" not in flags:  # else all ratios may be clipped
        assert not torch.equal(weight, Toy().weight)
    single, near = toy_update(algorithm, batches) if algorithm == "nft" else toy_update(algorithm, batches, *flags[2:])
    assert torch.allclose(near, weight, rtol=1e-4, atol=1e-5)
    assert single["policy_loss"] == pytest.approx(metrics["policy_loss"], rel=1e-4, abs=1e-4)
