"""What users of such software have hit in public: each kind has tests here or a reason why it cannot happen.

python -m pytest tests/test_pitfalls.py checks that the named tests exist, and holds the few that belong nowhere else.
"""

import ast
from pathlib import Path

import pytest
import torch
from script_runs import run, values_of

import run_folder
import train_flowgrpo
import train_nft
from rewards import group_advantages
from trajectory_cache import open_cache, read_tensors, table_writer

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
OWN = {"sde_window_range": (0, 3), "clip_range": 1e-3}

# The kind of fault: tests as file::function, or why it cannot happen.
PITFALLS = {
    "cached latents and log-prob precision": [
        "test_train_flowgrpo::test_staging_changes_no_number",
        "test_rollout::test_log_probs_recomputed_from_what_is_stored_are_equal_bit_for_bit",
        "test_bad_input::test_bad_input_is_one_line_before_a_model_is_loaded",  # latents in bf16 are refused
    ],
    "log-prob is a mean, not a sum": [
        "test_sde_step::test_log_prob_is_a_mean_over_elements",
        "test_sde_step::test_sde_step_golden",
        "test_train_flowgrpo::test_a_clip_range_from_language_models_is_warned_about",
    ],
    "step std at the ends": [
        "test_sde_step::test_std_at_the_first_step",
        "test_sde_step::test_the_last_step_is_finite",
        "test_flowgrpo_refusals::test_refusals_are_one_line_before_a_model_is_loaded",  # noise level 0
    ],
    "advantage std over repeated rewards": ["test_pitfalls::test_advantages_do_not_depend_on_the_number_of_steps"],
    "group or global std": [
        "test_rewards::test_advantages_golden",
        "test_ranks::test_three_epochs_are_those_of_one_process",
    ],
    "reward climbs, then collapses": [
        "test_divergence::test_a_rate_that_destroys_the_policy_stops_the_run",
        "test_divergence::test_a_nan_stops_the_run_by_name_and_resume_goes_on",
    ],
    "r near 0.5": ["test_nft_loss::test_reward_probability", "test_pitfalls::test_spread_of_r_is_logged"],
    "the NFT loss, and old = new": ["test_nft_loss::test_loss_golden", "test_train_nft::test_refusals"],
    "which timesteps train": [
        "test_nft_loss::test_train_timesteps",
        "test_pitfalls::test_every_sample_and_step_trains_once_per_inner_epoch",
    ],
    "timestep look-up": [
        "test_train_flowgrpo::test_a_cache_with_wrong_rows_is_refused_by_name",  # bf16 timesteps
        "test_qwen_image::test_timesteps_stay_fp32_and_everything_else_is_cast",
    ],
    "FSDP2 + LoRA uses more memory": [
        "test_lora::test_every_trainable_parameter_is_an_fp32_adapter_with_a_gradient",
        "test_pitfalls::test_the_census_is_printed",
    ],
    "FSDP1, frozen and trainable together": "prepare_policy makes FSDP1's adapters ignored modules, whole on each "
    "rank: no flat parameter mixes frozen and trainable; measured on GPUs in LOG.md",
    "no_sync memory": [
        "test_train_batch::test_an_update_is_a_step_on_the_mean_loss",
        "test_ranks::test_one_update_is_that_of_one_process",
    ],
    "pinned memory rounds up": "a ring of prefetch + 1 slots is made per micro-batch, torch's pinned cache reuses "
    "them; only with --staging_prefetch on a GPU: test_staging_ring (-m gpu)",
    "Qwen-Image OOM": "benchmarks/full_size.py measures it, the README has its peaks; the CPU has no device memory",
    "activation checkpointing wraps the wrong module": "the model's own checkpointing is used, once a block; with "
    "fsdp_activation_checkpointing besides the run is refused by make_accelerator; there is no lora_dropout",
    "uniform dtype assertion": ["test_ranks::test_three_epochs_are_those_of_one_process"],
    "FSDP1 dtype error, NaN": [
        "test_smoke::test_all_phases_on_two_cpu_ranks",
        "test_divergence::test_a_nan_stops_the_run_by_name_and_resume_goes_on",
    ],
    "disable_adapter under FSDP1": [
        "test_train_nft::test_switching_adapters_leaves_requires_grad_alone_even_after_an_error",
        "test_lora::test_with_adapters_off_it_is_the_base_model",
        "test_ranks::test_three_epochs_are_those_of_one_process",  # with a KL to the base model
    ],
    "second adapter": [
        "test_train_nft::test_old_adapter_is_an_exact_frozen_copy",
        "test_train_nft::test_trainable_parameters_stay_the_same",
        "test_train_nft::test_resume_gives_the_same_run",
    ],
    "reference with the adapter on": [
        "test_train_flowgrpo::test_kl_to_the_base_model",
        "test_ranks::test_three_epochs_are_those_of_one_process",
    ],
    "nothing trains": [
        "test_ranks::test_one_update_is_that_of_one_process",
        "test_pitfalls::test_the_first_update_moves_the_policy",
    ],
    "clipping with CPU offload": ["test_smoke::test_all_phases_on_two_cpu_ranks"],
    "regional compile": [
        "test_speed::test_compiled_blocks_share_graphs_and_no_switch_recompiles",
        "test_speed::test_a_compiled_run_is_the_eager_one",
        "test_speed::test_compilation_is_refused_under_fsdp_version_1",
    ],
    "bf16 and fp16 in the cache": [
        "test_trajectory_cache::test_every_bfloat16_is_told_apart",
        "test_trajectory_cache::test_bits_and_dtype_survive",
        "test_trajectory_cache::test_a_file_is_no_larger_than_its_payload",
        "test_trajectory_cache::test_an_empty_table_is_refused",
        "test_properties::test_the_cache_keeps_every_bit",
    ],
    "2 GB offsets": ["test_pitfalls::test_a_row_is_a_record_batch_of_its_own"],
    "stale cache": [
        "test_pitfalls::test_the_second_epoch_sees_its_own_rewards",
        "test_train_flowgrpo::test_a_second_run_in_the_same_folder_is_refused",
    ],
    "slow rows": [
        "test_zero_copy::test_reading_a_step_takes_the_memory_of_that_step",
        "test_zero_copy::test_warm_reads_are_at_least_half_as_fast_as_memory",
    ],
    "ranks race": [
        "test_trajectory_cache::test_a_table_is_seen_only_when_it_is_whole",
        "test_ranks::test_groups_that_span_ranks_have_the_same_advantages",
    ],
    "non_blocking": ["test_staging_ring::test_prefetched_steps_hold_their_own_index"],
    "disk fills": [
        "test_faults::test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room",
        "test_security::test_nothing_outside_the_run_folder_is_written_or_deleted",
        "test_soak::test_nothing_grows_over_300_epochs",
        "test_pitfalls::test_old_caches_are_deleted",
    ],
    "empty LoRA file": [
        "test_ranks::test_export_holds_the_gathered_tensors",
        "test_lora::test_an_empty_export_is_refused",
    ],
    "save hangs": [
        "test_ranks::test_two_sharded_ranks_are_resumed_by_one",
        "test_interruptions::test_ctrl_c_ends_with_a_checkpoint_and_an_adapter",
        "test_faults::test_a_dead_rank_ends_the_run_and_it_resumes",
    ],
    "mixed key names": [
        "test_lora::test_export_loads_into_a_pipeline",
        "test_train_flowgrpo::test_reloaded_adapter_is_the_evaluated_policy",
    ],
    "optimizer state": [
        "test_interruptions::test_killed_and_resumed_is_the_same_run",
        "test_ranks::test_two_sharded_ranks_are_resumed_by_one",
        "test_ranks::test_full_weights_sharded_over_two_ranks_are_resumed",
    ],
    "mixed precision default": [
        "test_train_flowgrpo::test_staging_changes_no_number",
        "test_pitfalls::test_precision_is_the_launchers",
    ],
    "broken clean install": ".ci/run installs from requirements.txt, whose floors are versions that were run",
}


