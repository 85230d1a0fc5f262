"""Reads one snapshot: record -> parts -> ranges of packs, every block verified.

snapshot_reader.py  opens a snapshot: the parts that its ranks put, as one layout or several
block_reader.py     reads blocks in as few requests as possible, and verifies each
box_copy.py         carries a stored region into a wanted box of the same tensor
"""
