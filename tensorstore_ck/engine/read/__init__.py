"""Reads a snapshot: record, parts, and ranges of packs, each block verified before its bytes count."""
