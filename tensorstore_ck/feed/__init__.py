"""Keeps the tensors of a process at the newest snapshot of a branch, for inference: see `Feed`. Reads the store, and never writes to it.

feed.py             `Feed`: polls, stages and swaps versions
feed_ranks.py       the ranks of one model stage and swap the same version together
stage_version.py    finds what a version changes, reads and stages it
match_tensors.py    which tensor of the follower takes which stored tensor
followed_tensor.py  a tensor of the follower, and the changes that are staged for it
held_blocks.py      the blocks whose bytes the follower's tensors have
host_cache.py       ranges of packs that the followers of a host read once
read_changes.py     reads what changed: differences to held blocks, else whole blocks
shared_ranges.py    ranges of packs that several ranks read once
"""

from tensorstore_ck.feed.feed import Feed
from tensorstore_ck.feed.feed_ranks import FeedRanks
from tensorstore_ck.feed.stage_version import FeedVersion

__all__ = ["Feed", "FeedRanks", "FeedVersion"]
