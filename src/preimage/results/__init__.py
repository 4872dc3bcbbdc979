"""Result types and files. Nobody else writes a result."""

from preimage.results.files import dumps, plain, write_json, write_text
from preimage.results.inversion import Inversion, Position, Positions, Status
from preimage.results.run_folder import RunFolder

__all__ = [
    "Inversion",
    "Position",
    "Positions",
    "RunFolder",
    "Status",
    "dumps",
    "plain",
    "write_json",
    "write_text",
]
