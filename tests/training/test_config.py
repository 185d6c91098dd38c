import tomllib
from pathlib import Path
from typing import get_args, get_origin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from pivotpatch.data.augment import AugmentPolicy
from pivotpatch.errors import InputError
from pivotpatch.training.config import RunConfig, TaskSection, dump_config, load_config

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
FIELDS = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, "utf-8")
    return path


def test_every_part_is_a_section_with_a_default() -> None:
    assert set(SECTIONS) == set(RunConfig.model_fields)
    assert load_config(None) == RunConfig()


@pytest.mark.parametrize(("section", "key"), FIELDS)
def test_every_field_is_described_and_its_default_is_valid(section: str, key: str) -> None:
    field = SECTIONS[section].model_fields[key]
    assert field.description
    assert not field.is_required()
    SECTIONS[section].model_validate({key: field.get_default()})


@pytest.mark.parametrize(("section", "key"), FIELDS)
def test_what_may_be_none_is_none_by_default(section: str, key: str) -> None:
    """TOML has no None: a dump that leaves one out is read back as the same only if it is the default."""
    field = SECTIONS[section].model_fields[key]
    if type(None) in get_args(field.annotation):
        assert field.default is None


def test_defaults_are_the_published_settings() -> None:
    config = RunConfig()
    assert (config.optimiser.lr, config.optimiser.weight_decay) == (1e-4, 1e-4)
    assert config.schedule.warmup == 0.2
    assert config.ema.decay == 0.9997
    assert (config.train.epochs, config.train.batch_size, config.train.seed) == (80, 128, 1)
    assert config.loss.name == "asymmetric"
    assert (config.loss.gamma_neg, config.loss.gamma_pos, config.loss.clip) == (4, 0, 0.05)
    assert (config.task.kind, config.task.grid, config.task.lam, config.task.temperature) == ("patch", 2, 1, 1)


def test_augmentation_is_described_as_the_data_layer_has_it() -> None:
    augment = RunConfig().augment.model_dump()
    assert AugmentPolicy(**augment) == AugmentPolicy()


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().train.epochs = 3  # type: ignore[misc]


def test_a_recipe_changes_the_defaults_and_overrides_change_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, '[train]\nepochs = 5\nseed = 7\n[model]\nbackbone = "resnet18"\n')
    config = load_config(recipe, ["train.epochs=3", "model.head=ml_decoder", "train.epochs=4"])
    assert (config.train.epochs, config.train.seed, config.train.batch_size) == (4, 7, 128)
    assert (config.model.backbone, config.model.head) == ("resnet18", "ml_decoder")
    assert config.loss == RunConfig().loss


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.train=coco:data/coco@train2014", "coco:data/coco@train2014"),
        ("data.train=voc:a=b@2007-test?difficult=unknown", "voc:a=b@2007-test?difficult=unknown"),
        ('data.train="quoted"', "quoted"),
        ("data.labels=['cat', 'dog']", ("cat", "dog")),
        ("data.labels=cat", ("cat",)),
        ("data.test=scenes:@test-same", ("scenes:@test-same",)),
        ("data.test=[]", ()),
        ("model.head_options={width = 512}", {"width": 512}),
        ("model.pretrained=false", False),
        ("optimiser.lr=3e-5", 3e-5),
        ("optimiser.clip_norm=1", 1.0),
    ],
)
def test_overrides_are_toml_or_text(override: str, value: object) -> None:
    config = load_config(None, [override])
    section, _, key = override.partition("=")[0].partition(".")
    assert getattr(getattr(config, section), key) == value


