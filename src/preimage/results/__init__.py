"""Result types and files. Nobody else writes a result."""

from preimage.results.files import dumps, plain, write_json
from preimage.results.inversion import Inversion, Position, Status
from preimage.results.run_folder import RunFolder

__all__ = ["Inversion", "Position", "RunFolder", "Status", "dumps", "plain", "write_json"]
