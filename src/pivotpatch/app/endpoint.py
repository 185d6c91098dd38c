"""The HTTP endpoint: `POST /api/predict` answers as `pivotpatch predict --json` does."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pivotpatch import __version__
from pivotpatch.app.batching import MAX_BYTES, Batcher, fail
from pivotpatch.errors import InputError, check_known, quote
from pivotpatch.runtime.prediction import TagRule

MAX_HELD = 8 * MAX_BYTES
"""Bytes of all request bodies together; while one is taken out of its form, it is there twice."""
BODY_SECONDS = 120.0
"""Until the whole body of a request has arrived."""
_PARAMETERS = {"threshold": float, "top_k": int}
_DISCARDED = MAX_BYTES  # of a body that is too large: a client that is cut off while it sends may miss the answer
_NAME = 255  # characters of a file name
STATUS: dict[type[Exception], int] = {InputError: 422, ClientDisconnect: 400}
"""Of the answer to each kind of exception; 500 to all others but HTTPException, which has its own."""
_CLOSE = {"Connection": "close"}  # whatever else the client sends is not read


class Bodies:
    """Reads the bodies of requests: none of them, nor all together, may be too large or take too long.

    Attributes:
        held: bytes of the bodies that are being read or answered now, `most` at most.
        seconds: until a body must have arrived.
    """

    def __init__(self, *, seconds: float = BODY_SECONDS, most: int = MAX_HELD) -> None:
        self.held = 0
        self.seconds = seconds
        self.most = most

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[tuple[bytes, str | None]]:
        """The image of a request and its name; its body counts as held until the caller is done."""
        held = 0

        async def take() -> AsyncGenerator[bytes, None]:
            nonlocal held
            async for chunk in read_limited(request):
                held += len(chunk)
                self.held += len(chunk)
                if self.held > self.most:
                    raise HTTPException(503, "server: too many images are on their way; try again", _CLOSE)
                yield chunk

        try:
            try:
                async with asyncio.timeout(self.seconds):
                    upload = await _find_image(request, take())
            except TimeoutError:
                wrong = f"request: its body did not arrive within {self.seconds:g} s; send a smaller file"
                raise HTTPException(408, wrong, _CLOSE) from None
            yield upload
        finally:
            self.held -= held


async def read_limited(request: Request, most: int = MAX_BYTES) -> AsyncIterator[bytes]:
    """The chunks of a body of so many bytes at most; one that says that it is far larger is not begun."""
    wrong = f"request: its body is larger than {most / 1e6:.0f} MB; send a smaller file"
    stated, size = request.headers.get("content-length", ""), 0
    if stated.isdecimal() and int(stated[:20]) > most + _DISCARDED:
        raise HTTPException(413, wrong, _CLOSE)
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            yield chunk
        elif size > most + _DISCARDED:
            break
    if size > most:
        raise HTTPException(413, wrong, _CLOSE)


class _FormInMemory(MultiPartParser):
    """Starlette's reader of forms, which by itself writes large files to the disk."""

    spool_max_size = MAX_BYTES + 1


async def _find_image(request: Request, body: AsyncGenerator[bytes, None]) -> tuple[bytes, str | None]:
    """The image of a request and its name: the body, or a file of a form. One copy of it outlives the reading."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return b"".join([chunk async for chunk in body]), None
    try:
        form = await _FormInMemory(request.headers, body, max_files=8, max_fields=8).parse()
    # FormParserError comes from older versions of Starlette, UnicodeError from a strange charset.
    except (MultiPartException, FormParserError, UnicodeError) as error:
        reason = "Unknown charset" if isinstance(error, UnicodeError) else "Invalid multipart data"
        reason = getattr(error, "message", reason).rstrip(".")
        raise HTTPException(400, f"request: its form cannot be read ({reason}); send one image", _CLOSE) from None
    try:
        images = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if len(images) != 1:
            raise InputError("request", f"its form has {len(images)} whole files", "send one image")
        return await images[0].read(), (images[0].filename or "")[:_NAME] or None
    finally:
        await form.close()


def make_routes(batcher: Batcher, *, name: str, bodies: Bodies) -> list[BaseRoute]:
    """The addresses of the endpoint of a model called `name`; `batcher` answers what `bodies` reads."""
    engine = batcher.engine
    description = json.loads(files("pivotpatch.app").joinpath("openapi.json").read_text("utf-8"))
    description["info"]["version"] = __version__
    model = {"name": name, "labels": engine.labels, "grid": engine.grid, "tuned": engine.thresholds is not None}
    told: dict[str, dict[str, Any]] = {
        "/api/model": model,
        "/health": {"status": "ok"},
        "/openapi.json": description,
    }

    async def predict(request: Request) -> Response:
        rule = _read_rule(request.query_params)
        async with bodies.read(request) as (content, picture):
            prediction = await batcher.ask(content, name=picture or "image")
        tags = [tag.to_dict() for tag in rule.choose(prediction)]
        return answer_json({"picture": picture, "size": list(prediction.size), "tags": tags})

    async def tell(request: Request) -> Response:
        return answer_json(told[request.url.path])

    return [Route("/api/predict", predict, methods=["POST"]), *(Route(path, tell) for path in told)]


def _read_rule(query: Mapping[str, str]) -> TagRule:
    """Which labels a request asks for."""
    values: dict[str, Any] = {}
    for name, text in query.items():
        check_known(name, _PARAMETERS, where="request", what="parameter")
        try:
            values[name] = _PARAMETERS[name](text)
        except ValueError:
            raise InputError(name, f"{quote(text)} is no number", "give one") from None
    return TagRule(**values)


def answer_json(content: dict[str, Any], status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """One line of JSON, written as the command line writes it."""
    return Response(json.dumps(content) + "\n", status, headers, "application/json")


async def answer_error(request: Request, error: Exception) -> Response:
    """An exception as one line of JSON, with the status of its kind."""
    if type(error) in STATUS:
        return answer_json({"error": str(error)}, STATUS[type(error)])
    error = error if isinstance(error, HTTPException) else fail(error)
    wrong = {
        404: "request: nothing is at this address; send images to /api/predict, see /openapi.json",
        405: f"request: {request.method[:20]} cannot be used here; use {(error.headers or {}).get('Allow')}",
    }.get(error.status_code, error.detail)
    return answer_json({"error": wrong}, error.status_code, headers=error.headers)
