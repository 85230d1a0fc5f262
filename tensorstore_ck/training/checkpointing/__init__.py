"""When to save: triggers on which all ranks agree, and the training loop's helper that uses them.

triggers.py            decide at each step whether to save
step_flag.py           announces to all ranks, ahead of time, the step from which something holds
unsaved_time.py        how long a run has been without a snapshot, and when that is too long
step_pace.py           slows writes down that slow steps down
pending_saves.py       saves in progress, which run saved a snapshot, and the end of the training when saves keep failing
exception_save.py      saves the last completed step after an exception
dropped_snapshots.py   frees what the policy of the job's branch dropped, in a thread
checkpointer.py        Checkpointer: saves when a trigger fires, resumes from the newest intact snapshot
"""

from tensorstore_ck.training.checkpointing.checkpointer import Checkpointer
from tensorstore_ck.training.checkpointing.triggers import (
    Trigger,
    TriggerContext,
    at_fraction,
    at_steps,
    auto,
    every_epochs,
    every_seconds,
    every_steps,
    first,
    last,
    on_improvement,
    on_metric,
    on_preemption,
)

__all__ = [
    "Checkpointer",
    "Trigger",
    "TriggerContext",
    "at_fraction",
    "at_steps",
    "auto",
    "every_epochs",
    "every_seconds",
    "every_steps",
    "first",
    "last",
    "on_improvement",
    "on_metric",
    "on_preemption",
]
