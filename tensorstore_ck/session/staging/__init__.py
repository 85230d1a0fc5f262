"""Saves in two steps: durable on the hosts' staging disks first, then uploaded and published.

stage.py         the first step, of one process or of many ranks
publish.py       the second step: publish, give up, clean up
outcome.py       what became of a staged save, and which errors end it
renew.py         new names for staged objects whose names cannot be used any more
manifest.py      describes the staged objects, so that another process can publish them
staged_chain.py  what one handle has staged on a ref and not published yet
verify.py        checks what another user staged, before it is published
listing.py       what is staged, on a disk and by the log
"""
