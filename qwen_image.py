"""Qwen-Image as FlowGRPO and DiffusionNFT need it: load, LoRA, encode, velocity, SDE step with log-prob, decode.

Rollout and update call the same `predict_velocity` and `sde_step_with_logprob`, so that the first ratio is exactly 1.

Shapes: B samples, L = (height/16)(width/16) image tokens, C = 64 channels of a packed latent, S text tokens,
D width of a text embedding. sigma runs from 1 (noise) to 0 (image); velocity v = noise - x0; timesteps = 1000 sigma.
"""

import copy
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.utils.checkpoint
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from huggingface_hub import hf_hub_download, snapshot_download
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

PIXELS_PER_TOKEN = 16  # the VAE halves a side three times, packing once more
# Backends of diffusers' dispatcher that have a backward; those with flash in their name take no mask.
ATTENTION_BACKENDS = (
    "native", "_native_cudnn", "_native_flash", "_native_efficient", "flash", "flash_hub", "_flash_3", "_flash_3_hub",
)  # fmt: skip
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")  # CUDA graphs would overwrite what the backward needs
SDE_TYPES = ("sde", "cps", "dance")
LORA_TARGETS = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip


# ----- Loading -----------------------------------------------------------------------------------------------------


# Why a pipeline of another class is refused, by the first expression that its name begins with.
OTHER_PIPELINES = {
    r"QwenImage(Edit|Img2Img|Inpaint|ControlNet|Layered)": "needs an image beside the prompt, which is not passed on",
    r"QwenImage21": "has another transformer and another autoencoder",
    r".*(Wan|Video|LTX|Mochi|Cosmos)": "makes videos",
    r"": "is another architecture",
}


def check_pipeline_class(pretrained_model_name_or_path: str, *, revision: str | None = None) -> None:
    """Refuse, from model_index.json alone, a model that is not a QwenImagePipeline. Raises ValueError."""
    if Path(pretrained_model_name_or_path).is_dir():
        index = Path(pretrained_model_name_or_path) / "model_index.json"
        if not index.is_file():
            raise ValueError(f"{pretrained_model_name_or_path} holds no model_index.json: name a pipeline's folder")
    else:
        try:
            index = hf_hub_download(pretrained_model_name_or_path, "model_index.json", revision=revision)
        except (OSError, ValueError) as error:  # hub errors are OSErrors, a malformed name is a ValueError
            raise ValueError(
                f"{pretrained_model_name_or_path} is neither a folder nor a model that the hub gives "
                f"({type(error).__name__}): check the name, or download it and name the folder"
            ) from error
    try:
        class_name = json.loads(Path(index).read_text()).get("_class_name")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{index} is not a pipeline's json ({error}): download the model again") from error
    if class_name != "QwenImagePipeline":
        reason = next(why for names, why in OTHER_PIPELINES.items() if re.match(names, str(class_name)))
        raise ValueError(
            f"{pretrained_model_name_or_path} is a {class_name}, which {reason}; these scripts train a "
            "QwenImagePipeline: choose a Qwen-Image text-to-image model, Qwen/Qwen-Image or Qwen/Qwen-Image-2512"
        )


def local_pipeline_folder(
    pretrained_model_name_or_path: str, *, revision: str | None = None, subfolders: Sequence[str]
) -> Path:
    """The pipeline's folder on disk; of a hub model the named subfolders are downloaded if they are not there yet."""
    if Path(pretrained_model_name_or_path).is_dir():
        return Path(pretrained_model_name_or_path)
    kinds = ("json", "safetensors", "txt", "jinja")  # no pickles, no code
    patterns = ["model_index.json", *(f"{subfolder}/*.{kind}" for subfolder in subfolders for kind in kinds)]
    return Path(snapshot_download(pretrained_model_name_or_path, revision=revision, allow_patterns=patterns))


