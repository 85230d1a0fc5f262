"""Keeps the tensors of a process at the newest snapshot of a branch, for inference: see `Feed`. Reads the store, and never writes to it.

feed.py             `Feed`: polls, stages and swaps versions
match_tensors.py    which tensor of the follower takes which stored tensor
followed_tensor.py  a tensor of the follower, and the changes that are staged for it
held_blocks.py      the blocks whose bytes the follower's tensors have
host_cache.py       ranges of packs that the followers of a host read once
read_changes.py     reads what changed: differences to held blocks, else whole blocks
"""

from tensorstore_ck.feed.feed import Feed, FeedVersion

__all__ = ["Feed", "FeedVersion"]
