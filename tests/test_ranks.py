"""Two CPU ranks under DDP, FSDP and FSDP2 against one process: python -m pytest tests/test_ranks.py"""

import shutil
from pathlib import Path

import pytest
import torch
from forked_launch import launch as launch_forked
from forked_launch import launch_machines
from safetensors.torch import load_file
from script_runs import (
    SMALL,
    adapter_bytes,
    launch,
    launch_words,
    metrics_of,
    options_of,
    reset_accelerate,
    run,
    values_of,
    write_prompts,
)

import train_flowgrpo
import train_nft
from trajectory_cache import open_cache

SIZES = {"num_prompts_per_epoch": 2, "num_images_per_prompt": 8, "num_updates_per_epoch": 1, "num_train_epochs": 3}
SIZES |= {
    "learning_rate": 1e-3,
    "checkpointing_steps": 1,
    "checkpoints_total_limit": 3,
    "keep_trajectories": 3,
    "eval_epochs": 3,
}
OPTIONS = {
    train_flowgrpo: SIZES | {"sde_window_range": (0, 3), "clip_range": 1e-3, "kl_beta": 0.1},
    train_nft: SIZES | {"ref_kl_coef": 0.1, "old_policy_decay": "0:0.1:0.5", "old_policy_update_interval": 1},
}

CASES = [(train_flowgrpo, "ddp"), (train_flowgrpo, "fsdp2"), (train_nft, "fsdp"), (train_nft, "fsdp2")]

# A smooth reward: a JPEG's size jumps, and so would magnify rounding.
REWARD = "def mean_red(images, prompts, metadata):\n    return images[:, 0].mean(dim=(1, 2))\n"


def with_reward(folder: Path) -> dict:
    """The option that names REWARD, written into the folder."""
    (folder / "reward.py").write_text(REWARD)
    return {"reward_funcs": f"{folder / 'reward.py'}:mean_red"}


def run_on_ranks(kind: str, script, folder: Path, model: Path, *options: str, ranks: int = 2, **values) -> Path:
    """The script in subprocesses, one a rank; the launcher asserts the prepared class and the number of processes."""
    named = {"pretrained_model_name_or_path": model, "prompts": write_prompts(folder.parent), "output_dir": folder}
    named["eval_prompts"] = named["prompts"]
    words = [script.__file__, *options_of(SMALL | OPTIONS[script] | named | values), *options]
    logs = folder.with_name(f"{folder.name}-logs")
    logs.mkdir(exist_ok=True)
    if kind == "fsdp2_multinode":
        for output in launch_machines(logs, kind, *words, ranks=ranks):
            assert output.count(f"prepared as FSDPModule over (2, {ranks // 2}) on {ranks} ranks") == ranks // 2
    else:
        (output,) = launch_forked(logs, launch_words(kind, *words, ranks=ranks))
        assert output.count(f"on {ranks} ranks") == ranks
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_pipeline_folder):
    """Run folders by (script, how)."""
    base, folders = tmp_path_factory.mktemp("ranks"), {}
    reward = with_reward(base)
    for script in (train_flowgrpo, train_nft):
        for kind in ("one", "ddp", "fsdp", "fsdp2"):
            folder = base / f"{script.__name__}_{kind}"
            if kind == "one":
                run(script, folder, tiny_pipeline_folder, **OPTIONS[script], **reward)
            elif (script, kind) in CASES:
                workers = {"reward_workers": 1} if kind == "ddp" else {}
                run_on_ranks(kind, script, folder, tiny_pipeline_folder, **reward, **workers)
            folders[script, kind] = folder
    return folders


def check_first_update(first: Path, second: Path) -> None:
    """Two runs' accumulated gradients, as Adam's first moment has them, and their weights after one update agree."""
    one, two = (folder / "checkpoints/epoch-00001" for folder in (first, second))
    gradients = [load_file(folder / "optimizer.safetensors") for folder in (one, two)]
    moments = [name for name in gradients[0] if name.endswith("exp_avg")]
    largest = max(gradients[0][name].abs().max() for name in moments)
    assert gradients[0].keys() == gradients[1].keys()
    assert max((gradients[0][name] - gradients[1][name]).abs().max() for name in moments) < 1e-5 * largest
    adapters = [load_file(folder / "adapter_default.safetensors") for folder in (one, two)]
    assert max((adapters[0][name] - adapters[1][name]).abs().max() for name in adapters[0]) < 1e-6


