"""What the two training scripts share by copying stays equal: python -m pytest tests/test_scripts_agree.py"""

import argparse
import inspect

import pytest

import evaluation
import rollout
import train_flowgrpo
import train_nft

# Functions of one name that are the algorithm's own, and so differ.
OWN_FUNCTIONS = {
    "parse_args", "check_args", "forward_timesteps", "forward_only", "train_timesteps", "train_batch",
    "update_metrics", "checkpoint_identity", "cache_facts", "planned_bytes", "print_banner",
    "make_policy", "roll_out", "update_policy", "evaluate", "main", "trained_timesteps",
}  # fmt: skip
OWN_DEFAULTS = {"output_dir", "true_cfg_scale", "num_prompts_per_epoch"}  # the published recipes differ
OWN_HELP = {"output_dir", "pretrained_model_name_or_path"}  # rollout.py has no demo, and writes a cache


def functions_of(script) -> dict[str, str]:
    """Source of the functions a script defines."""
    found = inspect.getmembers(script, inspect.isfunction)
    return {name: inspect.getsource(function) for name, function in found if function.__module__ == script.__name__}


def options_of(script, monkeypatch) -> dict[str, argparse.Action]:
    """The options of a script by name."""
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, argv=None: parsers.append(self))
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "parse_known_args",
        lambda self, argv=None: [argparse.Namespace(pretrained_model_name_or_path="x")],
    )
    script.parse_args([])
    return {action.dest: action for action in parsers[0]._actions}


def test_functions_of_one_name_are_the_same():
    first, second = functions_of(train_flowgrpo), functions_of(train_nft)
    shared = (first.keys() & second.keys()) - OWN_FUNCTIONS
    assert "check_run" in shared
    for name in shared:
        assert first[name] == second[name], name
    assert first.keys() & second.keys() >= OWN_FUNCTIONS  # a name that is not in both needs no exception


@pytest.mark.parametrize("script", [train_nft, rollout, evaluation])
def test_options_of_one_name_mean_the_same(script, monkeypatch):
    first, second = options_of(train_flowgrpo, monkeypatch), options_of(script, monkeypatch)
    shared = first.keys() & second.keys()
    assert len(shared) > 15
    for name in shared:
        assert first[name].type == second[name].type, name
        assert first[name].choices == second[name].choices, name
        if name not in OWN_DEFAULTS:
            assert first[name].default == second[name].default, name
        if name not in OWN_HELP:
            assert first[name].help == second[name].help, name


@pytest.mark.parametrize("script", [train_flowgrpo, train_nft, rollout, evaluation])
def test_every_option_has_one_line_of_help(script, monkeypatch):
    for name, action in options_of(script, monkeypatch).items():
        assert action.help, name
        assert "\n" not in action.help
        assert len(action.help) < 100, name


def test_sections_stand_in_the_same_order():
    sections = []
    for script in (train_flowgrpo, train_nft):
        lines = inspect.getsource(script).splitlines()
        sections.append([line.strip(" #-") for line in lines if line.startswith("# -----")])
    assert sections[0] == sections[1]
