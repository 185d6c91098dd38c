import pytest

from pivotpatch.models.named import is_named


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hub:me/tags", True), ("timm:folder", True), ("transformers:me/vit@v1", True)]
    + [(name, False) for name in ("hub:", "hub:@v1", "hub", "tagger", "runs/pat", "C:\\runs", "table:photos.csv", "")],
)
def test_names_begin_with_a_scheme(name: str, expected: bool) -> None:
    assert is_named(name) is expected