def transformer_fingerprint(folder: str | Path) -> str:
    """Tells the transformer of one pipeline folder from others by its configuration and output layer, unloaded."""
    folder = Path(folder)
    config = json.loads((folder / "transformer/config.json").read_text())
    checksum = zlib.crc32(json.dumps({k: v for k, v in sorted(config.items()) if not k.startswith("_")}).encode())
    for path in sorted((folder / "transformer").glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            if "proj_out.weight" in tensors.keys():  # noqa: SIM118, a safe_open handle is no dict
                weight = tensors.get_tensor("proj_out.weight").contiguous()
                return f"{zlib.crc32(weight.view(torch.uint8).numpy(), checksum):08x}"
    raise ValueError(f"{folder}/transformer holds no safetensors file with proj_out.weight: download the model again")


def load_pipeline(folder: Path, *, dtype: torch.dtype, leave_out: Sequence[str] = ()) -> QwenImagePipeline:
    """Load a pipeline on the CPU, frozen and in eval mode; components that are left out are None."""
    pipeline = QwenImagePipeline.from_pretrained(folder, dtype=dtype, use_safetensors=True, **dict.fromkeys(leave_out))
    for module in (pipeline.transformer, pipeline.vae, pipeline.text_encoder):
        if module is not None:
            module.requires_grad_(False).eval()
    if pipeline.vae is not None:
        use_image_convolutions(pipeline.vae)
    return pipeline


def use_image_convolutions(vae: AutoencoderKLQwenImage) -> None:
    """Let the video VAE's causal convolutions treat single images as such: the same result, several times faster."""
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = partial(convolve_one_frame, module)


def convolve_one_frame(module: QwenImageCausalConv3d, frame: Tensor, cache_x: None = None) -> Tensor:
    """A causal 3-d convolution of one frame (B, C, 1, H, W): those before it are zeros, only the last slice counts."""
    weight, padding = module.weight[:, :, -1], module._padding[2::-2]
    return nn.functional.conv2d(frame[:, :, 0], weight, module.bias, module.stride[1:], padding)[:, :, None]


def tiny_tokenizer() -> Qwen2Tokenizer:
    """A byte-level tokenizer whose prompt template has the real one's 34 prefix tokens (one per word of it)."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    vocab["<|endoftext|>"] = len(vocab)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    template = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\nassistant"
    )
    words = dict.fromkeys(re.findall(r"<\|\w+\|>| ?\w+", template))
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=word.startswith("<|")) for word in words])
    return tokenizer


def tiny_pipeline(
    seed: int = 0,
    *,
    num_layers: int = 2,
    num_attention_heads: int = 2,
    text_width: int = 32,
    vae_base_dim: int = 8,
) -> QwenImagePipeline:
    """A QwenImagePipeline of the real classes with random weights, a few MB, made in a second without a network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(
            num_attention_heads=num_attention_heads,
            attention_head_dim=32,
            num_layers=num_layers,
            in_channels=64,
            out_channels=16,
            patch_size=2,
            joint_attention_dim=text_width,
            axes_dims_rope=(8, 12, 12),
            guidance_embeds=False,
        )
        vae = AutoencoderKLQwenImage(base_dim=vae_base_dim, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
        tokenizer = tiny_tokenizer()
        text_config = {
            "vocab_size": len(tokenizer),
            "hidden_size": text_width,
            "intermediate_size": 2 * text_width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [text_width // 8] * 2 + [0],
            },
        }
        vision_config = {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": text_width,
        }  # fmt: skip
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config)
        )
    scheduler = FlowMatchEulerDiscreteScheduler(  # the values of Qwen/Qwen-Image's scheduler_config.json
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    return QwenImagePipeline(
        scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )


# ----- LoRA --------------------------------------------------------------------------------------------------------


def unused_modules(num_layers: int) -> str:
    """Regular expression of the modules that no image depends on: the last block drops its text stream, so all that
    only its text tokens see (their queries, output projection and MLP) has no gradient or a zero one."""
    text_only = r"attn\.(add_q_proj|norm_added_q|to_add_out)|txt_mlp\.net\.(0\.proj|2)"
    return rf"transformer_blocks\.{num_layers - 1}\.({text_only})"


def target_names(transformer: nn.Module, target_modules: Sequence[str]) -> list[str]:
    """Full names of the linear layers that some targets mean, without those that never reach the image."""
    unused = re.compile(unused_modules(transformer.config.num_layers))
    return [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear)
        and not unused.fullmatch(name)
        and any(f".{name}".endswith(f".{target}") or not target for target in target_modules)
    ]


