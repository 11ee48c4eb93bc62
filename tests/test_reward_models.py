"""Tests of reward_models.py: OCR on drawn text, CLIP models made here, a scorer over loopback.

python -m pytest tests/test_reward_models.py
"""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from score_on_ranks import NUM_SAMPLES, sample_image, sample_prompt
from tiny_clip import save_tiny_clip
from transformers import CLIPModel, CLIPProcessor

from reward_models import HEAD_FILE, comparable_text, load_http, quoted_text
from rewards import check_reward_prompts, check_rewards, load_reward, score_images

ROOT = Path(__file__).resolve().parent.parent


def as_images(pictures):
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255 for picture in pictures])


def plain(colour, side=32):
    return Image.new("RGB", (side, side), colour)


# ----- OCR ---------------------------------------------------------------------------------------------------------


def draw(text, side=160):
    picture = plain("white", side)
    ImageDraw.Draw(picture).text((side / 2, side / 2), text, "black", ImageFont.load_default(size=34), anchor="mm")
    return picture


@pytest.fixture(scope="module")
def ocr():
    return load_reward("ocr").score


def test_ocr_reads_drawn_text_in_order(ocr):
    images = as_images([draw("OPEN 24"), draw("Qwen"), draw("")])
    right = ocr(images[:2], ['a sign "open 24"', "a sign that says “Qwen”"], [{}] * 2)
    wrong = ocr(images, ['a sign "closed"', 'a sign "OPEN 24"', 'a sign "OPEN 24"'], [{}] * 3)
    assert min(right) > 0.9
    assert max(wrong) < 0.5
    assert wrong[2] == 0  # an empty picture


@pytest.mark.parametrize("prompt", ["no quotes", 'an empty "" one', 'blank "  "', "'single'", 'half "open'])
def test_a_prompt_without_a_text_is_refused_by_number(prompt):
    with pytest.raises(ValueError, match="ocr needs text in double quotes") as error:
        quoted_text(prompt)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="--eval_prompts, prompt 2: ocr needs text"):
        check_reward_prompts(["ocr"], [{"prompt": 'a "b"'}, {"prompt": prompt}], "--eval_prompts")


def test_glyph_prompts_are_checked_too():
    check_reward_prompts(["glyph_match", "jpeg_compressibility"], [{"prompt": 'the text "7K"'}], "--prompts")
    with pytest.raises(ValueError, match="--prompts, prompt 1: glyph_match needs 1 to 3 of 0-9 and A-Z"):
        check_reward_prompts(["glyph_accuracy"], [{"prompt": 'the text "7k"'}], "--prompts")


def test_texts_are_compared_without_case_space_and_width():
    assert comparable_text(" Ａb\n c ") == comparable_text("ABC")
    assert quoted_text('"one" and “two”') == "one two"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rapidfuzz" else "there")
    with pytest.raises(ValueError, match="reward ocr: rapidfuzz not installed: pip install rapidocr onnx"):
        check_rewards(["ocr"])


# ----- CLIP and what is built on it --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A tiny random CLIP with processor and aesthetic head."""
    folder = tmp_path_factory.mktemp("clip")
    save_tiny_clip(folder)
    return folder


COLOURS = ["red", "green", "blue", "white"]
PROMPTS = ["red", "a green one", "b", "a text that is longer than twelve tokens, so cut"]


@pytest.mark.parametrize("name", ["clip", "pickscore", "aesthetic"])
def test_model_rewards_score_each_image_with_its_own_prompt(clip_folder, name):
    assert check_rewards([f"{name}:{clip_folder}"]) == {name: f"{name}:{clip_folder}"}
    reward = load_reward(f"{name}:{clip_folder}")
    images = as_images([plain(colour) for colour in COLOURS])
    together = reward.score(images, PROMPTS, [{}] * 4)
    alone = [reward.score(images[i : i + 1], PROMPTS[i : i + 1], [{}]).item() for i in range(4)]
    assert together.tolist() == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 5) for value in alone}) == 4
    swapped = reward.score(images.flip(0), PROMPTS[::-1], [{}] * 4)
    assert swapped.tolist() == pytest.approx(alone[::-1], abs=1e-5)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())


