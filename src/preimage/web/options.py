"""What a server is told: where it listens, who may ask, which runs it shows, and how much may be asked."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from preimage.errors import OptionError, shown

_TOKEN = re.compile(r"[A-Za-z0-9._~-]{12,200}")
_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """How much may be asked, at once and in all."""

    letters: int = 20_000  # of a prompt
    tokens: int = 512  # of a prompt, typed or of a file
    prompts: int = 10  # of a file that are inverted in one job
    waiting: int = 8  # jobs, beside the one that runs
    seconds: float = 600.0  # a job
    unwatched: float = 60.0  # seconds a job goes on though nobody looks
    upload: int = 128 * _MIB  # bytes of a file, and of a bundle
    uploads: int = 4  # kept at once; the oldest goes first
    request: int = 4 * _MIB  # bytes of any other body
    body_seconds: float = 120.0  # in which a body has to be here
    connections: int = 64


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens and what it shows.

    ``token``: what every request has to bring; without one the server listens on this machine alone.
    ``runs``: the folder whose run folders are listed. ``port`` 0 is any that is free.

    >>> ServeOptions(port=0).is_loopback
    True
    """

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    runs: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(
                f"Port {self.port} is none.", "Give a number from 0 to 65535; 0 is any that is free."
            )
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise OptionError(
                "The token cannot be used.", "Give 12 to 200 letters, digits, dots, dashes or underscores."
            )
        if not self.is_loopback and self.token is None:
            raise OptionError(
                f"Host {shown(self.host)} can be reached from other machines, and no token was given.",
                "Leave --host out, or give --token: every request then needs it.",
            )
        if self.runs is not None and not self.runs.is_dir():
            raise OptionError(
                f"{shown(str(self.runs))} is no folder.", "Give a folder that holds run folders."
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; what is no address in plain form is not taken for one."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