def check_lora_targets(folder: Path, target_modules: Sequence[str]) -> None:
    """Raise ValueError for a target that matches no linear layer, after building the model without its weights."""
    config = QwenImageTransformer2DModel.load_config(folder, subfolder="transformer")
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel.from_config(config)
    check_target_names(transformer, target_modules)


def check_target_names(transformer: QwenImageTransformer2DModel, target_modules: Sequence[str]) -> None:
    """Raise ValueError for a target that matches no linear layer of the transformer."""
    for target in target_modules:
        if not target_names(transformer, [target]):
            names = target_names(transformer, [""])
            known = sorted({re.sub(r"^transformer_blocks\.\d+\.(attn\.)?", "", name) for name in names})
            raise ValueError(
                f"--lora_target_modules: no linear layer is called {target!r}: choose from {', '.join(known)}"
            )


def add_lora(
    transformer: QwenImageTransformer2DModel,
    *,
    rank: int,
    lora_alpha: int,
    target_modules: Sequence[str],
    adapter_name: str = "default",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add a trainable adapter in `dtype` (fp32 keeps small AdamW steps that bf16 would round away).

    Layers that never reach the image get none, so that every trainable parameter has a gradient.
    """
    names = target_names(transformer, target_modules)
    config = LoraConfig(r=rank, lora_alpha=lora_alpha, target_modules=names, init_lora_weights="gaussian")
    transformer.add_adapter(config, adapter_name=adapter_name)
    for name, parameter in transformer.named_parameters():
        if f".{adapter_name}." in name:
            parameter.data = parameter.data.to(dtype)
    for layer in lora_layers(transformer):
        layer.__class__ = LoraLinear


class LoraLinear(peft.tuners.lora.Linear):
    """peft's layer, whose fp32 adapter computes in the inputs' dtype: no autocast, which would run norms in fp32.

    Equal to peft's forward up to rounding, in one kernel less, and without the adapter's output (..., out) beside the
    layer's: base + scaling (inputs A') B' is one multiply-add. A class, since compiled blocks share the graphs of one.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out) of the layer and its active adapter."""
        outputs = self.base_layer(x)
        if self._disable_adapters:
            return outputs
        name = self._active_adapter[0]
        down, up = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
        narrow = nn.functional.linear(x, down).flatten(0, -2)  # (tokens, rank)
        return torch.addmm(outputs.flatten(0, -2), narrow, up.T, alpha=self.scaling[name]).view_as(outputs)


def train_all_used(transformer: QwenImageTransformer2DModel) -> None:
    """Make all weights trainable but those that never reach the image, which would have no gradient."""
    unused = re.compile(unused_modules(transformer.config.num_layers))
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(unused.fullmatch(name.rpartition(".")[0]) is None)


# ----- Speed -------------------------------------------------------------------------------------------------------


def check_attention_backend(name: str) -> None:
    """Raise ValueError for a backend of diffusers' dispatcher that cannot run here, before any model is loaded."""
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(num_layers=1)
    try:
        transformer.set_attention_backend(name)
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"--attention_backend {name} cannot be used: {error}") from error


