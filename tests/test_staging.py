"""staging.py: same values in every mode, one step alive at a time, errors that name the field.

    python -m pytest tests/test_staging.py

Shapes: B samples, T timesteps, L tokens, C channels, S text tokens, D embedding width, K timesteps of one chunk.
"""

from contextlib import closing

import pytest
import torch
from staging_batches import (
    CONDITION_OPTIONS,
    CPU,
    STEP_OPTIONS,
    B,
    C,
    D,
    L,
    assert_same_step,
    direct_steps,
    make_batch,
    numbered,
    stacked,
    subsets,
)
from torch.multiprocessing.reductions import StorageWeakRef

import staging
from staging import FLOWGRPO_FIELDS, StepFields, check_supported, iterate_timesteps, step_input_bytes, validate_batch


def assert_same_steps(batch, num_timesteps, *, chunk=1, **mode):
    steps = iterate_timesteps(batch, FLOWGRPO_FIELDS, CPU, chunk=chunk, **mode)
    for step, expected in zip(steps, direct_steps(batch, num_timesteps, chunk), strict=True):
        assert_same_step(step, expected)


def record_gathers(monkeypatch):
    """Watch every tensor that staging makes. Returns weak references to the memory of all of them, and a list of the
    starts of steps that were alive when the entries of another one were gathered."""
    original, references, overlaps = staging.gather, [], []

    def gather(field, device, start=0, stop=None):
        if stop is not None:
            overlaps.extend(
                other for other, memory in references if other not in (None, start) and not memory.expired()
            )
        tensor = original(field, device, start, stop)
        references.append((None if stop is None else start, StorageWeakRef(tensor.untyped_storage())))
        return tensor

    monkeypatch.setattr(staging, "gather", gather)
    return references, overlaps


def alive(references):
    return [start for start, memory in references if not memory.expired()]


# ----- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("staged", "prefetch"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 3)])
def test_every_mode_yields_what_indexing_gives(listed, chunk, staged, prefetch):
    assert_same_steps(make_batch(listed=listed), 5, chunk=chunk, staged=staged, prefetch=prefetch)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("chunk", [1, 2])
def test_fields_are_rebased_together(staged, chunk):
    steps = iterate_timesteps(make_batch(4), FLOWGRPO_FIELDS, CPU, staged=staged, chunk=chunk)
    for number, step in enumerate(steps):
        for name, window in FLOWGRPO_FIELDS.per_step.items():
            assert step[name].shape[:2] == (B, chunk + window - 1), name
        assert step["all_timesteps"][:, 0].tolist() == [number * chunk, 4 + number * chunk]  # samples, then timesteps
        assert step["all_latents"].dtype == torch.float32
        assert step["prompt_embeds"].dtype == torch.bfloat16
        assert step["prompt_embeds_mask"].dtype == torch.int32


@pytest.mark.parametrize("options", subsets(STEP_OPTIONS))
@pytest.mark.parametrize("staged", [False, True])
def test_every_subset_of_the_optional_step_fields(options, staged):
    assert_same_steps(make_batch(3, options=options), 3, staged=staged)


@pytest.mark.parametrize("conditions", subsets(CONDITION_OPTIONS))
@pytest.mark.parametrize("staged", [False, True])
def test_every_subset_of_the_optional_conditions(conditions, staged):
    assert_same_steps(make_batch(3, conditions=conditions), 3, staged=staged)


@pytest.mark.parametrize("staged", [False, True])
def test_views_with_strides_are_copied_right(staged):
    batch = make_batch(3)
    batch["advantages"] = torch.tensor([1.0, -1.0])[:, None].expand(-1, 3)
    batch["all_latents"] = numbered(B, L, 4, C).transpose(1, 2)
    batch["negative_prompt_embeds"] = numbered(2, D, dtype=torch.bfloat16).expand(B, -1, -1)
    assert_same_steps(batch, 3, staged=staged)


@pytest.mark.parametrize("staged", [False, True])
def test_fields_that_nobody_reads_are_ignored(staged):
    batch = make_batch(3)
    unread = {
        "elsewhere": torch.empty(7, 9, device="meta"),
        "latents_clean": torch.zeros(1, requires_grad=True),
        "prompt": ["a", "b"],
    }
    for step, expected in zip(
        iterate_timesteps(batch | unread, FLOWGRPO_FIELDS, CPU, staged=staged),
        direct_steps(batch, 3, 1),
        strict=True,
    ):
        assert_same_step(step, expected)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("size", [1, B])
def test_steps_never_alias_the_batch(staged, listed, size):
    batch = {name: field[:size] for name, field in make_batch(3, listed=listed).items()}
    rows = [row for field in batch.values() for row in (field if isinstance(field, list) else [field])]
    own = {row.untyped_storage().data_ptr() for row in rows}
    before = {name: stacked(field).clone() for name, field in batch.items()}
    for step in iterate_timesteps(batch, FLOWGRPO_FIELDS, CPU, staged=staged):
        assert own.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in step.values())
        for tensor in step.values():
            tensor.zero_()
        if not staged:
            break  # here the steps are views of one copy
    assert_same_step({name: stacked(field) for name, field in batch.items()}, before)