def test_model_rewards_are_those_of_their_formulas(clip_folder):
    images = as_images([plain(colour) for colour in COLOURS])
    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder)
    pictures = [plain(colour) for colour in COLOURS]
    inputs = processor(
        text=PROMPTS, images=pictures, return_tensors="pt", padding=True, truncation=True, max_length=12
    )
    outputs = model(**inputs)
    scores = {
        n: load_reward(f"{n}:{clip_folder}").score(images, PROMPTS, []) for n in ("clip", "pickscore", "aesthetic")
    }
    cosine = torch.nn.functional.cosine_similarity(outputs.image_embeds, outputs.text_embeds)
    torch.testing.assert_close(scores["clip"], cosine.detach())
    torch.testing.assert_close(scores["pickscore"], outputs.logits_per_image.diagonal().detach())
    head = load_file(clip_folder / HEAD_FILE)
    hidden = outputs.image_embeds @ head["layers.0.weight"].T + head["layers.0.bias"]
    expected = hidden @ head["layers.10.weight"].T + head["layers.10.bias"]
    torch.testing.assert_close(scores["aesthetic"], expected[:, 0].detach())


@pytest.mark.parametrize(
    ("break_it", "name", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "clip", "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text('{"model_type": "bert"}'), "pickscore", "of type bert, not clip"),
        (lambda f: (f / "model.safetensors").unlink(), "clip", "holds no model.safe"),
        (lambda f: (f / "tokenizer.json").unlink(), "clip", "has no CLIP processor .tokenizer.json is"),
        (lambda f: (f / HEAD_FILE).unlink(), "aesthetic", "its head is not there"),
        (lambda f: save_file({"layers.0.weight": torch.ones(1, 9), "layers.0.bias": torch.ones(1)}, f / HEAD_FILE),
         "aesthetic", "takes embeddings of 9 numbers, .* makes 8"),
        (lambda f: None, "clip:/nowhere/clip", "neither a folder nor a model that the hub gives"),
    ],
)  # fmt: skip
def test_a_broken_model_folder_is_refused_before_loading(clip_folder, tmp_path, break_it, name, message):
    folder = tmp_path / "clip"
    folder.mkdir()
    for path in clip_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    break_it(folder)
    with pytest.raises(ValueError, match=message) as error:
        check_rewards([name if ":" in name else f"{name}:{folder}"])
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"reward {name.partition(':')[0]}: ")


def test_missing_weights_are_not_made_up(clip_folder, tmp_path):
    for path in clip_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["text_projection.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks the weights text_projection"):
        load_reward(f"clip:{tmp_path}")


