"""DiffusionNFT: old policy, noise layouts, whole runs: python -m pytest tests/test_train_nft.py"""

import shutil
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from script_runs import adapter_bytes, metrics_of, reset_accelerate, values_of
from script_runs import run as run_any

import qwen_image
import rollout
import run_folder
import train_nft
from trajectory_cache import open_cache, read_tensors

run = partial(run_any, train_nft, ref_kl_coef=0)

# ----- The old policy ----------------------------------------------------------------------------------------------


def with_adapters(folder) -> torch.nn.Module:
    """The tiny transformer with a default and an old adapter, fp32 on a bf16 base."""
    torch.manual_seed(0)
    transformer = qwen_image.load_pipeline(folder, dtype=torch.bfloat16).transformer
    qwen_image.add_lora(transformer, rank=4, lora_alpha=8, target_modules=qwen_image.LORA_TARGETS)
    qwen_image.add_old_adapter(transformer)
    return transformer


def census(transformer) -> dict[str, tuple]:
    return {name: (p.dtype, p.requires_grad) for name, p in transformer.named_parameters()}


def test_old_adapter_is_an_exact_frozen_copy(tiny_pipeline_folder):
    transformer = with_adapters(tiny_pipeline_folder)
    default, old = (qwen_image.adapter_state_dict(transformer.named_parameters(), n) for n in ("default", "old"))
    assert default.keys() == old.keys()
    assert all(torch.equal(default[name], old[name]) for name in default)
    assert {p.dtype for p in (*default.values(), *old.values())} == {torch.float32}
    assert all(p.requires_grad for p in default.values())
    assert not any(p.requires_grad for p in old.values())
    assert {p.data_ptr() for p in default.values()}.isdisjoint(p.data_ptr() for p in old.values())


def test_switching_adapters_leaves_requires_grad_alone_even_after_an_error(tiny_pipeline_folder):
    transformer = with_adapters(tiny_pipeline_folder)
    layers, before = qwen_image.lora_layers(transformer), census(transformer)

    def fail(switch):
        with switch:
            assert census(transformer) == before
            raise ZeroDivisionError

    for switch in (qwen_image.adapters_off(layers), qwen_image.adapter_active(layers, "old")):
        with pytest.raises(ZeroDivisionError):
            fail(switch)
        assert census(transformer) == before
        assert {tuple(layer.active_adapters) for layer in layers} == {("default",)}
        assert not any(layer.disable_adapters for layer in layers)


@pytest.mark.parametrize("lora_dtype", [torch.float32, torch.bfloat16])
def test_following(lora_dtype):
    old, current = [torch.zeros(3, dtype=lora_dtype)], [torch.nn.Parameter(torch.full((3,), 2.0))]
    train_nft.follow(old, current, 0.75)
    assert old[0].tolist() == [0.5] * 3
    train_nft.follow(old, current, 0.0)
    assert torch.equal(old[0].float(), current[0].data)