# ----- Errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("num_timesteps", [1, 2, 7])
def test_validate_batch_returns_the_number_of_timesteps(listed, num_timesteps):
    assert validate_batch(make_batch(num_timesteps, listed=listed), FLOWGRPO_FIELDS) == num_timesteps


def longer(tensor):
    return torch.cat([tensor, tensor[:, -1:]], dim=1)


FAULTS = {  # what is done to a good field (B, T, ...), and what the message says of it
    "meta device": (lambda field: field.to("meta"), "on meta"),
    "one row on the meta device": (lambda field: [field[0], field[1].to("meta")], "on meta"),
    "requires grad": (lambda field: field.clone().requires_grad_(), "requires grad"),
    "one row requires grad": (lambda field: [field[0], field[1].clone().requires_grad_()], "requires grad"),
    "one sample more": (lambda field: torch.cat([field, field[:1]]), "3 samples"),
    "one row more": (lambda field: [*field, field[0]], "3 samples"),
    "mixed dtypes": (lambda field: [field[0], field[1].double()], "mixes rows"),
    "not a tensor": (lambda field: field.tolist(), "holds a list"),
    "one row is not a tensor": (lambda field: [field[0], field[1].tolist()], "holds a list"),
    "a plain number": (lambda field: 0.5, "holds a float"),
    "empty list": (lambda field: [], "empty list"),
}
STEP_FAULTS = {
    "one timestep more": (longer, "timesteps"),
    "rows all longer": (lambda field: list(longer(field)), "timesteps"),
    "rows of unequal length": (lambda field: [field[0], field[1, :-1]], "entries along time"),
    "no time dimension": (lambda field: field.flatten()[:B], "no time dimension"),
    "rows without time": (lambda field: list(field.flatten()[:B]), "no time dimension"),
    "a single number": (lambda field: field.flatten()[0], "no batch dimension"),
}


def assert_refused(name, fault, words):
    batch = make_batch(3)
    batch[name] = fault(batch[name])
    with pytest.raises(ValueError, match=words) as error:
        validate_batch(batch, FLOWGRPO_FIELDS)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["all_latents", "old_log_probs", "rollout_is_weights", "negative_prompt_embeds"])
def test_faulty_fields_are_refused_by_name(name, fault):
    assert_refused(name, *FAULTS[fault])


@pytest.mark.parametrize("fault", STEP_FAULTS)
@pytest.mark.parametrize("name", ["all_latents", "sigmas", "advantages", "ref_prev_sample_mean"])
def test_faulty_step_fields_are_refused_by_name(name, fault):
    assert_refused(name, *STEP_FAULTS[fault])


def test_rows_of_unequal_trailing_shape_are_refused():
    assert_refused("all_latents", lambda field: [field[0], field[1, :, :1]], "mixes rows")


@pytest.mark.parametrize("name", sorted({*FLOWGRPO_FIELDS.shared, *FLOWGRPO_FIELDS.per_step}))
def test_missing_fields_are_refused_unless_optional(name):
    batch = make_batch(3)
    del batch[name]
    if name in (*STEP_OPTIONS, *CONDITION_OPTIONS):
        assert validate_batch(batch, FLOWGRPO_FIELDS) == 3
    else:
        with pytest.raises(ValueError, match=f"field '{name}' is missing"):
            validate_batch(batch, FLOWGRPO_FIELDS)


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
def test_less_than_one_timestep_is_refused(listed):
    with pytest.raises(ValueError, match="'all_latents' holds no whole timestep"):
        validate_batch(make_batch(0, listed=listed), FLOWGRPO_FIELDS)


@pytest.mark.parametrize(("chunk", "prefetch"), [(0, 0), (1, -1)])
def test_a_chunk_below_1_or_a_negative_prefetch_is_refused(chunk, prefetch):
    with pytest.raises(ValueError, match=f"chunk is {chunk} and prefetch {prefetch}: give at least 1 and 0"):
        next(iterate_timesteps(make_batch(3), FLOWGRPO_FIELDS, CPU, staged=True, chunk=chunk, prefetch=prefetch))


@pytest.mark.parametrize("staged", [False, True])
def test_iterating_checks_before_it_copies(monkeypatch, staged):
    references, _ = record_gathers(monkeypatch)
    batch = make_batch(3) | {"ref_log_prob": numbered(B, 4)}
    with pytest.raises(ValueError, match="'ref_log_prob'"):
        next(iterate_timesteps(batch, FLOWGRPO_FIELDS, CPU, staged=staged))
    assert not references


