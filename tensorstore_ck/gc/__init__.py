"""Which objects are needed, and which gc frees. PROTOCOL.md has the protocol and the proof that it is safe.

collect.py          one run of gc: ends undo windows and dated pins, condemns, sweeps, deletes
plan.py             what a run of gc would free now, and what later runs would
options.py          GcOptions
free_dropped.py     frees what a branch's policy dropped, without a list of the store
free_objects.py     the steps of both: condemn, sweep, delete, truncate tombstones
report.py           GcReport, Freeable, progress
roots.py            the snapshots that are held, and by what
mark_reachable.py  LiveSet: everything that the roots need
released.py         what was released within the undo window, by the store's time
live_bits.py       LiveBits: a bit for each entry of each pack
part_summary.py     the entries that a part refers to, and how many a pack has, cached on this host
listing.py          the objects in the backend
ended_writers.py    writer records: which processes have ended
block_runs.py       runs of neighbouring blocks, each read at once
compact.py          copies live entries of sparse packs into new packs
recode_or_move.py   rewrites packs smaller, or at another location
recode.py           encodes the packs of chosen snapshots smaller
tiering.py          re-encodes and moves packs as retention policies ask
usage.py            bytes per ref, job, snapshot and pack; what they cost a month
space_forecast.py   the space that is left, the growth, and when the store will be full
byte_sums.py        sums of bytes per set of holders
exclusive_bytes.py  bytes that each snapshot adds to those before it
"""

from tensorstore_ck.gc.collect import run_gc
from tensorstore_ck.gc.free_dropped import FreedSnapshots, free_dropped
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.gc.report import GcReport

__all__ = ["FreedSnapshots", "GcOptions", "GcReport", "free_dropped", "run_gc"]
