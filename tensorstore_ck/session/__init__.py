"""What a job does with its open store: saves and restores, in one process or as ranks of a group.

session.py       `Session`: engine, fence, process groups and the queue of saves of one open store
restoring.py     checkout, rank states, random streams, and the wait for saves before them
ref_fence.py     what this handle has seen, saved and staged of each ref, and what a save expects of them
group/           how the ranks of a process group save and restore together
save/            the queue of saves, in the background or waited for
staging/         saves that are durable on a local disk first
peers/           copies of staged saves on other hosts
"""
