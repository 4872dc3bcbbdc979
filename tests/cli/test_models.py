"""``preimage models``: what is known of a model before any work."""

from __future__ import annotations

from typing import Any

import preimage
from support.commands import CONTEXT, WIDTH, Typed


def test_models(document: Any, run: Typed, model: str) -> None:
    code, found = document("models")
    assert code == 0
    assert [alias["name"] for alias in found["aliases"]] == ["smollm2"]
    assert len(found["tested_architectures"]) == 12
    code, found = document("models", model)
    assert code == 0
    assert found["model"] == preimage.load(model).identity.to_dict() | {"max_length": CONTEXT}
    code, found = document("models", "--fetch", model)
    assert (code, found["path"]) == (0, model)
    code, out, err = run("models", model)
    assert code == 0
    assert f"d_model: {WIDTH}" in out.splitlines()
    assert err == ""
    for argv in (["models", "no-such-model"], ["models", "--fetch", "no-such-model"]):
        code, found = document(*argv)
        assert code == 2
        assert found["error"]["code"] == "bad_model"
