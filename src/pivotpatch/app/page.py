"""The page: drop a picture, see its tags and what speaks for each."""

from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any, NamedTuple

import gradio as gr
import torch
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pivotpatch.app.batching import MAX_BYTES, Batcher, BrokenError, BusyError
from pivotpatch.app.endpoint import answer_json
from pivotpatch.app.examples import draw_examples
from pivotpatch.app.rendering import (
    render_drop,
    render_error,
    render_examples,
    render_head,
    render_picture,
    render_summary,
    render_tags,
)
from pivotpatch.core.errors import InputError
from pivotpatch.data.decoding import decode_image
from pivotpatch.inference.prediction import Prediction, fit

_SYSTEM_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_CHOOSE = """element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) trigger("click", { place: button.dataset.place });
});"""
_NO_CALL = "request: the page would not send this; use the page or /api/predict"
_START = "<p class='summary'>No picture yet.</p>"


class Shown(NamedTuple):
    """New values of the page: what the network said, and the three parts that show it."""

    prediction: Prediction | None
    picture: str
    summary: str
    table: str


def mount_page(app: FastAPI, batcher: Batcher, *, name: str = "") -> None:
    """Add the page at `/` to an application, after whatever it answers already.

    Args:
        app: what to add to.
        batcher: answers the pictures.
        name: of the network, to be shown.
    """
    theme = gr.themes.Default(font=_SYSTEM_FONTS, font_mono=("ui-monospace", "monospace"))
    options: dict[str, Any] = {"footer_links": [], "pwa": False, "show_error": False, "ssr_mode": False}
    inner = {"openapi_url": None, "exception_handlers": {KeyError: _refuse_call}}
    page = build_page(batcher, name=name)
    gr.mount_gradio_app(app, page, "/", app_kwargs=inner, theme=theme, css=_read("page.css"), **options)


class _Page(gr.Blocks):
    """Gradio's page, but values that this page would not send are told to the sender only."""

    async def preprocess_data(self, *values: Any, **options: Any) -> list[Any]:
        """Gradio's values of what was sent."""
        with _reading_call():
            return list(await super().preprocess_data(*values, **options))


@contextmanager
def _reading_call() -> Iterator[None]:
    """What the page would never send is no fault of the server's, and no news for its terminal."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError):
        raise gr.Error(_NO_CALL, print_exception=False) from None


def _refuse_call(_request: Request, _error: Exception) -> Response:
    """Answer a call of a function that the page has not."""
    return answer_json({"error": _NO_CALL}, 400)


def build_page(batcher: Batcher, *, name: str = "") -> gr.Blocks:
    """The page, to be mounted."""
    labels, grid = batcher.predictor.labels, batcher.predictor.engine.grid
    pictures = draw_examples(labels)

    def tag_dropped(event: gr.EventData, fitted: bool, threshold: float) -> Shown:
        with _reading_call():
            file, size = str(event.name), int(event.size)
            content = None if event.content is None else b64decode(event.content)
        if content is None:
            return _refuse(file, size)
        return _tag(batcher, content, name=file, fitted=fitted, threshold=threshold)

    def tag_example(event: gr.EventData, fitted: bool, threshold: float) -> Shown:
        with _reading_call():
            example = pictures[int(event.place)]
        return _tag(batcher, example.content, name=example.name, fitted=fitted, threshold=threshold)

    page = _Page(analytics_enabled=False, title="pivotpatch")
    with page:
        told = gr.State(None)
        gr.HTML(render_head(name, len(labels), patched=grid > 0), elem_id="head")
        with gr.Row():
            with gr.Column(scale=2):
                dropped = gr.HTML(render_drop(MAX_BYTES), elem_id="drop", js_on_load=_read("drop.js"))
                picture = gr.HTML("", elem_id="picture")
                examples = gr.HTML(render_examples(pictures), elem_id="examples", js_on_load=_CHOOSE)
            with gr.Column(scale=3):
                summary = gr.HTML(_START, elem_id="summary", js_on_load="element.setAttribute('role', 'status')")
                with gr.Row():
                    fitted = gr.Checkbox(True, label="Fitted threshold of each label", min_width=220)
                    threshold = gr.Slider(0, 1, 0.5, step=0.01, label="One threshold for all", min_width=220)
                table = gr.HTML("", elem_id="tags", js_on_load=_read("tags.js"))
        shown, choice = [told, picture, summary, table], [fitted, threshold]
        _listen(dropped.upload, tag_dropped, choice, shown)
        _listen(examples.click, tag_example, choice, shown)
        _listen(fitted.input, _show_tags, [told, *choice], [summary, table])
        _listen(threshold.input, _override, [told, threshold], [fitted, summary, table])
    return page


def _read(name: str) -> str:
    return files("pivotpatch.app").joinpath(name).read_text("utf-8")


def _listen(event: Callable[..., Any], answer: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> None:
    """Answer an event, of a quick sequence the last for sure; only the page itself may ask."""
    limits: dict[str, Any] = {"trigger_mode": "always_last", "concurrency_limit": 16}
    event(answer, inputs, outputs, api_visibility="private", show_progress="hidden", **limits)


def _refuse(name: str, size: int) -> Shown:
    """Say why the browser did not send a file."""
    wrong = "it cannot be read; drop a file"
    if size > MAX_BYTES:
        wrong = f"{size / 1e6:.0f} MB are more than the limit of {MAX_BYTES / 1e6:.0f} MB; shrink the picture"
    return Shown(None, "", render_error(f"{name}: {wrong}"), "")


def _tag(batcher: Batcher, content: bytes, *, name: str, fitted: bool, threshold: float) -> Shown:
    """What the page shows of a picture."""
    if len(content) > MAX_BYTES:
        return _refuse(name, len(content))
    try:
        prediction = batcher.submit(content, name=name).result()
        seen = replace(prediction, source=decode_image(content, size=fit(prediction.size)))
        return Shown(seen, render_picture(seen, name=name), *_show_tags(seen, fitted, threshold))
    except (InputError, BusyError) as error:
        return Shown(None, "", render_error(str(error)), "")
    except BrokenError as error:
        raise gr.Error(str(error)) from error  # Gradio shows it, and its cause on the terminal


def _show_tags(prediction: Prediction | None, fitted: bool, threshold: float) -> tuple[str, str]:
    """The summary and the table, under the fitted thresholds or one for all labels."""
    if prediction is None:
        return _START, ""
    if not fitted:
        prediction = replace(prediction, thresholds=torch.full_like(prediction.thresholds, threshold))
    return render_summary(prediction), render_tags(prediction)


def _override(prediction: Prediction | None, threshold: float) -> tuple[bool, str, str]:
    """The same under the slider's threshold, which takes the place of the fitted ones."""
    return (False, *_show_tags(prediction, False, threshold))
