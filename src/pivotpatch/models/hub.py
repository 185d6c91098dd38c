"""Networks by name: fetched from the Hugging Face hub, or sent there."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pivotpatch import __version__
from pivotpatch.errors import InputError, quote_fault
from pivotpatch.models.bundled import find_bundled
from pivotpatch.models.card import Card, write_card
from pivotpatch.models.checkpoint import CARD, DESCRIPTION, WEIGHTS, load_checkpoint, save_checkpoint, write_checkpoint
from pivotpatch.models.classifier import Classifier

Kind = TypeVar("Kind", bound=Classifier)
# The client reports a broken connection in the words of its HTTP library, which differs from version to version; what
# it says of answers inherits from the same base.
_FAULTS: tuple[type[Exception], ...] = (OSError, HfHubHTTPError.__mro__[1])
_LOG_IN = "set HF_TOKEN or run `hf auth login`"


def load_pretrained(
    kind: type[Kind],
    name_or_folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
) -> Kind:
    """`Classifier.from_pretrained`, where the arguments are explained."""
    folder = fetch_folder(
        name_or_folder, needed=DESCRIPTION, also=(WEIGHTS, CARD), revision=revision, cache_dir=cache_dir, token=token
    )
    model = load_checkpoint(folder)
    if not isinstance(model, kind):
        found = type(model).__name__
        raise InputError(
            str(name_or_folder), f"holds a {found}, no {kind.__name__}", f"open it with {found}.from_pretrained"
        )
    model.origin = os.fspath(name_or_folder)
    return model


def save_pretrained(model: Classifier, folder: str | Path, *, card: Card | None, overwrite: bool) -> None:
    """`Classifier.save_pretrained`, where the arguments are explained."""
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    keep = card is None and overwrite and (folder / CARD).is_file()
    name = folder.resolve().name
    text = None if keep else write_card(model, card or Card(), title=name, address=name)
    save_checkpoint(model, folder, overwrite=overwrite, card=text)


def push_to_hub(
    model: Classifier, repo_id: str, *, private: bool, token: str | None, message: str, card: Card | None
) -> str:
    """`Classifier.push_to_hub`, where the arguments are explained."""
    api = HfApi(token=token, library_name="pivotpatch", library_version=__version__)
    with TemporaryDirectory() as scratch, _explaining(repo_id):
        write_checkpoint(model, Path(scratch))
        place = api.create_repo(repo_id, private=private, exist_ok=True)
        if card is not None or not api.file_exists(place.repo_id, CARD):
            text = write_card(model, card or Card(), title=place.repo_name, address=f"hub:{place.repo_id}")
            (Path(scratch) / CARD).write_text(text, "utf-8")
        api.upload_folder(repo_id=place.repo_id, folder_path=scratch, commit_message=message)
    return str(place)


def fetch_folder(
    name_or_folder: str | os.PathLike[str],
    *,
    needed: str,
    also: Sequence[str],
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
) -> Path:
    """The folder of a network: a local one, or a copy of some files that the hub has under a name.

    Args:
        name_or_folder: a folder or the name of a bundled network, else `owner/name`.
        needed: the file that tells what kind of network it is; fetched first.
        also: names or patterns of the other files, fetched where they are there.
        revision: a branch, tag or commit of the hub's; the newest by default.
        cache_dir: where copies are kept; the hub client's own place by default.
        token: of the hub's, for what is not public; the one that the client has stored by default.
    """
    name = os.fspath(find_bundled(os.fspath(name_or_folder)) or name_or_folder)
    if Path(name).is_dir():
        if revision is not None:
            raise InputError(name, f"revision {revision!r} is given for a folder", "leave it out")
        return Path(name)
    where = name if revision is None else f"{name}@{revision}"
    told: dict[str, Any] = {"library_name": "pivotpatch", "library_version": __version__}
    told |= {"cache_dir": cache_dir, "token": token}
    with _explaining(where, "is no folder that is there, and "):
        if name.count("/") != 1:  # old names have no owner, but most words without are mistyped folders
            raise HFValidationError
        told["local_files_only"] = not _reach_hub(name, needed)
        try:
            first = hf_hub_download(name, needed, revision=revision, **told)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise InputError(where, f"holds no {needed}, so it is another kind of model", "check the name") from None
        # The commit of the first file, so that the others are of the same one whatever happens to the branch meanwhile.
        return Path(snapshot_download(name, revision=Path(first).parent.name, allow_patterns=list(also), **told))


def _reach_hub(name: str, file: str) -> bool:
    """Whether the hub answers, whatever it says; asked once, where its client would try again for half a minute."""
    try:
        get_hf_file_metadata(hf_hub_url(name, file), token=False)
    except HfHubHTTPError:
        return True
    except _FAULTS:
        return False
    return True


@contextmanager
def _explaining(name: str, sought: str = "") -> Iterator[None]:
    """Turn what the hub and its client say into a message for people; `sought` is where else `name` was looked for."""
    try:
        yield
    except InputError:
        raise
    except HFValidationError:
        raise InputError(name, f"{sought}is no owner/name on the hub", "check what you gave") from None
    except GatedRepoError as error:
        raise InputError(name, "its owner gives it to those who ask", f"ask on its page, then {_LOG_IN}") from error
    except RepositoryNotFoundError as error:
        wrong = f"{sought}the hub shows no such model"
        raise InputError(name, wrong, f"check the name; if it is private, {_LOG_IN}") from error
    except RevisionNotFoundError as error:
        raise InputError(name, "the hub has no such revision of it", "check the branch, tag or commit") from error
    except LocalEntryNotFoundError as error:
        raise InputError(name, f"{sought}the hub cannot be reached", "check the name and the connection") from error
    except _FAULTS as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        may = f"{_LOG_IN}, with a token that allows it"
        todo = may if status in (401, 403) else "check the connection, or try again later"
        said = f"status {status}" if status else _say_briefly(error)
        raise InputError(name, f"the hub cannot be used ({said})", todo) from error
    except ValueError as error:  # its opinion of a card
        raise InputError(name, f"the hub refuses it ({_say_briefly(error)})", "change the card") from error


def _say_briefly(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {quote_fault(error)}"
