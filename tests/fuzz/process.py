"""One process of a search: ``python -m fuzz.process FOLDER SEED SECONDS CASES plain|guided TARGET …``.

Cases and seconds are for each target, and 0 is without end; what was counted is left in the folder.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from support.surroundings import settle


def main(folder: str, seed: str, seconds: str, cases: str, how: str, *names: str) -> None:
    """Search the targets one after the other; guided there is only one, as atheris does not return."""
    faulthandler.register(signal.SIGQUIT)  # for whoever waits in vain: where is it?
    settle()
    with ExitStack() as instrumented:
        if how == "guided":
            import atheris

            # Imports of a later moment are instrumented as well: the stack is not left before the end.
            instrumented.enter_context(atheris.instrument_imports(include=["preimage"]))
        import torch

        from fuzz.searching import Search, search

        torch.set_num_threads(1)
        for name in names:
            one = Search(name, Path(folder), float(seconds) or None, int(cases) or None)
            if how == "guided":
                from fuzz.guiding import guide

                guide(one, int(seed))
            else:
                search(one, int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
