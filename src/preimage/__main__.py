"""``python -m preimage``."""

from preimage.cli import entry

entry()
