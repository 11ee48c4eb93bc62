"""Rewards that need a file, a package, a model or a server: module.py:function, ocr, clip, pickscore, aesthetic, http.

What stands after the colon of `--reward_funcs clip:/models/clip http:http://127.0.0.1:8000/score` is the reward's
option: a hub name or folder of a model, or an address. Each reward has a check, which runs before any model is loaded
and says what to install or to mend, and a loader. Nothing is imported that the reward asked for does not need.
"""

import base64
import importlib.util
import io
import json
import re
import socket
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

RewardFunction = Callable[[Tensor, list[str], list[dict[str, Any]]], Sequence[float] | Tensor]


class Reward(NamedTuple):
    """A loaded reward, and its model if it has one, which is on the device only while images are scored."""

    score: RewardFunction
    model: nn.Module | None = None


def to_pil(image: Tensor) -> Image.Image:
    """(3, H, W) in [0, 1] to an 8-bit RGB picture."""
    return Image.fromarray((image * 255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().contiguous().numpy())


# ----- A function in a file of yours -------------------------------------------------------------------------------


@lru_cache
def load_module(path: str) -> ModuleType:
    """Import a file once, whatever number of its functions is asked for."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def load_function(name: str) -> RewardFunction:
    """The function of `path/to/module.py:function`. Raises ValueError."""
    path, _, function_name = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"reward {name!r}: there is no file {path}")
    try:
        module = load_module(str(Path(path).resolve()))
    except (Exception, SystemExit) as error:  # it is the user's file: whatever it raises, say whose it was
        raise ValueError(f"reward {name!r}: importing {path} raised {type(error).__name__}: {error}") from error
    if not callable(vars(module).get(function_name)):
        raise ValueError(f"reward {name!r}: {path} defines no function {function_name}")
    return vars(module)[function_name]


# ----- Text in the picture -----------------------------------------------------------------------------------------


def comparable_text(text: str) -> str:
    """Text as it is compared: without case, white space and the variants that unicode has of one character."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def quoted_text(prompt: str) -> str:
    """What a prompt wants to be read in the picture: all that stands in double quotes. Raises ValueError for none."""
    texts = [straight or curly for straight, curly in re.findall(r'"([^"]*)"|“([^”]*)”', prompt)]
    if not comparable_text("".join(texts)):
        raise ValueError(f"ocr needs text in double quotes, not the prompt {prompt!r}")
    return " ".join(texts)


def check_ocr(option: str) -> None:
    """Raise ValueError where ocr's packages are missing."""
    if option:
        raise ValueError(f"reward ocr:{option}: ocr takes no option, write ocr")
    missing = [
        package for package in ("rapidocr", "onnxruntime", "rapidfuzz") if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ValueError(f"reward ocr: {', '.join(missing)} not installed: pip install rapidocr onnxruntime rapidfuzz")


def load_ocr(option: str) -> Reward:
    """How well the text read in the picture is that in the prompt's quotes: 1 - edit distance / length of the longer.

    The models ship in rapidocr's package. A picture without text gets 0. flow_grpo divides by the wanted length and
    gives 1 as soon as the wanted text is part of what is read; here text that was not asked for costs something.
    """
    from rapidfuzz.distance import Levenshtein
    from rapidocr import RapidOCR

    threads = torch.get_num_threads()  # one in a worker process, which is one of several
    params = {"Global.log_level": "error", "EngineConfig.onnxruntime.intra_op_num_threads": threads}
    engine = RapidOCR(params=params)

    def ocr(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        scores = []
        for image, prompt in zip(images, prompts, strict=True):
            wanted = comparable_text(quoted_text(prompt))
            pixels = (image * 255).round().clamp(0, 255).byte().permute(1, 2, 0).flip(-1)  # RapidOCR takes BGR
            read = comparable_text("".join(engine(pixels.contiguous().numpy()).txts or ()))
            scores.append(Levenshtein.normalized_similarity(read, wanted))
        return scores

    return Reward(ocr)


# ----- CLIP and what is built on it --------------------------------------------------------------------------------

CLIP_FILES = ["*.json", "*.txt", "*.safetensors"]
CLIP, PICKSCORE = "openai/clip-vit-large-patch14", "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # PickScore's own repository is used with this one's
AESTHETIC_HEAD = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"  # LAION's improved aesthetic predictor
HEAD_FILE = "aesthetic_head.safetensors"  # in a folder of one's own, beside the CLIP model


def clip_folder(reward: str, name: str, files: list[str] = CLIP_FILES) -> Path:
    """The folder of a CLIP model by folder or hub name; of a hub model the files are downloaded. Raises ValueError."""
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, allow_patterns=files))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"reward {reward}: {name} is neither a folder nor a model that the hub gives ({type(error).__name__}):"
                f" download it and write {reward}:FOLDER"
            ) from error
    config = folder / "config.json"
    try:
        found = json.loads(config.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"reward {reward}: {config} cannot be read ({error}): name a CLIP model's folder") from error
    if found != "clip":
        raise ValueError(f"reward {reward}: {name} is a model of type {found}, not clip: name a CLIP model")
    if files is CLIP_FILES and not any(folder.glob("model*.safetensors")):
        raise ValueError(f"reward {reward}: {folder} holds no model.safetensors: save the model with save_pretrained")
    return folder