# ----- A scorer behind an address ----------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """Answers with what the test put into `script`, one entry a request; the last one again and again."""

    script: ClassVar[list] = []
    asked: ClassVar[list] = []

    def do_POST(self):
        self.asked.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if status == "sleep":
            time.sleep(body)
            return
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        with suppress(OSError):  # the client may have gone
            for piece in body if isinstance(body, list) else [body]:
                self.wfile.write(piece)
                time.sleep(0.1 if isinstance(body, list) else 0)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """Start a server on a free port; gives its address."""
    servers = []

    def start(server):
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/score"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_example_server_scores_images_in_order(serve):
    spec = importlib.util.spec_from_file_location("reward_server", ROOT / "examples/reward_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = f"http:{serve(module.make_server(0))}"
    assert check_rewards([name]) == {"http": name}
    reds = [(20 * index, 255, 0) for index in range(11)]  # more than one request
    scores = load_reward(name).score(as_images([plain(red) for red in reds]), ["p"] * 11, [{"n": 1}] * 11)
    assert scores == pytest.approx([20 * index / 255 for index in range(11)])


GOOD = (200, b'{"scores": [1, 2]}')


def ask(serve, script, timeout=5.0):
    Answers.script, Answers.asked = list(script), []
    url = serve(ThreadingHTTPServer(("127.0.0.1", 0), Answers))
    reward = load_http(url, timeout=timeout, pause=0.01).score
    return score_images({"http": reward}, torch.zeros(2, 3, 8, 8), ["a", "b"], [{}] * 2, [7, 8])


@pytest.mark.parametrize("script", [[GOOD], [(500, b""), GOOD], [(503, b""), (429, b""), GOOD]])
def test_http_tries_again(serve, script):
    number = len(script)
    assert ask(serve, script) == {"http": [1, 2]}
    assert len(Answers.asked) == number


@pytest.mark.parametrize(
    ("answer", "message", "requests"),
    [
        ((500, b"oh"), "failed 3 times, last with status 500", 3),
        ((404, b"no such thing"), "answered status 404: 'no such thing'", 1),
        ((302, b""), "answered status 302, a redirect, which is not followed", 1),
        ((200, b"<html>"), "answered '<html>', not", 1),
        ((200, b"[1, 2]"), 'not {"scores"', 1),
        ((200, b'{"scores": [1]}'), "answered 1 scores for 2 images", 1),
        ((200, b'{"scores": "12"}'), "answered no list of scores for 2 images", 1),
        ((200, b'{"scores": [1, NaN]}'), "reward http is nan for sample 8", 1),
        ((200, b'{"scores": [1, "2"]}'), "reward http is 2 for sample 8", 1),
        ((200, b" " * (1 << 20) + b'{"scores": [1, 2]}'), "longer than 1048576 bytes", 1),
        (("sleep", 1.0), "failed 3 times, last with TimeoutError", 3),
        ((200, [b" "] * 8), "failed 3 times, last with TimeoutError: no answer within 0.3 s", 3),  # a slow drip
    ],
)
def test_a_failing_scorer_is_one_line_that_names_the_samples(serve, answer, message, requests):
    timeout = 0.3 if answer[0] == "sleep" or isinstance(answer[1], list) else 5.0
    with pytest.raises(ValueError, match=message) as error:
        ask(serve, [answer], timeout)
    assert "\n" not in str(error.value)
    assert "sample" in str(error.value)
    assert Answers.asked == ["/score"] * requests


def test_proxies_of_the_environment_are_not_used(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask(serve, [GOOD]) == {"http": [1, 2]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("http", "write http:http://HOST:PORT/PATH"),
        ("http:localhost:80", "write http:http"),
        ("http:file:///etc/passwd", "write http:http"),
        ("http:http://user:secret@host/", "write http:http"),
        ("http:http://127.0.0.1:99999/", "write http:http"),
        ("http:http://127.0.0.1:9/score", "nobody listens there"),
        ("ocr:model", "ocr takes no option"),
    ],
)
def test_a_wrong_option_is_refused(name, message):
    with pytest.raises(ValueError, match=message) as error:
        check_rewards([name])
    assert "\n" not in str(error.value)


def test_labels_are_short_where_they_are_unique(serve):
    Answers.script = [GOOD]
    names = [f"http:{serve(ThreadingHTTPServer(('127.0.0.1', 0), Answers))}" for _ in range(2)]
    assert list(check_rewards([names[0], "jpeg_compressibility"])) == ["http", "jpeg_compressibility"]
    assert list(check_rewards(names)) == names


def test_labels_of_own_rewards_are_their_functions(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def score(*_):\n    return [1.0]\n\n\ndef red(*_):\n    return [1.0]\n")
    score, other, red = f"{tmp_path}/one.py:score", f"{tmp_path}/two.py:score", f"{tmp_path}/one.py:red"
    assert check_rewards([score, red]) == {"score": score, "red": red}
    assert check_rewards([score, other, red]) == {score: score, other: other, "red": red}


def test_metadata_that_json_does_not_know_is_sent_as_text(serve):
    Answers.script = [GOOD]
    reward = load_http(serve(ThreadingHTTPServer(("127.0.0.1", 0), Answers))).score
    assert reward(torch.zeros(2, 3, 8, 8), ["a", "b"], [{"when": np.datetime64("2026-01-01")}, {}]) == [1, 2]


# ----- Ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # half a minute: four processes that import torch
def test_two_ranks_gather_every_reward_in_the_order_of_the_samples(clip_folder, serve, tmp_path):
    """Image i is coloured by i and shows the digit i: what two ranks gather is what each image gets by itself."""
    spec = importlib.util.spec_from_file_location("reward_server", ROOT / "examples/reward_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "mine.py").write_text(
        "def red(images, prompts, metadata):\n    return images[:, 0].mean(dim=(1, 2))\n"
    )
    names = [f"{kind}:{clip_folder}" for kind in ("clip", "pickscore", "aesthetic")]
    names += [f"http:{serve(module.make_server(0))}", f"{tmp_path}/mine.py:red", "glyph_match", "jpeg_compressibility"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["tests/score_on_ranks.py", str(tmp_path / "table.pt"), *names]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    table = torch.load(tmp_path / "table.pt")  # (samples, rewards)
    for column, name in enumerate(names):
        reward = load_reward(name).score
        alone = [float(reward(sample_image(i)[None], [sample_prompt(i)], [{}])[0]) for i in range(NUM_SAMPLES)]
        assert table[:, column].tolist() == pytest.approx(alone, abs=1e-4)
        assert name == "glyph_match" or len({round(value, 6) for value in alone}) == NUM_SAMPLES
