"""Imports point one way, from cli down to errors; LAYERS says in which order."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import pivotpatch

PACKAGE = Path(__file__).parents[1] / "src" / "pivotpatch"
LAYERS = [
    {"errors"},
    {"faces", "process", "writing"},
    {"runtime"},
    {"core"},
    {"accel"},
    {"data", "models"},
    {"peers"},
    {"inference"},
    {"tuning"},
    {"training", "audit"},
    {"report", "export", "app", "cluster"},
    {"review"},
    {"cli"},
]
# What a layer may import beside Python's own modules.
OUTSIDE = {"core": {"torch"}, "runtime": {"numpy", "PIL"}, "cluster": {"numpy", "PIL"}}
# Named in a string and imported when it is asked for: what `Predictor.load` opens with torch, heads of other systems.
DOORS = {("runtime", "pivotpatch.inference.engine"), ("models", "pivotpatch.peers")}
ALLOWED = {("prediction", "drawing")}  # what `Prediction.plot` draws knows a prediction
MODULE = re.compile(r"(pivotpatch(?:\.\w+)+)(?::\w+|\.)?")  # with a last dot: an f-string adds the name of a module
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imported_modules(source: str, *, strings: bool = True) -> set[str]:
    """Every module a source imports, wherever the import stands and however it is written."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif strings and isinstance(node, ast.Constant) and (named := MODULE.fullmatch(str(node.value))):
            found.add(named[1])  # given to import_module
    return found


def home(module: str) -> str | None:
    """The layer a module of this package belongs to; None for one of another package."""
    top, *rest = module.split(".")
    if top != "pivotpatch":
        return None
    if rest and rest[0] in pivotpatch.__all__:  # a public name, found in its layer when first used
        return str(getattr(pivotpatch, rest[0]).__module__).split(".")[1]
    return rest[0] if rest else "pivotpatch"


def wrong_imports(layer: str, source: str) -> list[str]:
    """What a module of `layer` may not import: a layer to its left, or a neighbour in its own rank."""
    wrong, plain = [], imported_modules(source, strings=False)
    for module in sorted(imported_modules(source)):
        other = home(module)
        if other is None:
            if layer in OUTSIDE and module.partition(".")[0] not in sys.stdlib_module_names | OUTSIDE[layer]:
                wrong.append(module)
        elif module not in plain and {(layer, module), (layer, module.rpartition(".")[0])} & DOORS:
            continue
        elif other not in (layer, "__version__") and RANK.get(other, len(LAYERS)) >= RANK[layer]:
            wrong.append(module)
    return wrong


def modules() -> list[tuple[str, Path]]:
    paths = sorted([*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("[!_]*/**/*.py")])
    return [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in paths]


@pytest.mark.parametrize(("layer", "path"), modules(), ids=lambda item: getattr(item, "stem", item))
def test_imports_point_one_way(layer: str, path: Path) -> None:
    assert wrong_imports(layer, path.read_text("utf-8")) == []


def test_a_wrong_import_would_be_found() -> None:
    for layer, source in (
        ("core", "import numpy"),
        ("runtime", "def f():\n    import torch"),
        ("runtime", "import_module('pivotpatch.inference.scoring')"),
        ("core", "from pivotpatch.models.heads import Head"),
        ("data", "import_module('pivotpatch.peers.csra')"),
        ("data", "import_module(f'pivotpatch.peers.{name}')"),
        ("data", "def f():\n    from pivotpatch import inference"),
        ("models", "import pivotpatch"),
    ):
        assert wrong_imports(layer, source) != [], source
    with pytest.raises(AssertionError, match="relative imports"):
        wrong_imports("core", "from ..models import heads")


def test_public_names_are_few_and_all_there() -> None:
    assert len(pivotpatch.__all__) <= 18
    assert pivotpatch.__all__ == sorted(pivotpatch.__all__)
    for name in pivotpatch.__all__:
        assert getattr(pivotpatch, name).__doc__, name
    assert set(pivotpatch.__all__) <= set(dir(pivotpatch))
    with pytest.raises(AttributeError, match="no attribute 'PatchInferense'"):
        _ = pivotpatch.PatchInferense


@pytest.mark.parametrize("name", sorted({layer for layer, _ in modules()}))
def test_no_module_of_a_package_imports_itself_by_way_of_others(name: str) -> None:
    """Imports inside functions count: they only hide a circle. Readers that an address names by a string do not."""
    sources = {path.stem: path.read_text("utf-8") for path in (PACKAGE / name).glob("*.py") if path.stem != "__init__"}
    package: dict[str, set[str]] = {}
    for stem, source in sources.items():
        inside = [module.split(".") for module in imported_modules(source, strings=False)]
        found = {parts[2] for parts in inside if parts[:2] == ["pivotpatch", name] and len(parts) > 2}
        package[stem] = {other for other in found if other in sources and (stem, other) not in ALLOWED}
    TopologicalSorter(package).prepare()  # raises where there is a circle


@pytest.mark.parametrize("package", ["accel", "cluster", "data", "inference", "models", "runtime", "training"])
def test_a_face_shows_what_type_checkers_see(package: str) -> None:
    source = (PACKAGE / package / "__init__.py").read_text("utf-8")
    typed = {name: home for home, name in re.findall(rf"from pivotpatch\.{package}\.(\w+) import (\w+) as \2", source)}
    shown = {
        name: home for home, names in re.findall(r'^ {8}"(\w+)": "([\w ]+)",$', source, re.M) for name in names.split()
    }
    assert typed == shown != {}
    face = import_module(f"pivotpatch.{package}")
    for name, home in shown.items():
        assert getattr(face, name) is getattr(import_module(f"pivotpatch.{package}.{home}"), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = face.nothing
