"""The page of a review and what it asks: the next image, a grid of one label, decisions, undo, progress."""

import json
import os
import socket
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from typing import Any

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from pivotpatch.app.endpoint import answer_json, read_limited
from pivotpatch.app.server import Access, guard, make_page_route, make_server
from pivotpatch.errors import InputError, cut
from pivotpatch.review.desk import Desk
from pivotpatch.review.session import Entry
from pivotpatch.runtime.decoding import decode_image, decode_with_size
from pivotpatch.runtime.predictor import ModelError

MAX_BYTES = 1_000_000
"""Of what a page may send."""
SIDES = (256, 1280)
"""Pixels of the longer side of an image that is sent: in a grid, and alone."""
Said = dict[str, Any]
"""A JSON object, from a page or to it."""
_NAME = 80  # characters of who somebody is
_LARGEST_GRID = 1000  # images in one decision


def serve_review(desk: Desk, listening: socket.socket, *, access: Access | None = None) -> None:
    """Serve a review at a socket until the process is told to end."""
    make_server(build_review(desk, access=access)).run([listening])


def build_review(desk: Desk, *, access: Access | None = None) -> ASGIApp:
    """The page and what it asks as an ASGI application; see `app.server.build_app`."""
    pages = [make_page_route("pivotpatch.review", name) for name in ("index.html", "review.css", "review.js")]
    return guard([*pages, make_page_route("pivotpatch.app", "icon.svg"), *make_routes(desk)], access or Access())


def make_routes(desk: Desk) -> list[BaseRoute]:
    """The addresses that the page asks. No request names a file: images go by their place in the pile."""
    pile, session = desk.pile, desk.session

    @lru_cache(256)
    def draw(image: int, side: int) -> bytes:
        rows, columns = decode_with_size(pile.paths[image], size=(8, 8)).size  # quick for a large JPEG
        scale = min(1.0, side / max(rows, columns))
        size = max(round(rows * scale), 1), max(round(columns * scale), 1)
        written = BytesIO()
        Image.fromarray(decode_image(pile.paths[image], size=size)).save(written, "JPEG", quality=88)
        return written.getvalue()

    async def describe(_request: Request) -> Response:
        told = {"source": pile.source, "out": session.out.name, "model": desk.predictor.engine.name}
        # A page that outlives the server must not send its decisions to another review.
        id_ = sha256(os.fsencode(session.out.resolve())).hexdigest()[:16]
        return answer_json({**told, "labels": session.labels, "id": id_})

    async def send_image(request: Request) -> Response:
        image, side = _find_image(request.path_params["image"]), SIDES[request.query_params.get("small") is None]
        return Response(await run_in_threadpool(draw, image, side), media_type="image/jpeg")

    async def find_next(said: Said) -> Said:
        tab = _word(said, "tab")
        if "put_off" in said:
            desk.put_off(tab, _find_image(said["put_off"]))
        if said.get("image") is not None:
            return await run_in_threadpool(desk.show, _find_image(said["image"]), tab)
        while found := desk.next(tab):
            try:
                shown = await run_in_threadpool(desk.show, found[0], tab)
                return {**shown, "ahead": found[1] if len(found) > 1 else None}
            except ModelError:
                raise  # no other image would mend it
            except InputError:  # a file that was moved or cut since
                desk.put_off("", found[0])
        return {"image": None}

    async def look_ahead(said: Said) -> Said:
        await run_in_threadpool(desk.look, _find_image(said.get("image")))
        return {}

    async def add(said: Said) -> Said:
        label = said.get("label")
        if not isinstance(label, str) or label not in session.known:
            raise InputError("review", f"{cut(str(label))!r} is none of its labels", "start it with --labels to add it")
        return await run_in_threadpool(desk.describe, _find_image(said.get("image")), label)

    async def find_grid(said: Said) -> Said:
        label, claimed = str(said.get("label")), bool(said.get("claimed", True))
        cells, left = desk.grid(_word(said, "tab"), label, claimed=claimed)
        return {"label": label, "claimed": claimed, "cells": cells, "left": left}

    async def decide(said: Said) -> Said:
        states = said.get("states")
        if (
            not isinstance(states, dict)
            or not all(isinstance(each, dict) and each for each in states.values())
            or not 0 < len(states) <= _LARGEST_GRID
            or said.get("mode") not in ("image", "grid")
        ):
            raise InputError("review", "a decision has no states of images", "load the page again")
        entry = Entry(_word(said, "id"), _word(said, "who"), "", states, said["mode"])
        try:
            await run_in_threadpool(desk.decide, _word(said, "tab"), entry)
        except InputError as error:
            if isinstance(error.__cause__, OSError):  # the disk, not the page: it asks again
                raise HTTPException(503, str(error)) from None
            raise
        return {}

    async def undo(said: Said) -> Said:
        return {"undone": await run_in_threadpool(desk.undo, _word(said, "who"), _word(said, "tab"))}

    async def tell(said: Said) -> Said:
        return desk.tell(_word(said, "tab"), _word(said, "who"))

    def _find_image(text: Any) -> int:
        if not str(text).isdecimal() or len(str(text)) > 18 or int(text) >= len(pile.names):
            raise InputError("review", f"{cut(str(text))!r} is none of its images", "load the page again")
        return int(text)

    asked = {"next": find_next, "ahead": look_ahead, "add": add, "grid": find_grid, "decide": decide, "undo": undo}
    asked["progress"] = tell

    async def answer(request: Request) -> Response:
        return answer_json(await asked[request.url.path.rpartition("/")[2]](await _read(request)))

    posts = [Route(f"/api/{name}", answer, methods=["POST"]) for name in asked]
    return [Route("/api/review", describe), Route("/api/image/{image}", send_image), *posts]


async def _read(request: Request) -> Said:
    """The JSON object that a page sends, of `MAX_BYTES` at most."""
    content = b"".join([chunk async for chunk in read_limited(request, MAX_BYTES)])
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise HTTPException(400, "request: it is no JSON object; load the page again")
    return said


def _word(said: Said, name: str) -> str:
    """A short text of a request, as one line."""
    value = said.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InputError("request", f"it has no {name!r}", "load the page again")
    return cut(value.strip(), _NAME)
