import json
import re
import socket
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
import torch
from app_process import AppProcess
from PIL import Image
from starlette.testclient import TestClient

from pivotpatch.app.batching import MAX_BYTES, Batcher
from pivotpatch.app.endpoint import build_endpoint
from pivotpatch.cli.main import main
from pivotpatch.core.errors import InputError
from pivotpatch.inference.engine import Answer
from pivotpatch.inference.predictor import Predictor


def write_form(*files: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    lines = b""
    for name, content in files:
        head = f'--cut\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        lines += head.encode() + content + b"\r\n"
    return lines + b"--cut--\r\n", {"Content-Type": "multipart/form-data; boundary=cut"}


@pytest.mark.parametrize("options", [[], ["--threshold", "0.05"], ["--top-k", "2"], ["--threshold", "0.99"]])
def test_the_answer_is_that_of_predict_json(
    options: list[str], app: AppProcess, model: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(photo), "--model", str(model), "--json", *options]) == 0
    expected = json.loads(capsys.readouterr().out)
    query = "?" + "=".join(options)[2:].replace("-", "_") if options else ""
    body, headers = write_form((str(photo), photo.read_bytes()))
    status, sent = app.ask(body, query=query, headers=headers)
    raw = json.loads(app.ask(photo.read_bytes(), query=query).body)
    assert status == 200
    assert raw == {**json.loads(sent), "picture": None}
    assert_close(json.loads(sent), expected)


def assert_close(found: object, expected: object) -> None:
    """Equal but for the last digits of probabilities: a batch is summed in another order."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5)
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == expected


def write_huge_png() -> bytes:
    """A picture of 20,000 x 20,000 pixels, as its header says; there is no need to draw them."""
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)),
        (b"IDAT", b""),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content


BAD = {
    "text": (b"hello, I am no picture", 422, "picture: is in none of the known formats; give one of JPEG"),
    "empty": (b"", 422, "picture: is empty"),
    "huge": (write_huge_png(), 422, "400000000 pixels are more than the limit of 89478485; shrink the picture$"),
    "heavy": (bytes(50_000_000), 413, r"request: its body is larger than 32 MB; send a smaller file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_pictures_get_one_line_and_the_server_goes_on(kind: str, app: AppProcess, photo: Path) -> None:
    content, status, message = BAD[kind]
    reply = app.ask(content)
    assert reply.status == status
    assert re.search(message, json.loads(reply.body)["error"])
    assert reply.body.count(b"\n") == 1
    assert app.ask(photo.read_bytes()).status == 200


def test_a_cut_jpeg_is_named_in_its_message(app: AppProcess, photo: Path) -> None:
    body, headers = write_form(("holiday.jpg", photo.read_bytes()[:2000]))
    reply = app.ask(body, headers=headers)
    assert reply.status == 422
    assert json.loads(reply.body)["error"].startswith("holiday.jpg: cannot be decoded (")


def test_requests_that_make_no_sense(app: AppProcess, photo: Path) -> None:
    content = photo.read_bytes()
    two, form = write_form(("a.jpg", content), ("b.jpg", content))
    cases = [
        (app.ask(content, query="?treshold=0.5"), 422, "unknown parameter 'treshold'; did you mean 'threshold'?"),
        (app.ask(content, query="?threshold=much"), 422, "threshold: 'much' is no number"),
        (app.ask(content, query="?threshold=nan"), 422, "threshold: nan is no probability"),
        (app.ask(content, query="?top_k=0"), 422, "top_k: it is 0; give 1 or more"),
        (app.ask(b"", method="GET"), 405, "use POST"),
        (app.ask(b"", method="OPTIONS"), 405, "request: a picture is sent; use POST"),
        (app.ask(content, query="/"), 404, "request: nothing is at this address; use /api/predict"),
        (app.ask(b"", path="/api/tags", method="GET"), 404, "use /api/predict"),
        (app.ask(b"", path="/api/", method="GET"), 404, "use /api/predict"),
        (app.ask(two, headers=form), 422, "request: its form has 2 files; send one picture"),
        (app.ask(content, headers={"Content-Type": "multipart/form-data"}), 400, "boundary"),
        (app.ask(b"nothing", headers=form), 400, ""),
    ]
    for reply, status, message in cases:
        assert reply.status == status, reply
        assert message in json.loads(reply.body)["error"]


def test_a_picture_of_one_pixel_is_tagged(app: AppProcess) -> None:
    written = BytesIO()
    Image.new("RGB", (1, 1)).save(written, "PNG")
    status, body = app.ask(written.getvalue(), query="?top_k=2")
    assert status == 200
    assert json.loads(body)["size"] == [1, 1]
    assert [tag["box"] for tag in json.loads(body)["tags"]] == [[0, 0, 1, 1]] * 2


def test_someone_who_hangs_up_does_no_harm(app: AppProcess, photo: Path) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", app.port)) as caller:
            caller.sendall(b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\nabc")
    assert app.ask(photo.read_bytes()).status == 200


def test_two_hundred_at_once_all_get_their_own_answer(app: AppProcess) -> None:
    sizes = [(40 + place, 300 - place) for place in range(200)]
    start = threading.Barrier(200)

    def ask(size: tuple[int, int]) -> tuple[int, list[int]]:
        written = BytesIO()
        Image.new("RGB", size, (size[0], size[1] % 256, 0)).save(written, "PNG")
        start.wait()
        status, body = app.ask(written.getvalue())
        return status, json.loads(body)["size"]

    with ThreadPoolExecutor(200) as askers:
        replies = list(askers.map(ask, sizes))
    assert replies == [(200, [height, width]) for width, height in sizes]


def test_a_body_may_be_just_as_large_as_the_limit(app: AppProcess) -> None:
    assert app.ask(bytes(MAX_BYTES)).status == 422
    assert app.ask(bytes(MAX_BYTES + 1)).status == 413


class Gated:
    """An engine that waits until it may answer, then fails where it is told to."""

    labels = ("only \ud800",)  # a label that UTF-8 cannot write
    thresholds = (0.1,)
    picture_size = 8
    grid = 0
    overlap = 0.0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.fault: Exception | None = None

    def __call__(self, pictures: torch.Tensor) -> Answer:
        self.gate.wait(30)
        if self.fault:
            raise self.fault
        probs = torch.ones(len(pictures), 1)
        return Answer(probs, probs)


def test_a_full_server_says_so_and_a_broken_network_too(photo: Path) -> None:
    engine, content = Gated(), photo.read_bytes()
    batcher = Batcher(Predictor(engine), capacity=1)
    with TestClient(build_endpoint(batcher), raise_server_exceptions=False) as client, ThreadPoolExecutor(1) as other:
        first = other.submit(client.post, "/api/predict", content=content)
        while batcher._room._value:  # until the first has the only place
            threading.Event().wait(0.01)
        refused = client.post("/api/predict", content=content)
        engine.gate.set()
        answered = first.result(30)
        engine.fault = InputError("/srv/secret/model.onnx", "has gone", "bring it back")
        broken = client.post("/api/predict", content=content)
    batcher.close()
    assert (refused.status_code, refused.json()) == (
        503,
        {"error": "too many pictures wait for an answer; try again in a moment"},
    )
    assert answered.json()["tags"][0]["label"] == "only \ud800"
    assert (broken.status_code, broken.json()) == (
        500,
        {"error": "server: it failed (InputError); its terminal says more"},
    )
