import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from app_process import LABELS, AppThread, write_form
from made_engines import FixedEngine

from pivotpatch import __version__
from pivotpatch.app.batching import MAX_BYTES
from pivotpatch.app.endpoint import Bodies
from pivotpatch.app.server import Access
from pivotpatch.cli.main import main
from pivotpatch.errors import InputError
from pivotpatch.runtime.predictor import Predictor


@pytest.fixture(scope="module")
def app(model: Path) -> Iterator[AppThread]:
    """The same model as that of the process, which starts in a moment."""
    with AppThread(Predictor.load(model, device="cpu").engine, name="model") as served:
        yield served


@pytest.mark.parametrize("options", [[], ["--threshold", "0.05"], ["--top-k", "2"]])
def test_the_answer_is_that_of_predict_json(
    options: list[str], app: AppThread, model: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(photo), "--model", str(model), "--json", *options]) == 0
    expected = json.loads(capsys.readouterr().out)
    query = "?" + "=".join(options)[2:].replace("-", "_") if options else ""
    body, headers = write_form((str(photo), photo.read_bytes()))
    status, sent, _ = app.ask(body, query=query, headers=headers)
    found = json.loads(sent)
    assert status == 200
    assert json.loads(app.ask(photo.read_bytes(), query=query).body) == {**found, "picture": None}
    for tag, known in zip(found.pop("tags"), expected.pop("tags"), strict=True):
        assert list(tag) == list(known)
        for name, value in known.items():  # a batch is summed in another order
            assert tag[name] == (value if name == "label" else pytest.approx(value, abs=1e-5))
    assert found == expected


def test_requests_that_make_no_sense(app: AppThread, photo: Path) -> None:
    content = photo.read_bytes()
    two, form = write_form(("a.jpg", content), ("b.jpg", content))
    cases = [
        (app.ask(b"P5 20000 20000 255\n"), 422, "pixels are more than the limit of 89478485; shrink the image"),
        (app.ask(bytes(MAX_BYTES)), 422, "image: is in none of the known formats"),
        (app.ask(bytes(50_000_000)), 413, "request: its body is larger than 32 MB; send a smaller file"),
        (app.ask(content, query="?treshold=0.5"), 422, "unknown parameter 'treshold'; did you mean 'threshold'?"),
        (app.ask(content, query="?threshold=nan"), 422, "threshold: nan is no probability"),
        (app.ask(content, query="?top_k=0"), 422, "top_k: it is 0; give 1 or more"),
        (app.ask(b"", method="OPTIONS"), 405, "request: OPTIONS cannot be used here; use POST"),
        (app.ask(content, query="/"), 404, "request: nothing is at this address; send images to /api/predict"),
        (app.ask(two, headers=form), 422, "request: its form has 2 whole files; send one image"),
        (app.ask(content, headers={"Content-Type": "multipart/form-data"}), 400, "Missing boundary"),
        (app.ask(b"nothing", headers=form), 400, "request: its form cannot be read (Invalid multipart data)"),
        (app.ask(two, headers={"Content-Type": f"{form['Content-Type']}; charset=undefined"}), 400, "Unknown charset"),
    ]
    for reply, status, message in cases:
        assert reply.status == status, reply
        assert len(reply.body) < 1000
        assert reply.body.count(b"\n") == 1
        assert message in json.loads(reply.body)["error"]
    assert app.ask(content).status == 200


