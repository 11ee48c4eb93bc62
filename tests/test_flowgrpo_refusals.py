"""What train_flowgrpo.py refuses before it loads a model: python -m pytest tests/test_flowgrpo_refusals.py"""

import shutil
from functools import partial

import pytest
from script_runs import run as run_any

import rollout
import run_folder
import train_flowgrpo

run = partial(run_any, train_flowgrpo, sde_window_range=(0, 3), clip_range=1e-3)

REFUSALS = {
    "noise": (["--noise_level", "0"], "--noise_level 0.0"),
    "arithmetic": (["--num_prompts_per_epoch", "5", "--num_updates_per_epoch", "2"], "--num_prompts_per_epoch 4"),
    "resolution": (["--resolution", "70"], "nearest is 64"),
    "window size": (["--sde_window_size", "4"], "--sde_window_range 0 3"),
    "window end": (["--sde_window_range", "0", "4"], "end it at 3"),
    "steps": (["--num_inference_steps", "1"], "at least 2"),
    "kl without lora": (["--no-use_lora", "--kl_beta", "0.1"], "--use_lora or --kl_beta 0"),
    "window schedule": (["--sde_window_schedule", "progressive", "--sde_window_size", "0"], "a size above 0"),
    "window epochs": (["--sde_window_epochs", "0"], "--sde_window_epochs is 0"),
    "window stride": (["--sde_window_stride", "-1"], "--sde_window_stride is -1"),
    "kl threshold": (["--dppo_kl_threshold", "0"], "--dppo_kl_threshold is 0.0"),
    "guard with cps": (["--policy_loss", "grpo_guard", "--sde_type", "cps"], "--sde_type sde, not cps"),
    "target": (["--lora_target_modules", "to_query"], "'to_query'"),
    "reward": (["--reward_funcs", "beauty"], "choose from"),
    "gdpo from a cache": (["--reward_aggregation", "gdpo", "--trajectory_cache", "x"], "gdpo with --trajectory_cache"),
    "timeout": (["--reward_timeout", "0"], "--reward_timeout is 0"),
    "workers": (["--reward_workers", "-1"], "--reward_workers is -1"),
    "no text to draw": (["--reward_funcs", "glyph_match"], "--prompts, prompt 1: glyph_match needs"),
    "no text to evaluate": (["--eval_reward_funcs", "ocr"], "--eval_prompts, prompt 1: ocr needs text in double"),
    "scorer": (["--reward_funcs", "http:http://127.0.0.1:9/"], "nobody listens there"),
    "weights": (["--reward_weights", "1", "2"], "2 values for 1"),
    "prompts": (["--prompts", "nowhere.txt"], "nowhere.txt"),
    "batch": (["--train_batch_size", "0"], "--train_batch_size is 0"),
    "negative seed": (["--seed", "-1"], "--seed is -1"),
    "no checkpoint": (["--resume_from_checkpoint", "latest"], "no checkpoint"),
    "cache": (["--trajectory_cache", "nowhere"], "nowhere"),
    "sequence": (["--max_sequence_length", "2000"], "at most 1024"),
    "model": (["--pretrained_model_name_or_path", "no/such-model"], "no/such-model"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_before_a_model_is_loaded(tmp_path, tiny_pipeline_folder, monkeypatch, capsys, name):
    options, expected = REFUSALS[name]
    monkeypatch.setattr(rollout, "load_models", None)  # reaching it would be a TypeError with a traceback
    code = run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, *options))
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert expected in error[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2", "parallelism_config_cp_size"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "parallelism_config_tp_size"),
    ],
)
def test_launchers_that_are_not_supported(
    tmp_path, tiny_pipeline_folder, monkeypatch, capsys, variable, value, expected
):
    monkeypatch.setenv(variable, value)
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder)) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def test_another_pipeline_class_is_refused(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImageEditPipeline"}')
    assert run_folder.run_script(lambda: run(tmp_path / "run", tmp_path)) == 2
    assert "is a QwenImageEditPipeline" in capsys.readouterr().err


BAD_NUMBERS = {
    "nan": ({"noise_level": "nan"}, "--noise_level is nan"),
    "infinite rate": ({"learning_rate": "inf"}, "--learning_rate is inf"),
    "beta": ({"adam_beta1": 1}, "--adam_beta1"),
    "weights": ({"reward_weights": 0}, "--reward_weights are [0.0]"),
    "twice": ({"reward_funcs": ("jpeg_compressibility", "jpeg_compressibility")}, "names a reward twice"),
    "prefetch": ({"staging_prefetch": 1}, "--enable_timestep_staging"),
    "cfg": ({"true_cfg_scale": 0.5}, "--true_cfg_scale 0.5"),
    "empty resume": ({"resume_from_checkpoint": "nowhere"}, "does not exist"),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_numbers_that_cannot_be_meant_are_refused(tmp_path, tiny_pipeline_folder, monkeypatch, capsys, name):
    values, expected = BAD_NUMBERS[name]
    monkeypatch.setattr(rollout, "load_models", None)
    assert run_folder.run_script(lambda: run(tmp_path / "run", tiny_pipeline_folder, **values)) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_folder_with_other_files_is_not_written_into(tmp_path, tiny_pipeline_folder, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_pipeline_folder, model)
    before = (model / "transformer/diffusion_pytorch_model.safetensors").read_bytes()
    assert run_folder.run_script(lambda: run(model, model, "--no-use_lora")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (model / "transformer/diffusion_pytorch_model.safetensors").read_bytes() == before
