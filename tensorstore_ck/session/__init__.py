"""What a job does with its open store: saves and restores, in one process or as ranks of a group.

session.py    `Session`: engine, fence, process groups and the queue of saves of one open store
restore.py    checkout, rank states and random streams
ref_fence.py  what this handle has seen of refs, and what a save expects of them; the options of a save
group/        how the ranks of a process group save and restore together
save/         the queue of saves, in the background or waited for
staging/      saves that are durable on a local disk first
peers/        copies of staged saves on other hosts
"""