# ----- Lifetime ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_step_is_dead_before_the_next_is_gathered(monkeypatch, listed, chunk, prefetch):
    references, overlaps = record_gathers(monkeypatch)
    steps = iterate_timesteps(
        make_batch(5, listed=listed), FLOWGRPO_FIELDS, CPU, staged=True, chunk=chunk, prefetch=prefetch
    )
    with closing(steps):
        for number, step in enumerate(steps):
            step_now = [number * chunk] * len(FLOWGRPO_FIELDS.per_step)
            assert alive(references) == [None] * len(FLOWGRPO_FIELDS.shared) + step_now
            assert step["all_timesteps"][0, 0] == number * chunk
    assert not overlaps
    assert not alive(references)
    assert not step  # a consumer that keeps the dict keeps no tensor


@pytest.mark.parametrize("staged", [False, True])
def test_nothing_is_alive_after_close(monkeypatch, staged):
    references, _ = record_gathers(monkeypatch)
    steps = iterate_timesteps(make_batch(5), FLOWGRPO_FIELDS, CPU, staged=staged)
    step = next(steps)
    assert alive(references)
    steps.close()
    assert not alive(references)
    assert not step


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("fails_at", [0, 2, 4])
def test_nothing_is_alive_after_an_error_in_the_loop(monkeypatch, staged, fails_at):
    references, overlaps = record_gathers(monkeypatch)

    def consume():
        with closing(iterate_timesteps(make_batch(5), FLOWGRPO_FIELDS, CPU, staged=staged)) as steps:
            for number, step in enumerate(steps):
                if number == fails_at:
                    raise RuntimeError(f"step {number} with {len(step)} fields")

    with pytest.raises(RuntimeError, match=f"step {fails_at}"):  # its traceback still holds the frames
        consume()
    assert references
    assert not alive(references)
    assert not overlaps


# ----- Bytes -------------------------------------------------------------------------------------------------------


def resident_bytes(batch, **mode):
    """Largest sum of the memory behind a step's per-step fields, as counted from what is yielded."""
    largest = 0
    for step in iterate_timesteps(batch, FLOWGRPO_FIELDS, CPU, **mode):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for n, t in step.items() if n in STEP_NAMES}
        largest = max(largest, sum(storage.nbytes() for storage in storages.values()))
    return largest


STEP_NAMES = frozenset(FLOWGRPO_FIELDS.per_step)


@pytest.mark.parametrize("num_timesteps", [1, 8, 32])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists"])
def test_step_input_bytes_is_what_the_iterator_holds(num_timesteps, chunk, staged, listed):
    batch = make_batch(num_timesteps, listed=listed, options=("ref_prev_sample_mean",))
    predicted = step_input_bytes(batch, FLOWGRPO_FIELDS, staged=staged, chunk=chunk)
    assert predicted == resident_bytes(batch, staged=staged, chunk=chunk)


def test_step_input_bytes_grow_with_timesteps_only_when_not_staged():
    on_meta = {t: {n: f.to("meta") for n, f in make_batch(t, options=()).items()} for t in (1, 8, 32)}
    plain, staged = (
        [step_input_bytes(batch, FLOWGRPO_FIELDS, staged=flag) for batch in on_meta.values()] for flag in (False, True)
    )
    per_latent, per_number = B * L * C * 4, B * 4
    assert staged == [2 * per_latent + 5 * per_number] * 3  # x_t and x_t+1; two sigmas and one each of three others
    assert plain == [(t + 1) * (per_latent + per_number) + 3 * t * per_number for t in (1, 8, 32)]


@pytest.mark.parametrize("chunk", [1, 2, 4, 32])
def test_a_chunk_of_k_holds_k_plus_1_latents(chunk):
    latents = {"all_latents": make_batch(32)["all_latents"]}
    only_latents = StepFields(shared=(), per_step={"all_latents": 2})
    assert step_input_bytes(latents, only_latents, staged=True, chunk=chunk) == (chunk + 1) * B * L * C * 4
    steps = iterate_timesteps(latents, only_latents, CPU, staged=True, chunk=chunk)
    assert {step["all_latents"].untyped_storage().nbytes() for step in steps} == {(chunk + 1) * B * L * C * 4}


# ----- Launchers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["true", "True", "1", "yes"])
@pytest.mark.parametrize("variable", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_TPU"])
def test_untried_engines_are_refused(variable, value):
    with pytest.raises(ValueError, match=f"not supported.*{variable}.*launch with") as error:
        check_supported({variable: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["CP", "SP", "TP"])
def test_untried_parallelism_is_refused(kind):
    with pytest.raises(ValueError, match=f"PARALLELISM_CONFIG_{kind}_SIZE is 2") as error:
        check_supported({f"PARALLELISM_CONFIG_{kind}_SIZE": "2"})
    assert "\n" not in str(error.value)


def test_tried_launchers_pass():
    check_supported({})
    check_supported(
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "ACCELERATE_USE_DEEPSPEED": "false",
            "ACCELERATE_USE_MEGATRON_LM": "False",
            "ACCELERATE_USE_TPU": "0",
            "PARALLELISM_CONFIG_CP_SIZE": "1",
            "PARALLELISM_CONFIG_SP_SIZE": "",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8",
        }
    )
