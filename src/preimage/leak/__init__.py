"""What leaks: which prompts can be read from what a service keeps, what would stop it, at what price."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.leak.audit import measure_leak
    from preimage.leak.exposures import Exposure
    from preimage.leak.files import read_files
    from preimage.leak.holdings import Told
    from preimage.leak.options import LeakOptions
    from preimage.leak.result import FilesAudit, LeakAudit, LeakCell
    from preimage.leak.verdict import judge, judge_files

__getattr__, __dir__, __all__ = lazy_names(__name__)
