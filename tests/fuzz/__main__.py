"""Search all targets, for seconds or by cases: ``python -m fuzz``; exit code 1 where a fault was found.

Every search is in a process of its own: some faults end it, and atheris does not return.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fuzz.searching import CURRENT
from fuzz.targets import TARGETS
from preimage.storage import record

SILENT = 300.0  # seconds on one case, or to begin: beyond, a process is lost
TESTS = Path(__file__).parents[1]


def main(argv: list[str] | None = None) -> int:
    """What was asked for; a line a target, and everything in a file."""
    asked = _parser().parse_args(argv)
    names = asked.target or list(TARGETS)
    print(f"Seed {asked.seed}", flush=True)
    guided = not asked.plain and importlib.util.find_spec("atheris") is not None
    shared = Path("/dev/shm")  # a long search would wear out a disk
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as work:
        begun = Searches(Path(work), asked, "guided" if guided else "plain", len(names))
        for group in [[name] for name in names] if guided else [names]:
            begun.run(group)
        asked.keep.mkdir(parents=True, exist_ok=True)
        for case in begun.folder.glob("*.case"):
            shutil.copy(case, asked.keep / case.name)
    faults = sum(target["faults"] for target in begun.found.values())
    if faults:
        print(f"The shortest case of each fault is in {asked.keep}.")
    if asked.json:
        asked.json.write_text(json.dumps(_document(begun, asked), indent=1) + "\n", encoding="utf-8")
    return int(faults > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0, help="in all, without the start of processes")
    parser.add_argument("--cases", type=int, default=0, help="of each target, and fewer of slow ones")
    parser.add_argument("--target", action="append", choices=TARGETS, help="one of them, and again")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="else another every time")
    parser.add_argument("--plain", action="store_true", help="without atheris: the same cases every time")
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="folder for cases that fail")
    parser.add_argument("--json", type=Path, help="file for what was counted")
    return parser


class Searches:
    """Processes, one after the other, and what each target's search came to."""

    def __init__(self, folder: Path, asked: argparse.Namespace, how: str, targets: int) -> None:
        self.folder, self.how = folder / "found", how
        self.folder.mkdir()
        self.found: dict[str, dict[str, Any]] = {}
        seconds = asked.seconds / targets if asked.seconds or asked.cases else 60 / targets
        self._command = [sys.executable, "-m", "fuzz.process", str(self.folder), str(asked.seed)]
        self._command += [str(seconds), str(asked.cases), how]
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}

    def run(self, names: list[str]) -> None:
        """Search some targets in one process, and in the next one those that it did not come to."""
        while names:
            ended = self._wait(names)
            for name in list(names):
                names = names[1:]
                whole = self._read(name, ended)
                _print(name, self.found[name])
                if not whole:
                    break

    def _wait(self, names: list[str]) -> str:
        """How a process ended, in words."""
        with (self.folder / "log").open("wb") as log:
            command = [*self._command, *names]
            process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
            while process.poll() is None:
                time.sleep(0.1)
                if time.time() - max(path.stat().st_mtime for path in self.folder.iterdir()) > SILENT:
                    process.send_signal(signal.SIGQUIT)  # it writes where it is into the log
                    time.sleep(5)
                    process.kill()
                    process.wait()
                    return f"no end within {SILENT:.0f} s"
        if process.returncode >= 0:
            return f"exit code {process.returncode}"
        return signal.Signals(-process.returncode).name

    def _read(self, name: str, ended: str) -> bool:
        """Take what was counted for a target; False: it was its search that the process ended in."""
        path = self.folder / f"{name}.json"
        told = path.read_text(encoding="utf-8") if path.exists() else "{}"
        counts = dict.fromkeys(("cases", "accepted", "refused", "faults"), 0)
        found = self.found[name] = {**counts, "found": {}, "done": False, **json.loads(told)}
        whole: bool = found.pop("done")
        if not whole:
            file = f"{name}-process.case"
            if (self.folder / CURRENT).exists():
                shutil.copy(self.folder / CURRENT, self.folder / file)
            print((self.folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:])
            found["faults"] += 1
            found["found"]["process"] = {"what": ended, "file": file, "times": 1}
        return whole


def _print(name: str, found: dict[str, Any]) -> None:
    counts = "  ".join(f"{found[kind]:>9,} {kind}" for kind in ("cases", "accepted", "refused", "faults"))
    print(f"{name:15}  {counts}", flush=True)
    for place, fault in found["found"].items():
        print(f"    {fault['times']} x {place}: {fault['what']}", flush=True)


def _document(begun: Searches, asked: argparse.Namespace) -> dict[str, Any]:
    keys = ("cases", "accepted", "refused", "faults")
    sums = {key: sum(found[key] for found in begun.found.values()) for key in keys}
    known = {**record(), "command": ["python", "-m", "fuzz", *sys.argv[1:]]}
    return {**known, "how": begun.how, "seed": asked.seed, **sums, "targets": begun.found}


if __name__ == "__main__":
    sys.exit(main())
