"""What the server of a review refuses: strangers, other web sites, names of files, bodies that are too large."""

import json
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from app_process import Asked, Reply
from made_engines import Means
from PIL import Image

from pivotpatch.app.server import Access, make_server, open_socket
from pivotpatch.review.desk import Desk
from pivotpatch.review.pile import Pile
from pivotpatch.review.server import MAX_BYTES, build_review
from pivotpatch.review.session import Session
from pivotpatch.runtime.predictor import Predictor

WHO = {"tab": "t", "who": "ann"}


class ReviewThread(Asked):
    """Serves a desk from a thread of this process, on a real socket."""

    def __init__(self, desk: Desk, access: Access | None) -> None:
        listening = open_socket(port=0)
        self.port = listening.getsockname()[1]
        self.server = make_server(build_review(desk, access=access))
        self.thread = threading.Thread(target=self.server.run, args=([listening],))

    def post(self, path: str, said: Any, **headers: str) -> Reply:
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        return self.ask(content, path=f"/api/{path}", headers=headers)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask(b"", path=path, method="GET", headers=headers)


Serve = Callable[..., ReviewThread]


@pytest.fixture
def serve(pile_up: Callable[..., Pile], tmp_path: Path) -> Iterator[Serve]:
    pile, opened = pile_up(), list[ReviewThread]()
    with Session(tmp_path / "review.csv", pile.doubts.labels) as session:

        def start(access: Access | None = None) -> ReviewThread:
            opened.append(ReviewThread(Desk(pile, session, Predictor(Means(grid=2))), access))
            opened[-1].thread.start()
            return opened[-1]

        yield start
        for each in opened:
            each.server.should_exit = True
            each.thread.join()


def test_images_go_by_their_place_and_no_request_names_a_file(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    (tmp_path / "secret").write_text("secret")
    whole, small = server.get("/api/image/1"), server.get("/api/image/1?small=1")
    assert [Image.open(BytesIO(reply.body)).size for reply in (whole, small)] == [(40, 30), (40, 30)]
    for path in ("4", "-1", "1e0", "../secret", "..%2f..%2fsecret", "%2fetc%2fpasswd", "9" * 400):
        assert server.get(f"/api/image/{path}").status in (404, 422), path
    for said in ({"image": "../secret"}, {"image": -1}, {"image": [1]}, {"put_off": "x"}):
        assert server.post("next", {**WHO, **said}).status == 422


def test_strangers_and_other_web_sites_are_refused(serve: Serve) -> None:
    server = serve(Access(token="open-sesame"))
    assert server.get("/api/review").status == 401
    assert server.get("/api/image/0").status == 401
    assert server.post("next", WHO).status == 401
    good = {"Authorization": "Bearer open-sesame"}
    assert server.post("next", WHO, **good).status == 200
    assert server.post("next", WHO, Origin="http://evil.example", **good).status == 403
    assert server.get("/", Host="evil.example").status == 400


def test_what_is_no_decision_leaves_the_journal_alone(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    sound = {**WHO, "id": "1", "mode": "image", "states": {"photos/a.png": {"red": 1}}}
    for status, said in (
        (400, b"{"),
        (400, b"[]"),
        (400, b"[" * 100_000),
        (413, b"0" * (MAX_BYTES + 1)),
        (422, {**sound, "who": " "}),
        (422, {**sound, "mode": "all"}),
        (422, {**sound, "states": {}}),
        (422, {**sound, "states": {"photos/a.png": {}}}),
        (422, {**sound, "states": [1]}),
        (422, {**sound, "states": {"secret": {"red": 1}}}),
        (422, {**sound, "states": {"photos/a.png": {"red": "1"}}}),
        (422, {**sound, "states": {"photos/a.png": {"red": [1]}}}),
    ):
        assert server.post("decide", said).status == status, said[:50] if isinstance(said, bytes) else said
    journal = tmp_path / "review.csv.journal.jsonl"
    assert journal.read_bytes() == b""
    assert server.post("decide", sound).status == 200
    assert server.post("decide", sound).status == 200
    assert len(journal.read_bytes().splitlines()) == 1


def test_a_file_that_has_gone_is_passed_over(serve: Serve, photos: Path) -> None:
    server = serve()
    first = json.loads(server.post("next", WHO).body)["name"]
    (photos.parent / first).unlink()
    other = {"tab": "u", "who": "bob"}
    again = serve()  # another server, which has not seen it
    assert json.loads(again.post("next", other).body)["name"] != first