def names_of(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("kind", PITFALLS)
def test_every_kind_has_a_test_or_a_reason(kind):
    cover = PITFALLS[kind]
    if isinstance(cover, str):
        assert len(cover) > 30
        return
    assert cover
    for name in cover:
        file, _, function = name.partition("::")
        assert function in names_of(TESTS / f"{file}.py"), name


# ----- Kinds that belong to no other file --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_pipeline_folder):
    """A FlowGRPO run of three epochs whose rewards are the epoch's number, with every cache kept."""
    folder = tmp_path_factory.mktemp("pitfalls")
    (folder / "reward.py").write_text(
        "from pathlib import Path\n"
        "def score(images, prompts, metadata):\n"
        "    run = Path(__file__).with_name('run') / 'trajectories'\n"
        "    epoch = len(list(run.glob('epoch-*'))) - 1\n"
        "    return [100 * epoch + value for value in images.mean(dim=(1, 2, 3)).tolist()]\n"
    )
    options = OWN | {"reward_funcs": f"{folder / 'reward.py'}:score", "eval_epochs": 0, "num_train_epochs": 3}
    return run(train_flowgrpo, folder / "run", tiny_pipeline_folder, **options, keep_trajectories=9)


def test_the_second_epoch_sees_its_own_rewards(finished):
    means = values_of(finished, "rollout/reward_mean")
    assert [round(mean / 100) for mean in means] == [0, 1, 2]
    for epoch, mean in enumerate(means):
        cache = open_cache(run_folder.trajectory_folder(finished, epoch))
        assert cache.facts["epoch"] == epoch
        assert sum(cache.values["reward"]) / 16 == pytest.approx(mean)


def test_advantages_do_not_depend_on_the_number_of_steps():
    rewards, ids = torch.tensor([0.0, 1.0, *[1.0] * 4, *[0.0] * 4]), torch.tensor([0] * 2 + [1] * 8)
    advantages = group_advantages(rewards, ids, global_std=False, eps=0.0)
    assert advantages.tolist() == pytest.approx([-1.0, 1.0, *[1.0] * 4, *[-1.0] * 4])  # both groups have std 0.5
    assert advantages.shape == (10,)  # one a sample; the update repeats it along time afterwards


def test_spread_of_r_is_logged(tmp_path, tiny_pipeline_folder):
    values = {"num_train_epochs": 1, "eval_epochs": 0, "checkpointing_steps": 0, "old_policy_decay": "copy"}
    folder = run(train_nft, tmp_path / "run", tiny_pipeline_folder, **values)
    assert values_of(folder, "train/reward_prob_mean")[0] == pytest.approx(0.5, abs=0.05)
    assert values_of(folder, "train/reward_prob_std")[0] > 0.05


def test_every_sample_and_step_trains_once_per_inner_epoch(tmp_path, tiny_pipeline_folder, monkeypatch):
    seen, train_batch = [], train_flowgrpo.train_batch

    def noting(*args, **options):
        for batch in args[6]:
            times = torch.stack(list(batch["all_timesteps"]))
            seen.extend(
                (sample, float(time)) for sample, row in zip(batch["sample_index"], times, strict=True) for time in row
            )
        return train_batch(*args, **options)

    monkeypatch.setattr(train_flowgrpo, "train_batch", noting)
    values = OWN | {"num_train_epochs": 1, "num_inner_epochs": 2, "eval_epochs": 0, "checkpointing_steps": 0}
    folder = run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values)
    cache = open_cache(run_folder.trajectory_folder(folder, 0))
    expected = []
    for row, sample in enumerate(cache.sample_indices):
        times = read_tensors(cache.trajectories, row)["all_timesteps"].tolist()
        expected += [(sample, time) for time in times]
    assert len(expected) == 32
    assert sorted(seen) == sorted(expected * 2)
    assert sorted(seen[:32]) == sorted(expected)


