"""Copies of staged files on other hosts, so that what a host staged outlives it (as Gemini does, https://doi.org/10.1145/3600006.3613145).

A copy lies in its keeper's staging folder in the form that the keeper's own files have: objects, and a manifest once all of them are
there, durable and verified. Whoever goes on with staged snapshots after a crash finds those of lost hosts on the survivors.

ring.py        which ranks keep whose files
link.py        messages between ranks, over gloo
pieces.py      one stream of bytes from rank to rank, in bounded memory
exchange.py    what both sides of one exchange know
sending.py     one side
keeping.py     the other
kept.py        what a rank keeps for others, and when that goes
replicator.py  Replicator: all of it, once per put
"""

from tensorstore_ck.session.peers.link import PeerLink, connect
from tensorstore_ck.session.peers.replicator import Replicator
from tensorstore_ck.session.peers.ring import host_of_folder, sources_of, targets_of

__all__ = ["PeerLink", "Replicator", "connect", "host_of_folder", "sources_of", "targets_of"]