# ----- Updates -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(tiny_pipeline_folder):
    """A function (options, micro-batch changes) -> (outputs, metrics, calls by policy, weights) of one update."""

    def update(*options: str, old_is_current=False, steps=3, only_forward=False, **changes):
        reset_accelerate()
        accelerator = Accelerator(cpu=True)
        transformer = with_adapters(tiny_pipeline_folder).float()
        torch.manual_seed(1)
        for name, parameter in transformer.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_(std=0.02)
        args = train_nft.parse_args(["--ref_kl_coef", "0", *options])
        parameters = [p for p in transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        calls = {"current": 0, "old": 0, "reference": 0}
        layers = qwen_image.lora_layers(transformer)

        def predictor(name, context):
            def predict(*tensors, **conditions):
                calls[name] += 1
                with context():
                    return qwen_image.predict_velocity(
                        transformer, *tensors, height=64, width=64, true_cfg_scale=1.0, cfg_batched=True,
                        dtype=torch.float32, **conditions,
                    )  # fmt: skip

            return predict

        predictors = train_nft.Predictors(
            predictor("current", nullcontext),
            predictor("old", lambda: qwen_image.adapter_active(layers, "old")),
            predictor("reference", lambda: qwen_image.adapters_off(layers)),
        )
        generator = torch.Generator().manual_seed(2)
        batch = {
            "prompt_embeds": torch.randn(2, 6, 32, generator=generator),
            "latents_clean": list(torch.randn(2, 16, 64, generator=generator)),
            "train_timesteps": torch.tensor([[900.0, 500.0, 100.0], [300.0, 700.0, 1000.0]])[:, :steps],
            "reward_prob": torch.tensor([[0.9], [0.2]]).expand(2, steps),
            "sample_index": [0, 1],
            "noise_words": (0, 0, 0),
        } | changes
        if only_forward:
            return train_nft.forward_only(args, predictors, batch, accelerator.device)
        metrics, outputs = train_nft.train_batch(
            args, accelerator, transformer, predictors, optimizer, parameters, [batch], old_is_current=old_is_current
        )
        return outputs, metrics, calls, [p.detach().clone() for p in parameters]

    return update


@pytest.mark.parametrize(
    ("options", "old_is_current", "expected"),
    [
        ([], True, (3, 0, 0)),
        ([], False, (3, 3, 0)),
        (["--ref_kl_coef", "0.1"], False, (3, 3, 3)),
        (["--ref_kl_coef", "0.1"], True, (3, 0, 3)),
        (["--timesteps_per_forward", "3"], True, (1, 0, 0)),
    ],
)
def test_only_the_forwards_that_are_needed_run(case, options, old_is_current, expected):
    assert tuple(case(*options, old_is_current=old_is_current)[2].values()) == expected


def stored_noise(per_step: bool, steps=3):
    rows = [
        [qwen_image.seeded_noise((train_nft.NOISE_STREAM, 0, 0, 0, sample, k), (16, 64)) for k in range(steps)]
        for sample in range(2)
    ]
    return [torch.stack(row) if per_step else row[0] for row in rows]


def test_stored_noise_is_that_drawn_on_demand(case):
    on_demand = case()
    stored = case(forward_noise=stored_noise(per_step=True))
    assert all(torch.equal(a, b) for a, b in zip(on_demand[3], stored[3], strict=True))
    shared = case(forward_noise=stored_noise(per_step=False))
    assert not all(torch.equal(a, b) for a, b in zip(on_demand[3], shared[3], strict=True))


@pytest.mark.parametrize("layout", ["on_demand", "per_step", "shared"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_staging_changes_no_weight(case, layout, chunk):
    changes = {} if layout == "on_demand" else {"forward_noise": stored_noise(layout == "per_step")}
    options = ["--timesteps_per_forward", str(chunk)]
    staged = case(*options, "--enable_timestep_staging", "--staging_prefetch", "1", **changes)
    resident = case(*options, **changes)
    assert staged[1] == resident[1]
    assert all(torch.equal(a, b) for a, b in zip(staged[3], resident[3], strict=True))
    one_by_one = case(**changes)
    for a, b in zip(staged[3], one_by_one[3], strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_kept_outputs(case):
    names = {"forward_prediction", "old_prediction", "x0", "xt", "t_expanded"}
    (outputs,), *_ = case("--return_model_output")
    assert set(outputs) == names
    assert {name: tuple(tensor.shape[:2]) for name, tensor in outputs.items()} == dict.fromkeys(names, (2, 3))
    (outputs,), *_ = case("--return_model_output", "--ref_kl_coef", "0.1")
    assert set(outputs) == {*names, "ref_forward_prediction"}
    assert case()[0] == []
    x0, xt, t = (outputs[name] for name in ("x0", "xt", "t_expanded"))
    noise = torch.stack(stored_noise(per_step=True))
    torch.testing.assert_close(xt, (1 - t) * x0 + t * noise)


@pytest.mark.parametrize("layout", ["on_demand", "per_step", "shared"])
def test_forward_only_gives_what_training_sees(case, layout):
    changes = {} if layout == "on_demand" else {"forward_noise": stored_noise(layout == "per_step")}
    options = ["--ref_kl_coef", "0.1", "--enable_timestep_staging"]
    (kept,), *_ = case(*options, "--return_model_output", **changes)
    for flags in ([], ["--return_model_output"]):
        outputs = case(*options, *flags, only_forward=True, **changes)
        assert outputs.keys() == kept.keys()
        assert all(torch.equal(outputs[name], kept[name]) for name in kept)


def test_bad_input_is_named(case):
    for field, value in (
        ("latents_clean", torch.zeros(2, 16, 64, requires_grad=True)),
        ("forward_noise", torch.zeros(2, 4, 16, 64)),
        ("forward_noise", torch.zeros(3, 16, 64)),
        ("reward_prob", torch.zeros(2, 2)),
    ):
        with pytest.raises(ValueError, match=field):
            case(**{field: value})


# ----- Whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["on_demand", "per_step", "shared"])
def test_runs_are_the_same_staged_and_not(tmp_path, tiny_pipeline_folder, layout):
    folders = [
        run(tmp_path / name, tiny_pipeline_folder, *options, forward_noise=layout, ref_kl_coef=0.01)
        for name, options in {
            "off": [],
            "on": ["--enable_timestep_staging"],
            "prefetch": ["--enable_timestep_staging", "--staging_prefetch", "1"],
        }.items()
    ]
    for folder in folders[1:]:
        assert metrics_of(folder) == metrics_of(folders[0])
        assert adapter_bytes(folder) == adapter_bytes(folders[0])


def test_resume_gives_the_same_run(tmp_path, tiny_pipeline_folder):
    options = {"old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1, "num_train_epochs": 4}
    whole = run(tmp_path / "whole", tiny_pipeline_folder, **options)
    halved = run(tmp_path / "halved", tiny_pipeline_folder, **options)
    shutil.rmtree(halved / "checkpoints/epoch-00004")
    run(halved, tiny_pipeline_folder, "--resume_from_checkpoint", "latest", **options)
    assert metrics_of(halved) == metrics_of(whole)
    assert adapter_bytes(halved) == adapter_bytes(whole)
    adapters = [
        load_file(whole / f"checkpoints/epoch-00004/adapter_{name}.safetensors") for name in ("default", "old")
    ]
    assert any(not torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def test_copy_makes_the_old_policy_the_current_one(tmp_path, tiny_pipeline_folder):
    options = {"old_policy_decay": "copy", "old_policy_update_interval": 1}
    folder = run(tmp_path / "run", tiny_pipeline_folder, "--export_old_policy", **options)
    adapters = [
        load_file(folder / f"checkpoints/epoch-00002/adapter_{name}.safetensors") for name in ("default", "old")
    ]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert adapter_bytes(folder) == adapter_bytes(folder / "old_policy")
    assert values_of(folder, "train/old_deviate")[0] == 0
    assert values_of(folder, "train/old_deviate")[1] > 0


def test_only_clean_latents_are_cached(tmp_path, tiny_pipeline_folder):
    folder = run(tmp_path / "run", tiny_pipeline_folder, num_train_epochs=1)
    cache = open_cache(folder / "trajectories/epoch-00000")
    assert cache.fields == {"latents_clean"}
    assert sum(read_tensors(cache.trajectories, row)["latents_clean"].nbytes for row in range(16)) == 16 * 16 * 64 * 4


def test_training_from_a_cache_equals_the_online_run(tmp_path, tiny_pipeline_folder):
    online = run(tmp_path / "online", tiny_pipeline_folder, num_train_epochs=1)
    cached = run(tmp_path / "cached", tiny_pipeline_folder, trajectory_cache=online / "trajectories/epoch-00000")
    assert adapter_bytes(cached) == adapter_bytes(online)


def test_full_weights(tmp_path, tiny_pipeline_folder):
    options = {"learning_rate": 1e-4, "old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1}
    folder = run(tmp_path / "run", tiny_pipeline_folder, "--no-use_lora", **options)
    before = load_file(tiny_pipeline_folder / "transformer/diffusion_pytorch_model.safetensors")
    after = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) > len(before) / 2
    assert np.isfinite(values_of(folder, "train/policy_loss")).all()
    assert values_of(folder, "train/old_deviate")[-1] > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nft_beta": 0}, "--nft_beta is 0"),
        ({"adv_clip_max": 0}, "--adv_clip_max is 0"),
        ({"timestep_fraction": 0}, "--timestep_fraction 0"),
        ({"timestep_fraction": 1.5}, "--timestep_fraction 1.5"),
        ({"old_policy_decay": "slowly"}, "flat:rate:cap"),
        ({"old_policy_decay": "0:0.1:1"}, "cap"),
        ({"old_policy_update_interval": 0}, "--old_policy_update_interval is 0"),
    ],
)
def test_refusals(tmp_path, tiny_pipeline_folder, capsys, options, expected):
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, **options)) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_the_reference_needs_lora(tmp_path, tiny_pipeline_folder, capsys):
    options = {"ref_kl_coef": 0.1}
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, "--no-use_lora", **options)) == 2
    assert "--ref_kl_coef 0" in capsys.readouterr().err


