"""train_flowgrpo.train_batch: one update is the same in every mode, matches the formula, and fails cleanly.

    python -m pytest tests/test_train_batch.py

All on the transformer of the tiny pipeline, fp32 on a CPU; SGD, so that weights move by the gradients themselves.
Broken on purpose, each once:
    log-prob as a sum       fails test_log_probs_are_mean_densities, test_an_update_is_a_step_on_the_mean_loss
    no clip                 fails test_clipped_loss*, test_an_update_is_a_step_on_the_mean_loss
    old_log_probs off by 1  fails test_the_first_ratio_is_one, test_an_update_is_a_step_on_the_mean_loss

Shapes: B samples, W trained timesteps, L tokens, C channels.
"""

import inspect
import math
from contextlib import suppress

import pytest
import torch
from flowgrpo_updates import (
    CONDITIONS,
    CPU,
    MODES,
    SDE_TYPES,
    STAGED,
    B,
    C,
    L,
    W,
    assert_equal,
    call_counter,
    distance,
    make_batch,
    old_log_probs,
    plain_updates,
    start,
    update,
    weights,
)
from torch.distributions import Normal
from torch.multiprocessing.reductions import StorageWeakRef

import staging
import train_flowgrpo
from train_flowgrpo import clipped_loss, forward_only, train_batch
from trajectory_cache import open_cache, read_micro_batch, table_writer, write_manifest

# ----- The same update in every mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "not staged"])
def test_staging_changes_no_bit(conditions, mode):
    options = CONDITIONS[conditions]
    batches = [make_batch(0, **options), make_batch(1, listed=True, **options)]
    metrics, _, trained = update(start(*MODES[mode]), batches, updates=2)
    expected_metrics, expected = plain_updates(conditions, 2)
    assert metrics == expected_metrics
    assert_equal(trained, expected)


@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("mode", ["not staged", "staged"])
@pytest.mark.parametrize("chunk", [2, 3])  # 2 leaves a last chunk of one timestep
def test_timesteps_in_one_forward_change_only_the_rounding(conditions, mode, chunk):
    batches = [make_batch(seed, **CONDITIONS[conditions]) for seed in (0, 1)]
    policy, calls = call_counter(start(*MODES[mode], "--timesteps_per_forward", str(chunk)))
    metrics, _, trained = update(policy, batches, updates=2)
    assert calls == {2: [2 * B, B], 3: [3 * B]}[chunk] * 4
    expected_metrics, expected = plain_updates(conditions, 2)
    assert distance(trained, expected) < 1e-6
    assert metrics == [pytest.approx(numbers, rel=1e-4, abs=1e-6) for numbers in expected_metrics]


def test_views_of_the_cache_train_like_tensors_in_memory(tmp_path):
    fields = ("all_latents", "sigmas", "sigma_max", "all_timesteps", "old_log_probs")
    batch = make_batch()
    with table_writer(tmp_path / "trajectories-00000.arrow") as write:
        for row in range(B):
            write({"sample_index": row, "prompt_id": 0} | {name: batch[name][row] for name in fields})
    with table_writer(tmp_path / "prompts-00000.arrow") as write:
        write({"prompt_id": 0, "prompt_embeds": batch["prompt_embeds"][0]})
    write_manifest(tmp_path, 0, {"num_shards": 1})
    cached = read_micro_batch(open_cache(tmp_path), range(B))
    assert isinstance(cached["all_latents"], list)
    expected = update(start(), [batch])[2]
    for flags in MODES.values():
        assert_equal(update(start(*flags), [batch | cached])[2], expected)


# ----- The formula -------------------------------------------------------------------------------------------------


