import re
from pathlib import Path

import pytest
from app_process import AppProcess

from pivotpatch.app.server import is_loopback, open_socket
from pivotpatch.core.errors import InputError


def test_another_name_than_the_own_is_refused(app: AppProcess, photo: Path) -> None:
    assert app.ask(photo.read_bytes(), headers={"Host": "example.org"}).status == 400
    assert app.ask(photo.read_bytes(), headers={"Host": f"localhost:{app.port}"}).status == 200


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
