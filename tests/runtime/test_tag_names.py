"""Rules for tags: what they let through, what they are called, and what is wrong with a file of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotpatch.errors import InputError
from pivotpatch.runtime.prediction import Tag
from pivotpatch.runtime.tag_names import LANGUAGES, TagRules, read_language

PACKAGE = Path(__file__).parents[2] / "src" / "pivotpatch"
LABELS: list[str] = json.loads((PACKAGE / "tagger" / "model.json").read_text("utf-8"))["labels"]
SOME = st.lists(st.sampled_from(LABELS[:12]), max_size=6, unique=True).map(tuple)


def read(folder: Path, text: str) -> TagRules:
    path = folder / "tags.toml"
    path.write_text(text, "utf-8")
    return TagRules.read(path, LABELS)


def apply(rules: TagRules, tags: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Labels and probabilities, of tags that are the most probable first."""
    named = rules.apply(Tag(label, prob, threshold=0.1, image_prob=prob) for label, prob in tags)
    return [(tag.label, tag.prob) for tag in named]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_names_each_label_in_its_own_way(language: str) -> None:
    names = read_language(language)
    assert list(names) == LABELS
    assert len(set(names.values())) == len(LABELS)
    assert all(name == name.strip() and name and "|" not in name for name in names.values())
    is_chinese = [any("\u4e00" <= sign <= "\u9fff" for sign in name) for name in names.values()]
    assert all(is_chinese) if language == "zh" else not any(is_chinese)


def test_labels_of_one_name_become_one_tag(tmp_path: Path) -> None:
    rules = read(tmp_path, 'at_most = 2\n[rename]\ncat = "pet"\ndog = "pet"')
    assert apply(rules, [("cat", 0.8), ("dog", 0.6), ("bus", 0.5)]) == [("pet", 0.8), ("bus", 0.5)]


@given(SOME, SOME, st.none() | SOME, st.sampled_from([None, 1, 2, 4, 10**30]), st.sampled_from([None, *LANGUAGES]))
def test_what_comes_out_obeys(
    found: tuple[str, ...],
    deny: tuple[str, ...],
    allow: tuple[str, ...] | None,
    at_most: int | None,
    language: str | None,
) -> None:
    tags = [(label, 1 / (2 + place)) for place, label in enumerate(found)]
    names = read_language(language) if language else {}
    rules = TagRules(allow=allow, deny=deny, language=language, at_most=at_most, always=("mine",))
    kept = [(label, prob) for label, prob in tags if label not in deny and (allow is None or label in allow)][:at_most]
    assert apply(rules, tags) == [(names.get(label, label), prob) for label, prob in kept] + [("mine", 1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('alow = ["cat"]', "unknown key 'alow'; did you mean 'allow'?"),
        ('deny = ["persn"]', "deny: unknown label 'persn'; did you mean 'person'?"),
        ('rename = { kat = "x" }', "rename: unknown label 'kat'; did you mean 'cat'?"),
        ('language = "german"', "unknown language 'german'"),
        ('allow = "cat"', "allow is 'cat'; give a list of names"),
        ('always = [" "]', "always is [' ']"),
        ('rename = { cat = " | " }', "rename is {'cat': ' | '}"),
        ("at_most = 0", "at_most is 0; give 1 or more"),
        ("at_most = 1.5", "at_most is 1.5"),
        ("allow = [", "is not valid TOML"),
        ("x = " + "[" * 100_000, "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'tags.toml'}: {message}")
