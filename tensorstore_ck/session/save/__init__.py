"""Puts beside the training: captured at once, stored by a thread of their own, one after the other, within a budget of memory.

`SaveQueue` is the queue, `PendingSnapshot` what users hold of a put in it, `jobs` are the two ways to put: alone, and by many ranks.
"""

from tensorstore_ck.session.save.drain_report import DrainReport
from tensorstore_ck.session.save.pending import Milestone, PendingSnapshot
from tensorstore_ck.session.save.process_end import Preemption
from tensorstore_ck.session.save.save_queue import OnFull, SaveQueue

__all__ = ["DrainReport", "Milestone", "OnFull", "PendingSnapshot", "Preemption", "SaveQueue"]
