"""How the ranks of one group agree on a save or a restore: small records in the group's own key-value store, and the log as the judge.

Knows no torch and no formats: a process group is anything with a rank, a size and a store. No collectives, no pickle, and no wait without
an end. `Group` counts the attempts of a process group, `Round` is one of them, and the caller does the work in `Participant`.
"""

from tensorstore_ck.session.group.channel import Channel, ChannelError, KeyValue, StoreRunner
from tensorstore_ck.session.group.group import Group, StoreThread, open_group
from tensorstore_ck.session.group.liveness import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.rank_messages import mismatches, named_ranks
from tensorstore_ck.session.group.round import GRACE_SECONDS, Participant, Round

__all__ = [
    "DEAD_AFTER_SECONDS",
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
