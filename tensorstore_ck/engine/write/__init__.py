"""Writes a snapshot: blocks into packs, then parts, then the record, then the log entry. Known blocks are not written again.

write_and_commit.py  the phases "write" and "commit" of every save; where its bytes become durable
request.py           what a save says besides the state: its options, and the request as of one entry of the log
write_plan.py        which blocks and small tensors of a layout a part stores
part_writer.py       one rank's blocks, read and encoded in runs, and its part
pack_writer.py       blocks into packs, each once
dedup.py             which blocks need not be written, or not even be read
delta_bases.py       which blocks may be encoded against others
publish.py           what the ranks have written; the record of all; the log entry that publishes it
branch_conflict.py   the error for a branch that another process moved
sampled_checks.py    a sample of the state: changes during the capture, numbers that are not finite
compare_parent.py    compares a part and its step counters with those of earlier snapshots
suspicious_save.py   judges saves whose content contradicts their step
"""
