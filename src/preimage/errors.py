"""The errors preimage raises on purpose.

Every one carries a stable ``code`` (for ``--json``), a ``message`` that says what was given and what is
allowed, and a ``hint`` that says what to do next. Anything else that escapes is a bug.
"""

from __future__ import annotations


class PreimageError(Exception):
    """Base of all expected errors; the command line turns it into one line and exit code 2."""

    code = "bad_input"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()

    def to_dict(self) -> dict[str, str]:
        """The ``error`` object of the json output."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


class OptionError(PreimageError):
    """An option has a value outside what is allowed."""

    code = "bad_option"


class PromptError(PreimageError):
    """A prompt or a source of prompts cannot be used."""

    code = "bad_prompt"


class ModelError(PreimageError):
    """A model cannot be found, loaded or mapped."""

    code = "bad_model"


class LayerError(PreimageError):
    """A layer outside 0..L and "final", or one that was not captured."""

    code = "bad_layer"


class StatesError(PreimageError):
    """States that cannot be inverted or compared: wrong width, not finite, unreadable."""

    code = "bad_states"


class BundleError(StatesError):
    """A state bundle is damaged, incomplete, or belongs to another model."""

    code = "bad_bundle"


class RunFolderError(PreimageError):
    """A run folder belongs to other work, or cannot be written."""

    code = "bad_run_folder"


class ClusterError(PreimageError):
    """A cluster cannot be used, or its workers cannot do what they were given."""

    code = "bad_cluster"


class MissingExtraError(PreimageError):
    """An optional dependency is not installed."""

    code = "missing_extra"


class UnwritableError(RunFolderError):
    """A file cannot be written: the disk is full, read-only or gone."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, not too much of it, its type where that is empty."""
    return clip((str(error).strip() or type(error).__name__).splitlines()[0])


def clip(text: str, most: int = 300) -> str:
    """``text``, its middle left out beyond ``most`` characters: what was given may be a whole novel."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[1 - half :]}"


def shown(name: str) -> str:
    """A name that a file gives, fit for one line: cut short, and control characters as escapes."""
    return clip(name if name.isprintable() else ascii(name), 60)
