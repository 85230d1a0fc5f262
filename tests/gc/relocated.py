"""Relocations by hand: whole packs copied with the writers of gc, and moved objects that no gc would write."""

from collections.abc import Sequence

import numpy as np

from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.format.pack import Footer, pack_name
from tensorstore_ck.format.relocation import RELOCATION_DTYPE, RelocationMap
from tensorstore_ck.format.sealed import object_hash
from tensorstore_ck.gc.compact import SparsePack, compact, read_footer
from tensorstore_ck.log import ObjectKey, Objects, Op


def packs_of(engine: Engine) -> list[Ulid]:
    """The packs that are there, oldest first."""
    found = (parse_ulid(info.name[-26:]) for info in engine.backend.list("packs/"))
    return sorted(ulid for ulid in found if ulid is not None)


def footer_of(engine: Engine, pack: Ulid) -> Footer:
    """The footer of a pack."""
    return read_footer(engine.backend, pack, engine.backend.size(pack_name(pack)))


def copy_pack(engine: Engine, pack: Ulid) -> Ulid:
    """Moves all entries of a pack to a new one, as gc does when it compacts; returns that."""
    size_bytes = engine.backend.size(pack_name(pack))
    footer = footer_of(engine, pack)
    (move,) = compact(engine, [SparsePack(pack, footer, np.arange(len(footer.entries)), size_bytes)]).moves
    condemn = Op.condemn(Objects([ObjectKey("pack", pack)]))
    engine.log.append(lambda _: [Op.relocate(pack, move.ulid, move.hash, move.targets), condemn])
    (target,) = move.targets
    return target


def relocate(engine: Engine, moves: Sequence[tuple[Ulid, Sequence[tuple[int, Ulid, int]]]], like: Footer | None = None) -> list[Ulid]:
    """Says in one entry where entries are: for each pack (entry, target, entry there); returns the moved objects.

    `like`: a footer whose entries say where in its pack each target has them.
    """
    ops, names = [], []
    for pack, to in moves:
        targets = sorted({target for _, target, _ in to})
        rows = np.zeros(len(to), RELOCATION_DTYPE)
        rows["from"], rows["entry"] = [entry for entry, _, _ in to], [there for _, _, there in to]
        rows["target"] = [targets.index(target) for _, target, _ in to]
        for field in ("stored", "offset", "codec"):
            rows[field] = 100 if like is None else like.entries[field][rows["entry"]]
        encoded, ulid = RelocationMap(pack, targets, rows).encode(), engine.new_id()
        engine.backend.put(ObjectKey("moved", ulid).name, encoded)
        ops.append(Op.relocate(pack, ulid, object_hash(encoded), targets))
        names.append(ulid)
    engine.log.append(lambda _: ops)
    return names
