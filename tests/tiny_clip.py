"""A tiny random CLIP model with processor and aesthetic head, for the rewards that are built on CLIP."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from reward_models import HEAD_FILE


def save_tiny_clip(folder: Path) -> None:
    """Write it as `clip:folder`, `pickscore:folder` and `aesthetic:folder` read it."""
    layer = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    symbols = sorted(ByteLevel.alphabet())
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    text = layer | {"vocab_size": len(words), "max_position_embeddings": 12, "eos_token_id": len(words) - 1}
    config = CLIPConfig(
        text_config=text | {"bos_token_id": len(words) - 2, "pad_token_id": len(words) - 1},
        vision_config=layer | {"image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[])
    size = {"shortest_edge": 32}
    CLIPProcessor(CLIPImageProcessor(size=size, crop_size={"height": 32, "width": 32}), tokenizer).save_pretrained(
        folder
    )
    head = {"layers.0.weight": torch.randn(4, 8), "layers.0.bias": torch.randn(4)}
    save_file(head | {"layers.10.weight": torch.randn(1, 4), "layers.10.bias": torch.randn(1)}, folder / HEAD_FILE)
