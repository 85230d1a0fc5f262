"""When to save: triggers that all ranks decide alike, and the loop's helper that goes by them.

expressions.py    conditions on metrics, as text
triggers.py       what fires at a step
board.py          what rank 0 tells the others in advance
unsaved.py        how long a run has been without a snapshot, and when that is too long
candidates.py     which snapshot a run may go on from
resuming.py       restores it, on all ranks or on none
checkpointer.py   saves when a trigger fires, resumes from what is sound
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
