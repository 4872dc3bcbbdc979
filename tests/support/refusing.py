"""An action that must be refused in words."""

from collections.abc import Callable

import pytest

from preimage.errors import PreimageError


def refused(kind: type[PreimageError], action: Callable[[], object]) -> PreimageError:
    """The error the action raises: of exactly this kind, one short line, with what to do next."""
    with pytest.raises(kind) as caught:
        action()
    error = caught.value
    assert type(error) is kind
    assert error.hint
    assert len(str(error)) < 1000  # paths of temporary folders are long, and some come several times
    assert "\n" not in str(error)
    return error
