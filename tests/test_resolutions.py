"""Several resolutions in one run: sizes of prompts, schedules, ratios: python -m pytest tests/test_resolutions.py"""

import json
from functools import partial

import pytest
import torch
from PIL import Image
from script_runs import SMALL, metrics_of, options_of, reset_accelerate, run, values_of

import rollout
import run_folder
import train_flowgrpo
import train_nft
from prompts import parse_size, prompt_sizes, size_name
from qwen_image import get_sigmas, load_pipeline
from trajectory_cache import open_cache, read_tensors, table_writer, write_manifest

SIZES = [(64, 64), (64, 96), (128, 64)]  # 16, 24 and 32 tokens
THREE = {"resolution": ("64", "96x64", "64x128"), "sde_window_range": (0, 3), "clip_range": 1e-3}


@pytest.mark.parametrize(
    ("text", "size"), [("512", (512, 512)), ("768x512", (512, 768)), (96, (96, 96)), (" 64 ", (64, 64))]
)
def test_sizes_are_width_by_height(text, size):
    assert parse_size(text) == size
    assert parse_size(size_name(size)) == size


@pytest.mark.parametrize("text", ["", "big", "64x", "x64", "64 x 64", "-64", "64.0", None, "6400000"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no size: write 512, or WIDTHxHEIGHT"):
        parse_size(text)


def test_prompts_take_turns_that_move_on_each_epoch():
    prompts = [{"prompt": str(number)} for number in range(4)]
    assert prompt_sizes(prompts, SIZES[:2], None) == [SIZES[0], SIZES[1]] * 2
    assert prompt_sizes(prompts, SIZES[:2], None, epoch=1) == [SIZES[1], SIZES[0]] * 2
    assert prompt_sizes(prompts, SIZES[:1], None, epoch=7) == [SIZES[0]] * 4


def test_a_prompts_own_size():
    prompts = [{"prompt": "a", "size": "96x64"}, {"prompt": "b", "size": 64}]
    assert prompt_sizes(prompts, [(512, 512)], "size", epoch=3) == [(64, 96), (64, 64)]
    with pytest.raises(ValueError, match="--resolution_column size: prompt 2 has none of that name"):
        prompt_sizes([prompts[0], {"prompt": "b"}], [], "size")
    with pytest.raises(ValueError, match="--resolution_column size: prompt 1: 'tall' is no size"):
        prompt_sizes([{"prompt": "a", "size": "tall"}], [], "size")


@pytest.fixture(scope="module")
def schedules(tiny_pipeline_folder):
    """Sigmas by number of tokens."""
    scheduler = load_pipeline(tiny_pipeline_folder, dtype=torch.float32).scheduler
    tables = {rollout.num_tokens(size): get_sigmas(scheduler, 4, height=size[0], width=size[1]) for size in SIZES}
    assert len({tuple(table.tolist()) for table in tables.values()}) == 3
    return tables


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, tiny_pipeline_folder):
    """A FlowGRPO run of two epochs over three resolutions."""
    values = {"resolution": ("64", "96x64", "64x128"), "sde_window_range": (0, 3), "clip_range": 1e-3}
    return run(
        train_flowgrpo, tmp_path_factory.mktemp("mixed") / "run", tiny_pipeline_folder, keep_trajectories=2, **values
    )


def test_every_row_has_its_own_schedule_and_the_first_ratio_is_1(mixed, schedules):
    sizes_of_prompt = {}
    for epoch in range(2):
        cache = open_cache(mixed / f"trajectories/epoch-0000{epoch}")
        assert cache.facts["sizes"] == [[64, 64], [64, 96], [128, 64]]
        assert [torch.tensor(s).tolist() for s in cache.facts["sigmas"]] == [t.tolist() for t in schedules.values()]
        for row, prompt_id in enumerate(cache.prompt_ids):
            tensors = read_tensors(cache.trajectories, row)
            tokens = tensors["all_latents"].shape[1]
            height, width = SIZES[(prompt_id + epoch) % 3]
            assert tokens == height * width // 256
            table = schedules[tokens]
            start = (table == tensors["sigmas"][0]).nonzero().item()
            assert torch.equal(tensors["sigmas"], table[start : start + 3])
            assert torch.equal(tensors["all_timesteps"], 1000 * table[start : start + 2])
            assert tensors["sigma_max"] == table[1]
            sizes_of_prompt.setdefault(prompt_id, set()).add(tokens)
    assert all(len(sizes) == 2 for sizes in sizes_of_prompt.values())
    deviations = values_of(mixed, "train/ratio_max_dev")
    assert deviations[0] == deviations[2] == 0  # the first update of each epoch
    assert max(deviations) > 0


def test_the_evaluation_samples_each_prompt_in_its_size(mixed):
    assert len(values_of(mixed, "eval/jpeg_compressibility")) == 2
    with Image.open(mixed / "grids/epoch-00000.png") as grid:
        width, height = grid.size
    assert (width, height) == (2 * (96 + 2), 2 * (128 + 2) + 12)  # tiles as wide and as high as the largest; a title


def test_staging_changes_nothing_with_several_resolutions(mixed, tmp_path, tiny_pipeline_folder):
    values = {
        "resolution": ("64", "96x64", "64x128"),
        "sde_window_range": (0, 3),
        "clip_range": 1e-3,
        "eval_epochs": 0,
    }
    staged = run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, "--enable_timestep_staging", **values)
    for name in ("train/grad_norm", "train/policy_loss", "rollout/reward_mean"):
        assert values_of(staged, name) == values_of(mixed, name)


