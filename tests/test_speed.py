"""Compiled blocks, partly checkpointed blocks, attention backends: python -m pytest tests/test_speed.py"""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from script_runs import metrics_of, reset_accelerate, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import qwen_image
import train_flowgrpo
import train_nft
from qwen_image import adapter_active, adapters_off, checkpoint_blocks, compile_blocks, predict_velocity
from sharding import clear_gradients, gathered, make_accelerator

NUM_BLOCKS = 5
TARGETS = ("to_q", "to_add_out", "img_mlp.net.2")  # few, since tracing takes long; the runs below have all
SMALL = {"num_train_epochs": 1, "eval_epochs": 0, "checkpointing_steps": 0, "report_to": "none"}


@pytest.fixture
def transformer():
    """Five blocks with a trained and an old adapter that differ."""
    model = qwen_image.tiny_pipeline(0, num_layers=NUM_BLOCKS).transformer.requires_grad_(False)
    torch.manual_seed(0)
    qwen_image.add_lora(model, rank=4, lora_alpha=8, target_modules=TARGETS)
    qwen_image.add_old_adapter(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.normal_(std=0.1)
    return model


def velocity(model, *, batch=2, text=7, grad=True):
    """The velocity at seeded inputs, with or without a graph."""
    generator = torch.Generator().manual_seed(batch + text)
    latents, embeds = (torch.randn(batch, *shape, generator=generator) for shape in ((16, 64), (text, 32)))
    options = {"height": 64, "width": 64, "true_cfg_scale": 1.0, "cfg_batched": False, "dtype": torch.float32}
    with torch.set_grad_enabled(grad):
        return predict_velocity(model, latents, torch.full((batch,), 500.0), embeds, **options)


def gradients(model):
    """The adapter's gradients of one backward, by name."""
    model.zero_grad()
    velocity(model).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_compiled_blocks_share_graphs_and_no_switch_recompiles(transformer):
    """Two graphs (all blocks but the last, and the last) for each kind of pass, whatever the number of blocks."""
    layers, counter = qwen_image.lora_layers(transformer), CompileCounterWithBackend("eager")
    names = list(transformer.state_dict())

    def passes():
        outputs, counts = [], []
        for switch in (lambda: adapter_active(layers, "default"), lambda: adapter_active(layers, "old"),
                       lambda: adapters_off(layers)):  # fmt: skip
            with switch():
                outputs.append(velocity(transformer, grad=False))
            counts.append(counter.frame_count)
        outputs.append(velocity(transformer).detach())
        return outputs, [*counts, counter.frame_count]

    expected, none = passes()
    assert none == [0, 0, 0, 0]
    compile_blocks(transformer, mode="default", dynamic=True, fullgraph=True, backend=counter)
    outputs, counts = passes()
    assert counts == [2, 4, 6, 8]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    for text in (5, 6, 9):  # a new prompt length is the same graph
        velocity(transformer, text=text)
    assert passes()[1] == [8, 8, 8, 8]
    assert list(transformer.state_dict()) == names


def test_recompute_of_compiled_blocks_gives_the_same_gradients(transformer):
    expected = gradients(transformer)
    compile_blocks(transformer, mode="default", dynamic=True, fullgraph=True, backend="aot_eager")
    checkpoint_blocks(transformer)
    found = gradients(transformer)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-9) for name in expected)


