"""Bad input by name, for test_bad_input.py: the scripts it is given to, how to make it, a part of the message."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

import rollout
import train_flowgrpo
import train_nft
from trajectory_cache import open_cache, read_tensors, table_writer, write_manifest


class Place(NamedTuple):
    """Where a case may spoil things: copies of what ran well before."""

    folder: Path
    model: Path
    cache: Path
    run: Path


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def edit_json(path: Path, **changes) -> None:
    """Set keys of a json file; None deletes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: v for name, v in value.items() if v is not None}))


def edit_tensors(path: Path, change: Callable[[dict], dict]) -> None:
    """Rewrite a safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


def cut(path: Path, keep: float = 0.5) -> None:
    """Keep only the first part of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def rewrite_table(cache: Path, name: str, change: Callable[[dict], dict | None]) -> None:
    """Rewrite one table of a one-shard cache, plain columns and tensors, with checksums that agree."""
    opened = open_cache(cache)
    table = getattr(opened, name)
    rows = [read_tensors(table.with_format("arrow"), row) for row in range(table.num_rows)]
    plain = [column for column in table.column_names if not column.endswith(("_shape", "_dtype"))]
    plain = [column for column in plain if column not in rows[0]]
    rows = [
        {column: table.data.column(column)[number].as_py() for column in plain} | row
        for number, row in enumerate(rows)
    ]
    path = cache / f"{name}-00000.arrow"
    copies = [{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in row.items()} for row in rows]
    with table_writer(path) as write_row:
        for row in map(change, copies):
            if row is not None:
                write_row(row)
    facts = {k: v for k, v in opened.facts.items() if k not in ("files", "schema_version", "shard")}
    write_manifest(cache, 0, facts)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = float("nan")
    return tensor


# ----- The cases: scripts, what to spoil (returns options to change), a part of the message ------------------------

BOTH, ALL = (train_flowgrpo, train_nft), (train_flowgrpo, train_nft, rollout)
ONLY_FLOWGRPO, ONLY_NFT, ONLY_ROLLOUT = (train_flowgrpo,), (train_nft,), (rollout,)


def options(**values):
    """A case that only changes options."""
    return lambda place: values


def reward(code: str, name: str = "score"):
    """A case with a reward file."""
    return lambda place: {"reward_funcs": f"{write(place.folder / 'reward.py', code)}:{name}"}


def prompts(name: str, content: str | bytes, option: str = "prompts", **values):
    """A case with a prompts file."""
    return lambda place: {option: write(place.folder / name, content)} | values


def model(*spoilers: Callable[[Path], object]):
    """A case with a copy of the model folder."""

    def change(place: Place):
        for spoil in spoilers:
            spoil(place.model)
        return {"pretrained_model_name_or_path": place.model}

    return change


def cache(*spoilers: Callable[[Path], object], **values):
    """A case with a copy of the cache."""

    def change(place: Place):
        for spoil in spoilers:
            spoil(place.cache)
        return {"trajectory_cache": place.cache} | values

    return change


def checkpoint(*spoilers: Callable[[Path], object], **values):
    """A case that resumes a copy of the finished run; a spoiler gets its last checkpoint's folder."""

    def change(place: Place):
        for spoil in spoilers:
            spoil(place.run / "checkpoints/epoch-00002")
        return {"output_dir": place.run, "resume_from_checkpoint": "latest", "eval_epochs": 0} | values

    return change


def row(table: str, **changes: Callable):
    """Change some columns of every row of a cache's table; a new value of None deletes the column."""

    def spoil(folder: Path):
        def change(old: dict) -> dict:
            new = old | {name: function(old.get(name)) for name, function in changes.items()}
            return {name: value for name, value in new.items() if value is not None}

        rewrite_table(folder, table, change)

    return spoil


TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT_CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 288}
FIRST = "transformer_blocks.0.attn.to_q"
CASES = {
    # Options.
    "seed too large for numpy": (ALL, options(seed=2**32), "--seed is 4294967296"),
    "seed beyond 64 bits": (ALL, options(seed=2**63), "2**63"),
    "negative seed": (ALL, options(seed=-1), "--seed is -1"),
    "no images": (ALL, options(num_images_per_prompt=0), "--num_images_per_prompt is 0"),
    "no prompts per epoch": (ALL, options(num_prompts_per_epoch=-4), "--num_prompts_per_epoch is -4"),
    "no batch": (ALL, options(train_batch_size=0), "--train_batch_size is 0"),
    "no tokens": (ALL, options(max_sequence_length=0), "--max_sequence_length is 0"),
    "too many tokens": (ALL, options(max_sequence_length=2000), "Qwen-Image reads at most 1024"),
    "negative epoch": (ONLY_ROLLOUT, options(epoch=-1), "--epoch is -1"),
    "uneven epoch": (ALL, options(num_prompts_per_epoch=3, num_images_per_prompt=3), "--num_prompts_per_epoch"),
    "infinite noise": (ONLY_FLOWGRPO, options(noise_level="inf"), "--noise_level is inf"),
    "NaN of CFG": (ALL, options(true_cfg_scale="nan"), "--true_cfg_scale is nan"),
    "rate beyond fp32": (BOTH, options(learning_rate=1e300), "--learning_rate is 1e+300"),
    "warm-up beyond the run": (
        BOTH, options(lr_scheduler="linear", lr_warmup_steps=5), "beyond the 4 optimizer steps"
    ),
    "warm-up of a constant rate": (BOTH, options(lr_warmup_steps=1), "choose constant_with_warmup"),
    "polynomial that would rise": (
        BOTH, options(lr_scheduler="polynomial", learning_rate=1e-8), "--lr_scheduler polynomial ends at 1e-07"
    ),
    "reward weights count": (ALL, options(reward_weights=(1, 2)), "2 values for 1"),
    "reward weight NaN": (ALL, options(reward_weights="nan"), "--reward_weights are [nan]"),
    "reward weight too large": (ALL, options(reward_weights=1e40), "--reward_weights are [1e+40]"),
    "reward weights all 0": (ALL, options(reward_weights=0), "not all 0"),
    "reward twice": (ALL, options(reward_funcs=("glyph_match", "glyph_match")), "names a reward twice"),
    "window reversed": (ONLY_FLOWGRPO, options(sde_window_range=(3, 0)), "--sde_window_range 3 0"),
    "window before 0": (ONLY_FLOWGRPO, options(sde_window_range=(-1, 3)), "--sde_window_range -1 3"),
    "decay words": (ONLY_NFT, options(old_policy_decay="0:x:1"), "flat:rate:cap"),
    "decay cap NaN": (ONLY_NFT, options(old_policy_decay="0:0.1:nan"), "[0, 1)"),
    "timestep fraction NaN": (ONLY_NFT, options(timestep_fraction="nan"), "--timestep_fraction"),
    "target": (BOTH, options(lora_target_modules="to_query"), "'to_query'"),
    "output is a file": (ALL, lambda p: {"output_dir": write(p.folder / "file", "x")}, "cannot be written"),
    "output on a file system that refuses": (ALL, options(output_dir="/proc/run"), "/proc/run"),
    # Prompts and evaluation prompts.
    "empty prompts": (ALL, prompts("empty.txt", ""), "empty.txt holds no prompt"),
    "blank prompts": (ALL, prompts("blank.txt", " \n\t\n"), "blank.txt holds no prompt"),
    "binary prompts": (ALL, prompts("binary.txt", bytes(range(256))), "binary.txt is not utf-8"),
    "prompts in utf-16": (ALL, prompts("wide.txt", "a cat\n".encode("utf-16")), "wide.txt is not utf-8"),
    "broken jsonl": (ALL, prompts("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n'), "bad.jsonl line 2"),
    "jsonl of numbers": (ALL, prompts("numbers.jsonl", "3\n"), "line 1 is a json int"),
    "prompt of another type": (ALL, prompts("typed.jsonl", '{"prompt": 3}\n'), "row 1 has no text"),
    "missing key": (ALL, prompts("keys.jsonl", '{"text": "a"}\n'), "row 1 has no text in 'prompt'"),
    "missing column": (ALL, prompts("table.csv", "text\na\n"), "has no column 'prompt'"),
    "unknown kind of file": (ALL, prompts("prompts.doc", "a\n"), "--prompts"),
    "no such evaluation prompts": (BOTH, options(eval_prompts="nowhere.txt"), "--eval_prompts nowhere.txt"),
    "evaluation prompts of an unknown kind": (
        BOTH, prompts("prompts.doc", "a\n", "eval_prompts"), "--eval_prompts"
    ),
    # Rewards.
    "no such reward": (ALL, options(reward_funcs="beauty"), "choose from"),
    "no such reward file": (ALL, options(reward_funcs="nowhere.py:f"), "there is no file nowhere.py"),
    "reward with a syntax error": (ALL, reward("def score(:\n"), "raised SyntaxError"),
    "reward that exits": (ALL, reward("import sys; sys.exit(3)\n"), "raised SystemExit"),
    "reward without its function": (ALL, reward("def other(): pass\n"), "defines no function score"),
    "reward that is no function": (ALL, reward("score = 3\n"), "defines no function score"),
    # Model folders.
    "no such model": (ALL, options(pretrained_model_name_or_path="no/such-model"), "no/such-model"),
    "model_index of another pipeline": (
        ALL, model(lambda m: edit_json(m / "model_index.json", _class_name="FluxPipeline")), "is a FluxPipeline"
    ),
    "model with its own code": (
        ALL, model(lambda m: edit_json(m / "model_index.json", transformer=["modeling", "Mine"])), "no code"
    ),
    "no transformer weights": (ALL, model(lambda m: (m / TRANSFORMER).unlink()), f"{TRANSFORMER} is missing"),
    "truncated transformer": (ALL, model(lambda m: cut(m / TRANSFORMER)), "no whole safetensors file"),
    "transformer that is text": (ALL, model(lambda m: write(m / TRANSFORMER, "<html>404</html>" * 99)), "safetensors"),
    "transformer lacks a tensor": (
        ALL,
        model(lambda m: edit_tensors(m / TRANSFORMER, lambda t: {n: v for n, v in t.items() if "img_in" not in n})),
        "lacks the tensor img_in",
    ),
    "transformer of another width": (
        ALL,
        model(lambda m: edit_tensors(m / TRANSFORMER, lambda t: t | {"txt_in.weight": torch.zeros(64, 5)})),
        "txt_in.weight of shape (64, 5)",
    ),
    "transformer in integers": (
        ALL,
        model(lambda m: edit_tensors(m / TRANSFORMER, lambda t: {n: v.to(torch.int8) for n, v in t.items()})),
        "in I8",
    ),
    "transformer with guidance": (
        ALL, model(lambda m: edit_json(m / "transformer/config.json", guidance_embeds=True)),
        "guidance_embeds True, these scripts need False",
    ),
    "transformer of other latents": (
        BOTH, model(lambda m: edit_json(m / "transformer/config.json", in_channels=128)), "in_channels 128",
    ),
    "transformer config cut": (ALL, model(lambda m: cut(m / "transformer/config.json")), "config.json is not json"),
    "transformer config with words": (
        ALL, model(lambda m: edit_json(m / "transformer/config.json", num_layers="two")), "describes no QwenImage"
    ),
    "shard of an index missing": (
        ALL,
        model(
            lambda m: (m / TRANSFORMER).unlink(),
            lambda m: write(m / f"{TRANSFORMER}.index.json", json.dumps({"weight_map": {"a": "part.safetensors"}})),
        ),
        "part.safetensors is missing",
    ),
    "index that leads elsewhere": (
        ALL,
        model(
            lambda m: (m / TRANSFORMER).unlink(),
            lambda m: write(m / f"{TRANSFORMER}.index.json", json.dumps({"weight_map": {"a": "../../x.safetensors"}})),
        ),
        "no weight_map of tensors to files beside it",
    ),
    "no scheduler": (ALL, model(lambda m: shutil.rmtree(m / "scheduler")), "scheduler_config.json is missing"),
    "truncated VAE": (ALL, model(lambda m: cut(m / VAE)), f"{VAE} is no whole"),
    "VAE of another width": (ALL, model(lambda m: edit_json(m / "vae/config.json", base_dim=4)), f"{VAE} holds"),
    "no VAE": (ALL, model(lambda m: shutil.rmtree(m / "vae")), "vae/config.json is missing"),
    "truncated text encoder": (ALL, model(lambda m: cut(m / "text_encoder/model.safetensors")), "no whole"),
    "text encoder lacks a layer": (
        ALL,
        model(
            lambda m: edit_tensors(
                m / "text_encoder/model.safetensors",
                lambda t: {n: v for n, v in t.items() if "layers.1." not in n or "visual" in n},
            )
        ),
        "lacks layer 1 of 2",
    ),
    "text encoder of another width": (
        ALL,
        model(lambda m: edit_json(m / "text_encoder/config.json", text_config=TEXT_CONFIG | {"hidden_size": 64})),
        "the transformer reads 32",
    ),
    "no tokenizer": (ALL, model(lambda m: shutil.rmtree(m / "tokenizer")), "tokenizer_config.json is missing"),
    "tokenizer without vocabulary": (ALL, model(lambda m: (m / "tokenizer/tokenizer.json").unlink()), "neither"),
    "tokenizer that is text": (ALL, model(lambda m: write(m / "tokenizer/tokenizer.json", "x")), "is not json"),
    "tokenizer of a larger model": (
        ALL,
        model(
            lambda m: edit_json(
                m / "tokenizer/tokenizer.json", added_tokens=[{"id": 151_643, "content": "<|endoftext|>"}]
            )
        ),
        "token 151643",
    ),
    # Adapters.
    "no such adapter": (ONLY_ROLLOUT, options(lora="nowhere"), "--lora nowhere holds no pytorch_lora_weights"),
    "pickled adapter": (
        ONLY_ROLLOUT,
        lambda p: {"lora": write(p.folder / "lora/pytorch_lora_weights.bin", b"\x80\x04.").parent},
        "holds no pytorch_lora_weights.safetensors",
    ),
    "truncated adapter": (
        ONLY_ROLLOUT, lambda p: cut(p.run / "pytorch_lora_weights.safetensors") or {"lora": p.run}, "no whole"
    ),
    "adapter of another model": (
        ONLY_ROLLOUT,
        lambda p: {"lora": p.run}
        | (edit_tensors(p.run / "pytorch_lora_weights.safetensors", lambda t: {"unet.x": torch.zeros(2)}) or {}),
        "holds unet.x",
    ),
    "adapter of another width": (
        ONLY_ROLLOUT,
        lambda p: {"lora": p.run}
        | (
            edit_tensors(
                p.run / "pytorch_lora_weights.safetensors",
                lambda t: t | {f"transformer.{FIRST}.lora_A.weight": torch.zeros(4, 5)},
            )
            or {}
        ),
        f"for {FIRST}, which needs",
    ),
    # Caches.
    "cache cut within a batch": (BOTH, cache(lambda c: cut(c / "trajectories-00000.arrow", 0.9)), "manifest says"),
    "cache with a flipped byte": (
        BOTH,
        cache(
            lambda c: write(
                c / "prompts-00000.arrow",
                bytes(b ^ (i == 900) for i, b in enumerate((c / "prompts-00000.arrow").read_bytes())),
            )
        ),
        "has checksum",
    ),
    "cache without its manifest": (BOTH, cache(lambda c: (c / "manifest-00000.json").unlink()), "no manifest"),
    "cache of too many shards": (
        BOTH, cache(lambda c: edit_json(c / "manifest-00000.json", num_shards=10**12)), "of 1000000000000"
    ),
    "cache of another schema": (BOTH, cache(lambda c: edit_json(c / "manifest-00000.json", schema_version=7)), "7"),
    "sigmas of words": (
        BOTH, cache(lambda c: edit_json(c / "manifest-00000.json", sigmas=["a"] * 5)), "made with sigmas"
    ),
    "sigmas of lists": (
        BOTH, cache(lambda c: edit_json(c / "manifest-00000.json", sigmas=[[1]] * 5)), "made with sigmas"
    ),
    "no sigmas": (BOTH, cache(lambda c: edit_json(c / "manifest-00000.json", sigmas=None)), "sigmas None"),
    "cache of another size": (BOTH, cache(resolution=32), "made with height 64"),
    "prompts' sizes for a cache": (BOTH, cache(resolution_column="size"), "name the cache's sizes with --resolution"),
    "cache of another model": (BOTH, cache(lambda c: edit_json(c / "manifest-00000.json", model="x")), "model x"),
    "rows do not divide": (BOTH, cache(num_updates_per_epoch=3), "cannot be dealt"),
    "NaN in latents": (ONLY_FLOWGRPO, cache(row("trajectories", all_latents=with_nan)), "all_latents of row 0 holds"),
    "infinity in clean latents": (
        ONLY_NFT, cache(row("trajectories", latents_clean=lambda x: x / 0)), "latents_clean of row 0 holds"
    ),
    "NaN in old log-probs": (ONLY_FLOWGRPO, cache(row("trajectories", old_log_probs=with_nan)), "old_log_probs"),
    "old log-probs in double": (
        ONLY_FLOWGRPO, cache(row("trajectories", old_log_probs=lambda x: x.double())), "old_log_probs of row 0 must"
    ),
    "latents in bf16": (ONLY_NFT, cache(row("trajectories", latents_clean=lambda x: x.bfloat16())), "bfloat16"),
    "NaN in embeddings": (BOTH, cache(row("prompts", prompt_embeds=with_nan)), "prompt_embeds of prompt_id"),
    "embeddings of another width": (
        BOTH, cache(row("prompts", prompt_embeds=lambda x: x[:, :8])), "this model reads (tokens, 32)"
    ),
    "embeddings in integers": (BOTH, cache(row("prompts", prompt_embeds=lambda x: x.int())), "torch.int32"),
    "no embeddings": (BOTH, cache(row("prompts", prompt_embeds=lambda x: None, y=lambda x: torch.zeros(1))), "(0,)"),
    "embedding of a prompt missing": (
        BOTH,
        cache(lambda c: rewrite_table(c, "prompts", lambda r: None if r["prompt_id"] == 2 else r)),
        "lacks prompt_id 2",
    ),
    "sample_index as words": (BOTH, cache(row("trajectories", sample_index=str)), "sample_index of integers"),
    "sample_index with a gap": (
        BOTH, cache(row("trajectories", sample_index=lambda i: i + (i > 3))), "must count its 16 rows"
    ),
    "rewards of a missing row": (
        BOTH,
        cache(lambda c: rewrite_table(c, "values", lambda r: None if r["sample_index"] == 3 else r)),
        "must hold each sample_index",
    ),
    "rewards as words": (BOTH, cache(row("values", reward=str)), "reward of sample 0 is"),
    "reward NaN in a cache": (BOTH, cache(row("values", reward=lambda r: float("nan"))), "sample 0 is nan"),
    "reward 1e300 in a cache": (BOTH, cache(row("values", reward=lambda r: 1e300)), "sample 0 is 1e+300"),
    "no rewards": (BOTH, cache(row("values", reward=lambda r: None)), "no values table with columns reward"),
    # Checkpoints.
    "no checkpoint": (BOTH, options(resume_from_checkpoint="latest"), "holds no checkpoint"),
    "checkpoint of another script": (
        BOTH, checkpoint(lambda c: edit_json(c / "state.json", script="train_x.py")), "script train_x.py"
    ),
    "checkpoint of another rank": (BOTH, checkpoint(rank=8), "made with rank 4, this run has 8"),
    "checkpoint without a counter": (
        BOTH, checkpoint(lambda c: edit_json(c / "state.json", global_step=None)), "global_step None"
    ),
    "checkpoint with a broken schedule": (
        BOTH, checkpoint(lambda c: edit_json(c / "state.json", lr_scheduler={"last_epoch": "x"})), "lr_scheduler"
    ),
    "checkpoint without the old policy's state": (
        ONLY_NFT, checkpoint(lambda c: edit_json(c / "state.json", old_is_current=None)), "old_is_current None"
    ),
    "checkpoint whose metrics are gone": (
        BOTH, checkpoint(lambda c: (c.parent.parent / "metrics.jsonl").unlink()), "metrics.jsonl is shorter"
    ),
    "no adapter in a checkpoint": (
        BOTH, checkpoint(lambda c: (c / "adapter_default.safetensors").unlink()), "adapter_default.safetensors is miss"
    ),
    "truncated adapter in a checkpoint": (
        BOTH, checkpoint(lambda c: cut(c / "adapter_default.safetensors")), "no whole safetensors file"
    ),
    "no old adapter in a checkpoint": (
        ONLY_NFT, checkpoint(lambda c: (c / "adapter_old.safetensors").unlink()), "adapter_old.safetensors is missing"
    ),
    "adapter with another shape": (
        BOTH,
        checkpoint(
            lambda c: edit_tensors(
                c / "adapter_default.safetensors", lambda t: t | {f"{FIRST}.lora_A.weight": torch.zeros(2, 64)}
            )
        ),
        f"{FIRST}.lora_A.weight of shape (2, 64)",
    ),
    "optimizer lacks a key": (
        BOTH,
        checkpoint(
            lambda c: edit_tensors(
                c / "optimizer.safetensors",
                lambda t: {n: v for n, v in t.items() if n != f"{FIRST}.lora_A.weight.exp_avg"},
            )
        ),
        f"lacks the tensor {FIRST}.lora_A.weight.exp_avg",
    ),
    "optimizer with a foreign key": (
        BOTH,
        checkpoint(
            lambda c: edit_tensors(c / "optimizer.safetensors", lambda t: t | {"momentum": torch.zeros(1)})
        ),
        "holds the tensor momentum",
    ),
}  # fmt: skip
