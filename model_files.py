"""What the files of a pipeline, an adapter or a checkpoint hold, told by their json and safetensors headers alone.

A model of 20 B parameters takes minutes to load; here it takes a second to learn that it would not. No weights are
read, no pickle and no code of a model's folder is ever loaded.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from safetensors import SafetensorError, safe_open
from torch import nn

from qwen_image import target_names

Shape = tuple[int, ...]

COMPONENTS = {  # what model_index.json may say of each part: anything else would be other code than was tried
    "scheduler": [["diffusers", "FlowMatchEulerDiscreteScheduler"]],
    "transformer": [["diffusers", "QwenImageTransformer2DModel"]],
    "text_encoder": [["transformers", "Qwen2_5_VLForConditionalGeneration"]],
    "tokenizer": [["transformers", "Qwen2Tokenizer"], ["transformers", "Qwen2TokenizerFast"]],
    "vae": [["diffusers", "AutoencoderKLQwenImage"]],
}
TRANSFORMER_FACTS = {  # what changes the forward or the latents; everything else in the config is only a size
    "patch_size": 2, "in_channels": 64, "guidance_embeds": False, "zero_cond_t": False,
    "use_additional_t_cond": False, "use_layer3d_rope": False,
}  # fmt: skip
WEIGHTS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
}
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
FLOATS = ("F64", "F32", "BF16", "F16")


def read_json(path: Path) -> dict[str, Any]:
    """A json object; raises ValueError that names a missing or damaged file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: name a whole pipeline folder, or download it again") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not json ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a json {type(value).__name__}, not an object: download it again")
    return value


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """The shapes in a safetensors header. Raises ValueError where the file is missing, cut short, or holds others
    than floating-point numbers."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: name a whole folder, or download it again")
    shapes, foreign = {}, []
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, a safe_open handle is no dict
                part = tensors.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                if part.get_dtype() not in FLOATS:
                    foreign.append(f"{name} in {part.get_dtype()}")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}): write or download it again") from error
    if foreign:
        raise ValueError(f"{path} holds {foreign[0]}: give weights in one of {', '.join(FLOATS)}")
    return shapes


def compare_shapes(path: Path, found: Mapping[str, Shape], expected: Mapping[str, Shape], *, exact: bool) -> None:
    """Raise ValueError naming the first tensor that is missing, has another shape, or, if exact, is not expected."""
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{path} lacks the tensor {name} {shape}: it is another model's, or not whole")
        if found[name] != shape:
            raise ValueError(
                f"{path} holds {name} of shape {found[name]}, this model needs {shape}: name the right one"
            )
    foreign = sorted(found.keys() - expected.keys())
    if exact and foreign:
        raise ValueError(f"{path} holds the tensor {foreign[0]} that this model does not have: name the right one")


# ----- A pipeline --------------------------------------------------------------------------------------------------


def check_pipeline(folder: Path, subfolders: Sequence[str]) -> None:
    """Refuse a pipeline folder whose named parts are of another class, not whole, or do not fit each other.

    Raises ValueError that names the file.
    """
    index = read_json(folder / "model_index.json")
    for name in subfolders:
        if index.get(name) not in COMPONENTS[name]:
            raise ValueError(
                f"{folder}/model_index.json has {name} {index.get(name)}, these scripts load "
                f"{' '.join(COMPONENTS[name][0])} and no code of a model's folder: choose a Qwen-Image model"
            )
    read_json(folder / "scheduler/scheduler_config.json")
    transformer = meta_model(folder, "transformer", QwenImageTransformer2DModel)
    for name, value in TRANSFORMER_FACTS.items():
        if transformer.config[name] != value:
            raise ValueError(
                f"{folder}/transformer/config.json has {name} {transformer.config[name]}, these scripts need {value}: "
                "choose a Qwen-Image text-to-image model"
            )
    check_weights(folder, "transformer", transformer)
    if "vae" in subfolders:
        check_weights(folder, "vae", meta_model(folder, "vae", AutoencoderKLQwenImage))
    if "text_encoder" in subfolders:
        check_text_encoder(folder, transformer.config.joint_attention_dim)


def meta_model(folder: Path, subfolder: str, model_class: type) -> nn.Module:
    """The model that a subfolder's config.json describes, without memory for its weights."""
    path = folder / subfolder / "config.json"
    config = read_json(path)
    try:
        with torch.device("meta"):
            return model_class.from_config(config)
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"{path} describes no {model_class.__name__} ({error}): download it again") from error


def stored_shapes(folder: Path, subfolder: str) -> tuple[Path, dict[str, Shape]]:
    """The shapes of a part's weights, in one safetensors file or in those that its index lists; and where they are."""
    path = folder / subfolder / f"{WEIGHTS[subfolder]}.safetensors"
    index = path.with_suffix(".safetensors.index.json")
    if path.is_file() or not index.is_file():
        return path, tensor_shapes(path)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise ValueError(f"{index} has no weight_map of tensors to files beside it: download it again")
    shapes: dict[str, Shape] = {}
    for name in sorted(set(names.values())):
        shapes |= tensor_shapes(index.parent / name)
    return index, shapes


