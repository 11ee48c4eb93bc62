"""Adapters of the tiny transformer and their export: python -m pytest tests/test_lora.py"""

import json

import pytest
import torch
from diffusers import QwenImagePipeline
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_inputs import randn, text_embeds, velocity

from qwen_image import (
    LORA_TARGETS,
    adapter_active,
    adapter_state_dict,
    adapters_off,
    add_lora,
    add_old_adapter,
    check_lora_targets,
    export_lora,
    load_pipeline,
    lora_layers,
    prompt_conditions,
    train_all_used,
)


def lora_transformer(folder, *, rank=4, lora_alpha=12, dtype=torch.float32):
    """The tiny transformer with an adapter whose B is random: at its first value, zero, the adapter does nothing."""
    transformer = load_pipeline(folder, dtype=dtype).transformer
    add_lora(transformer, rank=rank, lora_alpha=lora_alpha, target_modules=LORA_TARGETS)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    return transformer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_trainable_parameter_is_an_fp32_adapter_with_a_gradient(tiny_pipeline_folder, dtype):
    transformer = lora_transformer(tiny_pipeline_folder, dtype=dtype)
    conditions = prompt_conditions(text_embeds(5), None)
    velocity(transformer, conditions, dtype=dtype).square().mean().backward()
    trainable = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    assert {name for name, p in transformer.named_parameters() if ".lora_" in name} == trainable.keys()
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert {p.dtype for name, p in transformer.named_parameters() if name not in trainable} == {dtype}
    assert [name for name, p in trainable.items() if p.grad is None or not p.grad.any()] == []


