"""Tests of qwen_image.py: golden numbers, equality with QwenImagePipeline, LoRA and its export.

python -m pytest tests/test_qwen_image.py
"""

import json

import diffusers
import pytest
import torch
from diffusers import QwenImagePipeline
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributions import Normal

from qwen_image import (
    LORA_TARGETS,
    SDE_TYPES,
    adapter_active,
    adapter_state_dict,
    adapters_off,
    add_lora,
    add_old_adapter,
    check_lora_targets,
    check_pipeline_class,
    decode_latents,
    encode_prompts,
    export_lora,
    get_sigmas,
    load_pipeline,
    lora_layers,
    pad_prompt_embeds,
    predict_velocity,
    prompt_conditions,
    sde_step_with_logprob,
    seeded_noise,
    tiny_pipeline,
    train_all_used,
)
from rollout import sample_batch

HEIGHT, WIDTH, TOKENS, TEXT_WIDTH = 64, 32, 8, 32  # not square, so that swapped sides show
SIZE = {"height": HEIGHT, "width": WIDTH}
PROMPTS = ["a red fox", "a much longer prompt about a fox, à la façon de 狐 🦊"]


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline_folder):
    pipeline = load_pipeline(tiny_pipeline_folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_embeds(*lengths):
    return [randn(length, length, TEXT_WIDTH) for length in lengths]


def velocity(transformer, conditions, *, scale=1.0, batched=False, dtype=torch.float32, timestep=700.0):
    latents = randn(0, len(conditions["prompt_embeds"]), TOKENS, 64)
    timesteps = torch.full((len(latents),), timestep)
    options = SIZE | {"true_cfg_scale": scale, "cfg_batched": batched, "dtype": dtype}
    return predict_velocity(transformer, latents, timesteps, **conditions, **options)


# ----- SDE step ----------------------------------------------------------------------------------------------------

GOLDEN_STEPS = [
    ("sde", 0.7, 1.0, 0.929, 2.627053188, [0.7195, -1.581, 0.4485, 0.04675], [-0.60335606, -0.59598186]),
    (
        "sde", 0.7, 0.57, 0.455, 0.805937270,
        [0.86288924, -2.01212849, 0.61041337, -0.05273081], [0.22300866, 0.27328958],
    ),
    (
        "cps", 0.7, 1.0, 0.929, 0.827745061,
        [0.45725717, -1.05651435, 0.31737859, -0.01881071], [-0.37439606, -0.08025756],
    ),
    (
        "dance", 0.3, 0.57, 0.455, 0.101734950,
        [0.93146908, -2.10074605, 0.61436447, 0.00992237], [-0.84221336, 0.99331969],
    ),
]  # fmt: skip


def sde_step(latents, v, sigma, sigma_next, sigma_max, **options):
    sigmas = (torch.full((len(latents),), value, dtype=torch.float64) for value in (sigma, sigma_next))
    sigma_max = torch.full((len(latents),), sigma_max, dtype=torch.float64)
    return sde_step_with_logprob(v, latents, *sigmas, sigma_max=sigma_max, **options)


@pytest.mark.parametrize(("sde_type", "noise_level", "sigma", "sigma_next", "std", "mean", "log_prob"), GOLDEN_STEPS)
def test_sde_step_golden(sde_type, noise_level, sigma, sigma_next, std, mean, log_prob):
    x, v, x_next = (
        torch.tensor(values, dtype=torch.float64)
        for values in ([[[1, -2]], [[0.5, 0.25]]], [[[0.5, 1]], [[-1, 2]]], [[[0.9, -1.8]], [[0.7, 0.1]]])
    )
    options = {"noise_level": noise_level, "sde_type": sde_type, "prev_sample": x_next}
    prev_sample, got_log_prob, got_mean, got_std, sqrt_dt = sde_step(x, v, sigma, sigma_next, 0.929, **options)
    assert torch.equal(prev_sample, x_next)
    assert got_std.tolist() == pytest.approx([std] * 2, abs=1e-9)
    assert got_mean.flatten().tolist() == pytest.approx(mean, abs=1e-8)
    assert got_log_prob.tolist() == pytest.approx(log_prob, abs=1e-8)
    assert sqrt_dt.tolist() == pytest.approx([(sigma - sigma_next) ** 0.5] * 2)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 3)])