def test_a_full_server_says_so_and_a_broken_model_too(photo: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, content = FixedEngine(("only \ud800",)), photo.read_bytes()  # a label that UTF-8 cannot write
    engine.gate.clear()
    with AppThread(engine, capacity=1) as app, ThreadPoolExecutor(1) as other:
        first = other.submit(app.ask, content)
        assert engine.entered.wait(30)
        refused = app.ask(content)
        engine.gate.set()
        answered = first.result(30)
        engine.fault = InputError("/srv/secret/model.onnx", "has gone", "bring it back")
        broken = app.ask(content)
        engine.fault = RuntimeError("/srv/secret is full")
        failed = app.ask(content)
        engine.fault = None
        assert app.ask(content).status == 200
    assert json.loads(answered.body)["tags"][0]["label"] == "only \ud800"
    assert [(reply.status, json.loads(reply.body)["error"]) for reply in (refused, broken, failed)] == [
        (503, "too many images wait for an answer; try again in a moment"),
        (500, "model: has gone; the server's terminal says more"),
        (500, "server: it failed (RuntimeError); its terminal says more"),
    ]
    assert caplog.messages[0] == "/srv/secret/model.onnx: has gone; bring it back"
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.endswith("RuntimeError: /srv/secret is full\n")


def test_it_tells_its_model_health_and_description(app: AppThread, photo: Path) -> None:
    told = {path: json.loads(app.ask(b"", method="GET", path=path).body) for path in ("/health", "/api/model")}
    model = {"name": "model", "labels": list(LABELS), "grid": 2, "tuned": True}
    assert told == {"/health": {"status": "ok"}, "/api/model": model}
    answers = {**told, "/api/predict": json.loads(app.ask(photo.read_bytes(), query="?top_k=1").body)}
    description = json.loads(app.ask(b"", method="GET", path="/openapi.json").body)
    assert description["info"]["version"] == __version__
    described, schemas = dict(description["paths"]), description["components"]["schemas"]
    del described["/openapi.json"]
    assert set(described) == set(answers)
    for path, operations in described.items():
        for method, operation in operations.items():
            assert method.upper() in app.ask(b"", method="PUT", path=path).headers["allow"].split(", ")
            answer = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
            assert_described(answers[path], schemas[answer.rpartition("/")[2]])
    assert_described(answers["/api/predict"]["tags"][0], schemas["Tag"])
    for parameter in described["/api/predict"]["post"]["parameters"]:
        assert app.ask(photo.read_bytes(), query=f"?{parameter['name']}=1").status == 200


def assert_described(answer: dict[str, object], schema: dict[str, Any]) -> None:
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", type(None): "null"}
    assert set(schema["required"]) == set(answer) == set(schema["properties"])
    for name, value in answer.items():
        stated = schema["properties"][name]
        assert value in stated["enum"] if "enum" in stated else kinds[type(value)] in stated["type"]


def test_a_body_that_is_stated_too_large_is_not_waited_for(app: AppThread) -> None:
    with socket.create_connection(("127.0.0.1", app.port), timeout=30) as caller:
        caller.sendall(b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000000\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", app.port), timeout=30) as caller:
        caller.sendall(b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):  # it may end while we send
            for _ in range(400):
                caller.sendall(b"100000\r\n" + bytes(0x100000) + b"\r\n")
            raise AssertionError("400 MB were taken")


def test_all_bodies_together_are_bounded_and_one_that_does_not_come_is_given_up() -> None:
    head = b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    bodies = Bodies(most=1_500_000, seconds=1)
    with AppThread(FixedEngine(), bodies=bodies) as app:
        with socket.create_connection(("127.0.0.1", app.port), timeout=30) as first:
            first.sendall(head + bytes(900_000))
            wait_for(lambda: bodies.held == 900_000)
            assert app.ask(bytes(1_000_000)).status == 503
            assert app.ask(bytes(500_000)).status == 422  # no image, but there was room
            assert b"408" in first.recv(1000).partition(b"\r\n")[0]
        wait_for(lambda: bodies.held == 0)
        assert app.ask(bytes(1_000_000)).status == 422


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come true")


def test_a_token_is_asked_for_where_one_is_set(photo: Path) -> None:
    with AppThread(FixedEngine(), access=Access(token="open-sesame")) as app:
        for wrong in ({}, {"Authorization": "Bearer open"}, {"Authorization": "Basic open-sesame"}):
            for path, method in (("/api/predict", "POST"), ("/api/model", "GET"), ("/api/none", "GET")):
                reply = app.ask(photo.read_bytes(), path=path, method=method, headers=wrong)
                assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        right = {"Authorization": "Bearer open-sesame"}
        assert app.ask(photo.read_bytes(), headers=right).status == 200
        for path in ("/", "/health", "/openapi.json"):
            assert app.ask(b"", path=path, method="GET").status == 200


def test_another_name_than_the_own_is_refused(app: AppThread, photo: Path) -> None:
    for host in ("example.org", "localhost.example.org", "[::1", "", "evil.org@localhost", "localhost/evil.org"):
        reply = app.ask(photo.read_bytes(), headers={"Host": host})
        wrong = f"request: {host!r} is no name of this server's; use 127.0.0.1 or localhost, or --allow-host"
        assert (reply.status, json.loads(reply.body)) == (400, {"error": wrong})
    for host in (f"localhost:{app.port}", f"[::1]:{app.port}", "127.0.0.1"):
        assert app.ask(photo.read_bytes(), headers={"Host": host}).status == 200


def test_another_site_may_not_send_but_the_page_may(app: AppThread, photo: Path) -> None:
    own = f"127.0.0.1:{app.port}"
    for origin in ("http://127.0.0.1:1", f"http://localhost:{app.port}", "null", f"http://{own}.org"):
        reply = app.ask(photo.read_bytes(), headers={"Origin": origin})
        assert (reply.status, json.loads(reply.body)["error"][:40]) == (403, "request: it comes from another web site;")
    for origin in (f"http://{own}", f"HTTPS://{own}"):
        assert app.ask(photo.read_bytes(), headers={"Origin": origin}).status == 200
    reply = app.ask(b"", method="GET", path="/api/model", headers={"Origin": "http://127.0.0.1:1"})
    assert not [name for name in reply.headers if name.startswith("access-control")]  # browsers keep it from the site


def test_every_answer_tells_browsers_what_the_page_may_do(app: AppThread) -> None:
    for path in ("/", "/page.js", "/coffee.jpg", "/health", "/none", "/api/predict"):
        headers = app.ask(b"", method="GET", path=path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "server" not in headers
