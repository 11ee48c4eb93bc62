"""What a run leaves loads elsewhere, and what others write trains here: python -m pytest tests/test_interop.py

Broken on purpose, each once: peft's prefix left out, alpha dropped from the config, paths left in the card, sigma_max
taken from the first sigma in the example.
"""

import json
import re
import shlex

import pytest
import torch
import write_cache
import yaml
from diffusers import QwenImagePipeline
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from script_runs import metrics_of, run, values_of

import export_peft
import run_folder
import train_flowgrpo
import trajectory_cache
from model_files import ADAPTER_FILE


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_pipeline_folder):
    """A finished run of one epoch."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return run(train_flowgrpo, folder, tiny_pipeline_folder, num_train_epochs=1, num_inference_steps=7, lora_alpha=12)


@torch.no_grad()
def velocity(transformer):
    """The transformer's output at some fixed input."""
    generator = torch.Generator().manual_seed(0)
    latents, embeds = (torch.randn(2, *shape, generator=generator) for shape in ((16, 64), (5, 32)))
    shapes = [[(1, 4, 4)]] * 2
    timestep = torch.tensor([0.9, 0.3])
    inputs = {"encoder_hidden_states": embeds, "timestep": timestep, "img_shapes": shapes}
    return transformer(latents, **inputs, return_dict=False)[0]


@pytest.fixture(scope="module")
def expected(finished, tiny_pipeline_folder):
    """The trained velocity, as diffusers loads the run folder."""
    pipeline = QwenImagePipeline.from_pretrained(tiny_pipeline_folder)
    base = velocity(pipeline.transformer)
    pipeline.load_lora_weights(finished)
    trained = velocity(pipeline.transformer)
    assert (trained - base).abs().max() > 1e-4
    return trained


def test_the_peft_folder_loads_as_a_peft_model(finished, expected, tiny_pipeline_folder, tmp_path):
    export_peft.main([str(finished), str(tmp_path / "adapter")])
    transformer = QwenImagePipeline.from_pretrained(tiny_pipeline_folder).transformer
    model = PeftModel.from_pretrained(transformer, tmp_path / "adapter")
    torch.testing.assert_close(velocity(model.get_base_model()), expected, rtol=0, atol=1e-6)


def test_the_peft_folder_has_the_form_that_engines_read(finished, tiny_pipeline_folder):
    export_peft.main([str(finished)])
    config = json.loads((finished / "peft/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["inference_mode"]) == ("LORA", 4, 12, True)
    assert config["base_model_name_or_path"] == str(tiny_pipeline_folder)
    tensors = load_file(finished / "peft/adapter_model.safetensors")
    for name in tensors:
        layer = re.fullmatch(r"base_model\.model\.(transformer_blocks\.\d+\..+)\.lora_[AB]\.weight", name).group(1)
        assert any(f".{layer}".endswith(f".{target}") for target in config["target_modules"])
    assert len(tensors) == len(load_file(finished / ADAPTER_FILE)) > 20


def test_the_exported_file_loads_with_peft_alone(finished, expected, tiny_pipeline_folder):
    transformer = QwenImagePipeline.from_pretrained(tiny_pipeline_folder).transformer
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(finished / ADAPTER_FILE).items()
    }
    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=12, target_modules=layers), transformer)
    result = set_peft_model_state_dict(transformer, tensors)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key]
    torch.testing.assert_close(velocity(transformer), expected, rtol=0, atol=1e-6)


def test_every_metric_is_in_the_glossary(finished):
    glossary = (train_flowgrpo.HERE / "README.md").read_text().split("## Metrics")[1].split("## ")[0]
    for line in metrics_of(finished):
        for name in line.keys() - {"epoch", "step", "eval/jpeg_compressibility"}:
            words = name.split("/")[1].replace("jpeg_compressibility", "`<reward>`")
            assert re.search(rf"(?<![\w`]){re.escape(words)}(?!\w)", glossary), name


def test_a_folder_without_an_adapter_is_refused(tmp_path, capsys):
    assert run_folder.run_script(lambda: export_peft.main([str(tmp_path)])) == 2
    assert "holds no pytorch_lora_weights.safetensors" in capsys.readouterr().err
    save_file({"transformer.x.lora_A.weight": torch.zeros(1, 1)}, tmp_path / "pytorch_lora_weights.safetensors")
    assert run_folder.run_script(lambda: export_peft.main([str(tmp_path)])) == 2
    assert "has no lora_adapter_metadata, which holds alpha" in capsys.readouterr().err


def test_the_model_card_states_the_runs_facts(finished, tiny_pipeline_folder):
    card = ModelCard.load(finished / "README.md")
    assert card.data.library_name == "diffusers"
    assert card.data.base_model is None  # a folder is no repository of the hub
    assert {"lora", "qwen-image"} < set(card.data.tags)
    evaluations = values_of(finished, "eval/jpeg_compressibility")
    assert f"| eval/jpeg_compressibility | {evaluations[0]:.4g} | {evaluations[-1]:.4g} |" in card.text
    assert '"num_inference_steps": 7' in card.text
    assert f'from_pretrained("your folder {tiny_pipeline_folder.name}")' in card.text
    assert (json.loads((finished / "args.json").read_text())["git_commit"] or "unknown") in card.text
    assert "2 optimizer steps" in card.text
    for path in (finished.parent, tiny_pipeline_folder.parent):
        assert str(path) not in card.content


def test_the_card_names_a_model_of_the_hub(tmp_path):
    args = {"pretrained_model_name_or_path": "Qwen/Qwen-Image", "rank": 64, "prompts": "/home/me/prompts.txt"}
    args |= {"reward_funcs": ["/home/me/red.py:score", "ocr"], "eval_reward_funcs": ["http:http://my.host:80/score"]}
    metrics = '{"epoch": 0, "step": 3, "rollout/reward_mean": 0.5, "eval//home/me/red.py:score": 0.25}\n'
    (tmp_path / "metrics.jsonl").write_text(metrics)
    run_folder.write_model_card(tmp_path, "FlowGRPO", args)
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "Qwen/Qwen-Image"
    assert 'from_pretrained("Qwen/Qwen-Image")' in text
    assert "| eval/red.py:score | 0.25 | 0.25 |" in text
    options = json.loads(text.split("```json")[1].split("```")[0])
    assert options == {"eval_reward_funcs": ["http"], "rank": 64, "reward_funcs": ["red.py:score", "ocr"]}
    assert "/home/me" not in text
    assert "my.host" not in text


def test_a_cache_from_plain_tensors_is_checked_and_trains(tmp_path, monkeypatch, capsys):
    """The commands in the example's docstring, in this process."""
    torch.manual_seed(0)
    write_cache.write_example(tmp_path / "foreign", train_flowgrpo.HERE / "assets/demo_pipeline")
    assert trajectory_cache.main([str(tmp_path / "foreign")]) == 0
    assert "all checksums agree" in capsys.readouterr().out
    command = re.search(r"train_flowgrpo.py (.*)", write_cache.__doc__).group(1)
    options = shlex.split(command.replace("caches/foreign", str(tmp_path / "foreign")))
    train_flowgrpo.main(train_flowgrpo.parse_args([*options, "--output_dir", str(tmp_path / "run")]))
    assert values_of(tmp_path / "run", "train/ratio_max_dev")[0] == 0
    assert values_of(tmp_path / "run", "train/grad_norm")[0] > 0
