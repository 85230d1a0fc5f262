"""The queue of saves: in the background a state is captured at once, and stored by one thread, within a budget of memory.

save_queue.py            the queue of one store handle, for saves in the background and those that are waited for
worker.py                one thread that works through a queue in order
queued_put.py            a save in the queue, and what the queue asks of it; errors that were not raised yet
put_status.py            how far a save is, how it ended, and who waits for that
pending.py               what users hold of a save in the background
drain_report.py          what became of the saves that were in progress when a job ended
process_end.py           a process that ends, by itself or by a signal
capture_budget.py        the memory that states are captured into
frozen_tensors.py        tensors that do not change: captured without a copy
context.py               what a store handle gives to its saves
put.py                   a save of one process
group_put.py             one rank's side of a save of many
check.py                 finds what a save of many ranks would refuse, and writes nothing
publish_staged.py        uploads and publishes staged saves, of a ref in order
publish_staged_group.py  what the ranks of a staged save agree on
heal_staged.py           ranks replace what one rank's staging disk damaged
resume_staged.py         continues what earlier processes staged
retrying.py              `Store.retrying`
"""

from tensorstore_ck.session.save.drain_report import DrainReport
from tensorstore_ck.session.save.pending import Milestone, PendingSnapshot
from tensorstore_ck.session.save.process_end import Preemption
from tensorstore_ck.session.save.save_queue import OnFull, SaveQueue

__all__ = ["DrainReport", "Milestone", "OnFull", "PendingSnapshot", "Preemption", "SaveQueue"]
