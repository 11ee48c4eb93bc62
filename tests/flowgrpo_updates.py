"""Micro-batches of FlowGRPO and updates on them, for test_train_batch.py.

Shapes: B samples, W trained timesteps, L tokens, C channels, S text tokens, D embedding width.
"""

import copy
from functools import lru_cache, partial

import torch
from accelerate import Accelerator

from qwen_image import LORA_TARGETS, add_lora, predict_velocity, tiny_pipeline
from train_flowgrpo import forward_only, parse_args, train_batch

B, W, L, C, S, D = 2, 3, 16, 64, 5, 32
CPU = torch.device("cpu")
STAGED = ("--enable_timestep_staging",)
MODES = {
    "not staged": (),
    "staged": STAGED,
    "staged, prefetch": (*STAGED, "--staging_prefetch", "2"),
    "prefetch alone": ("--staging_prefetch", "2"),
}
SDE_TYPES = ("sde", "cps", "dance")


@lru_cache
def tiny_transformer():
    """With an adapter that is not zero, so that both of its matrices have gradients."""
    torch.manual_seed(0)
    transformer = tiny_pipeline(0).transformer.requires_grad_(False)
    add_lora(transformer, rank=4, lora_alpha=8, target_modules=LORA_TARGETS)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return transformer


def start(*flags, learning_rate=20.0):
    """What train_batch takes before its micro-batches, always with the same weights:
    (args, accelerator, transformer, predict, optimizer, trainable)."""
    args = parse_args(["--clip_range", "0.2", "--max_grad_norm", "1e9", "--log_ratio_limit", "inf", *flags])
    accelerator = Accelerator(cpu=True)
    transformer = copy.deepcopy(tiny_transformer())
    trainable = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    transformer, optimizer = accelerator.prepare(transformer, torch.optim.SGD(trainable, lr=learning_rate))
    predict = partial(
        predict_velocity,
        transformer,
        height=64,
        width=64,
        true_cfg_scale=args.true_cfg_scale,
        cfg_batched=args.cfg_batched,
        dtype=torch.float32,
    )
    return args, accelerator, transformer, predict, optimizer, trainable


@lru_cache
def cached_batch(seed, embeds_dtype, masks):
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator)
    sigmas = torch.tensor([0.9, 0.8, 0.6, 0.3])
    batch = {
        "prompt_embeds": randn(B, S, D).to(embeds_dtype),
        "negative_prompt_embeds": randn(1, 2, D).to(embeds_dtype).expand(B, -1, -1),
        "sigma_max": torch.full((B,), 0.95),
        "all_latents": randn(B, 1, L, C) + 0.3 * randn(B, W + 1, L, C).cumsum(dim=1),
        "sigmas": sigmas.expand(B, -1),
        "all_timesteps": (1000 * sigmas[:-1]).expand(B, -1),
        "advantages": torch.tensor([[1.0, -0.5, 7.0], [-2.0, 0.5, 1.0]]),
        "old_log_probs": torch.zeros(B, W),
        "rollout_is_weights": 0.5 + torch.rand(B, W, generator=generator),
    }
    if masks:
        batch["prompt_embeds_mask"] = torch.tensor([[1] * S, [1] * 3 + [0] * (S - 3)], dtype=torch.int32)
        batch["negative_prompt_embeds_mask"] = torch.tensor([[1, 1], [1, 0]], dtype=torch.int32)
    away = torch.tensor([[0.1, -0.2, -0.3], [0.3, -0.1, 0.05]])  # some of the ratios are clipped, some are not
    return batch | {"old_log_probs": old_log_probs(start(), batch) + away}


def make_batch(seed=0, *, embeds_dtype=torch.float32, masks=False, is_weights=True, listed=False):
    """A micro-batch whose old log-probs are up to 0.3 away from those of the weights that start() gives."""
    batch = {name: field.clone() for name, field in cached_batch(seed, embeds_dtype, masks).items()}
    if not is_weights:
        del batch["rollout_is_weights"]
    if listed:
        batch |= {name: list(batch[name]) for name in ("all_latents", "sigmas", "advantages", "prompt_embeds")}
    return batch


def old_log_probs(policy, batch):
    return forward_only(policy[0], policy[3], batch, CPU)["log_probs"]


def weights(policy):
    return [parameter.detach().clone() for parameter in policy[-1]]


def update(policy, batches, *, updates=1):
    """Metrics of every update, the outputs of the last, and the trained weights."""
    results = [train_batch(*policy, batches) for _ in range(updates)]
    return [metrics for metrics, _ in results], results[-1][1], weights(policy)


def assert_equal(tensors, expected):
    assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))


def distance(tensors, expected):
    """Largest difference of any weight, relative to the largest weight of its matrix."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(tensors, expected, strict=True))


def call_counter(policy, *, fails_at=None):
    """The policy with a predict that counts its calls, in a list, and fails at one of them (1 is the first)."""
    args, accelerator, transformer, predict, optimizer, trainable = policy
    calls = []

    def counted(latents, timesteps, **conditions):
        calls.append(len(latents))
        if len(calls) == fails_at:
            raise RuntimeError(f"call {fails_at} failed")
        return predict(latents, timesteps, **conditions)

    return (args, accelerator, transformer, counted, optimizer, trainable), calls


CONDITIONS = {"fp32": {}, "bf16 and masks": {"embeds_dtype": torch.bfloat16, "masks": True}}


@lru_cache
def plain_updates(conditions, updates):
    """Metrics and weights of some updates over two micro-batches: not staged, one timestep at a time."""
    batches = [make_batch(seed, **CONDITIONS[conditions]) for seed in (0, 1)]
    metrics, _, trained = update(start(), batches, updates=updates)
    assert all(numbers["grad_norm"] > 0 and 0 < numbers["clipfrac"] < 1 for numbers in metrics)
    assert distance(trained, weights(start())) > 0.1
    return metrics, trained
