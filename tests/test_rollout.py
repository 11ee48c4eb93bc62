"""Tests of rollout.py: the SDE window, what a trajectory holds, and that the first ratio is exactly 1.

python -m pytest tests/test_rollout.py
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from evaluation import sample_evaluation
from qwen_image import (
    SDE_TYPES,
    decode_latents,
    encode_prompts,
    get_sigmas,
    load_pipeline,
    predict_velocity,
    prompt_conditions,
    sde_step_with_logprob,
    seeded_noise,
)
from rewards import jpeg_incompressibility
from rollout import draw_sde_window, sample_batch, write_rollout
from scorer import Scorer
from trajectory_cache import (
    NEGATIVE_PROMPT_ID,
    open_cache,
    read_micro_batch,
    read_prompt_embeds,
    read_tensors,
    write_manifest,
)

HEIGHT, WIDTH, TOKENS, STEPS = 64, 32, 8, 5
SIZE = {"height": HEIGHT, "width": WIDTH}
CPU = torch.device("cpu")
PROMPTS = [
    {"prompt": "a red fox", "tag": 5},
    {"prompt": "a dog", "tag": 6},
    {"prompt": "two cats on a roof", "tag": 7},
]
FIELDS = ("all_latents", "sigmas", "sigma_max", "all_timesteps", "old_log_probs", "latents_clean")


@pytest.fixture(scope="module")
def model(tiny_pipeline_folder):
    """The tiny pipeline's parts as a training script holds them: policy, embeddings of PROMPTS, negative, schedule."""
    pipeline = load_pipeline(tiny_pipeline_folder, dtype=torch.float32)
    texts = [row["prompt"] for row in PROMPTS] + [" "]
    *embeddings, negative = encode_prompts(pipeline, texts, device=CPU, max_sequence_length=512)
    options = SIZE | {"true_cfg_scale": 3.0, "cfg_batched": True, "dtype": torch.float32}
    return SimpleNamespace(
        predict=partial(predict_velocity, pipeline.transformer, **options),
        embeddings=embeddings,
        negative=negative,
        vae=pipeline.vae,
        sigmas=get_sigmas(pipeline.scheduler, STEPS, **SIZE),
    )


def conditions_of(model, prompt_ids):
    return prompt_conditions([model.embeddings[prompt_id] for prompt_id in prompt_ids], model.negative)


def sample(model, samples, prompt_ids, *, seed_words=(0, 0), **options):
    options = {"sde_window": (1, 3), "noise_level": 0.7, "predict": model.predict} | options
    return sample_batch(
        options.pop("predict"),
        conditions=conditions_of(model, prompt_ids),
        samples=samples,
        device=CPU,
        sigmas=model.sigmas,
        seed_words=seed_words,
        **SIZE,
        **options,
    )


def ode(model, latents, prompt_ids, first, stop):
    """Euler steps from schedule position first to stop, written out."""
    for sigma, sigma_next in zip(model.sigmas[first:stop], model.sigmas[first + 1 : stop + 1], strict=True):
        velocity = model.predict(latents, (sigma * 1000).expand(len(latents)), **conditions_of(model, prompt_ids))
        latents = latents + (sigma_next - sigma) * velocity
    return latents


# ----- Window ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "window_range", "starts"), [(2, (0, 5), {0, 1, 2, 3}), (1, (1, 3), {1, 2}), (3, (2, 5), {2})]
)
def test_windows_lie_in_the_range_and_every_start_occurs(size, window_range, starts):
    windows = [draw_sde_window(size, window_range, 10, seed=0, epoch=epoch) for epoch in range(100)]
    assert {start for start, _ in windows} == starts
    assert {stop - start for start, stop in windows} == {size}


def test_window_size_0_is_all_steps_but_the_last():
    assert draw_sde_window(0, (0, 5), 10, seed=0, epoch=0) == (0, 9)


@pytest.mark.parametrize(
    ("size", "window_range", "epochs", "stride", "starts"),
    [
        (2, (0, 5), 2, 1, [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]),  # the last window stays
        (2, (0, 5), 3, 2, [0, 0, 0, 2, 2, 2, 3, 3, 3, 3]),  # a stride beyond the end stops at it
        (3, (4, 7), 1, 1, [4] * 10),
        (1, (2, 9), 1, 1, [2, 3, 4, 5, 6, 7, 8, 8, 8, 8]),
    ],
)
def test_progressive_windows_move_on_and_stop_at_the_end(size, window_range, epochs, stride, starts):
    schedule = {"schedule": "progressive", "epochs_per_window": epochs, "stride": stride}
    windows = [draw_sde_window(size, window_range, 10, seed=0, epoch=epoch, **schedule) for epoch in range(10)]
    assert windows == [(start, start + size) for start in starts]


