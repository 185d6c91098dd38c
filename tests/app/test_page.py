"""What the page says where its network fails."""

from pathlib import Path

import gradio as gr
import pytest
import torch

from pivotpatch.app.batching import Batcher
from pivotpatch.app.page import _tag
from pivotpatch.core.errors import InputError
from pivotpatch.inference.engine import Answer
from pivotpatch.inference.predictor import Predictor


class Broken:
    """An engine whose file has gone."""

    labels = ("cat",)
    thresholds = None
    picture_size = 8
    grid = 0
    overlap = 0.0

    def __call__(self, pictures: torch.Tensor) -> Answer:
        raise InputError("/srv/secret/model.onnx", "has gone", "bring it back")


def test_a_broken_network_is_told_without_the_names_of_its_files(photo: Path) -> None:
    batcher = Batcher(Predictor(Broken()))
    with pytest.raises(gr.Error) as told:
        _tag(batcher, photo.read_bytes(), name="photo.jpg", fitted=True, threshold=0.5)
    batcher.close()
    assert told.value.message == "server: it failed (InputError); its terminal says more"
    assert told.value.print_exception  # on the terminal, with its cause
