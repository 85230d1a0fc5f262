"""One open store: reads a snapshot from its blocks, and writes one in an order that makes a crash harmless. No torch.

engine.py           Engine: backend, configuration, log and block index of one open store
opening.py          opens or creates a store: from a URL to an Engine
freed_meanwhile.py  what gc freed while this process read it
interfaces.py       byte sources and targets of the data path
object_ids.py       ObjectIds: names of new objects, and the writer record
range_verifier.py   verifies ranges of a pack, part or record by the hashes inside it, while they are copied
reachability.py     where the blocks of a snapshot and their delta bases are now, and what must be rescued to keep it
read/               reads snapshots from their blocks
write/              writes packs, parts, record and log entry
"""
