"""Numbers that go wrong stop a run by name and are never applied: python -m pytest tests/test_divergence.py"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from script_runs import adapter_bytes, metrics_of, run

import qwen_image
import rollout
import run_folder
import sharding
import train_flowgrpo
import train_nft

OWN = {train_flowgrpo: {"sde_window_range": (0, 3), "clip_range": 1e-3}, train_nft: {"old_policy_decay": "copy"}}
TIMES = {train_flowgrpo: "all_timesteps", train_nft: "train_timesteps"}
FIRST = {train_flowgrpo: "log_ratio", train_nft: "policy_loss"}  # what is looked at first
BAD_ROW, BAD_STEP = 2, 3  # of the first micro-batch of the third update, in the second epoch


@pytest.fixture(scope="module", params=[train_flowgrpo, train_nft], ids=lambda script: script.__name__)
def spoiled(request, tmp_path_factory, tiny_pipeline_folder):
    """(script, a function that runs it with one NaN in a forward, the place of that NaN by update)."""
    script, places = request.param, []
    train_batch, train_timesteps = script.train_batch, script.train_timesteps

    def marked_batch(*args, **options):
        batch = args[6][0]
        places.append((batch["sample_index"][BAD_ROW], float(batch[TIMES[script]][BAD_ROW][0])))
        marked_batch.calls = 0
        return train_batch(*args, **options)

    def spoiled_timesteps(args, accelerator, policy, *rest, **options):
        marked_batch.calls += 1
        if len(places) == BAD_STEP and marked_batch.calls == 1:
            policy = spoil(policy) if script is train_flowgrpo else policy._replace(current=spoil(policy.current))
        return train_timesteps(args, accelerator, policy, *rest, **options)

    def spoil(predict):
        def predict_nan(*tensors, **conditions):
            velocity = predict(*tensors, **conditions)
            factor = torch.ones(len(velocity), 1, 1)
            factor[BAD_ROW] = math.nan
            return velocity * factor

        return predict_nan

    def spoiled_run(folder, *options, **values):
        places.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "train_batch", marked_batch)
            patch.setattr(script, "train_timesteps", spoiled_timesteps)
            return run(script, folder, tiny_pipeline_folder, *options, **OWN[script], eval_epochs=0, **values)

    return script, spoiled_run, places


def test_a_nan_stops_the_run_by_name_and_resume_goes_on(tmp_path, tiny_pipeline_folder, spoiled, capsys):
    script, spoiled_run, places = spoiled
    assert run_folder.run_script(lambda: spoiled_run(tmp_path / "run", checkpointing_steps=1)) == 2
    sample, timestep = places[-1]
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"epoch 1 step 3: {FIRST[script]} is nan for sample {sample} at timestep {timestep:.6g}" in line
    assert "--skip_nonfinite" in line
    assert not (tmp_path / "run/pytorch_lora_weights.safetensors").exists()
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["epoch-00001"]
    options = {**OWN[script], "eval_epochs": 0, "checkpointing_steps": 1}
    run(script, tmp_path / "run", tiny_pipeline_folder, "--resume_from_checkpoint", "latest", **options)
    whole = run(script, tmp_path / "whole", tiny_pipeline_folder, **options)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(whole)


def test_a_nan_is_left_out_on_request(tmp_path, spoiled, capsys):
    script, spoiled_run, places = spoiled
    weights = []
    with pytest.MonkeyPatch.context() as patch:
        apply_update = script.apply_update

        def noting(args, accelerator, optimizer, fault, where):
            numbers = apply_update(args, accelerator, optimizer, fault, where)
            weights.append(torch.cat([p.detach().flatten().clone() for p in optimizer.param_groups[0]["params"]]))
            return numbers

        patch.setattr(script, "apply_update", noting)
        folder = spoiled_run(tmp_path / "run", "--skip_nonfinite")
    assert len(places) == len(weights) == 4
    assert f"warning: epoch 1 step 3: {FIRST[script]} is nan for sample {places[2][0]}" in capsys.readouterr().out
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert weights[3].isfinite().all()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    updates = [value for value in values if "train/skipped" in value]
    assert [value["train/skipped"] for value in updates] == [0, 0, 1, 0]
    assert updates[2]["train/policy_loss"] is None
    assert updates[3]["train/policy_loss"] is not None


def test_a_rate_that_destroys_the_policy_stops_the_run(tmp_path, tiny_pipeline_folder, capsys):
    values = OWN[train_flowgrpo] | {"learning_rate": 1e3, "eval_epochs": 0}
    assert run_folder.run_script(lambda: run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values)) == 2
    assert "epoch 0 step 2: log_ratio is " in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (train_flowgrpo, {"divergence_limit": 1e-9}, "epoch 0 step 1: policy_loss is "),
        (train_nft, {"divergence_limit": 1e-9}, "epoch 0 step 1: policy_loss is "),
        (train_flowgrpo, {"log_ratio_limit": 1e-9}, "epoch 0 step 2: log_ratio is "),
    ],
)
def test_a_number_beyond_its_limit_stops_the_run(tmp_path, tiny_pipeline_folder, capsys, script, options, expected):
    values = OWN[script] | {"eval_epochs": 0, "num_train_epochs": 1, "num_updates_per_epoch": 4} | options
    assert run_folder.run_script(lambda: run(script, tmp_path / "run", tiny_pipeline_folder, **values)) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def faults_of_ranks(values: list[list[float]], norm: float) -> list[str | None]:
    """find_fault on ranks that hold two samples at two timesteps each, through a gather made by hand."""
    limits = {"log_ratio": 5.0, "policy_loss": 10.0, "grad_norm": 100.0}
    parts, faults = [], []

    def call(rank, gather):
        records = [{"policy_loss": torch.tensor(values[rank]).view(2, 2), "log_ratio": torch.zeros(2, 2)}]
        times = torch.tensor([[900.0, 800.0], [700.0, 600.0]])
        batches = [{"all_timesteps": times, "sample_index": [10 * rank, 10 * rank + 1]}]
        accelerator = SimpleNamespace(gather=gather)
        return sharding.find_fault(accelerator, records, batches, torch.tensor(norm), limits)

    for rank in range(len(values)):
        call(rank, lambda tensor: parts.append(tensor) or tensor)
    for rank in range(len(values)):
        faults.append(call(rank, lambda tensor: torch.cat(parts)))
    return faults


@pytest.mark.parametrize(
    ("values", "norm", "expected"),
    [
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 1.0, None),
        ([[1, 2, 3, 4], [5, 6, math.nan, 8]], 1.0, "policy_loss is nan for sample 11 at timestep 700 (limit 10)"),
        ([[1, -math.inf, 3, 4], [5, 6, 7, 8]], 1.0, "policy_loss is inf for sample 0 at timestep 800 (limit 10)"),
        ([[1, 2, 3, -11], [5, 6, 7, 8]], 1.0, "policy_loss is 11 for sample 1 at timestep 600 (limit 10)"),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], math.nan, "grad_norm is nan (limit 100)"),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 101.0, "grad_norm is 101 (limit 100)"),
    ],
)
def test_every_rank_finds_the_same_fault(values, norm, expected):
    faults = faults_of_ranks([[float(value) for value in rank] for rank in values], norm)
    assert faults[0] == faults[1]
    assert (faults[0] is None) if expected is None else faults[0].startswith(expected)


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_out_of_memory_in_the_text_encoder_is_named(script, tmp_path, tiny_pipeline_folder, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(rollout, "encode_prompt_table", fails)
    values = {"sde_window_range": (0, 3)} if script is train_flowgrpo else {}
    assert run_folder.run_script(lambda: run(script, tmp_path / "run", tiny_pipeline_folder, **values)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no memory left in the encoding of prompts: CUDA out of memory. Tried to allocate 2 GiB. free" in line
    assert "--trajectory_cache" in line


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
@pytest.mark.parametrize(("fails_at", "phase"), [(0, "evaluation"), (1, "rollout"), (2, "update")])
def test_out_of_memory_names_the_phase_and_what_to_change(
    script, fails_at, phase, tmp_path, tiny_pipeline_folder, monkeypatch, capsys
):
    """The first velocity after a phase has begun fails as a full GPU does."""
    begun = []

    def watched(name):
        function = getattr(script, name)

        def call(*args, **kwargs):
            begun.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("evaluate", "roll_out", "update_policy"):
        monkeypatch.setattr(script, name, watched(name))
    velocity = qwen_image.predict_velocity

    def fails(*args, **kwargs):
        if len(begun) == fails_at + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines.")
        return velocity(*args, **kwargs)

    monkeypatch.setattr(qwen_image, "predict_velocity", fails)
    values = {"sde_window_range": (0, 3)} if script is train_flowgrpo else {}
    assert run_folder.run_script(lambda: run(script, tmp_path / "run", tiny_pipeline_folder, **values)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"no memory left in the {phase}: CUDA out of memory. Tried to allocate 2 GiB. " in line
    assert "--train_batch_size" in line
    assert ("planned: step inputs 0." in line) == (phase == "update")
