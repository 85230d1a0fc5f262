"""What is kept and what goes. The protocol and why it is safe: PROTOCOL.md.

roots.py, reach.py            what is needed: snapshots, and all that they need
mark.py, summary.py           as bits per pack; what is kept of a part that was read
usage.py, tally.py            who uses how many bytes
increments.py                 what some snapshots take beyond others
listing.py, packcounts.py     what lies in the backend
compact.py                    live entries of sparse packs, copied
plan.py, writers.py           what a run of gc would free, and later ones; what ended processes left behind
run.py, report.py             a run of gc
recode.py                     blocks of cold snapshots, encoded anew
"""

from tensorstore_ck.gc.collect import run_gc
from tensorstore_ck.gc.report import GcOptions, GcReport

__all__ = ["GcOptions", "GcReport", "run_gc"]
