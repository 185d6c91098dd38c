"""Imports point one way: cli -> report, export, app -> training, inference, audit -> data, models -> core -> torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "pivotpatch"
LAYERS = [
    {"core"},
    {"data", "models"},
    {"training", "inference", "audit"},
    {"report", "export", "app"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imported_modules(source: str) -> set[str]:
    """Every module a source imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def wrong_imports(layer: str, source: str) -> list[str]:
    """What a module of `layer` may not import: a layer to its left, or a neighbour in its own rank."""
    wrong = []
    for module in sorted(imported_modules(source)):
        top, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if top == "pivotpatch" and other in RANK and other != layer and RANK[other] >= RANK[layer]:
            wrong.append(module)
        if layer == "core" and top not in sys.stdlib_module_names | {"torch", "pivotpatch"}:
            wrong.append(module)
    return wrong


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(PACKAGE).parts[0], path) for path in sorted(PACKAGE.glob("*/**/*.py"))]


def test_every_folder_is_a_known_layer() -> None:
    assert {layer for layer, _ in modules()} <= set(RANK)


@pytest.mark.parametrize(("layer", "path"), modules(), ids=lambda item: getattr(item, "stem", item))
def test_imports_point_one_way(layer: str, path: Path) -> None:
    assert wrong_imports(layer, path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "import numpy"),
        ("core", "from pivotpatch.models.heads import Head"),
        ("models", "import pivotpatch.data.records"),
        ("data", "def f():\n    from pivotpatch import inference"),
        ("inference", "from pivotpatch.report import plots"),
    ],
)
def test_a_wrong_import_would_be_found(layer: str, source: str) -> None:
    assert wrong_imports(layer, source) != []


def test_core_runs_with_torch_alone() -> None:
    """Importing all of core loads none of the heavier libraries, not even through torch's back door."""
    names = [f"pivotpatch.core.{path.stem}" for path in (PACKAGE / "core").glob("[!_]*.py")]
    code = f"import sys, {', '.join(names)}; print([m for m in ('timm', 'torchvision', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_few_and_all_there() -> None:
    import pivotpatch

    assert len(pivotpatch.__all__) <= 16
    assert pivotpatch.__all__ == sorted(pivotpatch.__all__)
    for name in pivotpatch.__all__:
        assert getattr(pivotpatch, name).__doc__, name
    assert set(pivotpatch.__all__) <= set(dir(pivotpatch))
    with pytest.raises(AttributeError, match="no attribute 'PatchInferense'"):
        _ = pivotpatch.PatchInferense


def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import pivotpatch, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