def log_density(sde_type, prev_sample, mean, std_dev_t, sqrt_dt):
    """Mean over L and C of the log-density of prev_sample (B, W, L, C); cps drops the Gaussian's scale."""
    if sde_type == "cps":
        return -((prev_sample - mean) ** 2).mean(dim=(2, 3))
    std = std_dev_t * sqrt_dt if sde_type == "sde" else std_dev_t
    return Normal(mean, std[..., None, None]).log_prob(prev_sample).mean(dim=(2, 3))


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_log_probs_are_mean_densities(sde_type):
    args, _, _, predict, _, _ = start("--sde_type", sde_type)
    batch = make_batch()
    outputs = forward_only(args, predict, batch, CPU)
    latents, mean = batch["all_latents"], outputs["prev_sample_mean"]
    expected = log_density(sde_type, latents[:, 1:], mean, outputs["std_dev_t"], outputs["sqrt_dt"])
    torch.testing.assert_close(outputs["log_probs"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs["sqrt_dt"] ** 2, -batch["sigmas"].diff(dim=1))
    assert outputs["log_probs"].std() > 0.01  # timesteps and samples are told apart


def reference_loss(policy, batch, *, clip_range=0.2, adv_clip_max=5.0):
    """Mean over samples and timesteps of one micro-batch, written out for Flow-SDE; a separate forward a timestep."""
    args, _, _, predict, _, _ = policy
    total = 0
    for t in range(W):
        x, x_next = batch["all_latents"][:, t], batch["all_latents"][:, t + 1]
        sigma, sigma_next = batch["sigmas"][0, t], batch["sigmas"][0, t + 1]
        embeds = {name: batch[name] for name in batch if "prompt_embeds" in name}
        velocity = predict(x, batch["all_timesteps"][:, t], **embeds)
        std, dt = args.noise_level * (sigma / (1 - sigma)).sqrt(), sigma_next - sigma
        mean = x + dt * velocity + std**2 / (2 * sigma) * dt * (x + (1 - sigma) * velocity)
        log_prob = Normal(mean, std * (-dt).sqrt()).log_prob(x_next).mean(dim=(1, 2))
        ratio = (log_prob - batch["old_log_probs"][:, t]).exp()
        advantage = batch["advantages"][:, t].clamp(-adv_clip_max, adv_clip_max)
        reward = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)
        total = total - (reward * batch.get("rollout_is_weights", torch.ones(B, W))[:, t]).sum() / (B * W)
    return total


