"""Shared by all tests, which run on a CPU and without a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of a hub library, which reads it once

import pytest
import torch

from qwen_image import load_pipeline, tiny_pipeline

torch.set_num_threads(1)  # tensors are tiny here: on a busy machine a second thread makes the tests 20 times slower


@pytest.fixture(scope="session")
def tiny_pipeline_folder(tmp_path_factory):
    """A saved QwenImagePipeline with random weights, made once; tests must not write into it."""
    folder = tmp_path_factory.mktemp("tiny_pipeline")
    tiny_pipeline(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pipeline(tiny_pipeline_folder):
    """The same, loaded in fp32; tests must not change its weights."""
    pipeline = load_pipeline(tiny_pipeline_folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
