"""Cold locations: where packs of old snapshots lie, cheaper than the store's own location.

allowed_locations.py   which locations a host uses
locations.py           what a user may name, and how a location is opened
owner_marker.py        the marker of its owner, and whose a damaged one was
cold_locations.py      `ColdLocations`: which packs lie where; reads, lists and deletes them there, for `store_backend.py`
"""