def load_processor(reward: str, folder: Path):
    """A CLIP model's processor of texts and images, a CLIPProcessor; raises ValueError where its files are missing."""
    from transformers import CLIPProcessor

    for names in (("tokenizer.json", "vocab.json"), ("preprocessor_config.json", "processor_config.json")):
        if not any((folder / name).is_file() for name in names):  # the library would make an empty tokenizer
            raise ValueError(
                f"reward {reward}: {folder} has no CLIP processor ({names[0]} is missing): save it there with "
                "CLIPProcessor.save_pretrained"
            )
    return CLIPProcessor.from_pretrained(folder)


def load_clip_model(reward: str, folder: Path) -> nn.Module:
    """A frozen CLIPModel on the CPU. Raises ValueError for weights that lack some: they would be random."""
    from transformers import CLIPModel

    model, info = CLIPModel.from_pretrained(folder, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"reward {reward}: {folder} lacks the weights {sorted(info['missing_keys'])[0]}, ...")
    return model.requires_grad_(False).eval()


def clip_similarity(reward: str, model_folder: Path, processor_folder: Path, *, scaled: bool) -> Reward:
    """Cosine between the embeddings of each image and its own prompt, times the model's temperature if `scaled`."""
    processor, model = load_processor(reward, processor_folder), load_clip_model(reward, model_folder)
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def similarity(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        pictures = [to_pil(image) for image in images]
        text = {"padding": True, "truncation": True, "max_length": length}
        inputs = processor(text=prompts, images=pictures, return_tensors="pt", **text).to(model.device)
        outputs = model(**inputs)  # its embeddings are unit vectors
        cosine = (outputs.image_embeds * outputs.text_embeds).sum(dim=-1)
        return (cosine * model.logit_scale.exp() if scaled else cosine).float().cpu()

    return Reward(similarity, model)


def check_clip(option: str) -> None:
    """Raise ValueError where there is no CLIP model with its processor."""
    load_processor("clip", clip_folder("clip", option or CLIP))


def load_clip(option: str) -> Reward:
    """CLIP score (arXiv 2104.08718): cosine of image and prompt, in [-1, 1]; prompts are cut at 77 tokens."""
    folder = clip_folder("clip", option or CLIP)
    return clip_similarity("clip", folder, folder, scaled=False)


def pickscore_folders(option: str) -> tuple[Path, Path]:
    """Of PickScore's model and processor; a folder of one's own holds both."""
    folder = clip_folder("pickscore", option or PICKSCORE)
    return folder, folder if option else clip_folder("pickscore", PICKSCORE_PROCESSOR, ["*.json", "*.txt"])


def check_pickscore(option: str) -> None:
    """Raise ValueError where PickScore's model or processor is missing."""
    load_processor("pickscore", pickscore_folders(option)[1])


def load_pickscore(option: str) -> Reward:
    """PickScore (arXiv 2305.01569): human preference, the scaled cosine of its CLIP; around 20 (flow_grpo: / 26)."""
    return clip_similarity("pickscore", *pickscore_folders(option), scaled=True)


def aesthetic_head(option: str) -> list[Tensor]:
    """Weights and biases of the predictor's linear layers, in order. Raises ValueError."""
    path = Path(option) / HEAD_FILE if option else None
    try:
        if path is None:
            path = Path(hf_hub_download(*AESTHETIC_HEAD))
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        else:
            tensors = load_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward aesthetic: its head is not there ({type(error).__name__}): download {AESTHETIC_HEAD[1]} of "
            f"{AESTHETIC_HEAD[0]}, save its tensors as {HEAD_FILE} beside a CLIP model, write aesthetic:FOLDER"
        ) from error
    layers = sorted({int(name.split(".")[-2]) for name in tensors})
    prefix = next(iter(tensors)).rpartition(f".{layers[0]}.")[0] or "layers"
    return [tensors[f"{prefix}.{layer}.{kind}"].float() for layer in layers for kind in ("weight", "bias")]


