"""What the server of a review refuses: strangers, other web sites, names of files, bodies that are too large."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from app_process import Reply, ServerThread
from made_engines import FixedEngine, Means
from PIL import Image

from pivotpatch.app.server import Access
from pivotpatch.errors import InputError
from pivotpatch.review.desk import Desk
from pivotpatch.review.pile import Pile
from pivotpatch.review.server import MAX_BYTES, build_review
from pivotpatch.review.session import Session
from pivotpatch.runtime.predictor import Predictor

WHO = {"tab": "t", "who": "ann"}


class ReviewThread(ServerThread):
    """Serves a desk."""

    def post(self, path: str, said: Any, **headers: str) -> Reply:
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        return self.ask(content, path=f"/api/{path}", headers=headers)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask(b"", path=path, method="GET", headers=headers)


Serve = Callable[..., ReviewThread]


@pytest.fixture
def serve(pile_up: Callable[..., Pile], tmp_path: Path) -> Iterator[Serve]:
    pile = pile_up()
    with Session(tmp_path / "review.csv", pile.doubts.labels) as session, ExitStack() as stack:

        def start(access: Access | None = None, engine: Means | None = None) -> ReviewThread:
            desk = Desk(pile, session, Predictor(engine or Means(grid=2)))
            return stack.enter_context(ReviewThread(build_review(desk, access=access)))

        yield start


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
    labels: tuple[object, ...] = ("elk", ["red"], {})
    for label in labels:
        assert server.post("add", {**WHO, "image": 0, "label": label}).status == 422
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


def test_a_model_that_fails_puts_no_image_off(serve: Serve) -> None:
    engine = FixedEngine(("red", "green", "blue"), None, patched=True)
    server = serve(engine=engine)
    engine.fault = InputError("model", "out of memory", "free some")
    failed = server.post("next", WHO)
    assert (failed.status, json.loads(failed.body)["error"]) == (
        500,
        "model: out of memory; the server's terminal says more",
    )
    engine.fault = None
    assert json.loads(server.post("next", WHO).body)["name"]


def test_labels_of_an_earlier_session_are_decided_on(pile_up: Callable[..., Pile], tmp_path: Path) -> None:
    said = {**WHO, "mode": "image", "states": {"photos/a.png": {"red": 1, "green": 1}}}
    for number, labels in enumerate((("red", "green"), ("red",))):
        with Session(tmp_path / "review.csv", labels) as session:
            desk = Desk(pile_up(labels), session, Predictor(Means(grid=2)))
            with ReviewThread(build_review(desk)) as server:
                assert server.post("decide", {**said, "id": str(number)}).status == 200
                wrong = {**said, "id": "x", "states": {"photos/a.png": {"blue": 1}}}
                assert server.post("decide", wrong).status == 422