def compile_blocks(
    transformer: QwenImageTransformer2DModel, *, mode: str, dynamic: bool, fullgraph: bool, backend: str = "inductor"
) -> None:
    """Compile each block's forward in place, before it is sharded; parameters keep their names.

    The hooks of FSDP2 and the recomputation of a block stay outside. All blocks share graphs: two (the last block
    differs) for each of training, no_grad, the old adapter and no adapter, and without `dynamic` for each shape.
    The first block would need its own, since its inputs are views without gradient: they become like the others'.
    """

    def like_a_block(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        return outputs.clone().requires_grad_(torch.is_grad_enabled())

    for embedder in (transformer.img_in, transformer.txt_in):
        embedder.register_forward_hook(like_a_block)
    torch._dynamo.config.recompile_limit = 256  # beyond it a block would silently run uncompiled
    torch._dynamo.config.accumulated_recompile_limit = 1024
    for block in transformer.transformer_blocks:
        block.forward = torch.compile(block.forward, mode=mode, dynamic=dynamic, fullgraph=fullgraph, backend=backend)


def seconds_compiled() -> float:
    """Seconds of this process that went into compiling so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


def checkpoint_blocks(transformer: QwenImageTransformer2DModel, num_blocks: int | None = None) -> None:
    """Recompute the first `num_blocks` blocks, or all, in the backward. The first, since their turn comes when what
    the others kept is freed: the peak does not hold both."""
    for index, block in enumerate(transformer.transformer_blocks):
        block.recomputed = num_blocks is None or index < num_blocks  # an attribute: FSDP wraps or replaces the module

    def run(block: nn.Module, *inputs: Any) -> Any:
        if block.recomputed:
            return torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    transformer.enable_gradient_checkpointing(gradient_checkpointing_func=run)


# ----- Parameters --------------------------------------------------------------------------------------------------


def parameter_census(model: nn.Module) -> str:
    """Parameters by dtype and whether they train, e.g. `338,400 frozen float32, 49,152 trainable float32`."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        kind = f"{'trainable' if parameter.requires_grad else 'frozen'} {str(parameter.dtype).removeprefix('torch.')}"
        counts[kind] = counts.get(kind, 0) + parameter.numel()
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))


def lora_layers(transformer: nn.Module) -> list[BaseTunerLayer]:
    """The layers that carry adapters; list them once, since walking 60 blocks for every switch costs milliseconds."""
    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


def add_old_adapter(transformer: QwenImageTransformer2DModel, *, dtype: torch.dtype = torch.float32) -> None:
    """Add the frozen adapter "old", an exact copy of "default", which stays active and trainable."""
    config = transformer.peft_config["default"]
    transformer.add_adapter(copy.deepcopy(config), adapter_name="old")
    parameters = dict(transformer.named_parameters())
    for name, parameter in parameters.items():
        if ".lora_" in name and ".old." in name:
            parameter.data = parameters[name.replace(".old.", ".default.")].detach().to(dtype).clone()
            parameter.requires_grad_(False)
            parameters[name.replace(".old.", ".default.")].requires_grad_(True)
    for layer in lora_layers(transformer):
        layer._active_adapter = ["default"]


@contextmanager
def adapter_active(layers: Sequence[BaseTunerLayer], adapter_name: str) -> Iterator[None]:
    """Run another adapter than "default". peft's own switch also changes requires_grad: see adapters_off."""
    for layer in layers:
        layer._active_adapter = [adapter_name]
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = ["default"]


@contextmanager
def adapters_off(layers: Sequence[BaseTunerLayer]) -> Iterator[None]:
    """Run the base model. peft's own switch also changes requires_grad, which sharding wrappers do not survive."""
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_state_dict(
    named_parameters: Iterable[tuple[str, Tensor]], adapter_name: str = "default"
) -> dict[str, Tensor]:
    """One adapter's tensors under peft's names (without the adapter's); sharding wrappers' prefixes are dropped."""
    return {
        name.replace(f".{adapter_name}.", ".").replace("_fsdp_wrapped_module.", "").removeprefix("module."): parameter
        for name, parameter in named_parameters
        if ".lora_" in name and f".{adapter_name}." in name
    }


