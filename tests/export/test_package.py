import zipfile
from pathlib import Path

import pytest
import torch
from made_networks import LABELS, fit_made_up, make_network, make_pictures

from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError
from pivotpatch.export.package import export_package
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.exported import PackageEngine, open_exported

pytestmark = pytest.mark.slow


def compiler_is_there() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except RuntimeError:
        return False


@pytest.mark.skipif(not compiler_is_there(), reason="needs a C++ compiler")
def test_a_package_says_what_torch_says(tmp_path: Path) -> None:
    model = make_network(source_size=50, overlap=0.1)
    fit_made_up(model)
    path = tmp_path / "network.pt2"
    path.write_text("the old one")
    agreement = export_package(model, path)
    assert agreement.difference < 1e-5
    assert list(tmp_path.iterdir()) == [path]
    assert agreement.size == path.stat().st_size
    assert zipfile.ZipFile(path).testzip() is None
    written, engine = open_exported(path), TorchEngine(model)
    assert isinstance(written, PackageEngine)
    for name in ("labels", "thresholds", "grid", "overlap", "picture_size"):
        assert getattr(written, name) == getattr(engine, name)
    assert written.labels == LABELS
    for count, height, width in ((1, 50, 50), (5, 50, 50), (2, 31, 77)):
        pictures = make_pictures(count, height, width)
        expected = engine(resize_images(pictures, (50, 50)))
        torch.testing.assert_close(written(pictures), expected, rtol=0, atol=1e-5)
    assert (expected.probs[0] - expected.probs[1]).abs().max() > 1e-2


def test_without_a_compiler_nothing_is_begun(tmp_path: Path) -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(InputError, match="^package: there is no C\\+\\+ compiler; install g\\+\\+, or name a compiler"),
    ):
        export_package(make_network(), tmp_path / "network.pt2")
    assert list(tmp_path.iterdir()) == []