def check_weights(folder: Path, subfolder: str, model: nn.Module) -> None:
    """Refuse weights that lack a tensor of the model or have it in another shape."""
    path, found = stored_shapes(folder, subfolder)
    compare_shapes(path, found, {n: tuple(t.shape) for n, t in model.state_dict().items()}, exact=False)


def check_text_encoder(folder: Path, text_width: int) -> None:
    """Refuse a text encoder that is not whole, of another width than the transformer reads, or smaller than the
    tokenizer's vocabulary. Layers and the embedding are looked for, since libraries rename the rest as they load."""
    path = folder / "text_encoder/config.json"
    config = read_json(path)
    config = config | (config["text_config"] if isinstance(config.get("text_config"), dict) else {})
    numbers = {name: config.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    if not all(isinstance(number, int) and number > 0 for number in numbers.values()):
        raise ValueError(f"{path} does not tell {', '.join(numbers)}: download it again")
    if numbers["hidden_size"] != text_width:
        raise ValueError(
            f"{path} has hidden_size {numbers['hidden_size']}, the transformer reads {text_width}: the parts are of "
            "different models"
        )
    path, shapes = stored_shapes(folder, "text_encoder")
    embedding = [shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    if embedding != [(numbers["vocab_size"], text_width)]:
        raise ValueError(
            f"{path} has embed_tokens.weight {embedding}, its config ({numbers['vocab_size']}, {text_width})"
        )
    layers = {int(match[1]) for name in shapes if (match := re.search(r"(?<!visual)\.layers\.(\d+)\.", name))}
    missing = sorted(set(range(numbers["num_hidden_layers"])) - layers)
    if missing:
        raise ValueError(f"{path} lacks layer {missing[0]} of {numbers['num_hidden_layers']}: download it again")
    check_tokenizer(folder / "tokenizer", numbers["vocab_size"])


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Refuse a tokenizer without its files, or with tokens that the text encoder does not embed."""
    read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        tokenizer = read_json(folder / "tokenizer.json")
        model, added = tokenizer.get("model"), tokenizer.get("added_tokens", [])
        vocab = model.get("vocab") if isinstance(model, dict) else None
        ids = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    else:
        if not (folder / "merges.txt").is_file():
            raise ValueError(f"{folder} holds neither tokenizer.json nor vocab.json and merges.txt: download it again")
        vocab, ids = read_json(folder / "vocab.json"), []
    ids += vocab.values() if isinstance(vocab, dict) else []
    if not vocab or not all(isinstance(number, int) for number in ids):
        raise ValueError(f"{folder} has no vocabulary: download it again")
    if max(ids) >= vocab_size:
        raise ValueError(
            f"{folder} has token {max(ids)}, the text encoder embeds {vocab_size}: the parts are of different models"
        )


# ----- Adapters and checkpoints ------------------------------------------------------------------------------------


def adapter_shapes(folder: Path, *, rank: int, target_modules: Sequence[str]) -> dict[str, Shape]:
    """Names, as peft has them, and shapes of the adapter that a run adds to a pipeline's transformer."""
    transformer = meta_model(folder, "transformer", QwenImageTransformer2DModel)
    shapes = {}
    for name in target_names(transformer, target_modules):
        layer = transformer.get_submodule(name)
        shapes[f"{name}.lora_A.weight"] = (rank, layer.in_features)
        shapes[f"{name}.lora_B.weight"] = (layer.out_features, rank)
    return shapes


def check_exported_adapter(pipeline_folder: Path, folder: Path) -> None:
    """Refuse a folder without a whole safetensors adapter for a pipeline's transformer. Raises ValueError."""
    path = folder / ADAPTER_FILE
    if not path.is_file():
        raise ValueError(f"--lora {folder} holds no {ADAPTER_FILE}: name a run's folder, or an adapter's")
    shapes = tensor_shapes(path)
    transformer = meta_model(pipeline_folder, "transformer", QwenImageTransformer2DModel)
    linear = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    matrices: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        match = re.fullmatch(r"transformer\.(.+)\.lora_([AB])\.weight", name)
        if match is None or match[1] not in linear:
            raise ValueError(f"{path} holds {name}, which is no adapter of this model's layers: name another --lora")
        matrices.setdefault(match[1], {})[match[2]] = shape
    if not matrices:
        raise ValueError(f"{path} holds no tensor: name another --lora")
    for name, found in matrices.items():
        rank = found["A"][0] if len(found.get("A", ())) == 2 else 0
        expected = {"A": (rank, linear[name].in_features), "B": (linear[name].out_features, rank)}
        if found != expected:
            raise ValueError(f"{path} has matrices {found} for {name}, which needs {expected}: name another --lora")


def check_checkpoint(folder: Path, adapters: Iterable[str], shapes: Mapping[str, Shape]) -> None:
    """Refuse a checkpoint whose adapters or optimizer state are not exactly this run's. Raises ValueError."""
    for name in adapters:
        path = folder / f"adapter_{name}.safetensors"
        compare_shapes(path, tensor_shapes(path), shapes, exact=True)
    path = folder / "optimizer.safetensors"
    found = tensor_shapes(path)
    state = {f"{n}.{key}": shape for n, shape in shapes.items() for key in ("exp_avg", "exp_avg_sq")}
    state |= {f"{name}.step": () for name in shapes}
    if found:  # none before the first update
        compare_shapes(path, found, state, exact=True)
