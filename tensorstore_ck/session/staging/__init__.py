"""Saves in two steps: durable on the hosts' staging disks first, then uploaded and published.

staging_destination.py  the staging disk as the destination of a save
staged_entries.py       the log entries of a staged save: staged, published, given up; and what is freed then
outcome.py              the outcome of a staged save, and the errors that end it
renew.py                new names for staged objects whose names cannot be used any more
manifest.py             describes the staged objects, so that another process can publish them
store_contact.py         calls the store, without waiting for one that does not answer
staged_chain.py         the saves that one handle has staged on a ref and not published yet
verify.py               checks what another user staged, before it is published
listing.py              what is staged, on a disk and by the log
"""
