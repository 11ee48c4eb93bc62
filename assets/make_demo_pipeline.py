"""Make the demo's pipeline: a tiny Qwen-Image that draws short texts at 64x64 pixels, trained here from nothing.

    python assets/make_demo_pipeline.py --device cuda

Everything is a real diffusers component, only small. Pillow's own font gives the data, so nothing is downloaded:
1. texts of 1 to 3 characters (0-9, A-Z) are drawn dark on white, with slight jitter of place and size;
2. the VAE learns to reconstruct them, then its latents are measured (`latents_mean`, `latents_std`);
3. the transformer learns flow matching on prompts such as `the text "7K"`; the text encoder stays random;
4. the pipeline, the prompts for RL and 256 held-out evaluation prompts are written, and the accuracy is printed.

The model is imperfect on purpose: in the captions of step 3 each character is exchanged for a random one with
probability `--caption_noise`. So the model can draw every character but often draws a wrong one, which leaves RL
something to do: the knowledge is there, the reward selects it.

Takes 80 seconds on one H200, by estimate two hours on two CPU cores. Seeds are fixed and kernels deterministic: a
second run with the same versions on the same machine gives the same files; elsewhere they may differ slightly.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products; read when CUDA starts

import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen_image import tiny_pipeline, use_image_convolutions
from rewards import GLYPH_LAYOUT, GLYPH_MATCH_RIGHT, GLYPHS, draw_ink, glyph_match

SIZE = 64
SCALES = (0.97, 1.0, 1.03)
INK = 0.05  # near black
NEGATIVE_PROMPT = " "
# What one training step of the transformer sees: texts of one length, so that no prompt is padded, or no prompt.
STEP_KINDS = {1: 0.08, 2: 0.47, 3: 0.35, "unconditional": 0.1}
PICTURES = {1: 2_000, 2: 10_000, 3: 16_000}  # drawn once, then used again in every epoch
TRAIN_TEXTS = {1: 36, 2: 348, 3: 128}
EVAL_TEXTS = {2: 192, 3: 64}


def prompt_of(text: str) -> str:
    return f'the text "{text}"'


def text_of(number: int, length: int) -> str:
    """Text number `number` of the 36**length texts of that length, in alphabetical order."""
    return "".join(GLYPHS[number // len(GLYPHS) ** place % len(GLYPHS)] for place in reversed(range(length)))


# ----- Data --------------------------------------------------------------------------------------------------------


def split_texts(seed: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Numbers of the texts for RL and of those for evaluation, by length; they are disjoint."""
    generator = random.Random(seed)
    train, held_out = {}, {}
    for length, count in TRAIN_TEXTS.items():
        numbers = generator.sample(range(len(GLYPHS) ** length), count + EVAL_TEXTS.get(length, 0))
        train[length], held_out[length] = sorted(numbers[:count]), sorted(numbers[count:])
    return train, held_out


