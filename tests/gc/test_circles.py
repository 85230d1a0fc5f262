"""Relocations that lead in a circle, which only a broken or hostile log has: an error, and neither a hang nor a crash."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorstore_ck.closure import follow, resolve
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.ids import Digest, new_ulid
from tensorstore_ck.log import Relocation
from tensorstore_ck.moved import MOVED_DTYPE, Moved
from tensorstore_ck.part import EXTENT_DTYPE


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_circle_is_an_error(length: int) -> None:
    packs = [new_ulid() for _ in range(length)]
    rows = np.zeros(1, MOVED_DTYPE)
    after = {pack: packs[(at + 1) % length] for at, pack in enumerate(packs)}
    moved = {pack: Moved(pack, [target], rows) for pack, target in after.items()}
    engine: Any = SimpleNamespace(read_moved=lambda relocation: moved[relocation.pack])
    view: Any = SimpleNamespace(relocations=lambda pack: [Relocation(pack, pack, 1, Digest(bytes(32)), (after[pack],))])
    part: Any = SimpleNamespace(packs=packs[:1], extents=np.zeros(1, EXTENT_DTYPE))
    with pytest.raises(CorruptObjectError, match="circle"):
        resolve(engine, view, part)
    with pytest.raises(CorruptObjectError, match="circle"):
        list(follow(engine, view, packs[0], np.zeros(1, np.uint32)))
