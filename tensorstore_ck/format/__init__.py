"""Everything that FORMAT.md describes: bytes in and bytes out. No I/O and no torch.

store_config.py        store.json
sealed.py              sealed objects: magic, msgpack body and hash; the names of objects
record.py              snapshot records
attributes.py          what a snapshot may be searched by, besides metrics
part.py                parts: what one rank contributes to one snapshot
part_index.py          finds the blocks of each tensor region in a part
layout.py              layouts: the tensors of a state and its tree
merge_layout_parts.py  merges the layouts of ranks whose states differ
tree.py                the tree of a layout, parsed and checked
hash_probes.py         how long Python would look for keys of a dict or set
values.py              encodes leaves that are not tensors, and dict keys
sharding.py            which elements of a tensor each rank holds
block_assignment.py    which rank writes which blocks
pack.py                packs of blocks and their footers
codec/                 how the bytes of a block are encoded
relocation.py          relocation maps: which pack entries are in other packs now
writer_record.py       writer records: the process behind a series of names
ref_statement.py       what a signature of a ref covers
proof.py               proofs that a tensor belongs to a root
blake3_tree.py         verified slices of BLAKE3's tree, for them
random_streams.py      derived seeds of random generators
"""