@pytest.mark.parametrize(("prev_sample", "log_prob"), [(0.88875, 0.589029), (1.0, 0.462738)])
def test_log_prob_is_a_mean_over_elements(shape, prev_sample, log_prob):
    x = torch.ones(shape, dtype=torch.float64)
    options = {"noise_level": 0.7, "sde_type": "sde", "prev_sample": x * prev_sample}
    _, got, mean, std_dev_t, sqrt_dt = sde_step(x, x * 0.5, 0.5, 0.4, 0.9, **options)
    assert mean.flatten().tolist() == pytest.approx([0.88875] * x.numel(), abs=1e-9)
    assert (std_dev_t * sqrt_dt).item() == pytest.approx(0.2213594, abs=1e-7)
    assert got.item() == pytest.approx(log_prob, abs=1e-6)


def test_std_at_the_first_step():
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    *_, std_dev_t, sqrt_dt = sde_step(x, x, 1.0, 0.9, 0.9, noise_level=0.7, sde_type="sde", prev_sample=x)
    assert std_dev_t.item() == pytest.approx(2.213594, abs=1e-6)
    assert (std_dev_t * sqrt_dt).item() == pytest.approx(0.7, abs=1e-9)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_the_last_step_is_finite(sde_type):
    x = randn(0, 2, 3, 4)
    outputs = sde_step(x, x, 0.02, 0.0, 0.9, noise_level=0.7, sde_type=sde_type, noise=x)
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.5, 0.4)])
def test_sampled_step_has_the_stated_mean_std_and_density(sde_type, sigma, sigma_next):
    x, v, noise = (randn(seed, 2, 3, 4).double() for seed in range(3))
    options = {"noise_level": 0.7, "sde_type": sde_type, "noise": noise}
    prev_sample, log_prob, mean, std_dev_t, sqrt_dt = sde_step(x, v, sigma, sigma_next, 0.9, **options)
    std = (std_dev_t * sqrt_dt if sde_type == "sde" else std_dev_t).view(-1, 1, 1)
    torch.testing.assert_close(prev_sample - mean, std * noise)
    density = -((prev_sample - mean) ** 2) if sde_type == "cps" else Normal(mean, std).log_prob(prev_sample)
    torch.testing.assert_close(log_prob, density.mean(dim=(1, 2)))


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_rows_of_different_sigmas_are_independent(sde_type):
    x, v, noise = (randn(seed, 3, 2, 4) for seed in range(3))
    sigma, sigma_next, sigma_max = torch.tensor([[1.0, 0.5, 0.9], [0.9, 0.2, 0.7], [0.9, 0.9, 0.9]])

    def step(rows):
        return sde_step_with_logprob(
            v[rows], x[rows], sigma[rows], sigma_next[rows],
            sigma_max=sigma_max[rows], noise_level=0.7, sde_type=sde_type, noise=noise[rows],
        )  # fmt: skip

    for whole, *rows in zip(step([0, 1, 2]), step([0]), step([1]), step([2]), strict=True):
        torch.testing.assert_close(whole, torch.cat(rows))


def test_bf16_inputs_are_computed_in_fp32():
    x = randn(0, 2, 3, 4).bfloat16()
    outputs = sde_step(x, x, 0.5, 0.4, 0.9, noise_level=0.7, sde_type="sde", prev_sample=x)
    assert [output.dtype for output in outputs[1:]] == [torch.float32] * 4
    expected = sde_step(x.float(), x.float(), 0.5, 0.4, 0.9, noise_level=0.7, sde_type="sde", prev_sample=x.float())
    assert torch.equal(outputs[1], expected[1])


def test_unknown_sde_type():
    x = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match="'ode' is unknown: choose from sde, cps, dance"):
        sde_step(x, x, 0.5, 0.4, 0.9, noise_level=0.7, sde_type="ode", prev_sample=x)


# ----- Schedule and noise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "sigmas"),
    [
        (512, [1, 0.92897, 0.851485, 0.766624, 0.673281, 0.570117, 0.455497, 0.3274, 0.183301, 0.02, 0]),
        (1024, [1, 0.936978, 0.866951, 0.788682, 0.700624, 0.600818, 0.486747, 0.355115, 0.20153, 0.02, 0]),
    ],
)
def test_sigmas_golden(pipeline, side, sigmas):
    got = get_sigmas(pipeline.scheduler, 10, height=side, width=side)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(sigmas, abs=1e-6)


