"""Which models are accepted: python -m pytest tests/test_pipeline_class.py"""

import json

import diffusers
import pytest

from qwen_image import check_pipeline_class


def test_a_qwen_image_pipeline_is_accepted(tiny_pipeline_folder):
    check_pipeline_class(str(tiny_pipeline_folder))


def test_another_pipeline_class_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImageEditPipeline"}')
    with pytest.raises(ValueError, match=r"is a QwenImageEditPipeline.*choose a Qwen-Image") as error:
        check_pipeline_class(str(tmp_path))
    assert "\n" not in str(error.value)


IMAGE_CONDITIONED = [
    "Edit",
    "EditPlus",
    "EditInpaint",
    "Layered",
    "Img2Img",
    "Inpaint",
    "ControlNet",
    "ControlNetInpaint",
]
REASONS = {f"QwenImage{kind}Pipeline": "needs an image beside the prompt" for kind in IMAGE_CONDITIONED} | {
    "QwenImage21Pipeline": "has another transformer",
    "WanPipeline": "makes videos",
    "HunyuanVideo15Pipeline": "makes videos",
    "LTXPipeline": "makes videos",
    "FluxPipeline": "is another architecture",
}


@pytest.mark.parametrize("class_name", REASONS)
def test_other_pipelines_are_refused_with_the_reason(tmp_path, class_name):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    with pytest.raises(ValueError, match=f"is a {class_name}, which {REASONS[class_name]}"):
        check_pipeline_class(str(tmp_path))


def test_every_relative_in_diffusers_has_a_reason():
    relatives = {name for name in dir(diffusers) if name.startswith("QwenImage") and name.endswith("Pipeline")}
    assert {name for name in relatives if "Modular" not in name} == {"QwenImagePipeline"} | {
        name for name in REASONS if name.startswith("QwenImage")
    }


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no model_index\.json") as error:
        check_pipeline_class(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nobody/nothing", "no/such/folder", "not a name!"])
def test_a_missing_model_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is neither a folder nor a model") as error:
        check_pipeline_class(name)
    assert "\n" not in str(error.value)