def check_losses(first: Path, second: Path, *, tolerance: float = 1e-5) -> None:
    """Two runs' losses and rewards agree in every epoch, the gradient norm in the first."""
    assert [line.keys() for line in metrics_of(first)] == [line.keys() for line in metrics_of(second)]
    for name in ("train/policy_loss", "train/kl_loss", "rollout/reward_mean"):
        one, two = (values_of(folder, name) for folder in (first, second))
        assert len(one) == 3
        assert one == pytest.approx(two, abs=tolerance)
    norms = [values_of(folder, "train/grad_norm")[0] for folder in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize(("script", "kind"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_one_update_is_that_of_one_process(runs, script, kind):
    check_first_update(runs[script, "one"], runs[script, kind])


@pytest.mark.parametrize(("script", "kind"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_three_epochs_are_those_of_one_process(runs, script, kind):
    one, two = metrics_of(runs[script, "one"]), metrics_of(runs[script, kind])
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for name in ("train/policy_loss", "train/kl_loss", "rollout/reward_mean"):
        values = [values_of(runs[script, k], name) for k in ("one", kind)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    kl = [values_of(runs[script, k], "train/kl_loss")[-1] for k in ("one", kind)]
    assert kl[0] > 0
    assert kl[0] == pytest.approx(kl[1], rel=1e-3)
    norms = [values_of(runs[script, k], "train/grad_norm") for k in ("one", kind)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-4)


def test_evaluations_are_those_of_one_process(runs):
    for kind in ("ddp", "fsdp2"):
        names = [name for name in metrics_of(runs[train_flowgrpo, kind])[0] if name.startswith("eval/")]
        assert len(names) == 2  # the reward and its interval
        for name in names:
            base, trained = zip(*(values_of(runs[train_flowgrpo, k], name) for k in ("one", kind)), strict=True)
            assert base[0] == base[1]  # the same batches on any number of ranks
            assert trained[0] == pytest.approx(trained[1], abs=1e-5)


def test_groups_that_span_ranks_have_the_same_advantages(runs):
    advantages = []
    for kind in ("one", "ddp"):
        cache = open_cache(runs[train_flowgrpo, kind] / "trajectories/epoch-00000")
        rows = sorted(zip(cache.values["sample_index"], cache.values["advantage"], strict=True))
        assert [sample for sample, _ in rows] == list(range(16))
        advantages.append([advantage for _, advantage in rows])
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-4)
    shard = open_cache(runs[train_flowgrpo, "ddp"] / "trajectories/epoch-00000", shards=[0])
    assert set(shard.sample_indices) == {0, 1, 2, 3, 8, 9, 10, 11}  # half of each group of 8


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_two_sharded_ranks_are_resumed_by_one(runs, tmp_path, tiny_pipeline_folder, script):
    folder = tmp_path / "resumed"
    shutil.copytree(runs[script, "fsdp2"], folder)
    for epoch in (2, 3):
        shutil.rmtree(folder / f"checkpoints/epoch-{epoch:05d}")
    (folder / "pytorch_lora_weights.safetensors").unlink()
    run(
        script,
        folder,
        tiny_pipeline_folder,
        "--resume_from_checkpoint",
        "latest",
        **OPTIONS[script],
        **with_reward(tmp_path),
    )
    for name, tolerance in (("train/policy_loss", 1e-5), ("rollout/reward_mean", 1e-4)):
        assert values_of(folder, name) == pytest.approx(values_of(runs[script, "fsdp2"], name), abs=tolerance)


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_export_holds_the_gathered_tensors(runs, script):
    folder = runs[script, "fsdp2"]
    exported = load_file(folder / "pytorch_lora_weights.safetensors")
    checkpoint = load_file(folder / "checkpoints/epoch-00003/adapter_default.safetensors")
    assert {f"transformer.{name}" for name in checkpoint} == set(exported)
    assert all(torch.equal(checkpoint[name], exported[f"transformer.{name}"]) for name in checkpoint)
    assert len(adapter_bytes(folder)) > sum(tensor.nbytes for tensor in checkpoint.values())


@pytest.mark.parametrize(
    ("script", "kind"), [(train_flowgrpo, "fsdp"), (train_flowgrpo, "fsdp2"), (train_nft, "fsdp2")]
)
def test_full_weights_sharded_over_two_ranks_are_resumed(tmp_path, tiny_pipeline_folder, script, kind):
    """Sharded full weights equal one process after an epoch, and resume, of DiffusionNFT the old policy too."""
    own = {"kl_beta": 0} if script is train_flowgrpo else {"ref_kl_coef": 0}
    values = {"learning_rate": 1e-4, "num_train_epochs": 2, "eval_epochs": 0, **own, **with_reward(tmp_path)}
    one = run(script, tmp_path / "one", tiny_pipeline_folder, "--no-use_lora", **(OPTIONS[script] | values))
    two = run_on_ranks(kind, script, tmp_path / "two", tiny_pipeline_folder, "--no-use_lora", **values)
    assert values_of(one, "train/grad_norm")[0] == pytest.approx(values_of(two, "train/grad_norm")[0], rel=1e-4)
    weights = [load_file(f / "transformer/diffusion_pytorch_model.safetensors") for f in (one, two)]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) < 4e-4  # two steps of Adam
    shutil.rmtree(two / "checkpoints/epoch-00002")
    shutil.rmtree(two / "transformer")
    resume = ["--no-use_lora", "--resume_from_checkpoint", "latest"]
    before = metrics_of(two)
    run_on_ranks(kind, script, two, tiny_pipeline_folder, *resume, **values)
    assert [line.keys() for line in metrics_of(two)] == [line.keys() for line in before]
    for name in ("train/policy_loss", "rollout/reward_mean", "train/grad_norm"):
        assert values_of(two, name) == pytest.approx(
            [line[name] for line in before if name in line], rel=1e-4, abs=1e-7
        )
    again = load_file(two / "transformer/diffusion_pytorch_model.safetensors")
    assert max((again[name] - weights[1][name]).abs().max() for name in again) < 1e-6


@pytest.fixture(scope="module")
def four(runs, tiny_pipeline_folder):
    """Two machines of two ranks, which are both this one: hybrid sharding as fsdp2_multinode.yaml has it."""
    base = runs[train_flowgrpo, "one"].parent
    return run_on_ranks(
        "fsdp2_multinode", train_flowgrpo, base / "four", tiny_pipeline_folder, ranks=4, **with_reward(base)
    )


def test_two_machines_of_two_ranks_are_two_ranks_of_one_and_one_process(runs, four):
    for kind in ("one", "fsdp2"):
        check_first_update(runs[train_flowgrpo, kind], four)
        check_losses(runs[train_flowgrpo, kind], four)
    shard = open_cache(four / "trajectories/epoch-00000", shards=[3])
    assert len({prompt for prompt in shard.values["prompt_id"]}) == 1
    assert len(shard.sample_indices) == 4  # half of a group of 8


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_eight_ranks_are_one_process_and_are_resumed_by_four(tmp_path, tiny_pipeline_folder, script):
    values = {"train_batch_size": 2, **with_reward(tmp_path)}  # eight batches: a group of 8 spans four ranks
    one = run(script, tmp_path / "one", tiny_pipeline_folder, **(OPTIONS[script] | values))
    eight = run_on_ranks("fsdp2", script, tmp_path / "eight", tiny_pipeline_folder, ranks=8, **values)
    check_first_update(one, eight)
    check_losses(one, eight)
    for epoch in (2, 3):
        shutil.rmtree(eight / f"checkpoints/epoch-{epoch:05d}")
    (eight / "pytorch_lora_weights.safetensors").unlink()
    resume = ("--resume_from_checkpoint", "latest")
    run_on_ranks("fsdp2", script, eight, tiny_pipeline_folder, *resume, ranks=4, **values)
    check_losses(one, eight)


@pytest.mark.slow
def test_full_weights_of_two_machines_are_those_of_one_process(tmp_path, tiny_pipeline_folder):
    values = {"kl_beta": 0, "learning_rate": 1e-4, "num_train_epochs": 1, "eval_epochs": 0, **with_reward(tmp_path)}
    full = (train_flowgrpo, tmp_path / "one", tiny_pipeline_folder, "--no-use_lora")
    one = run(*full, **(OPTIONS[train_flowgrpo] | values))
    four = run_on_ranks("fsdp2_multinode", full[0], tmp_path / "four", *full[2:], ranks=4, **values)
    assert values_of(one, "train/grad_norm") == pytest.approx(values_of(four, "train/grad_norm"), rel=1e-4)
    weights = [load_file(f / "transformer/diffusion_pytorch_model.safetensors") for f in (one, four)]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) < 2.1e-4  # a step of Adam


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_weights_gathered_once_a_rollout_change_nothing(runs, tmp_path, tiny_pipeline_folder, script):
    folder = run_on_ranks(
        "fsdp2", script, tmp_path / "gathered", tiny_pipeline_folder, "--gathered_rollout", **with_reward(tmp_path)
    )
    assert metrics_of(folder) == metrics_of(runs[script, "fsdp2"])
    assert adapter_bytes(folder) == adapter_bytes(runs[script, "fsdp2"])


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_the_demo_on_two_sharded_ranks_learns_as_one_process_does(tmp_path, script):
    """Epoch 1 is equal, later ones differ by at most three times what another order of summation does in one process:
    batches of half the size."""
    options = {"num_train_epochs": 5, "eval_epochs": 0, "checkpointing_steps": 0}
    runs = {}
    for name, values in {"one": {}, "other order": {"train_batch_size": 8}, "two": {}}.items():
        words = options_of(options | values | {"output_dir": tmp_path / name.replace(" ", "_")})
        if name == "two":
            assert launch("fsdp2", script.__file__, *words).count("on 2 ranks") == 2
        else:
            reset_accelerate()
            script.main(script.parse_args(words))
        runs[name] = tmp_path / name.replace(" ", "_")
    worst = {}
    for metric in ("rollout/reward_mean", "train/policy_loss"):
        one, other, two = (torch.tensor(values_of(runs[name], metric)) for name in ("one", "other order", "two"))
        first = len(one) // 5  # updates of an epoch
        assert (two - one)[:first].abs().max() < 1e-5
        noise, difference = ((values - one)[first:].abs().max().item() for values in (other, two))
        worst[metric] = (difference, noise)
    print(script.__name__, worst)
    assert all(difference <= 3 * noise for difference, noise in worst.values())