def export_lora(folder: str | Path, state_dict: dict[str, Tensor], lora_config: LoraConfig) -> None:
    """Write `pytorch_lora_weights.safetensors` for `pipe.load_lora_weights(folder)`; the metadata keeps alpha."""
    if not state_dict:
        raise ValueError("there are no adapter weights to export: was the model prepared with LoRA?")
    metadata = lora_config.to_dict()
    metadata["target_modules"] = sorted(
        metadata["target_modules"]
    )  # a set: sorted, the same run writes the same bytes
    QwenImagePipeline.save_lora_weights(
        folder,
        transformer_lora_layers={
            name: tensor.detach().cpu().contiguous() for name, tensor in sorted(state_dict.items())
        },
        transformer_lora_adapter_metadata=metadata,
        weight_name="unfinished.safetensors",
    )
    temporary = Path(folder) / "unfinished.safetensors"
    sort_safetensors_header(temporary)
    os.replace(temporary, Path(folder) / "pytorch_lora_weights.safetensors")


def sort_safetensors_header(path: Path) -> None:
    """Put the header's metadata in order, which safetensors writes in a random one: the same run, the same bytes."""
    with open(path, "rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps({"__metadata__": header.pop("__metadata__"), **header}, separators=(",", ":"))
        assert len(text) <= length, "a header in other order is as long"
        file.seek(8)
        file.write(text.ljust(length).encode())


# ----- Conditions --------------------------------------------------------------------------------------------------


@torch.no_grad()
def encode_prompts(
    pipeline: QwenImagePipeline, prompts: Sequence[str], *, device: torch.device, max_sequence_length: int
) -> list[Tensor]:
    """Encode one prompt at a time, so that none depends on its neighbours' length. Returns (S_i, D) on the CPU."""
    embeddings = []
    for prompt in prompts:
        prompt_embeds, _ = pipeline.encode_prompt(prompt, device=device, max_sequence_length=max_sequence_length)
        embeddings.append(prompt_embeds[0].cpu())
    return embeddings


def pad_prompt_embeds(embeddings: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Stack (S_i, D) embeddings to (B, S, D) and an int32 mask (B, S), or no mask where nothing is padded."""
    longest = max(len(embedding) for embedding in embeddings)
    prompt_embeds = embeddings[0].new_zeros(len(embeddings), longest, embeddings[0].shape[1])
    mask = torch.zeros(len(embeddings), longest, dtype=torch.int32)
    for row, embedding in enumerate(embeddings):
        prompt_embeds[row, : len(embedding)] = embedding
        mask[row, : len(embedding)] = 1
    return prompt_embeds, None if bool(mask.all()) else mask


def prompt_conditions(embeddings: Sequence[Tensor], negative: Tensor | None) -> dict[str, Tensor]:
    """The condition fields of one micro-batch: one (S_i, D) embedding a sample, one negative for all or None."""
    fields = dict(zip(("prompt_embeds", "prompt_embeds_mask"), pad_prompt_embeds(embeddings), strict=True))
    if negative is not None:
        fields["negative_prompt_embeds"] = negative.expand(len(embeddings), -1, -1)
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def drop_full_masks(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A micro-batch without the masks that mask nothing: with one, attention takes a slower kernel and the model waits
    for the device. Masks are read on the CPU; no field is copied."""
    names = ("prompt_embeds_mask", "negative_prompt_embeds_mask")
    return {
        name: field for name, field in batch.items() if name not in names or not all(bool(row.all()) for row in field)
    }


# ----- Sampling physics --------------------------------------------------------------------------------------------


def get_sigmas(
    scheduler: FlowMatchEulerDiscreteScheduler, num_inference_steps: int, *, height: int, width: int
) -> Tensor:
    """The pipeline's own schedule for one image size: (num_inference_steps + 1,) fp32 on the CPU, from 1 to 0."""
    config = scheduler.config
    scheduler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / num_inference_steps, num_inference_steps),
        mu=calculate_shift(
            (height // PIXELS_PER_TOKEN) * (width // PIXELS_PER_TOKEN),
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        ),
    )
    return scheduler.sigmas.float().cpu().clone()


def seeded_noise(seed_words: Sequence[int], shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal fp32 noise that depends on the words alone, e.g. (seed, epoch, sample, stream), and on whether
    it is drawn on a CPU or a GPU."""
    words = [len(seed_words), *(int(word) for word in seed_words)]  # SeedSequence takes (1, 2) and (1, 2, 0) for one
    sequence = np.random.SeedSequence(words)
    if torch.device(device).type == "cpu":  # torch's own CPU generator uses 32 bits of a seed
        return torch.from_numpy(np.random.default_rng(sequence).standard_normal(tuple(shape), dtype=np.float32))
    generator = torch.Generator(device).manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
    return torch.randn(*shape, generator=generator, device=device)


def predict_velocity(
    transformer: nn.Module,
    latents: Tensor,
    timesteps: Tensor,
    prompt_embeds: Tensor,
    prompt_embeds_mask: Tensor | None = None,
    negative_prompt_embeds: Tensor | None = None,
    negative_prompt_embeds_mask: Tensor | None = None,
    *,
    height: int,
    width: int,
    true_cfg_scale: float,
    cfg_batched: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Velocity (B, L, C) fp32 at latents (B, L, C) and timesteps (B,) in [0, 1000], with true CFG where scale > 1.

    The two CFG predictions run as one batch of 2B (`cfg_batched`) or one after the other. The combination is rescaled
    to the norm of the conditional one per token, as QwenImagePipeline does. The only cast to `dtype` is here.
    """

    def forward(latents: Tensor, timesteps: Tensor, embeds: Tensor, mask: Tensor | None) -> Tensor:
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds.to(dtype),
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN)]] * len(latents),
            return_dict=False,
        )[0].float()

    if true_cfg_scale <= 1:
        return forward(latents, timesteps, prompt_embeds, prompt_embeds_mask)
    if negative_prompt_embeds is None:
        raise ValueError(f"true_cfg_scale {true_cfg_scale} needs negative_prompt_embeds: pass them, or a scale of 1")
    if cfg_batched:
        embeds, mask = concatenate_conditions(
            prompt_embeds, prompt_embeds_mask, negative_prompt_embeds, negative_prompt_embeds_mask
        )
        positive, negative = forward(latents.repeat(2, 1, 1), timesteps.repeat(2), embeds, mask).chunk(2)
    else:
        positive = forward(latents, timesteps, prompt_embeds, prompt_embeds_mask)
        negative = forward(latents, timesteps, negative_prompt_embeds, negative_prompt_embeds_mask)
    combined = torch.lerp(negative, positive, true_cfg_scale)
    del negative  # the rest needs memory
    return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


