"""The shipped demo learns: python -m pytest tests/test_demo.py"""

from functools import partial
from pathlib import Path

import pytest
import torch
from script_runs import reset_accelerate

import evaluation
import qwen_image
import train_flowgrpo
import train_nft
from prompts import load_prompts
from rewards import glyph_accuracy, glyph_match
from scorer import Scorer

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def evaluate(adapter: Path | None) -> torch.Tensor:
    """glyph_match and glyph_accuracy of each of the 256 held-out prompts: (256, 2), ODE, fixed seeds."""
    prompts = load_prompts(str(ASSETS / "demo_eval_prompts.txt"))
    pipeline = qwen_image.load_pipeline(ASSETS / "demo_pipeline", dtype=torch.float32)
    if adapter is not None:
        pipeline.load_lora_weights(adapter)
    texts, size = [row["prompt"] for row in prompts], {"height": 64, "width": 64}
    encode = partial(qwen_image.encode_prompts, device=torch.device("cpu"), max_sequence_length=512)
    predict = partial(
        qwen_image.predict_velocity,
        pipeline.transformer,
        true_cfg_scale=1.0,
        cfg_batched=True,
        dtype=torch.float32,
        **size,
    )
    scores, _ = evaluation.sample_evaluation(
        predict,
        prompts=prompts,
        sizes=[(64, 64)] * len(prompts),
        embeddings=dict(enumerate(encode(pipeline, texts))),
        negative=None,
        vae=pipeline.vae,
        scorer=Scorer({"glyph_match": glyph_match, "glyph_accuracy": glyph_accuracy}),
        rewards=["glyph_match", "glyph_accuracy"],
        sigmas={(64, 64): qwen_image.get_sigmas(pipeline.scheduler, 10, **size)},
        batch_size=32,
        rank=0,
        world_size=1,
        seed=7,
    )
    return scores


@pytest.fixture(scope="module")
def before():
    return evaluate(None)


def test_the_base_model_is_right_about_half_the_time(before):
    assert before[:, 1].mean().item() == pytest.approx(0.53, abs=0.1)


def test_evaluation_prompts_are_not_trained_on():
    training, held_out = (
        {row["prompt"] for row in load_prompts(str(ASSETS / f"{name}.txt"))}
        for name in ("demo_prompts", "demo_eval_prompts")
    )
    assert len(held_out) == 256
    assert training.isdisjoint(held_out)


@pytest.mark.parametrize(("script", "epochs"), [(train_flowgrpo, 8), (train_nft, 5)])
def test_a_short_run_raises_the_reward(tmp_path, before, script, epochs):
    reset_accelerate()
    options = ["--num_train_epochs", str(epochs), "--eval_epochs", "0", "--checkpointing_steps", "0"]
    script.main(script.parse_args([*options, "--enable_timestep_staging", "--output_dir", str(tmp_path / "run")]))
    gain = evaluate(tmp_path / "run") - before  # paired: the same prompts and seeds
    standard_error = gain.std(dim=0) / len(gain) ** 0.5
    assert gain[:, 0].mean() > 4 * standard_error[0]
    assert gain[:, 1].mean() > 2 * standard_error[1]


def test_assets_are_small():
    assert sum(path.stat().st_size for path in (ASSETS / "demo_pipeline").rglob("*") if path.is_file()) < 8e6
