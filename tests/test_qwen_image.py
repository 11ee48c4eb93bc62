"""Tests of qwen_image.py: schedule, noise, velocity, equality with QwenImagePipeline.

python -m pytest tests/test_qwen_image.py
"""

from pathlib import Path

import pytest
import torch
from tiny_inputs import HEIGHT, SIZE, TOKENS, WIDTH, randn, text_embeds, velocity

from qwen_image import (
    decode_latents,
    encode_prompts,
    get_sigmas,
    load_pipeline,
    pad_prompt_embeds,
    predict_velocity,
    prompt_conditions,
    seeded_noise,
    tiny_pipeline,
)
from rollout import sample_batch

PROMPTS = ["a red fox", "a much longer prompt about a fox, à la façon de 狐 🦊"]


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


def test_weights_stay_in_their_files_until_they_move(tiny_pipeline_folder):
    """The ranks of a machine share one copy of what is stored in the dtype that they compute in."""

    def mapped(tensor):
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return line.endswith(".safetensors")
        raise AssertionError("a tensor outside the address space")

    models = load_pipeline(tiny_pipeline_folder, dtype=torch.float32)
    for module in (models.transformer, models.text_encoder, models.vae):
        in_files = sum(parameter.nbytes for parameter in module.parameters() if mapped(parameter))
        assert in_files > 0.95 * sum(parameter.nbytes for parameter in module.parameters())
    cast = load_pipeline(tiny_pipeline_folder, dtype=torch.bfloat16)
    assert not any(mapped(parameter) for parameter in cast.transformer.parameters())


def test_components_can_be_left_out(tiny_pipeline_folder):
    pipeline = load_pipeline(tiny_pipeline_folder, dtype=torch.float32, leave_out=["text_encoder", "tokenizer"])
    assert pipeline.text_encoder is None
    assert pipeline.tokenizer is None
    assert pipeline.transformer is not None
