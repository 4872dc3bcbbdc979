"""What a test must not depend on: who started it, from which terminal, in which language, with whose files.

``settle`` gives this process, and whatever it starts, the same environment everywhere; ``PYTHON`` is the way
to start a process that can be interrupted.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

# The shape and colour of a terminal, as rich, typer and pytest read it, and the encoding of Python's streams.
_TERMINAL = (
    "CLICOLOR", "CLICOLOR_FORCE", "COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PY_COLORS",
    "PYTHONIOENCODING", "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TYPER_USE_RICH",
)  # fmt: skip
# Where files of the user's own would be found and used.
_PLACES = ("HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT")
_FIXED = {
    "HF_HUB_OFFLINE": "1",  # no test may wait for the network
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # the bits of a sum depend on them; the workers are the parallelism
    "TERM": "dumb",
    "TOKENIZERS_PARALLELISM": "false",
    "TZ": "UTC",
}
# Virtual machines may advertise AMX and then refuse its instructions; torch's bfloat16 products die of that.
_UNLESS_SET = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
_OURS = "PREIMAGE_TEST_HOME"

# A shell without job control starts its background jobs with Ctrl-C ignored, and so are their children. By
# convention that stays so; a test that sends one has to undo it first.
_INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
PYTHON = (sys.executable, "-c", _INTERRUPTIBLE)


def settle() -> None:
    """The environment of the tests; caches are new and empty, but for the default model if it is there."""
    for name in (*_TERMINAL, *_PLACES):
        os.environ.pop(name, None)
    os.environ.update(_UNLESS_SET | os.environ | _FIXED)
    if _OURS not in os.environ:  # the workers of one run share what it makes
        home = Path(tempfile.mkdtemp(prefix="preimage-tests-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        os.environ[_OURS] = str(home)
        _lend_models(home / "cache")
    os.environ["PREIMAGE_CACHE"] = str(Path(os.environ[_OURS]) / "cache")
    os.environ["HF_HOME"] = str(Path(os.environ[_OURS]) / "hub")


def _lend_models(cache: Path) -> None:
    """Converted models of the user's cache; noise floors, codebooks and lenses are made anew."""
    from preimage.models.aliases import cache_folder

    (cache / "models").mkdir(parents=True)
    for folder in (cache_folder() / "models").glob("[!.]*"):
        (cache / "models" / folder.name).symlink_to(folder.resolve(), target_is_directory=True)
