"""Start-up (C3): imports are quick and light, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import preimage


def test_import_is_quick_and_does_without_torch() -> None:
    script = """
import sys, time
start = time.process_time()
import preimage
preimage.PreimageError, preimage.PromptOptions, preimage.InvertOptions
seconds = time.process_time() - start
print(seconds, *sorted({"torch", "transformers", "accelerate", "pyarrow", "datasets"} & sys.modules.keys()))
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert [found[1:] for found in runs] == [[], [], []]
    assert min(float(found[0]) for found in runs) < 0.3


@pytest.mark.parametrize("room", ["", ".collisions", ".geometry", ".inversion", ".models", ".theory"])
def test_dir_lists_the_public_names_without_loading_them(room: str) -> None:
    script = f"""
import sys, importlib
package = importlib.import_module("preimage{room}")
listed = dir(package)
print(sorted(set(package.__all__) - set(listed)), [n for n in listed if n in ("TYPE_CHECKING", "lazy_names")],
      "__name__" in listed, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]", "True", "False"]


def test_every_public_name_is_there() -> None:
    assert set(preimage.__all__) >= {"load", "capture", "open_states", "invert", "States", "Inversion"}
    for name in preimage.__all__:
        assert getattr(preimage, name) is not None
    with pytest.raises(AttributeError, match="module 'preimage' has no attribute 'invrt'"):
        _ = preimage.invrt


def test_importing_the_room_is_light():
    heavy = ["torch", "transformers", "tokenizers", "numpy", "pyarrow", "datasets", "pydoc_data"]
    script = f"import sys, preimage.prompts; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
