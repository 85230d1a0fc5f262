"""Locations behind a store, colder and cheaper than its own, where packs of old snapshots lie."""