def predict_sized(
    transformer: nn.Module, latents: Tensor, timesteps: Tensor, *, sizes: Mapping[int, tuple[int, int]], **options: Any
) -> Tensor:
    """predict_velocity of a run with images of several sizes: the number of tokens tells (height, width)."""
    height, width = sizes[latents.shape[1]]
    return predict_velocity(transformer, latents, timesteps, height=height, width=width, **options)


def concatenate_conditions(
    embeds: Tensor, mask: Tensor | None, other_embeds: Tensor, other_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Stack two condition batches (B, S, D) of unequal S into one of 2B; no mask where neither is padded."""
    length, other_length = embeds.shape[1], other_embeds.shape[1]
    longest = max(length, other_length)
    if length == other_length and mask is None and other_mask is None:
        return torch.cat([embeds, other_embeds]), None
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.int32, device=embeds.device)
    if other_mask is None:
        other_mask = torch.ones(other_embeds.shape[:2], dtype=torch.int32, device=embeds.device)
    pad = nn.functional.pad
    return (
        torch.cat([pad(embeds, (0, 0, 0, longest - length)), pad(other_embeds, (0, 0, 0, longest - other_length))]),
        torch.cat([pad(mask, (0, longest - length)), pad(other_mask, (0, longest - other_length))]),
    )


def sde_step_with_logprob(
    velocity: Tensor,
    latents: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    sigma_max: Tensor,
    noise_level: float,
    sde_type: str,
    prev_sample: Tensor | None = None,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One reverse-time SDE step with its log-prob (arXiv 2505.05470 eq. 9; 'cps' 2509.05952; 'dance' 2505.07818).

    velocity, latents, prev_sample, noise (B, L, C); sigma, sigma_next, sigma_max (B,), sigma_max being the schedule's
    second value, which stands in for 1 where 1 - sigma would vanish. Returns prev_sample (B, L, C), log_prob (B,) as
    the MEAN over L and C, prev_sample_mean (B, L, C), std_dev_t (B,) and sqrt_dt (B,). For 'sde' the noise has
    standard deviation std_dev_t * sqrt_dt, for the others std_dev_t. Computed in fp32 or, given float64, in that.
    """
    dtype = torch.promote_types(latents.dtype, torch.float32)
    velocity, latents = velocity.to(dtype), latents.to(dtype)
    sigma, sigma_next, sigma_max = (s.to(dtype).view(-1, 1, 1) for s in (sigma, sigma_next, sigma_max))
    dt = sigma_next - sigma
    sqrt_dt = torch.sqrt(-dt)
    if sde_type == "sde":
        std_dev_t = torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))) * noise_level
        drift = std_dev_t**2 / (2 * sigma) * dt
        prev_sample_mean = (latents * (1 + drift)).addcmul_(velocity, dt + drift * (1 - sigma))
        noise_std = std_dev_t * sqrt_dt
    elif sde_type == "cps":
        std_dev_t = noise_std = sigma_next * math.sin(noise_level * math.pi / 2)
        clean, noisy = latents - sigma * velocity, latents + (1 - sigma) * velocity
        prev_sample_mean = clean * (1 - sigma_next) + noisy * torch.sqrt(sigma_next**2 - std_dev_t**2)
    elif sde_type == "dance":
        clean = latents - sigma * velocity
        score = (latents - (1 - sigma) * clean) / sigma**2
        prev_sample_mean = latents + dt * velocity + 0.5 * dt * noise_level**2 * score
        std_dev_t = noise_std = noise_level * sqrt_dt
    else:
        raise ValueError(f"sde_type {sde_type!r} is unknown: choose from {', '.join(SDE_TYPES)}")

    del velocity
    if prev_sample is None:
        prev_sample = prev_sample_mean + noise_std * noise
    # The mean comes first, the rest is per sample; a norm, since a square would be one more (B, L, C) at the peak.
    difference = prev_sample.to(dtype).detach() - prev_sample_mean
    error = torch.linalg.vector_norm(difference, dim=(1, 2)) ** 2 / difference[0].numel()
    noise_std, std_dev_t, sqrt_dt = (s.flatten() for s in (noise_std, std_dev_t, sqrt_dt))
    if sde_type == "cps":  # its authors leave the Gaussian's scale out
        log_prob = -error
    else:
        log_prob = -error / (2 * noise_std**2) - torch.log(noise_std) - 0.5 * math.log(2 * math.pi)
    return prev_sample, log_prob, prev_sample_mean, std_dev_t, sqrt_dt


@torch.no_grad()
def decode_latents(vae: AutoencoderKLQwenImage, latents: Tensor, *, height: int, width: int) -> Tensor:
    """Decode packed latents (B, L, C) to images (B, 3, height, width) fp32 in [0, 1], as QwenImagePipeline does."""
    unpacked = QwenImagePipeline._unpack_latents(latents, height, width, 8).to(vae.dtype)  # (B, 16, 1, H/8, W/8)
    mean, std = (
        unpacked.new_tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    images = vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
    return (images.float() / 2 + 0.5).clamp(0, 1)