def test_layers_that_reach_no_image_get_no_adapter(tiny_pipeline_folder):
    transformer = lora_transformer(tiny_pipeline_folder)
    adapted = {name.partition(".lora_A")[0] for name in transformer.state_dict() if ".lora_A" in name}
    layers = {name if "_mlp" in name else f"attn.{name}" for name in LORA_TARGETS}
    unused = {"attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
    blocks = enumerate((layers, layers - unused))
    assert adapted == {f"transformer_blocks.{index}.{name}" for index, names in blocks for name in names}


def test_a_fresh_adapter_changes_nothing(tiny_pipeline_folder, pipeline):
    transformer = load_pipeline(tiny_pipeline_folder, dtype=torch.float32).transformer
    add_lora(transformer, rank=4, lora_alpha=12, target_modules=LORA_TARGETS)
    conditions = prompt_conditions(text_embeds(5), None)
    assert torch.equal(velocity(transformer, conditions), velocity(pipeline.transformer, conditions))


@pytest.mark.parametrize(("rank", "lora_alpha"), [(4, 12), (4, 2), (4, 4)])
def test_the_adapter_is_scaled_by_alpha_over_rank(tiny_pipeline_folder, rank, lora_alpha):
    layer = lora_layers(lora_transformer(tiny_pipeline_folder, rank=rank, lora_alpha=lora_alpha))[0]
    x = randn(0, 3, layer.in_features)
    change = layer.lora_B["default"](layer.lora_A["default"](x))
    torch.testing.assert_close(layer(x) - layer.base_layer(x), lora_alpha / rank * change, rtol=0, atol=1e-5)


def test_with_adapters_off_it_is_the_base_model(tiny_pipeline_folder, pipeline):
    transformer = lora_transformer(tiny_pipeline_folder)
    trainable = {name for name, p in transformer.named_parameters() if p.requires_grad}
    conditions, layers = prompt_conditions(text_embeds(5), None), lora_layers(transformer)
    with_adapter = velocity(transformer, conditions)
    with adapters_off(layers):
        assert torch.equal(velocity(transformer, conditions), velocity(pipeline.transformer, conditions))
    with pytest.raises(KeyError), adapters_off(layers):
        raise KeyError
    assert torch.equal(velocity(transformer, conditions), with_adapter)
    assert {name for name, p in transformer.named_parameters() if p.requires_grad} == trainable


def test_full_training_leaves_out_what_gets_no_gradient(tiny_pipeline_folder):
    transformer = load_pipeline(tiny_pipeline_folder, dtype=torch.float32).transformer
    train_all_used(transformer)
    velocity(transformer, prompt_conditions(text_embeds(5), None)).square().mean().backward()
    parameters = list(transformer.named_parameters())
    assert [name for name, p in parameters if p.requires_grad and (p.grad is None or not p.grad.any())] == []
    frozen = {name.rpartition(".")[0] for name, p in parameters if not p.requires_grad}
    unused = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    assert frozen == {f"transformer_blocks.1.{name}" for name in unused}


def test_the_old_adapter_is_a_frozen_copy_beside_the_active_one(tiny_pipeline_folder):
    transformer = lora_transformer(tiny_pipeline_folder)
    before = {name: p.requires_grad for name, p in transformer.named_parameters()}
    conditions, layers = prompt_conditions(text_embeds(5), None), lora_layers(transformer)
    expected = velocity(transformer, conditions)
    add_old_adapter(transformer)
    after = {name: p.requires_grad for name, p in transformer.named_parameters()}
    assert after == before | {name: False for name in after if ".old." in name}
    for name, parameter in transformer.named_parameters():
        if ".default." in name:
            parameter.data.mul_(-2)  # the copy must not follow
    changed = velocity(transformer, conditions)
    with adapter_active(layers, "old"):
        assert torch.equal(velocity(transformer, conditions), expected)
    with pytest.raises(KeyError), adapter_active(layers, "old"):
        raise KeyError
    assert torch.equal(velocity(transformer, conditions), changed)
    assert (changed - expected).abs().max() > 1e-2
    assert {name: p.requires_grad for name, p in transformer.named_parameters()} == after


@pytest.mark.parametrize("target", ["to_qq", "q", "attn", "transformer_blocks.0", "transformer_blocks.7.attn.to_q"])
def test_a_target_that_is_no_linear_layer_is_named(tiny_pipeline_folder, target):
    with pytest.raises(ValueError, match=f"'{target}'.*choose from .*to_q") as error:
        check_lora_targets(tiny_pipeline_folder, ["to_q", target])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("targets", [LORA_TARGETS, ["img_in"], ["transformer_blocks.0.attn.to_q"]])
def test_known_targets_pass(tiny_pipeline_folder, targets):
    check_lora_targets(tiny_pipeline_folder, targets)


# ----- Export ------------------------------------------------------------------------------------------------------


def exported(folder, transformer):
    export_lora(folder, adapter_state_dict(transformer.named_parameters()), transformer.peft_config["default"])
    return folder / "pytorch_lora_weights.safetensors"


def reloaded_velocity(pipeline_folder, export_folder, conditions):
    pipeline = QwenImagePipeline.from_pretrained(pipeline_folder)
    pipeline.load_lora_weights(export_folder)
    return velocity(pipeline.transformer, conditions).detach()


def test_export_loads_into_a_pipeline(tiny_pipeline_folder, tmp_path, pipeline):
    transformer = lora_transformer(tiny_pipeline_folder)
    path = exported(tmp_path / "export", transformer)
    conditions = prompt_conditions(text_embeds(5), None)
    expected = velocity(transformer, conditions).detach()
    got = reloaded_velocity(tiny_pipeline_folder, path.parent, conditions)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert (expected - velocity(pipeline.transformer, conditions)).abs().max() > 1e-2

    save_file(load_file(path), path, metadata={"format": "pt"})  # without its metadata alpha is lost
    scaled_wrongly = reloaded_velocity(tiny_pipeline_folder, path.parent, conditions)
    assert (scaled_wrongly - expected).abs().max() > 1e-2


def test_the_same_adapter_exports_the_same_bytes(tiny_pipeline_folder, tmp_path):
    transformer = lora_transformer(tiny_pipeline_folder)
    files = {exported(tmp_path / str(number), transformer).read_bytes() for number in range(8)}
    assert len(files) == 1


def test_exported_metadata_does_not_depend_on_a_sets_order(tiny_pipeline_folder, tmp_path):
    with safe_open(exported(tmp_path, lora_transformer(tiny_pipeline_folder)), framework="pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    targets = metadata["transformer.target_modules"]
    assert len(targets) > 1
    assert targets == sorted(targets)


def test_an_empty_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no adapter weights to export"):
        export_lora(tmp_path, {}, LoraConfig(target_modules=["to_q"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prefix", ["", "module.", "_fsdp_wrapped_module.", "module._fsdp_wrapped_module."])
@pytest.mark.parametrize("block", ["transformer_blocks.0.", "transformer_blocks.0._fsdp_wrapped_module."])
def test_adapter_names_lose_the_wrappers_prefixes(prefix, block):
    names = {"attn.to_q.lora_A.default.weight": 1, "attn.to_q.lora_A.old.weight": 2, "attn.to_q.weight": 3}
    parameters = [(prefix + block + name, torch.tensor(value)) for name, value in names.items()]
    key = "transformer_blocks.0.attn.to_q.lora_A.weight"
    assert adapter_state_dict(parameters) == {key: torch.tensor(1)}
    assert adapter_state_dict(parameters, "old") == {key: torch.tensor(2)}
