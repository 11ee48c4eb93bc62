"""Tests of prompts.py: prompt files, batch arithmetic, and which rank samples and trains on which batch.

python -m pytest tests/test_prompts.py
"""

import json
from itertools import chain

import datasets
import pytest
from datasets import Dataset, Features, Value
from PIL import Image

from prompts import (
    check_batch_arithmetic,
    epoch_prompt_ids,
    fill_batches,
    load_prompts,
    plan_updates,
    rank_batches,
)
from reward_models import quoted_text

ROWS = [{"prompt": "a red fox, sitting", "n": 1}, {"prompt": "狐 à la crème 🦊", "n": 2}]


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


# ----- Loading -----------------------------------------------------------------------------------------------------


def test_txt_lines_are_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a red fox, sitting\n\n  狐 à la crème 🦊 \n", encoding="utf-8")
    assert load_prompts(str(path)) == [{"prompt": row["prompt"]} for row in ROWS]
    assert load_prompts(str(path), column="caption") == load_prompts(str(path))


@pytest.mark.parametrize("column", ["prompt", "caption"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder"])
def test_tables_keep_metadata_and_unicode(tmp_path, kind, column):
    table = Dataset.from_list(ROWS).rename_columns({} if column == "prompt" else {"prompt": column})
    path = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        table.to_json(path, force_ascii=False)
        path.write_text(path.read_text(encoding="utf-8").replace("\n", "\n\n"), encoding="utf-8")  # and blank lines
    elif kind == "folder":
        table.save_to_disk(path)
    else:
        getattr(table, f"to_{kind}")(path)
    assert load_prompts(str(path), column=column) == ROWS


def test_the_public_ocr_and_geneval_formats(tmp_path):
    (tmp_path / "ocr.txt").write_text('A shop with a sign "OPEN 24"\nA cup that says "Hello"\n')
    assert [quoted_text(row["prompt"]) for row in load_prompts(str(tmp_path / "ocr.txt"))] == ["OPEN 24", "Hello"]
    row = {"tag": "counting", "include": [{"class": "clock", "count": 2}], "exclude": [], "prompt": "two clocks"}
    (tmp_path / "geneval.jsonl").write_text(json.dumps(row) + "\n")
    (loaded,) = load_prompts(str(tmp_path / "geneval.jsonl"))
    assert loaded == row  # what a reward gets as metadata


def test_a_split_is_named_after_a_colon(tmp_path):
    for split in ("train", "test"):
        Dataset.from_list([{"caption": f"a {split} prompt"}]).to_parquet(tmp_path / f"{split}.parquet")
    for name, split in ((str(tmp_path), "train"), (f"{tmp_path}:test", "test"), (f"{tmp_path}:train", "train")):
        assert load_prompts(name, column="caption") == [{"prompt": f"a {split} prompt"}]
    with pytest.raises(ValueError, match=r"--prompts .*, split nope: .*; write NAME:SPLIT"):
        load_prompts(f"{tmp_path}:nope", column="caption")


def test_pictures_of_a_table_are_left_out(tmp_path):
    rows = [{"prompt": "a", "n": 1, "picture": Image.new("RGB", (4, 4))}]
    features = Features({"prompt": Value("string"), "n": Value("int64"), "picture": datasets.Image()})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "pictures.parquet")
    assert load_prompts(str(tmp_path / "pictures.parquet")) == [{"prompt": "a", "n": 1}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt holds no prompt"),
        ("a.txt", b"\n  \n", "a.txt holds no prompt"),
        ("a.txt", b"fine\n\xff\xfe\x00", "a.txt is not utf-8 text .* at byte 5"),
        ("a.jsonl", b"", "a.jsonl holds no prompt"),
        ("a.jsonl", b"\x80\x02", "a.jsonl is not utf-8 text"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"\n', "a.jsonl line 3 is not json"),
        ("a.jsonl", b'["a", "b"]\n', "a.jsonl line 1 is a json list"),
        ("a.jsonl", b'{"prompt": "a"}\n"b"\n', "a.jsonl line 2 is a json str"),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "a.jsonl row 2 has no text in 'prompt'"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": " "}\n', "a.jsonl row 2 has no text in 'prompt'"),
        ("a.jsonl", b'{"prompt": 3}\n', "a.jsonl row 1 has no text in 'prompt'"),
        ("a.csv", b"text,n\na,1\n", "a.csv has no column 'prompt' but text, n"),
        ("a.csv", b'prompt,n\na,1\n"",2\n', "a.csv row 2 has no text in 'prompt'"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "nobody/nothing", "nothing"])
def test_a_missing_file_or_name_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"--prompts {name} is no file and no data set") as error:
        load_prompts(name)
    assert "\n" not in str(error.value)


# ----- Batch arithmetic --------------------------------------------------------------------------------------------


def batches_per_update(num_prompts, images_per_prompt, batch_size, world_size, num_updates):
    return check_batch_arithmetic(
        num_prompts=num_prompts,
        images_per_prompt=images_per_prompt,
        batch_size=batch_size,
        world_size=world_size,
        num_updates=num_updates,
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 16, 4, 1, 2), 64),
        ((32, 16, 4, 8, 2), 64),
        ((8, 8, 16, 1, 2), 2),
        ((8, 8, 16, 2, 2), 2),
        ((3, 5, 5, 3, 1), 3),
    ],
)
def test_an_even_epoch_gives_the_batches_of_an_update(sizes, expected):
    assert batches_per_update(*sizes) == expected


