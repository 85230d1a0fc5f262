"""One save: check, capture, write, commit. And the queue of saves: in the background a state is copied, and stored by one thread.

save.py             the four phases of a save
rank_round.py       one rank's side of a save of many ranks
context.py          what a store handle gives to its saves
frozen_tensors.py   tensors that do not change: captured without a copy
dry_run.py          finds what a save of many ranks would refuse, and writes nothing
staged_save.py      a save that is staged: publishes it, of a ref in order
staged_upload.py    what one process uploads of a staged save
publish_rounds.py   what the ranks of a staged save agree on
resume_staged.py    continues what earlier processes staged
save_queue.py       the queue of one store handle, for saves in the background and those that are waited for
queued_save.py      a save in the queue, and what the queue asks of it; the thread of a queue; errors that were not raised yet
save_status.py      how far a save is, how it ended, and who waits for that; what users hold of it
prepare_memory.py   what the first save of tensors on devices needs, made ready before it
capture_budget.py   the memory that states are copied into
drain_report.py     what became of the saves that were in progress when a job ended
process_end.py      a process that ends, by itself or by a signal
retrying.py         `Store.retrying`
"""

from tensorstore_ck.session.save.capture_budget import OnFull
from tensorstore_ck.session.save.drain_report import DrainReport
from tensorstore_ck.session.save.process_end import Preemption
from tensorstore_ck.session.save.save_queue import SaveQueue
from tensorstore_ck.session.save.save_status import Milestone, PendingSnapshot

__all__ = ["DrainReport", "Milestone", "OnFull", "PendingSnapshot", "Preemption", "SaveQueue"]
