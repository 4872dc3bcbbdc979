"""Where work runs. Today: this process, one item after another."""

from preimage.execution.local import run_each

__all__ = ["run_each"]
