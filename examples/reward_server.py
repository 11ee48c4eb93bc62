"""A scorer for `--reward_funcs http:http://127.0.0.1:8000/score`, to copy: put your own model into `score`.

    python examples/reward_server.py --port 8000

It takes POST {"images": [base64 PNG, ...], "prompts": [...], "metadata": [...]} and gives {"scores": [...]}.
"""

import argparse
import base64
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, ImageStat

MAX_REQUEST_BYTES = 1 << 28


def score(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """One number an image, in order: here how red it is, from 0 to 1."""
    return [ImageStat.Stat(image).mean[0] / 255 for image in images]


class Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds a client may take to send

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= MAX_REQUEST_BYTES:
            self.send_error(413)
            return
        request = json.loads(self.rfile.read(length))
        images = [Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB") for png in request["images"]]
        answer = json.dumps({"scores": score(images, request["prompts"], request["metadata"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def make_server(port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    return ThreadingHTTPServer((host, port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines ask, without a password")
    options = parser.parse_args()
    make_server(options.port, options.host).serve_forever()
