"""The complete state of a training job: everything that the next step depends on, captured in one call and restored in one.

training_state.py      TrainingState: saves and restores all of it
state_sides.py         its two sides, what all ranks share and what is a rank's own: captured and loaded together, or read as plain dicts
optimizers.py          states of optimizers, by parameter name; also behind torch's ZeroRedundancyOptimizer
parameter_names.py     parameter names, whatever wraps the model
model_state.py         parameters and buffers by these names
gradients.py           gradients in the middle of a step
buffers.py             buffers that ranks may hold differently
extras.py              objects and plain values that the user adds
random_generators.py   states and seeds of random number generators
noted_attributes.py    the attributes that each save notes for searches: learning rates, positions, the commit of the code
shared_state.py        what the ranks share: models, optimizers, schedules, what the user adds
per_rank_state.py      what each rank has for itself: generators (seeded again for another number of ranks), positions, buffers, values
postponed_pass.py      the pass in which a restored StatefulDataLoader continues, which begins after the script has called set_epoch
rank_group.py          this process's rank and group, the answers of the first rank, and the agreement of ranks before the first save
stateful_parts.py      the arguments of TrainingState
resume_search.py       the rule by which a run resumes: from the newest snapshot that is neither marked nor damaged
resume_candidates.py   which snapshot that is
environment.py         versions, devices and switches that change results
verify_resume.py       checks that a job resumes bit for bit: compares two states
step_watch.py          the state after the last completed step, while the next one has not changed weights
sample_cursor.py       SampleCursor: the order of samples, the position in it, and a DataLoader that draws a sample's random numbers again
progress_line.py       ProgressLine: saves in progress, on a terminal
checkpointing/         when to save, and from which snapshot to resume

Knows torch's models, optimizers, schedules and generators; uses a `Store` as any user does. Saving changes nothing that training can see
and copies no tensor. A restore first checks all that one rank can check, then changes things.
"""

from tensorstore_ck.training.environment import EnvironmentChangedWarning
from tensorstore_ck.training.training_state import TrainingState
from tensorstore_ck.training.verify_resume import Difference, ResumeReport, verify_resume

__all__ = ["Difference", "EnvironmentChangedWarning", "ResumeReport", "TrainingState", "verify_resume"]