@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_an_update_is_a_step_on_the_mean_loss(is_weights, mode):
    batches = [make_batch(seed, is_weights=is_weights, **CONDITIONS["bf16 and masks"]) for seed in (0, 1)]
    batches.append(make_batch(2, is_weights=is_weights))
    reference = start()
    loss = sum(reference_loss(reference, batch) for batch in batches) / len(batches)
    loss.backward()
    gradients = [parameter.grad for parameter in reference[-1]]
    expected = [p.detach() - 20 * gradient for p, gradient in zip(reference[-1], gradients, strict=True)]
    (metrics,), _, trained = update(start(*MODES[mode]), batches)
    assert distance(trained, expected) < 1e-5
    assert metrics["policy_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(math.hypot(*(g.norm().item() for g in gradients)), rel=1e-4)


@pytest.mark.parametrize("cfg_batched", ["--cfg_batched", "--no-cfg_batched"])
@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_the_first_ratio_is_one(cfg_batched, sde_type, mode):
    policy = start("--sde_type", sde_type, cfg_batched, *MODES[mode])
    batches = [make_batch(0), make_batch(1, embeds_dtype=torch.bfloat16, masks=True)]
    for batch in batches:
        batch["old_log_probs"] = old_log_probs(policy, batch)
    (first, second), _, _ = update(policy, batches, updates=2)
    assert first["ratio_max_dev"] == 0
    assert first["clipfrac"] == 0
    assert second["ratio_max_dev"] > 0


def test_rollout_weights_multiply_the_loss():
    plain = make_batch(is_weights=False)
    (metrics,), _, trained = update(start(learning_rate=20), [plain])
    doubled = plain | {"rollout_is_weights": torch.full((B, W), 2.0)}
    (doubled_metrics,), _, doubled_trained = update(start(learning_rate=10), [doubled])
    assert doubled_metrics["policy_loss"] == 2 * metrics["policy_loss"]
    assert doubled_metrics["grad_norm"] == 2 * metrics["grad_norm"]
    assert_equal(doubled_trained, trained)
    zero = plain | {"rollout_is_weights": torch.zeros(B, W)}
    assert_equal(update(start(), [zero])[2], weights(start()))


def test_rollout_weights_are_one_per_sample_and_timestep():
    plain = make_batch(is_weights=False)
    changed = plain | {"advantages": plain["advantages"].clone(), "rollout_is_weights": torch.ones(B, W)}
    plain["rollout_is_weights"] = torch.ones(B, W)
    plain["rollout_is_weights"][1, 2] = 0
    changed["advantages"][1, 2] = 0  # a sample without advantage has no loss either
    assert_equal(update(start(*STAGED), [plain])[2], update(start(*STAGED), [changed])[2])


GOLDEN = [  # advantage, ratio, loss, its derivative by the log-prob; clip_range 0.2, adv_clip_max 5
    (2.0, 1.0, -2.0, -2.0),
    (2.0, 1.1, -2.2, -2.2),
    (2.0, 1.5, -2.4, 0.0),  # better than the clip allows: nothing more to gain
    (2.0, 0.5, -1.0, -1.0),
    (-2.0, 1.5, 3.0, 3.0),
    (-2.0, 0.5, 1.6, 0.0),
    (-2.0, 0.9, 1.8, 1.8),
    (10.0, 1.0, -5.0, -5.0),
    (-10.0, 1.0, 5.0, 5.0),
    (10.0, 2.0, -6.0, 0.0),
    (0.0, 3.0, 0.0, 0.0),
]


def test_clipped_loss_has_the_values_of_the_paper():
    advantages, ratios, losses, derivatives = torch.tensor(GOLDEN, dtype=torch.float64).T[:, :, None]  # each (B, 1)
    old_log_probs = torch.linspace(-3, 3, len(GOLDEN), dtype=torch.float64)[:, None]
    log_probs = (old_log_probs + ratios.log()).requires_grad_()
    loss, ratio = clipped_loss(log_probs, old_log_probs, advantages, clip_range=0.2, adv_clip_max=5.0)
    loss.sum().backward()
    torch.testing.assert_close(loss, losses)
    torch.testing.assert_close(ratio, ratios)
    torch.testing.assert_close(log_probs.grad, derivatives)


@pytest.mark.parametrize(("advantage", "offset", "moves"), [(1.0, 1, False), (1.0, -1, True), (-1.0, -1, False)])
def test_clipped_loss_stops_the_update(advantage, offset, moves):
    batch = make_batch()
    batch["advantages"] = torch.full((B, W), advantage)
    batch["old_log_probs"] = old_log_probs(start(), batch) - offset  # ratio e or 1/e, clip 0.2
    (metrics,), _, trained = update(start(), [batch])
    assert metrics["clipfrac"] == 1
    assert (metrics["grad_norm"] > 0) == moves
    assert (distance(trained, weights(start())) > 0) == moves


# ----- Outputs -----------------------------------------------------------------------------------------------------

OUTPUT_SHAPES = {"log_probs": (B, W), "prev_sample_mean": (B, W, L, C), "std_dev_t": (B, W), "sqrt_dt": (B, W)}


@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_outputs_are_released_unless_asked_for(mode):
    assert update(start(*MODES[mode]), [make_batch()])[1] == []


@pytest.mark.parametrize("mode", ["not staged", "staged"])
@pytest.mark.parametrize("chunk", [1, 2])
def test_kept_outputs_are_those_of_the_forward(mode, chunk):
    flags = (*MODES[mode], "--timesteps_per_forward", str(chunk))
    batches = [make_batch(0), make_batch(1, embeds_dtype=torch.bfloat16, masks=True)]
    policy = start(*flags, "--return_model_output")
    expected = [forward_only(policy[0], policy[3], batch, CPU) for batch in batches]
    metrics, kept, trained = update(policy, batches)
    assert len(kept) == len(batches)
    for outputs, forward_outputs in zip(kept, expected, strict=True):
        assert {name: tensor.shape for name, tensor in outputs.items()} == OUTPUT_SHAPES
        for name, tensor in outputs.items():
            assert not tensor.requires_grad
            tolerance = 0 if chunk == 1 else 1e-5
            torch.testing.assert_close(tensor, forward_outputs[name], rtol=tolerance, atol=tolerance)
    other_metrics, _, other_trained = update(start(*flags), batches)  # keeping them changes nothing
    assert other_metrics == metrics
    assert_equal(other_trained, trained)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_forward_only_returns_everything_whatever_the_flags(sde_type):
    batch = make_batch()
    results = []
    for flags in ((), ("--return_model_output",), STAGED, (*STAGED, "--return_model_output")):
        args, _, _, predict, _, trainable = start("--sde_type", sde_type, *flags)
        results.append(forward_only(args, predict, batch, CPU))
        assert all(parameter.grad is None for parameter in trainable)
    for outputs in results:
        assert {name: tensor.shape for name, tensor in outputs.items()} == OUTPUT_SHAPES
        assert not any(tensor.requires_grad for tensor in outputs.values())
        assert_equal([outputs[name] for name in OUTPUT_SHAPES], [results[0][name] for name in OUTPUT_SHAPES])


# ----- Failures ----------------------------------------------------------------------------------------------------


def without(batch, name):
    return {other: field for other, field in batch.items() if other != name}


BAD_BATCHES = {
    "advantages": lambda batch: without(batch, "advantages"),
    "prompt_embeds": lambda batch: without(batch, "prompt_embeds"),
    "all_latents": lambda batch: batch | {"all_latents": batch["all_latents"].clone().requires_grad_()},
    "old_log_probs": lambda batch: batch | {"old_log_probs": batch["old_log_probs"][:, :-1]},
    "sigmas": lambda batch: batch | {"sigmas": batch["sigmas"].to("meta")},
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_a_bad_last_micro_batch_is_refused_before_the_first_forward(name, mode):
    policy, calls = call_counter(start(*MODES[mode]))
    before = weights(policy)
    with pytest.raises(ValueError, match=f"'{name}'"):
        train_batch(*policy, [make_batch(0), make_batch(1), BAD_BATCHES[name](make_batch(2))])
    assert calls == []
    assert all(parameter.grad is None for parameter in policy[-1])
    assert_equal(weights(policy), before)


@pytest.mark.parametrize("fails_at", [1, 2, 4, 2 * W])
@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_updates_after_a_failed_step_are_those_without_it(fails_at, mode):
    batches = [make_batch(0), make_batch(1)]
    policy, calls = call_counter(start(*MODES[mode]), fails_at=fails_at)
    with pytest.raises(RuntimeError, match=f"call {fails_at} failed"):
        train_batch(*policy, batches)
    assert len(calls) == fails_at
    assert all(parameter.grad is None for parameter in policy[-1])
    metrics, _, trained = update(policy, batches, updates=3)
    expected_metrics, expected = plain_updates("fp32", 3)
    assert metrics == expected_metrics
    assert_equal(trained, expected)


# ----- Lifetime ----------------------------------------------------------------------------------------------------


def record_gathers(monkeypatch):
    """Weak references to the memory of every tensor that staging makes, and the starts of steps that were alive when
    the entries of another one were gathered."""
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


@pytest.mark.parametrize("mode", ["not staged", "staged"])
@pytest.mark.parametrize("keep", [(), ("--return_model_output",)], ids=["released", "kept"])
@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_no_input_survives_its_step(monkeypatch, mode, keep, sde_type):
    batches = [make_batch(0), make_batch(1)]
    policy = start(*MODES[mode], *keep, "--sde_type", sde_type)
    references, overlaps = record_gathers(monkeypatch)
    _, kept = train_batch(*policy, batches)
    assert len(kept) == (2 if keep else 0)
    assert len({begin for begin, _ in references if begin is not None}) == (W if mode == "staged" else 0)
    assert not overlaps
    assert all(memory.expired() for _, memory in references)


@pytest.mark.parametrize("fails_at", [1, 2, 2 * W])
@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_no_input_survives_a_failed_step(monkeypatch, mode, fails_at):
    batches = [make_batch(0), make_batch(1)]
    policy, calls = call_counter(start(*MODES[mode]), fails_at=fails_at)
    references, overlaps = record_gathers(monkeypatch)
    with suppress(RuntimeError):  # pytest.raises would keep the traceback, and with it the frames
        train_batch(*policy, batches)
    assert len(calls) == fails_at
    assert references
    assert not overlaps
    assert all(memory.expired() for _, memory in references)


@pytest.mark.parametrize("mode", ["not staged", "staged"])
def test_steps_are_closed_while_the_error_is_still_held(monkeypatch, mode):
    original, iterators = train_flowgrpo.iterate_timesteps, []

    def watched(*args, **options):
        iterators.append(original(*args, **options))
        return iterators[-1]

    batches = [make_batch(0), make_batch(1)]
    policy, _ = call_counter(start(*MODES[mode]), fails_at=W + 1)
    monkeypatch.setattr(train_flowgrpo, "iterate_timesteps", watched)
    with pytest.raises(RuntimeError, match="call 4 failed"):
        train_batch(*policy, batches)
    assert [inspect.getgeneratorstate(iterator) for iterator in iterators] == [inspect.GEN_CLOSED] * 2


@pytest.mark.parametrize("keep", [(), ("--return_model_output",)], ids=["released", "kept"])
def test_outputs_die_with_their_step_unless_kept(monkeypatch, keep):
    batches, policy = [make_batch(0), make_batch(1)], start(*STAGED, *keep)
    original, references, alive = train_flowgrpo.forward_timesteps, [], []

    def watched(*args):
        alive.append(sum(not memory.expired() for memory in references))
        outputs = original(*args)
        references.append(StorageWeakRef(outputs["prev_sample_mean"].untyped_storage()))
        return outputs

    monkeypatch.setattr(train_flowgrpo, "forward_timesteps", watched)
    train_batch(*policy, batches)
    assert alive[:W] == ([0, 1, 2] if keep else [0, 0, 0])
    assert max(alive[W:]) == (2 if keep else 0)  # what is kept of a whole micro-batch is in new memory