@pytest.mark.parametrize(
    "sizes",
    [(31, 16, 4, 8, 4), (1, 16, 4, 8, 4), (33, 16, 4, 8, 4), (10, 3, 4, 3, 1), (7, 8, 16, 2, 2), (2, 1, 5, 1, 1)],
)
def test_an_uneven_epoch_names_the_nearest_number_of_prompts(sizes):
    def passes(num_prompts):
        _, images_per_prompt, batch_size, world_size, num_updates = sizes
        return num_prompts > 0 and num_prompts * images_per_prompt % (batch_size * world_size * num_updates) == 0

    with pytest.raises(ValueError, match="cannot be dealt to") as error:
        batches_per_update(*sizes)
    nearest = int(str(error.value).rpartition(" ")[2])
    batches_per_update(nearest, *sizes[1:])
    distance = next(d for d in range(1, 10**6) if passes(sizes[0] - d) or passes(sizes[0] + d))
    assert abs(nearest - sizes[0]) == distance


# ----- Batches of ranks --------------------------------------------------------------------------------------------

WORLD_SIZES = [1, 2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_share_out_all_batches_evenly(world_size):
    owned = [rank_batches(3, 8, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(batch for batches in owned for batch in batches) == list(range(24))
    assert [len(batches) for batches in owned] == [24 // world_size] * world_size
    assert all(batches == sorted(batches) for batches in owned)


def plan(inner_epoch, rank, world_size, seed=0):
    return plan_updates(3, 8, rank=rank, world_size=world_size, seed_words=(seed, 3, 0, inner_epoch))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("inner_epoch", [0, 1, 2])
def test_the_number_of_ranks_does_not_change_an_update(inner_epoch, world_size):
    plans = [plan(inner_epoch, rank, world_size) for rank in range(world_size)]
    updates = [sorted(batch for rank_plan in plans for batch in rank_plan[update]) for update in range(3)]
    assert updates == [sorted(batches) for batches in plan(inner_epoch, 0, 1)]
    assert sorted(batch for update in updates for batch in update) == list(range(24))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_rank_trains_on_its_own_batches_only(world_size):
    for rank in range(world_size):
        updates = plan(1, rank, world_size)
        assert [len(update) for update in updates] == [8 // world_size] * 3
        assert sorted(chain(*updates)) == rank_batches(3, 8, rank=rank, world_size=world_size)


def test_updates_are_shuffled_anew():
    assert plan(0, 0, 2) == plan(0, 0, 2)
    contents = [[sorted(update) for update in plan(*which)] for which in [(0, 0, 2), (1, 0, 2), (0, 0, 2, 9)]]
    assert contents[0] != contents[1] != contents[2] != contents[0]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([1, 3, 4, 5], [[3, 1], [5, 4]]),
        ([3], [[3], [5]]),
        ([1, 4, 5], [[0, 1], [5, 4]]),
        ([], [[], []]),
        ([5, 4, 0], [[0, 3], [5, 4]]),
    ],
)
def test_ranks_that_skip_batches_still_run_equally_many(wanted, expected):
    plans, flags = [[0, 3, 1], [5, 2, 4]], [batch in wanted for batch in range(6)]
    got = [fill_batches(plans, flags, rank) for rank in range(2)]
    assert got == expected


# ----- Prompts of an epoch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompts", "per_epoch"), [(7, 3), (4, 4), (6, 2), (3, 7), (1, 5), (5, 12)])
def test_every_prompt_comes_once_in_each_pass_over_the_table(num_prompts, per_epoch):
    epochs = [epoch_prompt_ids(num_prompts, per_epoch, seed=0, epoch=epoch) for epoch in range(num_prompts)]
    assert {len(epoch) for epoch in epochs} == {per_epoch}
    ids = list(chain(*epochs))
    passes = [ids[first : first + num_prompts] for first in range(0, len(ids), num_prompts)]
    assert [sorted(table_pass) for table_pass in passes] == [list(range(num_prompts))] * per_epoch


def test_prompt_order_depends_on_the_seed_and_the_pass_alone():
    first, again, other_seed = (epoch_prompt_ids(20, 20, seed=seed, epoch=0) for seed in (0, 0, 1))
    assert first == again
    assert first != other_seed
    assert first != epoch_prompt_ids(20, 20, seed=0, epoch=1)
    halves = epoch_prompt_ids(20, 10, seed=0, epoch=0) + epoch_prompt_ids(20, 10, seed=0, epoch=1)
    assert halves == first
