import json
import re
from pathlib import Path

import pytest
from app_process import AppProcess

from pivotpatch.app.server import is_loopback, open_socket
from pivotpatch.core.errors import InputError


def test_another_name_than_the_own_is_refused(app: AppProcess, photo: Path) -> None:
    for host in ("example.org", "localhost.example.org", "[::1", ""):
        reply = app.ask(photo.read_bytes(), headers={"Host": host})
        wrong = f"request: {host!r} is no name of this server's; use 127.0.0.1 or localhost"
        assert (reply.status, json.loads(reply.body)) == (400, {"error": wrong})
    for host in (f"localhost:{app.port}", f"[::1]:{app.port}", "127.0.0.1"):
        assert app.ask(photo.read_bytes(), headers={"Host": host}).status == 200


def test_a_taken_port_and_an_unknown_host_are_told() -> None:
    with open_socket(port=0) as taken:
        port = taken.getsockname()[1]
        assert is_loopback(taken)
        with pytest.raises(
            InputError, match=f"127.0.0.1:{port}: cannot be listened at .*; choose another host or port"
        ):
            open_socket(port=port)
    with pytest.raises(InputError, match="no.such.host.invalid:0: cannot be listened at"):
        open_socket("no.such.host.invalid", 0)
    with pytest.raises(InputError, match="port: 70000 is none; give 0 to 65535"):
        open_socket(port=70_000)
    with open_socket("0.0.0.0", 0) as everywhere:
        assert not is_loopback(everywhere)


def test_it_asks_nobody_warns_of_others_and_ends_by_an_interrupt(model: Path, tmp_path: Path, photo: Path) -> None:
    app = AppProcess(model, tmp_path / "asked.txt", "--host", "0.0.0.0")
    reply = app.ask(photo.read_bytes(), headers={"Host": "example.org"})
    status, said = app.stop()
    assert (reply.status, status) == (200, 0)
    assert said.strip() == (
        "warning: 0.0.0.0 is not loopback: whoever can reach this machine can use the page; there is no password"
    )
    assert re.fullmatch(r"http://0\.0\.0\.0:\d+ \(Ctrl-C ends it\)\n", app.told)
    asked = [line for line in app.log.read_text().splitlines() if "0.0.0.0" not in line and "127.0.0.1" not in line]
    assert asked == []


CALLS = [
    {"data": [], "fn_index": 0},
    {"data": [True, 0.5], "fn_index": 0, "event_data": None},
    {"data": [True, 0.5], "fn_index": 0, "event_data": {"name": "a", "size": 1, "content": 5}},
    {"data": [True, "much"], "fn_index": 0, "event_data": {"name": "a", "size": 1, "content": ""}},
    {"data": [True, 0.5], "fn_index": 1, "event_data": {"place": "99"}},
]


def test_calls_that_the_page_would_not_make_leave_no_trace(
    model: Path, tmp_path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "left"))
    app = AppProcess(model, tmp_path / "asked.txt")
    form = b'--cut\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nbytes\r\n--cut--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=cut"}
    for path in ("/gradio_api/upload", "/gradio_api/%75pload", "/openapi.json", "/gradio_api/openapi.json"):
        method = "GET" if path.endswith("json") else "POST"
        assert app.ask(form, path=path, method=method, headers=headers).status == 404, path
    assert list(tmp_path.glob("left/**/a.txt")) == []
    join, headers = "/gradio_api/queue/join", {"Content-Type": "application/json"}
    for call in CALLS:
        assert app.ask(json.dumps({**call, "session_hash": "x"}).encode(), path=join, headers=headers).status == 200
    unknown = json.dumps({"data": [], "fn_index": 99, "session_hash": "x"}).encode()
    assert app.ask(unknown, path=join, headers=headers).status == 400
    said = app.ask(b"", method="GET", path="/gradio_api/queue/data?session_hash=x").body
    assert said.count(b'"error":"request: the page would not send this; use') == len(CALLS), said
    assert app.ask(photo.read_bytes()).status == 200
    assert app.stop() == (0, "\n")
