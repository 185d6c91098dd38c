"""The schema, what changes it, and how it is written."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pivotpatch.data.augment import AugmentPolicy
from pivotpatch.errors import InputError
from pivotpatch.models.limits import HEAD_NAMES
from pivotpatch.training.config import LossSection, RunConfig, dump_config, load_config

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, "utf-8")
    return path


def test_every_field_is_described_and_has_a_valid_default() -> None:
    assert set(SECTIONS) == set(RunConfig.model_fields)
    assert load_config(None) == RunConfig()
    assert AugmentPolicy(**RunConfig().augment.model_dump()) == AugmentPolicy()
    for model in SECTIONS.values():
        for key, field in model.model_fields.items():
            assert field.description, key
            model.model_validate({key: field.get_default()})
            if type(None) in get_args(field.annotation):  # TOML has no None: what a dump leaves out must be the default
                assert field.default is None


def test_the_docs_mention_every_head_loss_and_key() -> None:
    root = Path(__file__).parents[2]
    text = "".join(path.read_text("utf-8") for path in (root / "README.md", *(root / "docs").glob("*.md")))
    losses = get_args(LossSection.model_fields["name"].annotation)
    keys = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
    assert len(losses) > 1
    assert [name for name in (*HEAD_NAMES, *losses) if f"`{name}`" not in text] == []
    assert [key for key in keys if not re.search(rf"(?<![\w.]){re.escape(key)}\b", text)] == []


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.train=voc:a=b@2007-test?difficult=unknown", "voc:a=b@2007-test?difficult=unknown"),
        ("data.labels=['cat', 'dog']", ("cat", "dog")),
        ("data.labels=cat", ("cat",)),
        ("data.labels=[0, 7]", ("0", "7")),
        ("model.head_options={width = 512}", {"width": 512}),
        ("precision.compile=true", True),
        ("precision.compile=auto", "auto"),
        ("optimiser.lr=3e-5", 3e-5),
        ("model.weights=", None),
    ],
)
def test_overrides_are_toml_or_text(override: str, value: object, tmp_path: Path) -> None:
    config = load_config(write_recipe(tmp_path, '[model]\nweights = "w.pth"\n'), [override])
    section, _, key = override.partition("=")[0].partition(".")
    assert getattr(getattr(config, section), key) == value


def test_one_option_of_several_is_changed_alone(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "[model]\nhead_options = {heads = 2, lam = 0.5}\n")
    config = load_config(recipe, ["model.head_options.lam=0.1", "model.backbone_options.depth=2"])
    assert config.model.head_options == {"heads": 2, "lam": 0.1}
    assert config.model.backbone_options == {"depth": 2}
    with pytest.raises(InputError, match=r"train\.epochs"):
        load_config(recipe, ["train.epochs.late=3"])


def test_an_override_has_a_section_a_key_and_a_value() -> None:
    for override in ("epochs=3", "train.epochs", ""):
        with pytest.raises(InputError, match="is not like section.key=value"):
            load_config(None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 3", "train is 3; "),
        ("[frozen]\nfolds = 1", "frozen.folds is 1; give 2 or more, or 0 for none"),
        ("[train\n", "is not valid TOML (Expected ']'"),
        ("a = " + "[" * 100_000, "is not valid TOML ("),
        (f"[{'z' * 100_000}]\nx = 1", "unknown key 'zz"),
        ('[data]\ntrain = "\udcff"', "is not valid TOML ('utf-8' codec"),
    ],
)
def test_a_wrong_or_hostile_recipe_is_one_line_that_names_its_file(text: str, message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as caught:
        load_config(recipe, ["train.epochs=3"])
    assert str(caught.value).startswith(f"{recipe}: {message}")
    assert len(str(caught.value)) < 600


texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=50)
@given(
    data=st.fixed_dictionaries({"train": texts, "val_fraction": st.floats(0, 0.99), "labels": st.lists(texts)}),
    options=st.dictionaries(texts, st.booleans() | st.integers() | numbers | texts),
    lr=st.floats(0, exclude_min=True, allow_infinity=False),
)
@example({"train": '\\" \x00\x1f\x7f\x85\u2028\n\r\t\'"""\ufeff\U0001f642 # ='}, {}, 5e-324)
@example({}, {"": 1, "a.b": 1.0, 'x"y': True, "\n": "1"}, 1.0)
def test_what_is_dumped_is_read_back_the_same(data: dict[str, object], options: dict[str, object], lr: float) -> None:
    config = RunConfig.model_validate({"data": data, "model": {"backbone_options": options}, "optimiser": {"lr": lr}})
    for explained in (False, True):
        text = dump_config(config, explained=explained)
        text.encode("utf-8")
        again = RunConfig.model_validate(tomllib.loads(text))
        assert again == config
        assert repr(again) == repr(config)  # 1, 1.0 and true are equal, yet not the same
    assert load_config(None, [f"optimiser.lr={lr!r}"]).optimiser.lr == lr