def test_windows_are_a_function_of_seed_and_epoch():
    first, again, other_seed = (
        [draw_sde_window(2, (0, 5), 10, seed=seed, epoch=epoch) for epoch in range(30)] for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other_seed


# ----- Trajectories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sde_window", [(0, 2), (1, 3), (2, 3), (0, STEPS - 1)])
def test_fields_have_the_documented_shapes_and_agree_with_the_window(model, sde_window):
    (start, stop), prompt_ids = sde_window, [0, 2, 2]
    got = sample(model, [3, 4, 5], prompt_ids, sde_window=sde_window, keep_prev_sample_mean=True)
    trained = stop - start
    assert {name: tuple(tensor.shape) for name, tensor in got.items()} == {
        "latents_clean": (3, TOKENS, 64),
        "all_latents": (3, trained + 1, TOKENS, 64),
        "sigmas": (3, trained + 1),
        "sigma_max": (3,),
        "all_timesteps": (3, trained),
        "old_log_probs": (3, trained),
        "old_prev_sample_mean": (3, trained, TOKENS, 64),
    }
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    for row in range(3):
        assert torch.equal(got["sigmas"][row], model.sigmas[start : stop + 1])
        assert torch.equal(got["all_timesteps"][row], model.sigmas[start:stop] * 1000)
        assert got["sigma_max"][row] == model.sigmas[1]
    noise = torch.stack([seeded_noise((0, 0, number, 0), (TOKENS, 64)) for number in (3, 4, 5)])
    before, after = (
        ode(model, noise, prompt_ids, 0, start),
        ode(model, got["all_latents"][:, -1], prompt_ids, stop, STEPS),
    )
    torch.testing.assert_close(got["all_latents"][:, 0], before, rtol=0, atol=1e-6)
    torch.testing.assert_close(got["latents_clean"], after, rtol=0, atol=1e-6)


def test_an_empty_window_keeps_the_clean_latents_of_the_ode_alone(model):
    got = sample(model, [3, 4], [0, 1], sde_window=(0, 0))
    assert got.keys() == {"latents_clean"}
    noise = torch.stack([seeded_noise((0, 0, number, 0), (TOKENS, 64)) for number in (3, 4)])
    torch.testing.assert_close(got["latents_clean"], ode(model, noise, [0, 1], 0, STEPS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_every_step_in_the_window_has_fresh_noise_of_its_own(model, sde_type):
    got = sample(model, [3, 4], [1, 1], sde_window=(0, 3), sde_type=sde_type, keep_prev_sample_mean=True)
    noise = (got["all_latents"][:, 1:] - got["old_prev_sample_mean"]).flatten(0, 1).flatten(1)  # (2 x 3, L C)
    correlation = torch.corrcoef(noise).fill_diagonal_(0)
    assert noise.std(dim=1).min() > 0.01
    assert correlation.abs().max() < 0.2


@pytest.mark.parametrize("sde_window", [(0, 0), (1, 3)])
def test_a_sample_is_the_same_in_any_batch(model, sde_window):
    together = sample(model, [5, 9, 7], [0, 2, 1], sde_window=sde_window)
    alone = sample(model, [9], [2], sde_window=sde_window)
    for name in together:
        torch.testing.assert_close(together[name][1:2], alone[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("number", "seed_words"), [(4, (0, 0)), (3, (1, 0)), (3, (0, 1))])
def test_sample_seed_and_epoch_change_the_initial_and_the_step_noise(model, number, seed_words):
    def noise(number, seed_words):
        options = {"sde_window": (0, 2), "keep_prev_sample_mean": True, "seed_words": seed_words}
        got = sample(model, [number], [0], **options)
        return [got["all_latents"][0, 0], *(got["all_latents"][0, 1:] - got["old_prev_sample_mean"][0])]

    for first, again, other in zip(noise(3, (0, 0)), noise(3, (0, 0)), noise(number, seed_words), strict=True):
        assert torch.equal(first, again)
        assert torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1].abs() < 0.2


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize("cfg_batched", [True, False])
@pytest.mark.parametrize("prompt_ids", [[0, 0, 0], [0, 2, 1]])  # without and with padding
def test_log_probs_recomputed_from_what_is_stored_are_equal_bit_for_bit(model, sde_type, cfg_batched, prompt_ids):
    predict = partial(model.predict, cfg_batched=cfg_batched)
    options = {"sde_window": (0, 3), "sde_type": sde_type, "keep_prev_sample_mean": True}
    got = sample(model, [3, 4, 5], prompt_ids, predict=predict, **options)
    for step in range(3):
        latents, prev_sample = got["all_latents"][:, step], got["all_latents"][:, step + 1]
        velocity = predict(latents, got["all_timesteps"][:, step], **conditions_of(model, prompt_ids))
        sigmas = got["sigmas"][:, step], got["sigmas"][:, step + 1]
        _, log_probs, mean, _, _ = sde_step_with_logprob(
            velocity, latents, *sigmas, sigma_max=got["sigma_max"],
            noise_level=0.7, sde_type=sde_type, prev_sample=prev_sample,
        )  # fmt: skip
        assert torch.equal(log_probs, got["old_log_probs"][:, step])
        assert torch.equal(mean, got["old_prev_sample_mean"][:, step])


# ----- The cache ---------------------------------------------------------------------------------------------------


def write(model, folder, negative, fields=FIELDS):
    """Two of four batches, out of order; returns (batches, prompt_ids, rewards (4, 3))."""
    batches, prompt_ids = [[6, 7], [2, 3]], [2, 2, 2, 0, 0, 0, 1, 1]
    rewards = {
        "jpeg": jpeg_incompressibility,
        "tag": lambda images, prompts, metadata: [row["tag"] for row in metadata],
        "length": lambda images, prompts, metadata: [len(prompt) for prompt in prompts],
    }
    scores = write_rollout(
        model.predict if negative is not None else partial(model.predict, true_cfg_scale=1.0),
        folder=folder, shard=1, batches=batches, prompt_ids=prompt_ids, prompts=PROMPTS,
        embeddings=dict(enumerate(model.embeddings)), negative=negative, vae=model.vae, scorer=Scorer(rewards),
        rewards=list(rewards),
        sizes=[(HEIGHT, WIDTH)] * 3, sigmas={(HEIGHT, WIDTH): model.sigmas}, sde_window=(1, 3), sde_type="sde",
        noise_level=0.7, seed_words=(0, 4), fields=fields,
    )  # fmt: skip
    write_manifest(folder, 1, {"num_shards": 2})
    return batches, prompt_ids, scores


def test_a_rollout_reads_back_as_it_was_sampled(model, tmp_path):
    batches, prompt_ids, scores = write(model, tmp_path, model.negative)
    cache = open_cache(tmp_path, shards=[1], verify_checksums=True)
    assert cache.sample_indices == [6, 7, 2, 3]
    assert cache.prompt_ids == [1, 1, 2, 0]
    for first, batch in zip((0, 2), batches, strict=True):
        ids = [prompt_ids[number] for number in batch]
        expected = sample(model, batch, ids, seed_words=(0, 4))
        read = read_micro_batch(cache, [first, first + 1])
        assert read.keys() == set(FIELDS)
        for name in FIELDS:
            rows = read[name] if isinstance(read[name], list) else list(read[name])
            assert torch.equal(torch.stack(rows), expected[name])
        images = decode_latents(model.vae, expected["latents_clean"], **SIZE)
        assert scores[first : first + 2, 0].tolist() == jpeg_incompressibility(images, [], [])
    assert scores[:, 1:].tolist() == [[6, 5], [6, 5], [7, 18], [5, 9]]
    assert scores.dtype == torch.float64


@pytest.mark.parametrize("with_negative", [True, False])
def test_the_prompts_table_holds_each_used_prompt_once(model, tmp_path, with_negative):
    write(model, tmp_path, model.negative if with_negative else None)
    cache = open_cache(tmp_path, shards=[1])
    assert list(cache.prompt_rows) == [NEGATIVE_PROMPT_ID] * with_negative + [0, 1, 2]
    texts = dict(zip(cache.prompt_rows, cache.prompts.data.column("prompt").to_pylist(), strict=True))
    for prompt_id, embedding in enumerate(model.embeddings):
        assert torch.equal(read_prompt_embeds(cache, prompt_id), embedding)
        assert texts[prompt_id] == PROMPTS[prompt_id]["prompt"]
    if with_negative:
        assert torch.equal(read_prompt_embeds(cache, NEGATIVE_PROMPT_ID), model.negative)


def test_only_the_named_fields_are_written(model, tmp_path):
    write(model, tmp_path, model.negative, fields=("latents_clean",))
    assert read_tensors(open_cache(tmp_path, shards=[1]).trajectories, 0).keys() == {"latents_clean"}


# ----- Evaluation --------------------------------------------------------------------------------------------------


def evaluate(model, rank, world_size, batch_size=2, seed=0):
    rewards = {
        "jpeg": jpeg_incompressibility,
        "tag": lambda images, prompts, metadata: [row["tag"] for row in metadata],
    }
    return sample_evaluation(
        model.predict, prompts=PROMPTS, sizes=[(HEIGHT, WIDTH)] * 3, embeddings=dict(enumerate(model.embeddings)),
        negative=model.negative, vae=model.vae, scorer=Scorer(rewards), rewards=list(rewards),
        sigmas={(HEIGHT, WIDTH): model.sigmas}, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 5)])
def test_the_ranks_parts_of_an_evaluation_sum_to_the_whole(model, world_size, batch_size):
    expected_scores, expected_grid = evaluate(model, 0, 1, batch_size=1)
    parts = [evaluate(model, rank, world_size, batch_size) for rank in range(world_size)]
    scores, grid = sum(part[0] for part in parts), sum(part[1].int() for part in parts)
    assert scores[:, 1].tolist() == [5, 6, 7]
    torch.testing.assert_close(scores[:, 0], expected_scores[:, 0], rtol=0, atol=0.02)  # kB; rounding moves few bytes
    assert (grid - expected_grid.int()).abs().max() <= 1
    assert grid.float().flatten(1).std(dim=1).min() > 1


def test_the_seed_changes_the_evaluations_images(model):
    assert not torch.equal(evaluate(model, 0, 1)[1], evaluate(model, 0, 1, seed=1)[1])