@pytest.mark.parametrize(("height", "width", "steps"), [(HEIGHT, WIDTH, 10), (256, 512, 2)])
def test_sigmas_are_the_pipelines_own(pipeline, height, width, steps):
    pipeline("a", height=height, width=width, num_inference_steps=steps, output_type="latent")
    expected = pipeline.scheduler.sigmas
    got = get_sigmas(tiny_pipeline(0).scheduler, steps, height=height, width=width)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "words",
    [(1, 2, 3, 0), (0, 3, 3, 0), (0, 2, 4, 0), (0, 2, 3, 1), (0, 2, 3, 1, 1), (3, 2, 0, 0), (2**32 - 1, 2, 3, 0)],
)
def test_noise_depends_on_every_word(words):
    noise = seeded_noise((0, 2, 3, 0), (100,))
    assert (seeded_noise(words, (100,)) - noise).abs().max() > 0.1


def test_noise_depends_on_nothing_else():
    first = seeded_noise((0, 2, 3, 0), (8, 64))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(seeded_noise([0, 2, 3, 0], (8, 64)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == torch.float32
    assert first.std().item() == pytest.approx(1, abs=0.1)


# ----- Velocity ----------------------------------------------------------------------------------------------------


class EchoTransformer:
    """Returns the first text embedding as the velocity of every token, and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, **inputs):
        self.calls.append(inputs)
        return (inputs["encoder_hidden_states"][:, :1].expand(-1, inputs["hidden_states"].shape[1], -1),)


CFG_CONDITIONS = {
    "prompt_embeds": torch.tensor([[[3.0, 4.0]]]),
    "negative_prompt_embeds": torch.tensor([[[1.0, 1.0]]]),
}


@pytest.mark.parametrize(("batched", "num_calls"), [(True, 1), (False, 2)])
def test_true_cfg_golden(batched, num_calls):
    transformer = EchoTransformer()
    got = velocity(transformer, CFG_CONDITIONS, scale=4.0, batched=batched)
    assert len(transformer.calls) == num_calls
    torch.testing.assert_close(got, torch.tensor([2.84604989, 4.11096096]).expand(1, TOKENS, 2))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("names", [["prompt_embeds"], ["prompt_embeds", "negative_prompt_embeds"]])
def test_cfg_scale_1_is_one_conditional_forward(batched, names):
    transformer = EchoTransformer()
    got = velocity(transformer, {name: CFG_CONDITIONS[name] for name in names}, scale=1.0, batched=batched)
    assert len(transformer.calls) == 1
    assert torch.equal(got, torch.tensor([3.0, 4.0]).expand(1, TOKENS, 2))


def test_cfg_without_a_negative_is_refused():
    with pytest.raises(ValueError, match=r"true_cfg_scale 4\.0 needs negative_prompt_embeds"):
        velocity(EchoTransformer(), {"prompt_embeds": torch.ones(1, 1, 2)}, scale=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batched", [True, False])
def test_timesteps_stay_fp32_and_everything_else_is_cast(dtype, batched):
    transformer = EchoTransformer()
    got = velocity(transformer, CFG_CONDITIONS, scale=4.0, batched=batched, dtype=dtype, timestep=570.117)
    assert got.dtype == torch.float32
    for call in transformer.calls:
        assert call["timestep"].dtype == torch.float32
        assert call["timestep"].tolist() == pytest.approx([0.570117] * len(call["hidden_states"]), abs=1e-7)
        assert call["hidden_states"].dtype == call["encoder_hidden_states"].dtype == dtype
        assert call["img_shapes"] == [[(1, HEIGHT // 16, WIDTH // 16)]] * len(call["hidden_states"])


@pytest.mark.parametrize(
    ("lengths", "negative_lengths"),
    [([5], [5]), ([3], [7]), ([7], [3]), ([5, 5], [5, 5]), ([7, 4], [5, 5]), ([2, 4], [3, 6]), ([6, 6], [3, 4])],
)
def test_batched_cfg_equals_two_passes(pipeline, lengths, negative_lengths):
    conditions = prompt_conditions(text_embeds(*lengths), None)
    negative = prompt_conditions(text_embeds(*(length + 20 for length in negative_lengths)), None)
    conditions |= {f"negative_{name}": tensor for name, tensor in negative.items()}
    got, expected = (velocity(pipeline.transformer, conditions, scale=4.0, batched=b) for b in (True, False))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (expected - velocity(pipeline.transformer, conditions, scale=1.0)).abs().max() > 1e-2


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("batched", [True, False])
def test_a_padded_row_equals_the_row_alone(pipeline, scale, batched):
    embeds, (negative,) = text_embeds(7, 3, 5), text_embeds(4)
    got = velocity(pipeline.transformer, prompt_conditions(embeds, negative), scale=scale, batched=batched)
    latents = randn(0, 3, TOKENS, 64)
    for row, embed in enumerate(embeds):
        alone = predict_velocity(
            pipeline.transformer, latents[row : row + 1], torch.tensor([700.0]),
            **prompt_conditions([embed], negative), **SIZE,
            true_cfg_scale=scale, cfg_batched=batched, dtype=torch.float32,
        )  # fmt: skip
        torch.testing.assert_close(got[row], alone[0], rtol=0, atol=1e-5)


def test_the_mask_matters(pipeline):
    conditions = prompt_conditions(text_embeds(7, 3), None)
    masked = velocity(pipeline.transformer, conditions)
    unmasked = velocity(pipeline.transformer, {"prompt_embeds": conditions["prompt_embeds"]})
    assert (masked[1] - unmasked[1]).abs().max() > 1e-3


@pytest.mark.parametrize(("lengths", "mask"), [([3, 3], None), ([5], None), ([3, 1], [[1, 1, 1], [1, 0, 0]])])
def test_pad_prompt_embeds_masks_only_what_is_padded(lengths, mask):
    embeds = text_embeds(*lengths)
    padded, got = pad_prompt_embeds(embeds)
    assert (got if got is None else got.tolist()) == mask
    for row, embed in enumerate(embeds):
        assert torch.equal(padded[row, : len(embed)], embed)
        assert padded[row, len(embed) :].abs().sum() == 0


def test_prompt_conditions_repeat_the_negative_and_leave_out_what_is_none():
    embeds, (negative,) = text_embeds(3, 3), text_embeds(2)
    assert prompt_conditions(embeds, None).keys() == {"prompt_embeds"}
    fields = prompt_conditions(embeds, negative)
    assert fields.keys() == {"prompt_embeds", "negative_prompt_embeds"}
    assert torch.equal(fields["negative_prompt_embeds"], torch.stack([negative, negative]))


# ----- The same as QwenImagePipeline -------------------------------------------------------------------------------


def pipeline_options(latents, output_type):
    return SIZE | {"latents": latents, "num_inference_steps": 4, "output_type": output_type}


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_sampling_without_noise_equals_the_pipeline(pipeline, scale):
    prompt, negative = encode_prompts(pipeline, [PROMPTS[0], " "], device="cpu", max_sequence_length=512)

    def predict(latents, timesteps, **conditions):
        options = SIZE | {"true_cfg_scale": scale, "cfg_batched": False, "dtype": torch.float32}
        return predict_velocity(pipeline.transformer, latents, timesteps, **conditions, **options)

    got = sample_batch(
        predict, conditions=prompt_conditions([prompt], negative), samples=[5], device=torch.device("cpu"),
        sigmas=get_sigmas(pipeline.scheduler, 4, **SIZE), seed_words=(1, 2), **SIZE,
    )  # fmt: skip
    noise = seeded_noise((1, 2, 5, 0), (1, TOKENS, 64))
    expected = pipeline(
        PROMPTS[0], negative_prompt=" ", true_cfg_scale=scale, **pipeline_options(noise, "latent")
    ).images
    torch.testing.assert_close(got["latents_clean"], expected, rtol=0, atol=1e-5)


def test_decoded_images_equal_the_pipelines(pipeline):
    noise = randn(0, 2, TOKENS, 64)
    latents, images = (
        pipeline(["a fox"] * 2, **pipeline_options(noise, output_type)).images for output_type in ("latent", "pt")
    )
    got = decode_latents(pipeline.vae, latents, **SIZE)
    assert got.shape == (2, 3, HEIGHT, WIDTH)
    torch.testing.assert_close(got, images, rtol=0, atol=1e-5)
    assert images.std() > 0.01


@pytest.mark.parametrize("prompt", [*PROMPTS, " "])
def test_an_encoded_prompt_is_the_pipelines_and_independent_of_others(pipeline, prompt):
    (alone,) = encode_prompts(pipeline, [prompt], device="cpu", max_sequence_length=512)
    others = encode_prompts(pipeline, [*PROMPTS, prompt], device="cpu", max_sequence_length=512)
    expected, mask = pipeline.encode_prompt(prompt, device="cpu", max_sequence_length=512)
    assert mask is None
    assert torch.equal(alone, expected[0])
    assert torch.equal(others[2], alone)
    assert not alone.requires_grad


def test_prompts_are_cut_to_max_sequence_length(pipeline):
    whole, cut = (encode_prompts(pipeline, PROMPTS[1:], device="cpu", max_sequence_length=n)[0] for n in (512, 7))
    assert len(whole) > 7
    assert torch.equal(cut, whole[:7])


def test_the_template_prefix_is_34_tokens(pipeline):
    prefix, _ = pipeline.prompt_template_encode.split("{}")
    ids = pipeline.tokenizer(prefix).input_ids
    assert len(ids) == pipeline.prompt_template_encode_start_idx == 34
    assert pipeline.tokenizer(prefix + "é").input_ids[:34] == ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_models_are_frozen_and_in_eval_mode(tiny_pipeline_folder, dtype):
    pipeline = load_pipeline(tiny_pipeline_folder, dtype=dtype)
    for module in (pipeline.transformer, pipeline.vae, pipeline.text_encoder):
        assert not any(m.training for m in module.modules())
        assert {(p.dtype, p.requires_grad) for p in module.parameters()} == {(dtype, False)}


def test_components_can_be_left_out(tiny_pipeline_folder):
    pipeline = load_pipeline(tiny_pipeline_folder, dtype=torch.float32, leave_out=["text_encoder", "tokenizer"])
    assert pipeline.text_encoder is None
    assert pipeline.tokenizer is None
    assert pipeline.transformer is not None


# ----- LoRA --------------------------------------------------------------------------------------------------------


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


# ----- Which models are accepted -----------------------------------------------------------------------------------


def test_a_qwen_image_pipeline_is_accepted(tiny_pipeline_folder):
    check_pipeline_class(str(tiny_pipeline_folder))


def test_another_pipeline_class_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImageEditPipeline"}')
    with pytest.raises(ValueError, match=r"is a QwenImageEditPipeline.*choose a Qwen-Image") as error:
        check_pipeline_class(str(tmp_path))
    assert "\n" not in str(error.value)


IMAGE_CONDITIONED = [
    "Edit",
    "EditPlus",
    "EditInpaint",
    "Layered",
    "Img2Img",
    "Inpaint",
    "ControlNet",
    "ControlNetInpaint",
]
REASONS = {f"QwenImage{kind}Pipeline": "needs an image beside the prompt" for kind in IMAGE_CONDITIONED} | {
    "QwenImage21Pipeline": "has another transformer",
    "WanPipeline": "makes videos",
    "HunyuanVideo15Pipeline": "makes videos",
    "LTXPipeline": "makes videos",
    "FluxPipeline": "is another architecture",
}


@pytest.mark.parametrize("class_name", REASONS)
def test_other_pipelines_are_refused_with_the_reason(tmp_path, class_name):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    with pytest.raises(ValueError, match=f"is a {class_name}, which {REASONS[class_name]}"):
        check_pipeline_class(str(tmp_path))


def test_every_relative_in_diffusers_has_a_reason():
    relatives = {name for name in dir(diffusers) if name.startswith("QwenImage") and name.endswith("Pipeline")}
    assert {name for name in relatives if "Modular" not in name} == {"QwenImagePipeline"} | {
        name for name in REASONS if name.startswith("QwenImage")
    }


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no model_index\.json") as error:
        check_pipeline_class(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nobody/nothing", "no/such/folder", "not a name!"])
def test_a_missing_model_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is neither a folder nor a model") as error:
        check_pipeline_class(name)
    assert "\n" not in str(error.value)
