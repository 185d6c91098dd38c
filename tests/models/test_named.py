import pytest

from pivotpatch.models.named import correct_scheme, is_named


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hub:me/tags", True), ("timm:folder", True), ("transformers:me/vit@v1", True)]
    + [(name, False) for name in ("hub:", "hub:@v1", "hub", "tagger", "runs/pat", "C:\\runs", "table:photos.csv", "")],
)
def test_names_begin_with_a_scheme(name: str, expected: bool) -> None:
    assert is_named(name) is expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [("HUB:me/tags", "hub:me/tags"), ("Timm:x@v1", "timm:x@v1"), ("transformer:C:\\x", "transformers:C:\\x")],
)
def test_a_mistyped_scheme_is_corrected(name: str, meant: str) -> None:
    assert correct_scheme(name) == f"did you mean '{meant}'? "
    assert is_named(meant)


@pytest.mark.parametrize("name", ["hub:me/tags", "hub:", "HUB:", "hub:@v1", "Timm", "runs/pat", "C:\\runs", "table:x"])
def test_any_other_name_is_left_alone(name: str) -> None:
    assert correct_scheme(name) == ""