def check_aesthetic(option: str) -> None:
    """Raise ValueError where the CLIP model, its processor or the head is missing or they do not fit."""
    folder = clip_folder("aesthetic", option or CLIP)
    load_processor("aesthetic", folder)
    config, width = json.loads((folder / "config.json").read_text()), aesthetic_head(option)[0].shape[1]
    if config.get("projection_dim", 512) != width:
        raise ValueError(
            f"reward aesthetic: the head takes embeddings of {width} numbers, {folder} makes "
            f"{config.get('projection_dim', 512)}: name the CLIP model that the head was trained on"
        )


def load_aesthetic(option: str) -> Reward:
    """LAION's aesthetic predictor: linear layers on CLIP's unit image embedding; 1 to 10, pictures have around 5."""
    folder = clip_folder("aesthetic", option or CLIP)
    processor, clip = load_processor("aesthetic", folder), load_clip_model("aesthetic", folder)
    layers = []
    parameters = aesthetic_head(option)
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers.append(layer)
    head = nn.Sequential(*layers).requires_grad_(False)  # no activations between them, as in the original

    @torch.no_grad()
    def aesthetic(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        inputs = processor(images=[to_pil(image) for image in images], return_tensors="pt").to(clip.device)
        embeds = clip.visual_projection(clip.vision_model(**inputs).pooler_output)
        return head(embeds / embeds.norm(dim=-1, keepdim=True))[:, 0].float().cpu()

    return Reward(aesthetic, nn.ModuleList([clip, head]))


# ----- A scorer behind an address ----------------------------------------------------------------------------------

HTTP_TIMEOUT = 60.0  # seconds for one request from connecting to the last byte
HTTP_ATTEMPTS = 3
HTTP_IMAGES = 8  # of one request
HTTP_RESPONSE_BYTES = 1 << 20


def split_address(option: str) -> SplitResult:
    """The parts of an address. Raises ValueError for what is not http(s)://host[:port]/path."""
    try:
        parts = urlsplit(option)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise ValueError(f"reward http:{option}: write http:http://HOST:PORT/PATH, the address of the scorer")
    return parts


def check_http(option: str) -> None:
    """Raise ValueError for an address that is none, or where nobody listens."""
    parts = split_address(option)
    try:
        address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, timeout=10).close()
    except OSError as error:
        raise ValueError(f"reward http:{option}: nobody listens there ({error}): start the scorer first") from error


