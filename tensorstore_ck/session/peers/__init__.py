"""Copies of staged files on other hosts, so that what a host staged outlives it (as Gemini does, https://doi.org/10.1145/3600006.3613145).

A copy lies in the receiver's staging folder in the form of its own files: objects, and a manifest once all of them are durable and
verified. After a crash, the files of lost hosts are found on the surviving ones.

copy_holders.py  which ranks keep whose files
link.py          messages between ranks, over gloo
piece_stream.py  one stream of bytes from rank to rank, in bounded memory
exchange.py      what both sides of one exchange share
sender.py        the side that sends
receiver.py      the side that receives
held_copies.py   the files that a rank keeps for others, and for how long
replicator.py    `Replicator`: one exchange per save

A restore reads what is staged on other hosts, so another layout than the one that staged it can restore it:

shared_disks.py  `SharedDisks`: which rank serves which packs of a staged snapshot, in one restore
pack_server.py   the side that serves
pack_reader.py   the side that reads
pack_wire.py     the protocol between the two
"""

from tensorstore_ck.session.peers.copy_holders import host_of_folder, sources_of, targets_of
from tensorstore_ck.session.peers.link import PeerLink, connect
from tensorstore_ck.session.peers.replicator import Replicator
from tensorstore_ck.session.peers.shared_disks import SharedDisks

__all__ = ["PeerLink", "Replicator", "SharedDisks", "connect", "host_of_folder", "sources_of", "targets_of"]
