"""A page as a pdf, printed by a browser that sees no network."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from preimage.errors import MissingExtraError, OptionError, first_line
from preimage.storage import Place, place_of, write_bytes

_SECONDS = 120.0  # for one page; a large one takes about ten
_FLAGS = (
    "--headless",
    # The sandbox needs rights that a container rarely has. What is printed is a page of ours, in which no
    # script but ours runs.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name leads anywhere
    "--no-pdf-header-footer",
)
_INSTALL = "Install Chrome or Chromium, or open the html file in a browser and print it there."


def print_pdf(
    html: str | os.PathLike[str] | Place, pdf: str | os.PathLike[str] | Place, seconds: float = _SECONDS
) -> Place:
    """Print a saved page; returns where the pdf is, which is written whole or not at all."""
    source, target = place_of(html), place_of(pdf)
    browser = _browser()
    try:
        page = source.read_bytes()
    except OSError as error:
        raise OptionError(
            f"{source} cannot be read: {error.strerror or first_line(error)}.", "Save the page first."
        ) from error
    with tempfile.TemporaryDirectory(prefix="preimage-print-", ignore_cleanup_errors=True) as folder:
        return write_bytes(target, _printed(browser, page, Path(folder), seconds))


def _browser() -> str:
    """Where Chrome, Chromium or one of their kind is."""
    try:
        from choreographer.browsers.chromium import Chromium
    except ImportError as error:
        raise MissingExtraError("A pdf needs the extra print.", "pip install 'preimage[print]'.") from error
    browser = Chromium.find_browser(skip_local=False)
    if not browser:
        raise MissingExtraError("A pdf needs a browser, and none was found.", _INSTALL)
    return browser


def _printed(browser: str, page: bytes, folder: Path, seconds: float) -> bytes:
    """The pdf, made from a copy of the page under a name that no address can misread."""
    html, pdf = folder / "page.html", folder / "page.pdf"
    write_bytes(html, page)
    command = [
        browser, *_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--print-to-pdf={pdf}", html.as_uri()
    ]  # fmt: skip
    quiet = subprocess.DEVNULL
    try:
        ended = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=seconds, check=False)
        content = pdf.read_bytes() if pdf.is_file() else b""
    except subprocess.TimeoutExpired as error:
        raise _failed(browser, f"it took longer than {seconds:g} s") from error
    except OSError as error:
        raise _failed(browser, error.strerror or first_line(error)) from error
    if ended.returncode or not content.startswith(b"%PDF"):
        raise _failed(browser, f"it ended with code {ended.returncode} and no pdf")
    return content


def _failed(browser: str, reason: str) -> OptionError:
    return OptionError(f"The page cannot be printed by {browser}: {reason}.", _INSTALL)
