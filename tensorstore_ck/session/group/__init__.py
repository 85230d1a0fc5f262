"""How the ranks of a group save and restore together: small records in the group's key-value store, and the log as the judge.

No collectives, no pickle, and no wait without an end. A process group is anything with a rank, a size and a store.

group.py               one rank's place in a process group, and the thread that talks to its store
round.py               one round of all ranks: propose, compare, execute, commit
participant.py         the steps of a rank in a round; its open rounds, and the keys that it can delete
late_rank_warning.py   logs which ranks are missing
channel.py             small records in the key-value store
liveness.py            heartbeats: which ranks are alive
failure_reason.py      why a round failed, as ranks report it to each other
rank_messages.py       the names of ranks, and their reports, in messages
matching_arguments.py  arguments that must be the same on all ranks
process_groups.py      the process groups that a store handle has used
rank_save.py           one rank's side of a save
planning_round.py      one rank's side of planning a save, within its round
save_plan.py           the plan: one layout, a layout for each kind of ranks, or a merged one
planned_state.py       a rank's state in the form that the plan gives it
rank_kinds.py          ranks with the same layout are of one kind
merge_layouts.py       merges the layouts of several kinds
region_claims.py       which rank stores a region that several hold; a tensor that ranks of several kinds hold in different ways
pipeline_stages.py     whether ranks with different layouts can be one snapshot
replica_check.py       replicas are compared at the first save of a plan
duplicate_regions.py   regions and tensors that ranks hold in different ways are compared
replica_drift.py       replicas are compared at later saves, in rotation
common_store.py        rank 0 finds in the store what every rank wrote, before the first commit
group_restore.py       a restore by all ranks, or by none
host_shared_reads.py   ranks of one host read each block once
"""

from tensorstore_ck.session.group.channel import Channel, ChannelError, KeyValue, StoreRunner
from tensorstore_ck.session.group.failure_reason import DIFFERENT_CALLS
from tensorstore_ck.session.group.group import Group, StoreThread, open_group
from tensorstore_ck.session.group.liveness import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.participant import Participant
from tensorstore_ck.session.group.rank_messages import mismatches, named_ranks
from tensorstore_ck.session.group.round import GRACE_SECONDS, Round

__all__ = [
    "DEAD_AFTER_SECONDS",
    "DIFFERENT_CALLS",
    "GRACE_SECONDS",
    "Channel",
    "ChannelError",
    "Group",
    "KeyValue",
    "Participant",
    "Round",
    "StoreRunner",
    "StoreThread",
    "mismatches",
    "named_ranks",
    "open_group",
]
