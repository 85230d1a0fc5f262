"""Writes a snapshot: blocks into packs, then parts, then the record; what is known is not written again."""
