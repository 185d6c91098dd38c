import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, point_client, serving_hub
from huggingface_hub import ModelCard, constants
from made_networks import LABELS, fit_made_up, make_network
from PIL import Image

from pivotpatch import MultiLabelClassifier, PatchClassifier, load_checkpoint, save_checkpoint
from pivotpatch.errors import InputError
from pivotpatch.models import Card

FILES = ["README.md", "model.json", "model.safetensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_hub(monkeypatch, tmp_path / "copies") as server:
        yield server


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


def test_a_card_says_what_the_model_knows_and_its_code_runs(here: Path) -> None:
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
    model_block, label_block = (part.split("\n```")[0] for part in card.split("```json\n")[1:])
    assert json.loads(model_block)["fitted"] == ["thresholds", "calibration"]
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


def test_the_checkpoint_alone_is_fetched_once(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is opened without a connection, and nothing is waited for."""
    model = make_network()
    model.save_pretrained(tmp_path / "m")
    hub.offer("me/m", tmp_path / "m").files.update({"pytorch_model.bin": b"pickle", "photo.jpg": b"large"})
    model.thresholds = (0.1, 0.2, 0.3)
    save_checkpoint(model, tmp_path / "m", overwrite=True)
    hub.offer("me/m", tmp_path / "m", revision="v2")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} seconds"))
    for offline, address, wrong in (
        (False, hub.address, "the hub cannot be used .401 Client Error"),
        (True, hub.address, "is no folder that is there, and the hub cannot be reached"),
        (False, "http://127.0.0.1:9", "is no folder that is there, and the hub cannot be reached"),  # nothing answers
    ):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        point_client(monkeypatch, address)
        opened = [PatchClassifier.from_pretrained("me/m", revision=revision) for revision in (None, "v2")]
        assert [each.thresholds for each in opened] == [None, (0.1, 0.2, 0.3)]
        with pytest.raises(InputError, match=f"^me/unheard-of: {wrong}"):
            PatchClassifier.from_pretrained("me/unheard-of")
    hub.offer("me/other", tmp_path / "m").files.pop("model.json")
    point_client(monkeypatch, hub.address)
    with pytest.raises(InputError, match="me/other: holds no model.json, so it is another kind of model"):
        PatchClassifier.from_pretrained("me/other")
    assert sorted({name for name in hub.fetched if "other" not in name}) == [f"me/m/{name}" for name in FILES]
    assert sum("other" not in name for name in hub.fetched) <= 6  # of two revisions, whose weights and card are equal


def test_a_model_is_sent_with_its_card(hub: HubServer, tmp_path: Path) -> None:
    model = make_network()
    model.save_pretrained(tmp_path / "m")
    for name in ("me/edited", "me/replaced"):
        hub.offer(name, tmp_path / "m").files["README.md"] = b"my own words"
        hub.repositories[name].files["model.json"] = b"{}"
    sending: list[tuple[str, dict[str, Any]]] = [
        ("me/new", {"private": True, "message": "First try"}),
        ("me/edited", {}),
        ("me/replaced", {"card": Card(license="mit", text="Said again.")}),
    ]
    for name, options in sending:
        assert model.push_to_hub(name, token="may-write", **options) == f"{hub.address}/{name}"
        sent = hub.repositories[name].files
        assert sorted(sent) == FILES
        for file in FILES[1:]:
            assert sent[file] == (tmp_path / "m" / file).read_bytes()
    cards = [hub.repositories[name].files["README.md"] for name, _ in sending]
    assert b'Predictor.load("hub:me/new")' in cards[0]
    assert cards[1] == b"my own words"
    assert b"Said again." in cards[2]
    assert hub.messages == ["First try", "Upload the model", "Upload the model"]
    assert "private" in (hub.made[0].get("visibility"), "private" if hub.made[0].get("private") else "")
    with pytest.raises(InputError, match="^me/new: the hub cannot be used .403"):
        model.push_to_hub("me/new", token="may-not-write")
    with pytest.raises(InputError, match="license"):
        model.push_to_hub("me/new", token="may-write", card=Card(license="nonsense"))
