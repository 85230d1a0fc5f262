"""Puts in two steps: durable on the hosts' staging disks first, then uploaded and published.

chain.py      what one handle has staged on a ref, and not published yet
manifest.py   what lies beside the staged objects, so that another process can go on
stage.py      the first step, of one process or of many ranks
publish.py    the second
verify.py     looks at what another user staged, before it is published
listing.py    what is staged, on a disk and by the log
"""
