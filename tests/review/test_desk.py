"""The pile and the desk: what the model said is kept, and no two people look at the same image."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_engines import Means
from PIL import Image

from pivotpatch.errors import InputError
from pivotpatch.review.desk import LEASE_SECONDS, Desk
from pivotpatch.review.pile import Pile, Source, find_worst_pairs, make_pile
from pivotpatch.review.session import Entry, Session
from pivotpatch.runtime.engine import Answer, Array, Pixels
from pivotpatch.runtime.predictor import Predictor


class Counting(Means):
    """Counts the images that it was asked about."""

    asked = 0

    def ask(self, images: Pixels) -> Answer[Array]:
        self.asked += len(images)
        return super().ask(images)


def test_a_restart_asks_about_new_and_changed_images_alone(photos: Path) -> None:
    engine, told = Counting(grid=2), list[str]()
    out = photos.parent / "review.csv"

    def look() -> tuple[Pile, int]:
        engine.asked = 0
        source = Source("photos", sorted(photos.iterdir()))
        return make_pile(source, Predictor(engine), engine.labels, out=out, tell=told.append), engine.asked

    first, asked = look()
    assert asked == 4
    cache = out.with_name("review.csv.looks.jsonl")
    cache.write_bytes(cache.read_bytes()[:-5])  # as a kill may leave it
    again, asked = look()
    assert asked == 1
    assert np.array_equal(first.doubts.probs, again.doubts.probs)
    Image.new("RGB", (40, 30), (0, 0, 99)).save(photos / "a.png")
    Image.new("RGB", (40, 30), (0, 99, 0)).save(photos / "e.png")
    (photos / "f.png").write_text("no image")
    third, asked = look()
    assert asked == 2
    assert third.names == tuple(f"photos/{name}.png" for name in "abcde")
    assert np.abs(third.doubts.probs[[0, 4], [2, 1]] - 99 / 255).max() < 1e-3
    assert len(told) == 1
    assert "f.png: is in none of the known formats" in told[0]
    engine.digest = lambda: "another"  # type: ignore[method-assign]
    assert look()[1] == 5


def test_two_people_get_different_images_until_one_goes_away(pile_up: Callable[..., Pile], tmp_path: Path) -> None:
    pile, at = pile_up(), [0.0]
    with Session(tmp_path / "review.csv", pile.doubts.labels) as session:
        desk = Desk(pile, session, Predictor(Means(grid=2)), clock=lambda: at[0])
        open_ = {tab: desk.next(tab)[0] for tab in "abcd"}
        assert sorted(open_.values()) == [0, 1, 2, 3]
        assert desk.next("e") == []
        assert desk.next("a")[0] == open_["a"]  # a page that is loaded again
        at[0] = LEASE_SECONDS - 1
        desk.tell("b", "bob")  # still open
        at[0] = LEASE_SECONDS + 1
        assert desk.next("e")[0] == open_["a"]
        assert open_["b"] not in [desk.next(tab)[0] for tab in "f"]
        with pytest.raises(InputError, match="review: True is no state; give 1, 0 or -1"):
            desk.decide("b", Entry("0", "bob", "", {pile.names[0]: {"red": True}}))
        decided = Entry("1", "bob", "", {pile.names[open_["b"]]: {"red": 1}})
        desk.decide("b", decided)
        assert open_["b"] not in {desk.next(tab)[0] for tab in "bb" if desk.next(tab)}
        told = desk.tell("b", "bob")
        assert (told["all"], told["done"], told["people"], told["undo"]) == (4, 1, 1, True)
        told = desk.tell("a", "ann")
        assert (told["done"], told["people"], told["undo"]) == (1, 2, False)  # progress is common, undo is one's own
        assert desk.undo("bob", "b") == {"image": open_["b"], "states": {"red": 1}}
        assert desk.tell("b", "bob")["done"] == 0


def test_a_grid_is_shared_out_by_label_and_comes_back_as_it_was(pile_up: Callable[..., Pile], tmp_path: Path) -> None:
    pile = pile_up()
    with Session(tmp_path / "review.csv", pile.doubts.labels) as session:
        desk = Desk(pile, session, Predictor(Means(grid=2)))
        cells, left = desk.grid("one", "red", claimed=True)
        assert [cell["name"] for cell in cells] == ["photos/a.png", "photos/b.png", "photos/d.png"]
        assert left == 3
        assert desk.grid("two", "red", claimed=True) == ([], 0)
        assert len(desk.grid("two", "green", claimed=True)[0]) == 1  # d alone: b has 126 / 255
        states = {"photos/a.png": {"red": 0}, "photos/b.png": {"red": 1}}
        desk.decide("one", Entry("1", "ann", "", states, "grid"))
        assert [cell["name"] for cell in desk.grid("one", "red", claimed=True)[0]] == ["photos/d.png"]
        undone = desk.undo("ann", "one")
        assert undone is not None
        assert undone["label"] == "red"
        assert [(cell["name"], cell["state"]) for cell in undone["cells"]] == [("photos/a.png", 0), ("photos/b.png", 1)]
        assert not session.is_done("photos/a.png")  # one label was


def test_tags_alone_start_at_once_and_the_rest_is_learned_when_an_image_is_opened(photos: Path, tmp_path: Path) -> None:
    engine, told = Counting(thresholds=(0.5, 0.5, 0.5), grid=2), list[str]()
    tags = [{"red": 0.51}, {"red": 0.98}, {"blue": 0.98}, {"red": 0.98, "green": 0.98}]
    source = Source("tags.csv", sorted(photos.iterdir()), tags=tags)
    pile = make_pile(source, Predictor(engine), engine.labels, out=tmp_path / "review.csv", tell=told.append)
    assert engine.asked == 0
    assert "predict --all-probs" in told[0]
    with Session(tmp_path / "review.csv", engine.labels) as session:
        desk = Desk(pile, session, Predictor(engine))
        assert desk.next("one")[0] == 0  # 0.51
        assert desk.show(1, "one")["reason"] == "green: 0.49, near its threshold 0.50"
        assert engine.asked == 1


def test_the_worst_pairs_are_those_that_the_audit_ranks_first() -> None:
    """Cups are claimed wherever there is a fork, and nowhere else wrongly."""
    generator = np.random.default_rng(0)
    fork = generator.random(400) < 0.4
    cup = fork & (generator.random(400) < 0.5)
    given = np.stack([cup, fork, generator.random(400) < 0.3], axis=1).astype(np.float32)
    probs = np.where(given == 1, 0.9, 0.1).astype(np.float32)
    probs[fork, 0] = generator.uniform(0.6, 0.9, fork.sum())
    pairs = find_worst_pairs(probs, given, ("cup", "fork", "dog"))
    assert pairs[0][:2] == (0, 1)
    assert find_worst_pairs(np.full_like(probs, np.nan), given, ("cup", "fork", "dog")) == []