def test_an_override_of_nothing_takes_an_optional_value_back(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, '[model]\nweights = "w.pth"\n')
    assert load_config(recipe, ["model.weights="]).model.weights is None
    with pytest.raises(InputError, match=r"^train.epochs=: train.epochs is None; input should be a valid integer"):
        load_config(recipe, ["train.epochs="])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.epochs=3", "unknown key 'trian'; did you mean 'train'?"),
        ("train.epohcs=3", "unknown key 'train.epohcs'; did you mean 'epochs'?"),
        ("model.head_options.width=3", "unknown key 'model.head_options.width'; did you mean 'head_options'?"),
        ("loss.name=assymetric", "loss.name is 'assymetric'; did you mean 'asymmetric'? known: asymmetric, bin"),
        ("task.kind=Patch", "task.kind is 'Patch'; did you mean 'patch'? known: image, independent, patch, patch_only"),
        ("train.epochs=0", "train.epochs is 0; input should be greater than or equal to 1"),
        ("train.epochs=3.5", "train.epochs is 3.5; input should be a valid integer"),
        ("train.epochs=many", "train.epochs is 'many'; input should be a valid integer"),
        ("train.epochs=true", "train.epochs is True; input should be a valid integer"),
        ("train.seed=9223372036854775808", "train.seed is 9223372036854775808; input should be less than 92233720368"),
        ("optimiser.lr=nan", "optimiser.lr is nan; input should be a finite number"),
        ("ema.decay=1", "ema.decay is 1; input should be less than 1"),
        ("task.lam=-1", "task.lam is -1; input should be greater than or equal to 0"),
        ("task.closer_size=0", "task.closer_size is 0; input should be greater than or equal to 1"),
        ("task.lam=inf", "task.lam is inf; input should be a finite number"),
        ("model.image_size=4097", "model.image_size is 4097; input should be less than or equal to 4096"),
        ("task.source_size=40000", "task.source_size is 40000; input should be less than or equal to 4096"),
        ("task.patch_size=5000", "task.patch_size is 5000; input should be less than or equal to 4096"),
        ("task.closer_size=5000", "task.closer_size is 5000; input should be less than or equal to 4096"),
        ("task.grid=17", "task.grid is 17; input should be less than or equal to 16"),
        ("data.train=5", "data.train is 5; input should be a valid string"),
        ("model.backbone_options={a = [1]}", "model.backbone_options.a"),
    ],
)
def test_a_wrong_override_is_named_with_what_to_do(override: str, message: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "[train]\nepochs = 5\n")
    with pytest.raises(InputError) as caught:
        load_config(recipe, ["train.seed=2", override, "train.seed=3"])
    assert str(caught.value).startswith(f"{override}: {message}")


@pytest.mark.parametrize("kind", ["image", "patch_only", "independent"])
def test_only_pat_looks_closer(kind: str, tmp_path: Path) -> None:
    change, other = "task.closer_size=48", f"task.kind={kind}"
    message = f"task.closer_size is 48; task.kind is '{kind}', leave it out or train task.kind=patch"
    for overrides in ([change, other], [other, change]):
        with pytest.raises(InputError) as caught:
            load_config(None, overrides)
        assert str(caught.value) == f"config: {message}"
    recipe = write_recipe(tmp_path, f'[task]\nkind = "{kind}"\ncloser_size = 48\n')
    with pytest.raises(InputError) as caught:
        load_config(recipe)
    assert str(caught.value) == f"{recipe}: {message}"
    with pytest.raises(ValidationError, match="leave it out or train"):
        TaskSection.model_validate({"kind": kind, "closer_size": 48})
    written = dump_config(load_config(None, [other]))
    assert "closer_size" not in written
    assert load_config(write_recipe(tmp_path, written)).task.kind == kind