def shuffle_rows(folder):
    """Rewrite a shard's trajectories so that neighbouring rows are of different batches."""
    cache = open_cache(folder)
    order = sorted(range(len(cache.sample_indices)), key=lambda row: cache.sample_indices[row] % 4)
    rows = [{n: t.clone() for n, t in read_tensors(cache.trajectories, row).items()} for row in order]
    with table_writer(folder / "trajectories-00000.arrow") as write:
        for number, row in zip(order, rows, strict=True):
            write({"sample_index": cache.sample_indices[number], "prompt_id": cache.prompt_ids[number]} | row)
    write_manifest(folder, 0, {k: v for k, v in cache.facts.items() if k not in ("files", "schema_version", "shard")})


def test_a_cache_of_several_resolutions_is_trained_from(tmp_path, tiny_pipeline_folder, capsys):
    rows = [{"prompt": f"number {n}", "size": size} for n, size in enumerate(["64", "96x64", "64", "96x64"])]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("num_inference_steps", "true_cfg_scale", "num_prompts_per_epoch", "num_images_per_prompt",
             "train_batch_size", "reward_funcs")  # fmt: skip
    values = {name: SMALL[name] for name in names} | {"sde_window_range": (0, 3), "output_dir": tmp_path / "cache"}
    values |= {"pretrained_model_name_or_path": tiny_pipeline_folder, "prompts": tmp_path / "prompts.jsonl"}
    reset_accelerate()
    rollout.main(rollout.parse_args([*options_of(values), "--resolution_column", "size"]))
    options = {"trajectory_cache": tmp_path / "cache", "sde_window_range": (0, 3)}
    trained = run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, resolution=("64", "96x64"), **options)
    assert values_of(trained, "train/ratio_max_dev")[0] == 0
    shuffle_rows(tmp_path / "cache")
    shuffled = run(train_flowgrpo, tmp_path / "shuffled", tiny_pipeline_folder, resolution=("64", "96x64"), **options)
    assert metrics_of(shuffled) == metrics_of(trained)
    for number, resolution in enumerate(("64", ("64", "64x128"))):
        train = partial(run, train_flowgrpo, tmp_path / f"no{number}", tiny_pipeline_folder, resolution=resolution)
        assert run_folder.run_script(partial(train, **options)) == 2
        assert "the trajectory cache was made with" in capsys.readouterr().err.strip().splitlines()[-1]


def test_nft_trains_on_the_timesteps_of_each_size(tmp_path, tiny_pipeline_folder, schedules, monkeypatch):
    seen, draw = [], train_nft.draw_train_timesteps
    monkeypatch.setattr(
        train_nft, "draw_train_timesteps", lambda args, sigmas, *rest: seen.append(sigmas) or draw(args, sigmas, *rest)
    )
    values = {"resolution": ("64", "96x64"), "ref_kl_coef": 0, "num_train_epochs": 1, "eval_epochs": 0}
    folder = run(train_nft, tmp_path / "run", tiny_pipeline_folder, **values)
    assert {tuple(sigmas.tolist()) for sigmas in seen} == {tuple(schedules[tokens].tolist()) for tokens in (16, 24)}
    assert all(value > 0 for value in values_of(folder, "train/grad_norm"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resolution": ("64", "70")}, "--resolution 70: not a multiple of 16, the nearest is 64"),
        ({"resolution": ("0",)}, "--resolution 0: not a multiple of 16, the nearest is 16"),
        ({"resolution": ("64x96", "96x64")}, "64x96 and 96x64 have equally many tokens"),
        ({"resolution": ("64", "96"), "train_batch_size": 8}, "--num_images_per_prompt, 4, must be a multiple of it"),
        ({"resolution_column": "size"}, "--resolution_column size: prompt 1 has none of that name"),
    ],
)
def test_refusals_are_one_line(tmp_path, tiny_pipeline_folder, monkeypatch, capsys, values, message):
    monkeypatch.setattr(rollout, "load_models", None)
    values = {"sde_window_range": (0, 3)} | values
    assert run_folder.run_script(lambda: run(train_flowgrpo, tmp_path / "run", tiny_pipeline_folder, **values)) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
