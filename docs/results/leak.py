"""What leaks, measured in several processes that share a device; one LeakAudit into a file.

    python docs/results/leak.py OUT.json [--model smollm2] [--layers 1,15,30] [--defences] [--exposures …] [--count 50]
        [--length 32] [--device cuda] [--processes 6] [--margins 8] [--cell-seconds 60]

The same as `preimage leak` for the default prompts, its cells dealt out among processes: their times are no
times. leak_page.py makes the page of it.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import preimage
from preimage.leak import LeakAudit, measure_leak
from preimage.leak.options import DEFENCES, STANDARD
from preimage.storage import record


def measure(given: argparse.Namespace, layer: str, exposures: list[str], margins: int) -> dict[str, Any]:
    """Some exposures at one layer."""
    model = preimage.load(given.model, device=given.device)
    prompts = preimage.gather(
        "default:prose:test", model, preimage.PromptOptions(count=given.count, length=given.length)
    )
    audit = measure_leak(
        model, prompts, layer, exposures=tuple(exposures), cell_seconds=given.cell_seconds, margins=margins
    )
    return audit.to_dict()


def main() -> None:
    """Deal out the cells, and put them together again."""
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
    parser.add_argument("--cell-seconds", type=float, default=60.0)
    parser.add_argument("--commit", default="", help="where this is not run in its repository")
    given = parser.parse_args()
    standard = given.exposures.split(",") if given.exposures else STANDARD
    exposures = list(dict.fromkeys([*standard, *(DEFENCES if given.defences else ())]))
    layers = given.layers.split(",")
    shares = max(1, given.processes // len(layers))
    done: list[LeakAudit] = []
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(measure, given, layer, exposures[first::shares], given.margins if first == 0 else 0)
            for layer in layers
            for first in range(shares)
        ]
        for part in parts:
            done.append(LeakAudit.from_dict(part.result()))
            whole = together(done, exposures)
            about = {"record": record() | ({"commit": given.commit} if given.commit else {})}
            given.out.write_text(json.dumps({**about, "audit": whole.to_dict()}))


def together(parts: list[LeakAudit], exposures: list[str]) -> LeakAudit:
    """One audit of all parts, cells in the order of layers and exposures."""
    order = {name: index for index, name in enumerate(exposures)}
    layers = list(dict.fromkeys(layer for part in parts for layer in part.layers))
    cells = [cell for part in parts for cell in part.cells]
    cells.sort(key=lambda cell: (layers.index(cell.layer), order[cell.exposure]))
    margins = {layer: values for part in parts for layer, values in part.margins.items()}
    options = {**parts[0].options, "exposures": exposures}
    return replace(parts[0], cells=tuple(cells), margins=margins, options=options)


if __name__ == "__main__":
    main()