def test_changes_that_fit_together_come_in_any_order(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, '[task]\nkind = "image"\n')
    first, second = "task.closer_size=672", "task.kind=patch"
    config = load_config(recipe, [first, second])
    assert load_config(recipe, [second, first]) == config
    assert config.task == TaskSection(kind="patch", closer_size=672)
    assert load_config(write_recipe(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize("override", ["epochs=3", "train.epochs", "train", ""])
def test_an_override_has_a_section_a_key_and_a_value(override: str) -> None:
    with pytest.raises(InputError, match="is not like section.key=value; write for example train.epochs=3"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nepochs = 3", "unknown key 'trian'; did you mean 'train'?"),
        ("epochs = 3", "unknown key 'epochs'; known: augment, data"),
        ("train = 3", "train is 3; "),
        ("[loss]\ngama_neg = 3", "unknown key 'loss.gama_neg'; did you mean 'gamma_neg'?"),
        ("[loss]\nclip = 1", "loss.clip is 1; input should be less than 1"),
        ("[train\n", "is no TOML (Expected ']'"),
        ("[train]\nepochs = 1\nepochs = 2", "is no TOML (Cannot overwrite a value"),
    ],
)
def test_a_wrong_recipe_is_named_by_its_file(text: str, message: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_config(recipe, ["train.epochs=3"])
    assert str(caught.value).startswith(f"{recipe}: {message}")


def test_a_recipe_in_another_encoding_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b'[data]\ntrain = "\xff"\n')
    with pytest.raises(InputError, match=r"mine.toml: is no TOML \('utf-8' codec"):
        load_config(tmp_path / "mine.toml")


def test_a_missing_recipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere.toml: there is no such recipe; see pivotpatch recipes"):
        load_config(tmp_path / "nowhere.toml")


texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.floats(allow_nan=False, allow_infinity=False)
changes = st.fixed_dictionaries(
    {},
    optional={
        "data": st.fixed_dictionaries(
            {},
            optional={
                "train": texts,
                "val_fraction": st.floats(0, 0.99),
                "labels": st.lists(texts),
                "test": st.lists(texts),
            },
        ),
        "model": st.fixed_dictionaries(
            {},
            optional={
                "backbone": texts,
                "pretrained": st.booleans(),
                "image_size": st.integers(1, 4096),
                "backbone_options": st.dictionaries(texts, st.booleans() | st.integers() | numbers | texts),
                "head_options": st.dictionaries(texts, st.integers() | numbers),
            },
        ),
        "optimiser": st.fixed_dictionaries({}, optional={"lr": st.floats(0, exclude_min=True, allow_infinity=False)}),
        "output": st.fixed_dictionaries({}, optional={"trackers": st.lists(texts)}),
    },
)


@given(changes)
@example({"data": {"train": '\\" \x00\x1f\x7f\x85\u2028\n\r\t\'"""\ufeff\U0001f642 # ='}})
@example({"model": {"backbone_options": {"": 1, "a.b": 1.0, 'x"y': True, "\n": "1"}}})
@example({"optimiser": {"lr": 5e-324}})
def test_what_is_dumped_is_read_back_the_same(values: dict[str, object]) -> None:
    config = RunConfig.model_validate(values)
    for only_changes in (False, True):
        text = dump_config(config, only_changes=only_changes)
        text.encode("utf-8")
        again = RunConfig.model_validate(tomllib.loads(text))
        assert again == config
        assert repr(again) == repr(config)  # 1, 1.0 and true are equal, yet not the same


def test_a_dump_is_a_recipe(tmp_path: Path) -> None:
    config = load_config(None, ["train.epochs=3", "data.labels=['zero\\n', '\"']", "model.image_size=96"])
    assert load_config(write_recipe(tmp_path, dump_config(config))) == config


def test_a_full_dump_names_every_field_that_has_a_value() -> None:
    stated = tomllib.loads(dump_config(RunConfig()))
    held = RunConfig()
    for section, key in FIELDS:
        value = getattr(getattr(held, section), key)
        assert (key in stated.get(section, {})) == (value is not None), (section, key)


def test_a_dump_of_changes_states_them_and_nothing_else() -> None:
    assert dump_config(RunConfig(), only_changes=True) == ""
    config = load_config(None, ["train.epochs=3", "train.seed=1", "optimiser.lr=2e-4", "task.kind=image"])
    assert tomllib.loads(dump_config(config, only_changes=True)) == {
        "task": {"kind": "image"},
        "optimiser": {"lr": 2e-4},
        "train": {"epochs": 3},
    }


@given(numbers.filter(lambda value: value > 0))
def test_an_override_of_a_number_is_exact(value: float) -> None:
    assert load_config(None, [f"optimiser.lr={value!r}"]).optimiser.lr == value


def test_choices_are_words_of_the_schema() -> None:
    """The nearest match is found in pydantic's message, so no choice may hold its separators."""
    for model in SECTIONS.values():
        for field in model.model_fields.values():
            if str(get_origin(field.annotation)) == "typing.Literal":
                assert all("'" not in choice and "," not in choice for choice in get_args(field.annotation))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a = " + "[" * 100_000, "the TOML is nested too deeply; check"),
        ("a = " + "{b = " * 5000 + "1" + "}" * 5000, "the TOML is nested too deeply; check"),
        ("[train]\nseed = " + "9" * 5000, "is no TOML .*digits.*; correct it there"),
        (f"[{'z' * 100_000}]\nx = 1", "unknown key 'zz.* ... .*zz'; known: augment"),
    ],
)
def test_a_hostile_recipe_is_one_line(text: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(InputError, match=rf"recipe\.toml: {wrong}") as told:
        load_config(tmp_path / "recipe.toml")
    assert len(str(told.value)) < 500
    with pytest.raises(InputError, match="train.epochs is '.*'; input should be a valid integer") as told:
        load_config(None, [f"train.epochs={text}"])
    assert len(str(told.value)) < 500