def post_json(url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    """One POST; returns status and body. No proxy, no redirect, at most `timeout` seconds and HTTP_RESPONSE_BYTES.

    Raises TimeoutError, OSError, HTTPException, or ValueError for a longer body.
    """
    parts = split_address(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection, started = kind(parts.hostname, parts.port, timeout=timeout), time.monotonic()
    connection.connect()
    sock = connection.sock
    # The socket's own time-out counts from byte to byte: a slow drip would never end.

    def cut_off() -> None:
        with suppress(OSError):  # the other side was faster
            sock.shutdown(socket.SHUT_RDWR)

    alarm = threading.Timer(max(0.0, timeout - (time.monotonic() - started)), cut_off)
    alarm.daemon = True
    alarm.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read(HTTP_RESPONSE_BYTES + 1)
    except (OSError, HTTPException) as error:
        if time.monotonic() - started >= timeout:
            raise TimeoutError(f"no answer within {timeout:g} s") from error
        raise
    finally:
        alarm.cancel()
        connection.close()
    if time.monotonic() - started >= timeout:  # cut off by the alarm
        raise TimeoutError(f"no answer within {timeout:g} s")
    if len(answer) > HTTP_RESPONSE_BYTES:
        raise ValueError(f"the scorer's answer is longer than {HTTP_RESPONSE_BYTES} bytes")
    return response.status, answer


def ask_scorer(url: str, request: dict[str, Any], timeout: float, pause: float) -> list[float]:
    """The scores of one request. Time-outs, broken connections and 5xx are tried HTTP_ATTEMPTS times; what a further
    try would not mend raises at once. Raises ValueError."""
    body = json.dumps(request, default=str).encode()  # metadata may hold dates and the like
    for attempt in range(HTTP_ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            status, answer = post_json(url, body, timeout)
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if status < 500 and status != 429:
            break
        problem = f"status {status}"
    else:
        raise ValueError(f"{url} failed {HTTP_ATTEMPTS} times, last with {problem}")
    if status != 200:
        redirect = ", a redirect, which is not followed" if 300 <= status < 400 else ""
        raise ValueError(f"{url} answered status {status}{redirect}: {answer[:100].decode(errors='replace')!r}")
    try:
        scores = json.loads(answer)["scores"]
    except (ValueError, KeyError, TypeError) as error:
        shown = answer[:60].decode(errors="replace")
        raise ValueError(f'{url} answered {shown!r}, not {{"scores": [one number an image]}}') from error
    if not isinstance(scores, list) or len(scores) != len(request["images"]):
        count = len(scores) if isinstance(scores, list) else "no list of"
        raise ValueError(f"{url} answered {count} scores for {len(request['images'])} images")
    return scores


def load_http(option: str, *, timeout: float = HTTP_TIMEOUT, pause: float = 1.0) -> Reward:
    """Scores of a server of yours: POST {"images": [base64 PNG], "prompts": [...], "metadata": [...]} gives
    {"scores": [...]}; examples/reward_server.py is one."""

    def http(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        scores = []
        for first in range(0, len(prompts), HTTP_IMAGES):
            part = slice(first, first + HTTP_IMAGES)
            encoded = []
            for image in images[part]:
                buffer = io.BytesIO()
                to_pil(image).save(buffer, format="PNG", compress_level=1)
                encoded.append(base64.b64encode(buffer.getvalue()).decode())
            request = {"images": encoded, "prompts": prompts[part], "metadata": metadata[part]}
            scores += ask_scorer(option, request, timeout, pause)
        return scores

    return Reward(http)


# Name: its check and its loader, both of which take the option, "" for none.
LOADED_REWARDS: dict[str, tuple[Callable[[str], None], Callable[[str], Reward]]] = {
    "ocr": (check_ocr, load_ocr),
    "clip": (check_clip, load_clip),
    "pickscore": (check_pickscore, load_pickscore),
    "aesthetic": (check_aesthetic, load_aesthetic),
    "http": (check_http, load_http),
}
