from io import BytesIO

import numpy as np
from PIL import Image

from pivotpatch.app.examples import draw_examples
from pivotpatch.data.scenes import SCENE_LABELS


def test_examples_are_the_same_every_time_and_differ_from_each_other() -> None:
    for labels in (("cat", "clock"), SCENE_LABELS.names):
        first = draw_examples(labels)
        assert first == draw_examples(labels)
        assert (
            len({example.name for example in first}) == len({example.content for example in first}) == len(first) >= 3
        )
        for example in first:
            pixels = np.asarray(Image.open(BytesIO(example.content)).convert("RGB"))
            assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100  # a drawing, not a blank


def test_a_network_that_knows_digits_gets_digits() -> None:
    digits = draw_examples(("other", *SCENE_LABELS.names))
    assert digits == draw_examples(SCENE_LABELS.names)
    assert not {example.name for example in digits} & {example.name for example in draw_examples(("cat",))}
