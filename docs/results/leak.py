"""What leaks, measured in several processes that share a device; one LeakAudit into a file.

    python docs/results/leak.py OUT.json [--model smollm2] [--layers 1,15,30] [--defences] [--exposures …]
        [--count 50] [--length 32] [--device cuda] [--processes 6] [--margins 8] [--minutes 2]

The same as `preimage leak` for the default prompts, its cells dealt out among processes: their times are no
times.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import preimage
from preimage.leak import LeakAudit, measure_leak
from preimage.leak.options import DEFENCES, STANDARD
from preimage.storage import record

_HELD: dict[str, Any] = {}  # the model and the prompts of this process


def begin(given: argparse.Namespace) -> None:
    """Make a process ready."""
    model = preimage.load(given.model, device=given.device)
    options = preimage.PromptOptions(count=given.count, length=given.length)
    _HELD.update(given=given, model=model, prompts=preimage.gather("default:prose:test", model, options))


def measure(layer: str, exposure: str, margins: int) -> dict[str, Any]:
    """One exposure at one layer."""
    minutes = _HELD["given"].minutes
    audit = measure_leak(
        _HELD["model"], _HELD["prompts"], layer, exposures=(exposure,), minutes=minutes, margins=margins
    )
    return audit.to_dict()


def main() -> None:
    """Deal out the cells, and put them together again; the file has what is finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", default="1,15,30")
    parser.add_argument("--defences", action="store_true")
    parser.add_argument("--exposures", default="", help="these, instead of the standard ones")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--margins", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0, help="for each cell")
    parser.add_argument("--commit", default="", help="where this is not run in its repository")
    given = parser.parse_args()
    standard = given.exposures.split(",") if given.exposures else STANDARD
    exposures = list(dict.fromkeys([*standard, *(DEFENCES if given.defences else ())]))
    about = {"record": record() | ({"commit": given.commit} if given.commit else {})}
    done: list[LeakAudit] = []
    pool = ProcessPoolExecutor(
        given.processes, mp_context=get_context("spawn"), initializer=begin, initargs=(given,)
    )
    with pool:
        parts = [
            pool.submit(measure, layer, exposure, given.margins if exposure == exposures[0] else 0)
            for exposure in exposures
            for layer in given.layers.split(",")
        ]
        for part in as_completed(parts):
            done.append(LeakAudit.from_dict(part.result()))
            whole = together(done, exposures).to_dict()
            given.out.write_text(json.dumps({**about, "audit": whole}))


def together(parts: list[LeakAudit], exposures: list[str]) -> LeakAudit:
    """One audit of all parts, cells in the order of layers and exposures."""
    order = {name: index for index, name in enumerate(exposures)}
    layers = sorted(
        {layer for part in parts for layer in part.layers}, key=lambda one: (isinstance(one, str), one)
    )
    cells = [cell for part in parts for cell in part.cells]
    cells.sort(key=lambda cell: (layers.index(cell.layer), order[cell.exposure]))
    margins = {layer: values for part in parts for layer, values in part.margins.items()}
    options = {**parts[0].options, "exposures": exposures}
    return replace(parts[0], cells=tuple(cells), margins=margins, options=options)


if __name__ == "__main__":
    main()
