import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from io import BytesIO
from pathlib import Path

import pytest
from app_process import AppProcess, write_form
from PIL import Image

pytestmark = pytest.mark.slow


def test_a_token_is_made_up_and_only_the_page_is_told(model: Path, tmp_path: Path, photo: Path) -> None:
    app = AppProcess(model, tmp_path / "asked.txt", "--host", "0.0.0.0", "--token")
    found = re.fullmatch(r"http://0\.0\.0\.0:\d+/#token=([\w-]{32}) \(Ctrl-C ends it\)\n", app.told)
    assert found
    assert app.ask(photo.read_bytes()).status == 401
    assert app.ask(photo.read_bytes(), headers={"Authorization": f"Bearer {found[1]}"}).status == 200
    ended, said = app.stop()
    assert (ended, said.strip()) == (0, "")  # nor is a warning needed


def test_no_request_gives_out_or_leaves_a_file(app: AppProcess, tmp_path: Path, photo: Path) -> None:
    """By the usual ways out of a folder."""
    secret = tmp_path / "secret.txt"
    secret.write_text("written where nobody asked for it")
    call = json.dumps({"data": [{"path": str(secret)}]}).encode()
    climbing = "".join(("/..",) * 12) + str(secret)
    sent = ["/upload", "/", "/api/predict", f"/api/predict?path={secret}"]
    got = [f"/file={secret}", f"//{secret}", f"/{secret.as_uri()}", "/server.py", "/page/../server.py"]
    got += [climbing, f"/page{climbing}", climbing.replace(".", "%2e").replace("/", "%2f", 3)]
    before = app.read_written()
    for method, path, body in [*(("POST", path, call) for path in sent), *(("GET", path, b"") for path in got)]:
        reply = app.ask(body, method=method, path=path, headers={"Content-Type": "application/json"})
        assert reply.status in (404, 405, 422), (method, path, reply)
        assert secret.read_bytes() not in reply.body
        assert len(reply.body) < 1000
    assert app.read_written() == before
    assert app.ask(photo.read_bytes()).status == 200


def test_no_file_is_written_however_large_the_image_and_a_body_is_held_once(app: AppProcess) -> None:
    body, headers = write_form(("none.jpg", bytes(31_000_000)))  # by default the disk gets forms of more than 1 MB
    written = app.read_written()
    assert app.ask(body, headers=headers).status == 422
    before = app.read_memory("VmHWM")
    with ThreadPoolExecutor(6) as callers:
        replies = list(callers.map(lambda _: app.ask(body, headers=headers), range(6)))
    assert {reply.status for reply in replies} <= {422, 503}
    assert app.read_memory("VmHWM") - before < 2 * 6 * 31_000_000
    assert app.read_written() == written


def test_the_largest_images_are_decoded_one_at_a_time(app: AppProcess) -> None:
    written = BytesIO()
    Image.new("RGBA", (9400, 9400)).save(written, "PNG")  # 353 MB when decoded
    before = app.read_memory("VmHWM")
    with ThreadPoolExecutor(4) as callers:
        replies = list(callers.map(app.ask, [written.getvalue()] * 4))
    assert [reply.status for reply in replies] == [200] * 4
    assert app.read_memory("VmHWM") - before < 600_000_000


def test_an_interrupt_while_many_wait_is_quiet_and_quick(model: Path, tmp_path: Path) -> None:
    app = AppProcess(model, tmp_path / "asked.txt")
    written = BytesIO()
    Image.new("RGBA", (8000, 8000)).save(written, "PNG")

    def ask(_number: int) -> bool:
        with suppress(HTTPException, OSError):
            return app.ask(written.getvalue()).status == 200
        return False

    with ThreadPoolExecutor(20) as callers:
        waiting = [callers.submit(ask, number) for number in range(20)]
        time.sleep(1.5)
        ended, said = app.stop()
        answered = sum(each.result(30) for each in waiting)
    assert (ended, said.strip()) == (0, "")
    assert answered < 20  # it did not wait for those that waited
