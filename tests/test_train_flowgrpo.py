"""train_flowgrpo.py as a whole, on the tiny pipeline in this process: python -m pytest tests/test_train_flowgrpo.py"""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from safetensors.torch import load_file
from script_runs import PROMPTS, adapter_bytes, metrics_of, options_of, roll_out, values_of
from script_runs import run as run_any

import evaluation
import rollout
import run_folder
import train_flowgrpo
from qwen_image import SDE_TYPES, predict_velocity, tiny_pipeline, unused_modules
from scorer import Scorer
from trajectory_cache import open_cache, read_tensors, table_writer, write_manifest

run = partial(run_any, train_flowgrpo, sde_window_range=(0, 3), clip_range=1e-3)
# A smooth reward: a JPEG's size jumps by bytes, and peft's own LoRA layers round differently from ours.
MEAN_RED = "def mean_red(images, prompts, metadata):\n    return images[:, 0].mean(dim=(1, 2))\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_pipeline_folder):
    """A finished run of two epochs that kept its caches."""
    folder = tmp_path_factory.mktemp("run") / "finished"
    (folder.parent / "reward.py").write_text(MEAN_RED)
    options = ["--enable_timestep_staging", "--keep_trajectories", "5"]
    return run(folder, tiny_pipeline_folder, *options, eval_reward_funcs=f"{folder.parent}/reward.py:mean_red")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_staging_changes_no_number(tmp_path, tiny_pipeline_folder, monkeypatch, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    staging = {
        "off": [],
        "on": ["--enable_timestep_staging"],
        "prefetch": ["--enable_timestep_staging", "--staging_prefetch", "1"],
    }
    folders = [run(tmp_path / name, tiny_pipeline_folder, *options) for name, options in staging.items()]
    for folder in folders[1:]:
        assert metrics_of(folder) == metrics_of(folders[0])
        assert adapter_bytes(folder) == adapter_bytes(folders[0])
    deviations = values_of(folders[0], "train/ratio_max_dev")  # two updates an epoch
    assert deviations[0::2] == [0.0, 0.0]
    assert min(deviations[1::2]) > 0


def test_run_folder_is_complete(finished):
    for name in ("args.json", "code/train_flowgrpo.py", "metrics.jsonl", "checkpoints/epoch-00002/state.json"):
        assert (finished / name).is_file()
    grids = sorted(path.name for path in (finished / "grids").iterdir())
    assert grids == ["epoch-00000.png", "epoch-00002.png"]
    assert Image.open(finished / "grids" / grids[0]).size == (132, 144)  # 2 x 2 of 64 px, framed by 1, and a title
    assert not list(finished.rglob("*.tmp"))


def test_reloaded_adapter_is_the_evaluated_policy(finished, tiny_pipeline_folder):
    pipeline = QwenImagePipeline.from_pretrained(tiny_pipeline_folder)
    base = evaluate_pipeline(pipeline)
    pipeline.load_lora_weights(finished)
    before, after = values_of(finished, "eval/mean_red")
    assert [before, after] == pytest.approx([base, evaluate_pipeline(pipeline)], abs=1e-6)
    assert abs(before - after) > 2e-5


def evaluate_pipeline(pipeline) -> float:
    """The evaluation's mean reward, sampled with a pipeline."""
    prompts = [{"prompt": prompt} for prompt in PROMPTS]
    encode = rollout.encode_prompts
    texts = [row["prompt"] for row in prompts]
    embeddings = dict(enumerate(encode(pipeline, texts, device=torch.device("cpu"), max_sequence_length=512)))
    (negative,) = encode(pipeline, [" "], device=torch.device("cpu"), max_sequence_length=512)
    size = {"height": 64, "width": 64}
    scores, _ = evaluation.sample_evaluation(
        lambda *tensors, **conditions: predict_velocity(
            pipeline.transformer,
            *tensors,
            true_cfg_scale=2.0,
            cfg_batched=True,
            dtype=torch.float32,
            **size,
            **conditions,
        ),
        prompts=prompts,
        sizes=[(64, 64)] * len(prompts),
        embeddings=embeddings,
        negative=negative,
        vae=pipeline.vae,
        scorer=Scorer({"mean_red": lambda images, prompts, metadata: images[:, 0].mean(dim=(1, 2))}),
        rewards=["mean_red"],
        sigmas={(64, 64): rollout.get_sigmas(pipeline.scheduler, 4, **size)},
        batch_size=4,
        rank=0,
        world_size=1,
        seed=0,
    )
    return scores.mean().item()


def test_resume_gives_the_same_run(tmp_path, tiny_pipeline_folder):
    whole = run(tmp_path / "whole", tiny_pipeline_folder, "--num_train_epochs", "4")
    halved = run(tmp_path / "halved", tiny_pipeline_folder, "--num_train_epochs", "4")
    shutil.rmtree(halved / "checkpoints/epoch-00004")  # as if it had been killed in the third epoch
    assert (halved / "checkpoints/epoch-00003").is_dir()
    (halved / "pytorch_lora_weights.safetensors").unlink()
    run(halved, tiny_pipeline_folder, "--num_train_epochs", "4", "--resume_from_checkpoint", "latest")
    assert metrics_of(halved) == metrics_of(whole)
    assert adapter_bytes(halved) == adapter_bytes(whole)


@pytest.mark.parametrize("loss", train_flowgrpo.POLICY_LOSSES)
def test_training_from_a_cache_equals_the_online_run(tmp_path, tiny_pipeline_folder, loss):
    options = ["--policy_loss", loss, "--num_inner_epochs", "2", "--num_train_epochs", "1"]
    online = run(tmp_path / "online", tiny_pipeline_folder, *options)
    keep = ["--keep_prev_sample_mean"] if loss in train_flowgrpo.NEEDS_OLD_MEAN else []
    roll_out(tmp_path / "cache", tiny_pipeline_folder, *keep)
    model = tmp_path / "transformer_only"
    shutil.copytree(tiny_pipeline_folder, model, ignore=shutil.ignore_patterns("vae", "text_encoder", "tokenizer"))
    cached = run(tmp_path / "cached", model, *options, "--trajectory_cache", str(tmp_path / "cache"))
    assert adapter_bytes(cached) == adapter_bytes(online)


def test_missing_old_log_probs_are_recomputed(tmp_path, tiny_pipeline_folder):
    online = run(tmp_path / "online", tiny_pipeline_folder, "--num_train_epochs", "1")
    cache = tmp_path / "cache"
    source = online / "trajectories/epoch-00000"
    rewrite_rows(source, cache, lambda row: {name: row[name] for name in row if name != "old_log_probs"})
    assert "old_log_probs" not in open_cache(cache).fields
    cached = run(tmp_path / "cached", tiny_pipeline_folder, "--trajectory_cache", str(cache))
    assert adapter_bytes(cached) == adapter_bytes(online)


def test_kl_to_the_base_model(tmp_path, tiny_pipeline_folder, monkeypatch):
    calls = {"policy": 0, "reference": 0}
    make_policy = train_flowgrpo.make_policy

    def counting(*args):
        policy = make_policy(*args)

        def count(name, function):
            def call(*tensors, **conditions):
                calls[name] += torch.is_grad_enabled() or name == "reference"
                return function(*tensors, **conditions)

            return call

        counted = {"predict": count("policy", policy.predict)}
        return policy._replace(**counted, predict_reference=count("reference", policy.predict_reference))

    monkeypatch.setattr(train_flowgrpo, "make_policy", counting)
    without = run(tmp_path / "without", tiny_pipeline_folder)
    steps = 2 * 4 * 2  # epochs x batches x timesteps
    assert calls == {"policy": steps, "reference": 0}
    with_kl = run(tmp_path / "with", tiny_pipeline_folder, "--kl_beta", "0.1")
    assert calls == {"policy": 2 * steps, "reference": steps}
    first, *others = values_of(with_kl, "train/kl_loss")
    assert first == 0  # LoRA B is 0 before the first step
    assert min(others) > 0
    assert not any("train/kl_loss" in line for line in metrics_of(without))


def test_full_weights_train_export_and_resume(tmp_path, tiny_pipeline_folder):
    options = ["--no-use_lora", "--learning_rate", "1e-4", "--num_train_epochs", "2", "--checkpointing_steps", "1"]
    whole = run(tmp_path / "whole", tiny_pipeline_folder, *options)
    before = load_file(tiny_pipeline_folder / "transformer/diffusion_pytorch_model.safetensors")
    after = load_file(whole / "transformer/diffusion_pytorch_model.safetensors")
    assert before.keys() == after.keys()
    unused = {name for name in before if torch.equal(before[name], after[name])}
    assert unused == {name for name in before if re.fullmatch(unused_modules(2), name.rpartition(".")[0])}
    shutil.rmtree(whole / "transformer")
    shutil.rmtree(whole / "checkpoints/epoch-00002")
    run(whole, tiny_pipeline_folder, *options, "--resume_from_checkpoint", "latest")
    resumed = load_file(whole / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(after[name], resumed[name]) for name in after)


def test_kept_outputs_are_written(tmp_path, tiny_pipeline_folder):
    folder = run(tmp_path / "kept", tiny_pipeline_folder, "--return_model_output", "--enable_timestep_staging")
    files = sorted((folder / "outputs").iterdir())
    assert len(files) == 4
    outputs = load_file(files[0])
    assert {name: tuple(tensor.shape) for name, tensor in outputs.items() if name.startswith("0.")} == {
        "0.log_probs": (4, 2), "0.std_dev_t": (4, 2), "0.sqrt_dt": (4, 2), "0.prev_sample_mean": (4, 2, 16, 64),
    }  # fmt: skip


def test_dropped_groups_leave_the_gradient_of_the_rest(tmp_path, tiny_pipeline_folder):
    """Constant rewards for half the prompts: their batches are not run, and the update is that of the others alone."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(images, prompts, metadata):\n"
        "    means = images.mean(dim=(1, 2, 3)).tolist()\n"
        "    return [m if 'one' in p or 'rain' in p else 1.0 for m, p in zip(means, prompts)]\n"
    )
    options = ["--reward_funcs", f"{reward}:score", "--num_train_epochs", "1", "--num_updates_per_epoch", "1"]
    dropped = run(tmp_path / "dropped", tiny_pipeline_folder, *options, "--drop_zero_std_groups")
    kept = run(tmp_path / "kept", tiny_pipeline_folder, *options)
    norms = [values_of(folder, "train/grad_norm")[0] for folder in (dropped, kept)]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--resolution", "80"], "height 64, this run has 80"),
        (["--num_inference_steps", "5", "--sde_window_range", "0", "3"], "sigmas"),
        (["--sde_type", "cps"], "sde_type sde, this run has cps"),
        (["--noise_level", "0.9"], "noise_level 1.2, this run has 0.9"),
        (["--true_cfg_scale", "3"], "true_cfg_scale 2.0, this run has 3.0"),
        (["--train_batch_size", "3"], "16 trajectories"),
    ],
)
def test_a_cache_of_another_kind_is_refused(tmp_path, finished, tiny_pipeline_folder, capsys, options, expected):
    cache = finished / "trajectories/epoch-00000"
    code = run_folder.run_script(
        lambda: run(tmp_path / "run", tiny_pipeline_folder, "--trajectory_cache", str(cache), *options)
    )
    assert code == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_cache_of_another_model_is_refused(tmp_path, finished, capsys):
    tiny_pipeline(1).save_pretrained(tmp_path / "other")
    cache = str(finished / "trajectories/epoch-00000")
    assert run_folder.run_script(lambda: run(tmp_path / "run", tmp_path / "other", "--trajectory_cache", cache)) == 2
    assert "made with model" in capsys.readouterr().err


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "expected"), [(flip_a_bit, "has checksum"), (lambda content: content[:-100], "its manifest says")]
)
def test_a_damaged_cache_is_refused(tmp_path, finished, tiny_pipeline_folder, capsys, damage, expected):
    cache = tmp_path / "cache"
    shutil.copytree(finished / "trajectories/epoch-00000", cache)
    path = cache / "trajectories-00000.arrow"
    path.write_bytes(damage(path.read_bytes()))
    code = run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, "--trajectory_cache", str(cache)))
    assert code == 2
    error = capsys.readouterr().err
    assert "trajectories-00000.arrow" in error
    assert expected in error


def test_a_second_run_in_the_same_folder_is_refused(finished, tiny_pipeline_folder, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert run_folder.run_script(lambda: run(finished, tiny_pipeline_folder)) == 2
    assert "--resume_from_checkpoint latest" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_adapter_is_refused(tmp_path, finished, tiny_pipeline_folder, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    options = ["--resume_from_checkpoint", "latest", "--rank", "8"]
    assert run_folder.run_script(lambda: run(folder, tiny_pipeline_folder, *options)) == 2
    assert "rank 4, this run has 8" in capsys.readouterr().err


def test_a_failing_reward_stops_the_run_by_name(tmp_path, tiny_pipeline_folder, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(images, prompts, metadata):\n    return [float('nan')] * len(prompts)\n")
    options = ["--reward_funcs", f"{reward}:score", "--eval_epochs", "0"]
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, *options)) == 2
    assert "is nan for sample 0" in capsys.readouterr().err


def test_window_is_drawn_anew_each_epoch(finished):
    windows = [open_cache(finished / f"trajectories/epoch-{epoch:05d}").facts["sde_window"] for epoch in range(2)]
    assert all(stop - start == 2 and start >= 0 and stop <= 3 for start, stop in windows)


def test_a_progressive_window_moves_on_in_both_scripts(tmp_path, tiny_pipeline_folder):
    options = {"sde_window_schedule": "progressive", "sde_window_epochs": 1}
    online = run(tmp_path / "online", tiny_pipeline_folder, **options, eval_epochs=0, keep_trajectories=2)
    windows = [open_cache(online / f"trajectories/epoch-{epoch:05d}").facts["sde_window"] for epoch in range(2)]
    assert windows == [[0, 2], [1, 3]]
    roll_out(tmp_path / "cache", tiny_pipeline_folder, "--epoch", "1", *options_of(options))
    assert open_cache(tmp_path / "cache").facts["sde_window"] == [1, 3]


def test_defaults_are_the_recipe_and_the_demo_overrides_few():
    recipe = train_flowgrpo.parse_args(["--pretrained_model_name_or_path", "Qwen/Qwen-Image"])
    demo = train_flowgrpo.parse_args([])
    changed = {name for name in vars(recipe) if getattr(recipe, name) != getattr(demo, name)}
    assert changed <= {*train_flowgrpo.DEMO_DEFAULTS, "pretrained_model_name_or_path"}
    assert (recipe.rank, recipe.lora_alpha, recipe.learning_rate, recipe.clip_range) == (64, 128, 3e-4, 1e-4)
    assert not recipe.enable_timestep_staging
    assert recipe.num_images_per_prompt == 16


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_dppo_measures_the_kl_in_units_of_the_injected_noise(tmp_path, tiny_pipeline_folder, monkeypatch, sde_type):
    """The noise of a rollout step, x_{t+1} minus the old mean, has the standard deviation that the loss is given."""
    calls = []
    loss = train_flowgrpo.dppo_loss

    def recorded(*tensors, **options):
        calls.append((tensors[5].clone(), *loss(*tensors, **options)))
        return calls[-1][1:]

    forward, noises = train_flowgrpo.forward_timesteps, []

    def forwarded(args, predict, step):
        noises.append((step["all_latents"][:, 1:] - step["old_prev_sample_mean"]).flatten(2).std(dim=2))
        return forward(args, predict, step)

    monkeypatch.setattr(train_flowgrpo, "dppo_loss", recorded)
    monkeypatch.setattr(train_flowgrpo, "forward_timesteps", forwarded)
    options = {"policy_loss": "flow_dppo", "sde_type": sde_type, "noise_level": 0.7, "num_train_epochs": 1}
    folder = run(tmp_path / "run", tiny_pipeline_folder, **options, num_inner_epochs=2, dppo_kl_threshold=1e-9)
    for (noise_std, *_), noise in zip(calls, noises, strict=True):
        torch.testing.assert_close(noise_std, noise, rtol=0.1, atol=0)
    # Updates of 4 batches of 4 samples and 2 timesteps: clipfrac is the share of the dropped terms.
    dropped = torch.stack([call[3] for call in calls]).view(4, -1).double()
    ratio = torch.stack([call[2] for call in calls]).view(4, -1)
    assert values_of(folder, "train/clipfrac") == pytest.approx(dropped.mean(dim=1).tolist())
    above = (dropped * (ratio > 1)).mean(dim=1).tolist()
    assert values_of(folder, "train/clipfrac_gt_one") == pytest.approx(above)
    assert dropped[0].sum() == 0
    assert dropped[1:].sum() > 0


def test_a_relative_of_other_sizes_trains(tmp_path):
    """Layers, heads and widths are read from the model."""
    tiny_pipeline(1, num_layers=3, num_attention_heads=1, text_width=64, vae_base_dim=16).save_pretrained(
        tmp_path / "m"
    )
    folder = run(tmp_path / "run", tmp_path / "m", num_train_epochs=1, eval_epochs=0)
    deviations = values_of(folder, "train/ratio_max_dev")
    assert deviations[0] == 0 < deviations[1]


def test_a_clip_range_from_language_models_is_warned_about(tmp_path, tiny_pipeline_folder, capsys):
    run(tmp_path / "run", tiny_pipeline_folder, clip_range=0.2, num_train_epochs=1)
    assert "--clip_range 0.2 clips nothing" in capsys.readouterr().out


def test_numbers_that_are_not_finite_stop_the_run(tmp_path, tiny_pipeline_folder, capsys):
    options = {"learning_rate": 1e20, "max_grad_norm": 1e20, "num_train_epochs": 5}
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, **options)) == 2
    assert "the update is not applied" in capsys.readouterr().err


def rewrite_rows(source: Path, target: Path, change) -> None:
    """Copy a one-shard cache with `change` applied to each row's tensors."""
    shutil.copytree(source, target)
    opened = open_cache(source)
    with table_writer(target / "trajectories-00000.arrow") as write:
        for row, (sample, prompt) in enumerate(zip(opened.sample_indices, opened.prompt_ids, strict=True)):
            write({"sample_index": sample, "prompt_id": prompt, **change(read_tensors(opened.trajectories, row))})
    write_manifest(target, 0, {k: v for k, v in opened.facts.items() if k not in ("files", "schema_version", "shard")})


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("all_timesteps", lambda t: t.bfloat16(), "float32"),
        ("all_timesteps", lambda t: t / 1000, "all_timesteps are 1000 x sigmas"),
        ("sigmas", lambda s: s.flip(0), "the schedule has"),
        ("sigma_max", lambda s: s * 0.5, "second of the schedule"),
        ("all_latents", lambda x: x[:, :9], "(9, 64)"),
        ("old_log_probs", lambda p: p[:1], "old_log_probs"),
    ],
)
def test_a_cache_with_wrong_rows_is_refused_by_name(
    tmp_path, finished, tiny_pipeline_folder, monkeypatch, capsys, name, change, expected
):
    monkeypatch.setattr(rollout, "load_models", None)
    cache = tmp_path / "cache"
    rewrite_rows(finished / "trajectories/epoch-00000", cache, lambda row: row | {name: change(row[name])})
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, trajectory_cache=cache)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert name in error
    assert expected in error


def test_weights_that_are_not_finite_are_not_exported(tmp_path, tiny_pipeline_folder, capsys):
    options = {"learning_rate": 1e30, "num_train_epochs": 1, "num_updates_per_epoch": 1, "adam_weight_decay": 1e30}
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, **options)) == 2
    assert "weights are not finite" in capsys.readouterr().err
    assert not (tmp_path / "run/pytorch_lora_weights.safetensors").exists()
    assert not (tmp_path / "run/checkpoints").exists()
