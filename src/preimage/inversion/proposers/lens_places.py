"""Where lenses are handed on: a folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from preimage.errors import ModelError, UnwritableError, first_line
from preimage.models import HUB_SECONDS
from preimage.storage import copy_hashed, replacing
from preimage.storage.locking import hold

REGISTRY = "lenses.json"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class Content(NamedTuple):
    """A file to be handed on, and what is in it."""

    source: Path
    bytes: int
    sha256: str


class FolderPlace:
    """A folder."""

    kind = "folder"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return f"the folder {self.path}"

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return (self.path / name).is_file()

    def fetch(self, name: str, most: int) -> Path:
        """Where a file lies."""
        path = self.path / name
        if not path.is_file():
            raise _missing(name, self)
        _require_size(name, path.stat().st_size, most)
        return path

    def open(self) -> None:
        """Make the folder, and keep other processes out of it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            hold(self.path, self)
        except OSError as error:
            raise UnwritableError(
                f"{self.path} cannot be written: {error.strerror}.", "Give another folder."
            ) from error

    def put(self, files: Mapping[str, Content], registry: str, gone: set[str]) -> None:
        """Copy the files; the registry is replaced when all are there."""
        with ExitStack() as stack:
            listing = stack.enter_context(replacing(self.path / REGISTRY))  # entered first: renamed last
            listing.write_text(registry, encoding="utf-8")
            for name, content in files.items():
                temporary = stack.enter_context(replacing(self.path / name))
                copied = copy_hashed(content.source, temporary, content.bytes + 1)
                if copied != (content.bytes, content.sha256):
                    raise ModelError(f"{content.source} was changed as it was copied.", "Push it again.")
        for name in gone:
            with suppress(OSError):  # one that stays is one that is not listed
                (self.path / name).unlink()


class HubPlace:
    """A repository of the hub; what is read is of one commit of it."""

    kind = "hub"

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"the hub repository {self.name}"

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return name in self._sizes

    def fetch(self, name: str, most: int) -> Path:
        """Where the hub's client keeps the file; offline, the one it has kept before."""
        from huggingface_hub import HfApi, constants

        offline: bool = constants.HF_HUB_OFFLINE
        if not offline:
            self._require_there()
            if not self.has(name):
                raise _missing(name, self)
            _require_size(name, self._sizes[name] or 0, most)
        try:
            revision = None if offline else self._info.sha
            kept = HfApi().hf_hub_download(self.name, name, revision=revision, local_files_only=offline)
        except Exception as error:  # no route, nothing kept: each client version has its own kinds
            why = "it is not in the hub's cache (offline)" if offline else first_line(error)
            raise ModelError(
                f"{name} of {self} cannot be fetched: {why}.", "Try again online; write a folder as ./name."
            ) from error
        _require_size(name, Path(kept).stat().st_size, most)
        return Path(kept)

    def open(self) -> None:
        """Ask what the repository holds; one that is not there is made."""
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"{self} cannot be written offline.", "Unset HF_HUB_OFFLINE; write a folder as ./name."
            )
        if self._info is None:
            with self._in_words():
                HfApi().create_repo(self.name, exist_ok=True)

    def put(self, files: Mapping[str, Content], registry: str, gone: set[str]) -> None:
        """One commit, refused by the hub where somebody else made one meanwhile."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        added = [CommitOperationAdd(name, content.source) for name, content in files.items()]
        listing = CommitOperationAdd(REGISTRY, registry.encode())
        taken = [CommitOperationDelete(name) for name in sorted(gone)]
        parent = None if self._info is None else self._info.sha
        with self._in_words():
            HfApi().create_commit(
                self.name, [*added, listing, *taken],
                commit_message=f"Lenses: {', '.join(files)}", parent_commit=parent,
            )  # fmt: skip

    @cached_property
    def _info(self) -> Any:
        """What the hub says of the repository, asked once and quickly; None where it has none for us."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._in_words():
            try:
                return HfApi().model_info(self.name, files_metadata=True, timeout=HUB_SECONDS)
            except RepositoryNotFoundError:
                return None

    @cached_property
    def _sizes(self) -> dict[str, int | None]:
        siblings = [] if self._info is None else self._info.siblings or []
        return {sibling.rfilename: sibling.size for sibling in siblings}

    def _require_there(self) -> None:
        if self._info is None:
            raise ModelError(
                f"{self.name} is no folder here, and the hub does not have it (or not for you).",
                "Check the name; write a folder as ./name.",
            )

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """What goes wrong with the hub, as one short error."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

        try:
            yield
        except HFValidationError as error:
            raise ModelError(
                f"{self.name} is no folder here and no hub id.", "Write a folder as ./name."
            ) from error
        except (HfHubHTTPError, LocalTokenNotFoundError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in (None, 401, 403):
                raise ModelError(
                    f"The hub refuses {self.name} without a token that allows it.",
                    "Log in with `hf auth login`; write a folder as ./name.",
                ) from error
            raise ModelError(f"The hub refused {self.name}: {first_line(error)}", "Try again.") from error
        except Exception as error:  # no route, no name, time-out: each client version has its own kinds
            raise ModelError(
                f"{self.name} is no folder here, and the hub cannot be reached.",
                "Try again; write a folder as ./name.",
            ) from error


Place: TypeAlias = FolderPlace | HubPlace  # files by plain names; as text it says what it was taken for


def place_of(given: str | Path) -> Place:
    """The place meant: ``owner/name`` is on the hub where there is no such folder; all else is a folder."""
    path = Path(given)
    try:
        there = path.exists()
    except OSError:  # a name too long for any file
        there = False
    if _HUB_ID.fullmatch(str(given)) and not there:
        return HubPlace(str(given))
    return FolderPlace(path)


def _missing(name: str, place: Place) -> ModelError:
    return ModelError(f"{place} has no {name}.", "Ask who made it, or give another place.")


def _require_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise ModelError(f"{name} has {size} bytes, where {most} at most are expected.", "Ask who made it.")