def test_the_second_order_solver_is_nearer_to_the_fine_ode(tiny_pipeline_folder):
    """On a curved field, 8 steps of unipc end nearer to 800 Euler steps than 8 Euler steps do."""
    options = {"sde_window": (0, 0), "sde_type": "sde", "noise_level": 0.0, "step_noise": None}
    noise = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))

    def velocity(latents, timesteps):
        return torch.sin(3 * latents) + latents * (timesteps / 1000).view(-1, 1, 1)

    def end(num_steps, solver):
        sigmas = torch.cat([torch.linspace(1, 1 / num_steps, num_steps), torch.zeros(1)])
        solver = rollout.make_solver(solver, sigmas)
        return rollout.sample_trajectories(velocity, noise, sigmas, solver=solver, **options)["latents_clean"]

    exact = end(800, "euler")
    assert (end(8, "unipc") - exact).norm() < 0.5 * (end(8, "euler") - exact).norm()


def test_rollout_with_the_second_order_solver(tmp_path, tiny_pipeline_folder):
    folders = [
        run(tmp_path / s, tiny_pipeline_folder, rollout_solver=s, num_train_epochs=1) for s in ("euler", "unipc")
    ]
    caches = [open_cache(folder / "trajectories/epoch-00000") for folder in folders]
    latents = [read_tensors(cache.trajectories, 0)["latents_clean"] for cache in caches]
    assert not torch.equal(*latents)
    assert (latents[0] - latents[1]).norm() < 0.2 * latents[0].norm()


def test_trainable_parameters_stay_the_same(tmp_path, tiny_pipeline_folder, monkeypatch):
    """Before step 1, after step 10, after an error inside the old policy's pass, and after resume."""
    policies, make_policy = [], train_nft.make_policy
    monkeypatch.setattr(train_nft, "make_policy", lambda *args: policies.append(make_policy(*args)) or policies[-1])
    options = {"num_train_epochs": 5, "old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1}
    folder = run(tmp_path / "run", tiny_pipeline_folder, **options)
    assert values_of(folder, "train/grad_norm")[9] > 0
    transformer = policies[0].transformer
    trainable = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in transformer.named_parameters() if ".default." in name}
    with pytest.raises(TypeError):
        policies[0].predictors.old(None)
    assert trainable == {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    shutil.rmtree(folder / "checkpoints/epoch-00005")
    run(folder, tiny_pipeline_folder, "--resume_from_checkpoint", "latest", **options)
    resumed = policies[1].transformer
    assert trainable == {name for name, parameter in resumed.named_parameters() if parameter.requires_grad}
