"""The endpoint `/api/predict`, which answers as `pivotpatch predict --json` does."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Message

from pivotpatch.app.batching import MAX_BYTES, Batcher, BrokenError, BusyError
from pivotpatch.core.errors import InputError, choose_one_of
from pivotpatch.inference.bulk import TagRule

_STATUS = {InputError: 422, BusyError: 503, ClientDisconnect: 400, HTTPException: 400, Exception: 500}
_PATH = "/api/predict"
_PARAMETERS = {"threshold": float, "top_k": int}
_DRAINED = 8 * MAX_BYTES  # read of a body that is too large: a client that is cut off while it sends hears no answer


class Upload(NamedTuple):
    """The bytes of a picture's file, and its name where the request tells one."""

    content: bytes
    name: str | None


def build_endpoint(batcher: Batcher) -> FastAPI:
    """An application that answers requests to `/api/predict`; errors below `/api/` are one line of JSON."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _tell(status))

    async def predict(request: Request) -> Response:
        if request.scope["path"] != _PATH:
            raise HTTPException(404, f"request: nothing is at this address; use {_PATH}")
        if request.method != "POST":
            raise HTTPException(405, "request: a picture is sent; use POST", {"Allow": "POST"})
        rule = _read_rule(request.query_params)
        upload = await _read_upload(request)
        prediction = await asyncio.wrap_future(batcher.submit(upload.content, name=upload.name or "picture"))
        tags = [tag.to_dict() for tag in rule.choose(prediction)]
        return answer_json({"picture": upload.name, "size": list(prediction.size), "tags": tags})

    app.mount("/api", request_response(predict))  # a route of some methods would leave the others to the page
    return app


def answer_json(content: dict[str, Any], status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """One line of JSON, written as the command line writes it."""
    return Response(json.dumps(content) + "\n", status, headers, "application/json")


def _tell(status: int) -> Callable[[Request, Exception], Response]:
    """What answers an exception with one line of JSON."""

    def answer(_request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return answer_json({"error": error.detail}, error.status_code, headers=error.headers)
        if status == 500 and not isinstance(error, BrokenError):
            error = BrokenError(error)
        return answer_json({"error": str(error)}, status)

    return answer


def _read_rule(query: Mapping[str, str]) -> TagRule:
    """Which labels a request asks for."""
    values: dict[str, Any] = {}
    for name, text in query.items():
        if name not in _PARAMETERS:
            raise InputError("request", f"unknown parameter {name!r}", choose_one_of(name, _PARAMETERS))
        try:
            values[name] = _PARAMETERS[name](text)
        except ValueError:
            raise InputError(name, f"{text!r} is no number", "give one") from None
    return TagRule(**values)


async def _read_upload(request: Request) -> Upload:
    """The one picture of a request: its body, or a file of a form."""
    content, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BYTES:
            content += chunk
        elif size > _DRAINED:
            break
    if size > MAX_BYTES:
        raise HTTPException(413, f"request: its body is larger than {MAX_BYTES / 1e6:.0f} MB; send a smaller file")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return Upload(bytes(content), None)

    async def replay() -> Message:
        return {"type": "http.request", "body": bytes(content)}

    async with Request(request.scope, replay).form() as form:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if len(files) != 1:
            raise InputError("request", f"its form has {len(files)} files", "send one picture")
        return Upload(await files[0].read(), files[0].filename or None)