def draw_pictures(length: int, held_out: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Ink masks (N, 64, 64) uint8 of random texts, none of them held out, and the texts' numbers (N,)."""
    generator = random.Random(seed)
    allowed = sorted(set(range(len(GLYPHS) ** length)) - set(held_out))
    masks, numbers = [], []
    for number in generator.choices(allowed, k=PICTURES[length]):
        scale, shift = generator.choice(SCALES), (generator.uniform(-1, 1), generator.uniform(-1, 1))
        masks.append(np.array(draw_ink(text_of(number, length), GLYPH_LAYOUT[length], (SIZE, SIZE), scale, shift)))
        numbers.append(number)
    return torch.from_numpy(np.stack(masks)), torch.tensor(numbers)


def paint(masks: Tensor) -> Tensor:
    """Ink masks (B, 64, 64) to pictures (B, 3, 64, 64) in [-1, 1]: dark ink on white paper."""
    return (1 - 2 * (1 - INK) * masks.float() / 255)[:, None].repeat(1, 3, 1, 1)


@torch.no_grad()
def embed_texts(pipeline: QwenImagePipeline, length: int) -> Tensor:
    """The pipeline's prompt embeddings of all texts of one length: (36**length, S, D)."""
    numbers = torch.arange(len(GLYPHS) ** length).split(2048)
    batches = [[prompt_of(text_of(number, length)) for number in batch.tolist()] for batch in numbers]
    return torch.cat([pipeline.encode_prompt(batch)[0] for batch in batches])


# ----- Training ----------------------------------------------------------------------------------------------------


def recorded(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """On a GPU, record `step` as a CUDA graph: its kernels are so small that launching them takes most of the time."""
    if device.type != "cuda":
        return step
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def make_update(module: nn.Module, compute_loss: Callable[..., Tensor], learning_rate: float, steps: int):
    """Returns update(*inputs) -> loss: one AdamW step; warm-up over 100 steps, then cosine decay to 0."""
    device = module.device
    rate = torch.zeros((), device=device)  # 0 while a graph warms up, so that the weights stay
    options = {"betas": (0.9, 0.98), "weight_decay": 0.01, "fused": True, "capturable": device.type == "cuda"}
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, **options)
    recordings = {}  # input shapes: (inputs in place, recorded step)
    done = 0

    def update(*inputs: Tensor) -> Tensor:
        nonlocal done
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in recordings:
            places = [tensor.clone() for tensor in inputs]

            def step() -> Tensor:
                optimizer.zero_grad()
                loss = compute_loss(*places)
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                return loss.detach()

            rate.zero_()
            recordings[shapes] = (places, recorded(step, device))
        places, replay = recordings[shapes]
        for place, tensor in zip(places, inputs, strict=True):
            place.copy_(tensor)
        rate.fill_(learning_rate * min(1, (done + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * done / steps)))
        done += 1
        return replay()

    return update


def train_vae(pipeline: QwenImagePipeline, masks: Tensor, steps: int, seed: int) -> None:
    """Reconstruction and a small KL term, which keeps the latents smooth: errors of the flow then blur, not break."""
    vae = pipeline.vae.train().requires_grad_(True)
    with torch.no_grad():
        vae.quant_conv.bias[16:] = -6  # start with a small variance: noise as large as the signal would never let go
    generator = torch.Generator(masks.device).manual_seed(seed)

    def compute_loss(pictures: Tensor, noise: Tensor) -> Tensor:
        posterior = vae.encode(pictures[:, :, None]).latent_dist
        # vae.decode would clamp, and where a picture is white a clamped output has no gradient.
        decoded = vae.decoder(vae.post_quant_conv(posterior.mean + posterior.std * noise))[:, :, 0]
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return l1_loss(decoded, pictures) + mse_loss(decoded, pictures) + 1e-3 * kl

    update = make_update(vae, compute_loss, 3e-3, steps)
    for step in range(steps):
        batch = torch.randint(len(masks), (64,), generator=generator, device=masks.device)
        pictures = paint(masks[batch])
        noise = torch.randn((64, 16, 1, SIZE // 8, SIZE // 8), generator=generator, device=masks.device)
        loss = update(pictures, noise)
        if (step + 1) % 500 == 0:
            print(f"VAE step {step + 1}: loss {loss.item():.4f}", flush=True)
    vae.eval().requires_grad_(False)


@torch.no_grad()
def encode_pictures(pipeline: QwenImagePipeline, masks: dict[int, Tensor]) -> dict[int, Tensor]:
    """Packed, normalised latents (N, 16, 64) of all pictures; sets the VAE's latents_mean and latents_std."""
    vae = pipeline.vae
    latents = {}
    for length in masks:
        posteriors = [vae.encode(paint(batch)[:, :, None]).latent_dist for batch in masks[length].split(500)]
        latents[length] = torch.cat([posterior.mean[:, :, 0] for posterior in posteriors])
    std, mean = torch.std_mean(torch.cat(list(latents.values())), (0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    packed = {}
    for length, batch in latents.items():
        normalised = (batch - mean[:, None, None]) / std[:, None, None]
        packed[length] = pipeline._pack_latents(normalised, len(batch), *normalised.shape[1:])
    return packed


def train_transformer(
    pipeline: QwenImagePipeline,
    latents: dict[int, Tensor],
    numbers: dict[int, Tensor],
    held_out: dict[int, list[int]],
    *,
    steps: int,
    batch_size: int,
    caption_noise: float,
    seed: int,
) -> None:
    """Flow matching: predict v = noise - x0 at x = (1 - sigma) x0 + sigma noise."""
    transformer = pipeline.transformer.train().requires_grad_(True)
    device = transformer.device
    embeddings = {length: embed_texts(pipeline, length) for length in latents}
    unconditional = pipeline.encode_prompt(NEGATIVE_PROMPT)[0]
    is_held_out = {length: torch.zeros(len(embeddings[length]), dtype=torch.bool, device=device) for length in latents}
    for length, texts in held_out.items():
        is_held_out[length][texts] = True

    config = pipeline.scheduler.config
    sequence_lengths = (latents[1].shape[1], config.base_image_seq_len, config.max_image_seq_len)
    shift = math.exp(calculate_shift(*sequence_lengths, config.base_shift, config.max_shift))

    def compute_loss(x0: Tensor, noise: Tensor, sigma: Tensor, prompt_embeds: Tensor) -> Tensor:
        velocity = transformer(
            hidden_states=(1 - sigma) * x0 + sigma * noise,
            timestep=sigma.flatten(),
            encoder_hidden_states=prompt_embeds,
            img_shapes=[[(1, SIZE // 16, SIZE // 16)]] * batch_size,
            return_dict=False,
        )[0]
        return mse_loss(velocity, noise - x0)

    update = make_update(transformer, compute_loss, 1.5e-3, steps)
    kinds = random.Random(seed).choices(list(STEP_KINDS), STEP_KINDS.values(), k=steps)
    lengths = random.Random(seed + 1).choices(list(latents), [STEP_KINDS[length] for length in latents], k=steps)
    generator = torch.Generator(device).manual_seed(seed)
    losses = []
    for step, (kind, any_length) in enumerate(zip(kinds, lengths, strict=True)):
        length = any_length if kind == "unconditional" else kind
        batch = torch.randint(len(latents[length]), (batch_size,), generator=generator, device=device)
        x0 = latents[length][batch]
        if kind == "unconditional":
            prompt_embeds = unconditional.expand(batch_size, -1, -1)
        else:
            caption = numbers[length][batch]
            for place in (len(GLYPHS) ** exponent for exponent in range(length)):
                glyph = caption // place % len(GLYPHS)
                other = torch.randint(len(GLYPHS), glyph.shape, generator=generator, device=device)
                exchange = torch.rand(glyph.shape, generator=generator, device=device) < caption_noise
                caption = torch.where(exchange, caption + (other - glyph) * place, caption)
            caption = torch.where(is_held_out[length][caption], numbers[length][batch], caption)
            prompt_embeds = embeddings[length][caption]

        # Uniform, then shifted as the pipeline's own timesteps are: training visits what sampling visits.
        uniform = torch.rand((batch_size, 1, 1), generator=generator, device=device)
        sigma = shift * uniform / (1 + (shift - 1) * uniform)
        noise = torch.randn(x0.shape, generator=generator, device=device)
        losses.append(update(x0, noise, sigma, prompt_embeds).clone())
        if (step + 1) % 1000 == 0:
            print(f"transformer step {step + 1}: loss {torch.stack(losses[-1000:]).mean().item():.4f}", flush=True)
    transformer.eval().requires_grad_(False)


# ----- Evaluation --------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(pipeline: QwenImagePipeline, held_out: dict[int, list[int]], true_cfg_scale: float) -> dict[str, float]:
    """Accuracy on the held-out prompts with the pipeline's own sampler in 10 steps, and the mean reward."""
    rewards = {}
    for length in EVAL_TEXTS:
        prompts = [prompt_of(text_of(number, length)) for number in held_out[length]]
        images = pipeline(
            prompt=prompts,
            negative_prompt=[NEGATIVE_PROMPT] * len(prompts),
            true_cfg_scale=true_cfg_scale,
            height=SIZE,
            width=SIZE,
            num_inference_steps=10,
            generator=torch.Generator().manual_seed(length),
            output_type="pt",
        ).images
        rewards[f"{length} characters"] = glyph_match(images.cpu(), prompts, [{}] * len(prompts))
    rewards["all"] = torch.cat(list(rewards.values()))
    accuracy = {name: (values > GLYPH_MATCH_RIGHT).float().mean().item() for name, values in rewards.items()}
    return {**accuracy, "reward": rewards["all"].mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vae_steps", type=int, default=2400)
    parser.add_argument("--transformer_steps", type=int, default=10_000)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--caption_noise", type=float, default=0.25)
    args = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward pass is not deterministic
    torch.backends.cuda.enable_flash_sdp(False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    torch.set_float32_matmul_precision("high")
    start = time.perf_counter()

    train, held_out = split_texts(seed=0)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, texts in (("demo_prompts.txt", train), ("demo_eval_prompts.txt", held_out)):
        lines = [prompt_of(text_of(number, length)) for length in texts for number in texts[length]]
        (args.output_dir / name).write_text("\n".join(lines) + "\n")

    pipeline = tiny_pipeline(0, num_layers=3, num_attention_heads=3, text_width=32, vae_base_dim=8).to(args.device)
    use_image_convolutions(pipeline.vae)
    pipeline.text_encoder.eval().requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    masks, numbers = {}, {}
    for length in PICTURES:
        drawn = draw_pictures(length, held_out[length], seed=length)
        masks[length], numbers[length] = (tensor.to(args.device) for tensor in drawn)
    print(f"{time.perf_counter() - start:.0f} s: {sum(map(len, masks.values()))} pictures drawn", flush=True)

    train_vae(pipeline, torch.cat(list(masks.values())), args.vae_steps, seed=0)
    latents = encode_pictures(pipeline, masks)
    print(f"{time.perf_counter() - start:.0f} s: VAE trained", flush=True)
    options = {"steps": args.transformer_steps, "batch_size": args.batch_size, "caption_noise": args.caption_noise}
    train_transformer(pipeline, latents, numbers, held_out, seed=0, **options)
    print(f"{time.perf_counter() - start:.0f} s: transformer trained", flush=True)
    pipeline.save_pretrained(args.output_dir / "demo_pipeline")
    for true_cfg_scale in (1.0, 2.0, 4.0):
        print(f"CFG {true_cfg_scale}: {json.dumps(evaluate(pipeline, held_out, true_cfg_scale))}", flush=True)


if __name__ == "__main__":
    main()
