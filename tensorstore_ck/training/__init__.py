"""The complete state of a training job: everything that the next step depends on, captured in one call and put back in one.

Knows torch's models, optimizers, schedules and generators; uses a `Store` as any user does. Nothing here decides how states are stored.
Invariants: a put changes nothing that training can see and copies no tensor; a restore
changes nothing before all that one rank can tell was found to fit.
"""

from tensorstore_ck.training.compare_states import Difference
from tensorstore_ck.training.environment import EnvironmentChangedWarning
from tensorstore_ck.training.training_state import TrainingState
from tensorstore_ck.training.verify_resume import ResumeReport, verify_resume

__all__ = ["Difference", "EnvironmentChangedWarning", "ResumeReport", "TrainingState", "verify_resume"]
