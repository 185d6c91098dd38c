import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub import ModelCard, RepoUrl
from huggingface_hub.errors import LocalEntryNotFoundError
from made_networks import LABELS, fit_made_up, make_network
from PIL import Image

from pivotpatch import MultiLabelClassifier, PatchClassifier, load_checkpoint, save_checkpoint
from pivotpatch.errors import InputError
from pivotpatch.models import Card, hub, open_model
from pivotpatch.models.classifier import Classifier, IndependentClassifier

FILES = ["README.md", "model.json", "model.safetensors"]


@pytest.mark.parametrize("kind", [MultiLabelClassifier, PatchClassifier, IndependentClassifier])
def test_each_kind_comes_back_from_its_folder(kind: type[Classifier], tmp_path: Path) -> None:
    model = kind("test_resnet", LABELS, image_size=32).eval()
    model.thresholds = (0.1, 0.2, 0.3)
    torch.compile(model).save_pretrained(tmp_path / "m")  # type: ignore[attr-defined]
    save_checkpoint(model, tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == FILES
    for name in FILES[1:]:
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    images = torch.rand(2, 3, 32, 32)
    for loaded in (kind.from_pretrained(tmp_path / "m"), open_model(f"hub:{tmp_path / 'm'}")):
        assert type(loaded) is kind
        assert loaded.thresholds == model.thresholds
        assert not loaded.training
        for one, other in zip(loaded(images), model(images), strict=True):
            assert torch.equal(one, other)


def test_a_place_that_cannot_be_meant_is_refused_at_once(tmp_path: Path) -> None:
    for name in (tmp_path / "nothing", "my-model", "a/b/c", "owner/my model"):
        with pytest.raises(InputError, match="no owner/name on the hub"):
            PatchClassifier.from_pretrained(name)
    with pytest.raises(InputError, match="my model: is no owner/name on the hub"):
        make_network().push_to_hub("my model")
    with pytest.raises(InputError, match="revision 'v1' is given for a folder"):
        PatchClassifier.from_pretrained(tmp_path, revision="v1")
    make_network().save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match="m: holds a PatchClassifier, no MultiLabelClassifier; open it with"):
        MultiLabelClassifier.from_pretrained(tmp_path / "m")


def test_a_card_says_what_the_model_knows_and_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_network(overlap=0.25, source_size=64)
    fit_made_up(model)
    told = Card(license="cc-by-4.0", text="Seen *nothing* yet.\n", metrics={"mAP | test": 81.25, "mAP\nval": "80 ± 1"})
    model.save_pretrained("my model", card=told)
    card = Path("my model", "README.md").read_text("utf-8")
    assert ModelCard(card).data.to_dict() == {  # type: ignore[no-untyped-call]
        "library_name": "pivotpatch",
        "pipeline_tag": "image-classification",
        "tags": ["multi-label", "pivotpatch"],
        "license": "cc-by-4.0",
    }
    assert "\nSeen *nothing* yet.\n" in card
    assert "| mAP \\| test | 81.25 |\n" in card
    assert "| mAP val | 80 ± 1 |\n" in card
    model_block, label_block = (part.split("\n```")[0] for part in card.split("```json\n")[1:])
    facts = json.loads(model_block)
    assert (facts["kind"], facts["architecture"]["backbone"]) == ("PatchClassifier", "test_resnet")
    assert (facts["patching"]["overlap"], facts["patching"]["source_size"]) == (0.25, 64)
    assert facts["fitted"] == ["thresholds", "calibration"]
    assert json.loads(label_block) == list(LABELS)
    Image.new("RGB", (40, 50)).save("photo.jpg")
    code = card.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})


def test_what_lies_beside_a_checkpoint_stays(tmp_path: Path) -> None:
    """Saving again never removes what somebody else wrote, least of all a card that was edited by hand."""
    model, folder = make_network(), tmp_path / "m"
    model.save_pretrained(folder)
    (folder / "README.md").write_text("my own words", "utf-8")
    (folder / "notes").mkdir()
    (folder / "notes" / "model.json").write_text("{}")
    (folder / "link").symlink_to("README.md")
    model.thresholds = (0.5, 0.6, 0.7)
    save_checkpoint(model, folder, overwrite=True)
    model.save_pretrained(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "link", "notes"])
    assert (folder / "link").readlink() == Path("README.md")
    assert (folder / "link").read_text("utf-8") == "my own words"
    assert (folder / "notes" / "model.json").read_text() == "{}"
    assert load_checkpoint(folder).thresholds == (0.5, 0.6, 0.7)
    model.save_pretrained(folder, card=Card(text="New words."), overwrite=True)
    assert "New words." in (folder / "README.md").read_text("utf-8")
    with pytest.raises(InputError, match="exists already; choose another folder or allow overwriting"):
        model.save_pretrained(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_only_the_files_of_a_checkpoint_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_network().save_pretrained(tmp_path / "m")
    asked: list[tuple[object, ...]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"], sorted(options["allow_patterns"]), options["token"]))
        return str(tmp_path / "m" if name == "me/m" else tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    model = PatchClassifier.from_pretrained("me/m", token="may-read")
    assert model.origin == "me/m"
    assert open_model("hub:me/m@v2").origin == "hub:me/m@v2"
    assert asked == [("me/m", None, FILES, "may-read"), ("me/m", "v2", FILES, None)]
    with pytest.raises(InputError, match="me/other: holds no model.json, so it is another kind of model; check the"):
        open_model("hub:me/other")


def test_what_the_hub_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {
        "me/away": (LocalEntryNotFoundError("no copy"), "is no folder that is there, and the hub cannot be reached"),
        "me/full": (OSError("disk full"), r"the hub cannot be used \(OSError: disk full\); check the name; if it is"),
    }

    def refuse(name: str, **_: object) -> str:
        raise faults[name][0]

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    for name, (_, message) in faults.items():
        with pytest.raises(InputError, match=f"^{name}@v9: {message}"):
            PatchClassifier.from_pretrained(name, revision="v9")


class FakeApi:
    """What a hub has, in the words of its client."""

    held: ClassVar[dict[str, dict[str, bytes]]] = {}
    told: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **_: object) -> None:
        pass

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> RepoUrl:
        self.told.append({"private": private, "exist_ok": exist_ok})
        self.held.setdefault(repo_id, {})
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def file_exists(self, repo_id: str, name: str) -> bool:
        return name in self.held[repo_id]

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.told[-1]["message"] = commit_message
        self.held[repo_id] |= {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


def test_a_network_is_sent_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", FakeApi)
    model = make_network()
    model.save_pretrained(tmp_path / "m")
    for name in ("edited", "replaced"):
        FakeApi.held[f"me/{name}"] = {"README.md": b"my own words"}
    assert model.push_to_hub("me/new", private=True, message="First try") == "https://huggingface.co/me/new"
    model.push_to_hub("me/edited")
    model.push_to_hub("me/replaced", card=Card(license="mit", text="Said again."))
    assert FakeApi.told[0] == {"private": True, "exist_ok": True, "message": "First try"}
    for sent in FakeApi.held.values():
        assert sorted(sent) == FILES
        for name in FILES[1:]:
            assert sent[name] == (tmp_path / "m" / name).read_bytes()
    cards = {name: sent["README.md"] for name, sent in FakeApi.held.items()}
    assert b'Predictor.load("hub:me/new")' in cards["me/new"]
    assert cards["me/edited"] == b"my own words"
    assert b"Said again." in cards["me/replaced"]