def test_the_census_is_printed(tmp_path, tiny_pipeline_folder, capsys):
    values = OWN | {"num_train_epochs": 1, "eval_epochs": 0, "checkpointing_steps": 0}
    run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters"))
    assert line.split(None, 1)[1] == "338,400 frozen float32, 14,848 trainable float32"


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_precision_is_the_launchers(tmp_path, tiny_pipeline_folder, monkeypatch, capsys, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    values = OWN | {"num_train_epochs": 1, "eval_epochs": 0, "checkpointing_steps": 0}
    code = run_folder.run_script(lambda: run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values))
    captured = capsys.readouterr()
    if precision == "fp16":
        assert code == 2
        assert "mixed_precision fp16 is not supported: choose bf16 or no" in captured.err
    else:
        assert f"launch             mixed precision {precision}, distributed NO, 1 process(es), cpu" in captured.out


def test_the_first_update_moves_the_policy(finished):
    deviations = values_of(finished, "train/ratio_max_dev")
    assert deviations[0::2] == [0.0] * 3
    assert min(deviations[1::2]) > 0


def test_old_caches_are_deleted(tmp_path, tiny_pipeline_folder):
    values = OWN | {"num_train_epochs": 3, "eval_epochs": 0, "checkpointing_steps": 0}
    folder = run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values)
    assert [path.name for path in (folder / "trajectories").iterdir()] == ["epoch-00002"]


def test_a_row_is_a_record_batch_of_its_own(tmp_path):
    """Arrow's offsets count entries of one record batch in 31 bits; rows of many are never joined into one."""
    with table_writer(tmp_path / "x.arrow") as write:
        for number in range(5):
            write({"sample_index": number, "latents": torch.full((1000,), number, dtype=torch.int8)})
    import pyarrow as pa

    with pa.OSFile(str(tmp_path / "x.arrow")) as file:
        batches = list(pa.ipc.open_stream(file))
    assert [batch.num_rows for batch in batches] == [1] * 5