@pytest.mark.parametrize(("num_blocks", "recomputed"), [(None, 5), (5, 5), (2, 2), (1, 1), (9, 5)])
def test_the_first_blocks_are_recomputed(transformer, num_blocks, recomputed):
    expected = gradients(transformer)
    runs = [0] * NUM_BLOCKS

    def count(index, *_):
        runs[index] += 1

    checkpoint_blocks(transformer, num_blocks)
    for index, block in enumerate(transformer.transformer_blocks):
        block.img_mod.register_forward_hook(partial(count, index))
    found = gradients(transformer)
    assert runs == [2] * recomputed + [1] * (NUM_BLOCKS - recomputed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ddp_has_gradients_once(transformer, tmp_path):
    """In its buckets, not beside them, from the second update on: at rank 64 they are 1.6 GiB."""
    reset_accelerate()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(transformer, **make_accelerator().ddp_handler.to_kwargs())
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trainable)
        for _ in range(2):
            with model.no_sync():
                velocity(model).sum().backward()
                gradients = {parameter.grad.untyped_storage().data_ptr() for parameter in trainable}
            velocity(model).sum().backward()
            clear_gradients(SimpleNamespace(distributed_type=DistributedType.MULTI_CPU), optimizer)
            assert not any(parameter.grad.any() for parameter in trainable)
        assert len(gradients) == 1 < len(trainable)
        clear_gradients(SimpleNamespace(distributed_type=DistributedType.NO), optimizer)
        assert all(parameter.grad is None for parameter in trainable)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_a_compiled_run_is_the_eager_one(script, tmp_path, tiny_pipeline_folder, monkeypatch):
    """The whole script with blocks compiled by the backend that changes no number, and checkpointed in part."""
    values = SMALL | ({"sde_window_range": (0, 3)} if script is train_flowgrpo else {})
    eager = run(script, tmp_path / "eager", tiny_pipeline_folder, **values)
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(qwen_image, "compile_blocks", partial(compile_blocks, backend=counter))
    options = ["--compile_blocks", "--compile_fullgraph", "--attention_backend", "native"]
    compiled = run(script, tmp_path / "compiled", tiny_pipeline_folder, *options, checkpointed_blocks=1, **values)
    assert counter.frame_count >= 2
    assert metrics_of(compiled) == metrics_of(eager)
    seconds = [
        line["time/compile_s"]
        for line in map(json.loads, (compiled / "metrics.jsonl").read_text().splitlines())
        if "time/update_s" in line
    ]
    assert seconds[0] > 0
    assert "time/compile_s" not in (eager / "metrics.jsonl").read_text()


REFUSED = {
    "no fsdp2": (["--gathered_rollout"], "--gathered_rollout is for FSDP2"),
    "backend": (["--attention_backend", "flash"], "--attention_backend flash cannot be used"),
    "no blocks": (["--checkpointed_blocks", "0"], "--checkpointed_blocks 0: give at least 1"),
    "no checkpointing": (
        ["--no-gradient_checkpointing", "--checkpointed_blocks", "2"],
        "with --gradient_checkpointing",
    ),
    "mode of nothing": (["--compile_mode", "max-autotune-no-cudagraphs"], "need --compile_blocks: add it"),
    "full graph of nothing": (["--compile_fullgraph"], "need --compile_blocks: add it"),
    "shapes of nothing": (["--no-compile_dynamic"], "need --compile_blocks: add it"),
}


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
@pytest.mark.parametrize("case", REFUSED)
def test_speed_options_that_cannot_work_are_refused(script, case, tmp_path, tiny_pipeline_folder):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        run(script, tmp_path / "run", tiny_pipeline_folder, *options)


def test_blocks_stay_whole_while_a_rollout_lasts(transformer, tmp_path):
    """FSDP2 of one rank over gloo: a block's weights are shards before and after, whole from its first forward on."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in transformer.transformer_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(transformer, mesh=mesh)
        block = transformer.transformer_blocks[1]

        def is_sharded():
            return isinstance(block.attn.to_q.base_layer.weight, DTensor)

        expected = velocity(transformer, grad=False)
        assert is_sharded()
        with gathered(transformer, keep=True):
            assert torch.equal(velocity(transformer, grad=False), expected)
            assert not is_sharded()
            assert torch.equal(velocity(transformer, grad=False), expected)
        assert is_sharded()
        with gathered(transformer, keep=False):
            velocity(transformer, grad=False)
            assert is_sharded()
        velocity(transformer).sum().backward()
        assert is_sharded()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft])
def test_compilation_is_refused_under_fsdp_version_1(script, tmp_path, tiny_pipeline_folder, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="--compile_blocks under FSDP version 1"):
        run(script, tmp_path / "run", tiny_pipeline_folder, "--compile_blocks")
