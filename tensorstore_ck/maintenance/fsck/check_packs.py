"""Packs for fsck and salvage: which there are, what their footers say, and which of their blocks are known to be bad.

Every byte of a pack is under some hash, so that reading header, footer and blocks (datacheck.py) finds any damage. Footers are kept up to
a bound and read again after that, so memory is bounded whatever the number of packs is.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Ulid, block_id, parse_ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, for_each
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.codec import BASED, decode
from tensorstore_ck.format.pack import Footer, pack_name
from tensorstore_ck.gc.compact import read_footer
from tensorstore_ck.gc.listing import ListedObject
from tensorstore_ck.maintenance.fsck.findings import require_reachable

FOOTER_CACHE_BYTES: Final = 64 << 20


class PackProblem(NamedTuple):
    """Why a pack's footer cannot be used."""

    kind: str
    message: str


@dataclass(slots=True)
class BadBlocks:
    """Blocks of one pack that are not what they were."""

    entries: set[int] = field(default_factory=set)
    message: str = ""


class Packs:
    """The packs of a store. Thread-safe."""

    def __init__(self, backend: Backend, listed: dict[Ulid, ListedObject]) -> None:
        self._backend = backend
        self.listed = listed
        self.problems: dict[Ulid, PackProblem] = {}
        """Packs whose header or footer is damaged, as far as they were looked at."""
        self.bad: dict[Ulid, BadBlocks] = {}
        """Blocks that are not what they were, as far as they were read."""
        self.blocks = 0
        """In the footers that `check_footers` went through."""
        self._footers: OrderedDict[Ulid, Footer] = OrderedDict()
        self._cached_bytes = 0
        self._single: dict[tuple[Ulid, int, bytes], bool] = {}
        self._lock = threading.Lock()

    def footer(self, pack: Ulid) -> Footer | PackProblem:
        """The checked footer of a pack, or why there is none."""
        with self._lock:
            known = self._footers.get(pack) or self.problems.get(pack)
        if known is not None:
            return known
        name = pack_name(pack)
        try:
            footer = self._read_footer(pack, name)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            problem = PackProblem(exc.kind, str(exc))
            with self._lock:
                return self.problems.setdefault(pack, problem)
        with self._lock:
            self._footers[pack] = footer
            self._cached_bytes += footer.entries.nbytes
            while self._cached_bytes > FOOTER_CACHE_BYTES and len(self._footers) > 1:
                self._cached_bytes -= self._footers.popitem(last=False)[1].entries.nbytes
        return footer

    def footers(self) -> Iterator[tuple[Ulid, Footer]]:
        """Every listed pack whose footer is sound, in order; the others' problems are noted."""
        for pack in sorted(self.listed):
            footer = self.footer(pack)
            if isinstance(footer, Footer):
                yield pack, footer

    def check_footers(self) -> None:
        """Looks at every listed pack's header and footer."""
        for_each(sorted(self.listed), lambda pack: self._count(self.footer(pack)), 1 if self._backend.is_local else REMOTE_THREADS)

    def note_bad(self, pack: Ulid, entry: int, message: str) -> None:
        """Notes a block that is not what it was."""
        with self._lock:
            bad = self.bad.setdefault(pack, BadBlocks())
            bad.entries.add(entry)
            bad.message = bad.message or message

    def unread(self, names: Collection[str]) -> list[Ulid]:
        """The listed packs of these names of which no damaged block is known yet."""
        found = {ulid for name in names if (ulid := parse_ulid(name[-26:])) is not None and pack_name(ulid) == name}
        return sorted((found & self.listed.keys()) - self.bad.keys())

    def is_intact(self, pack: Ulid, row: tuple[Any, ...], block: bytes) -> bool:
        """Whether one block that an extent names can be read: for packs whose footer cannot be used."""
        _, _, offset, stored, raw, _, codec, _ = row
        if codec in BASED:
            return False  # nobody can tell without a footer
        key = (pack, offset, block)
        if key not in self._single:
            name, data = pack_name(pack), bytearray(stored)
            try:
                self._backend.read_into(name, offset, memoryview(data))
                self._single[key] = block_id(decode(codec, memoryview(data), raw, name)) == block
            except StoreError as exc:
                require_reachable(self._backend, exc)
                self._single[key] = False
        return self._single[key]

    def _count(self, footer: Footer | PackProblem) -> None:
        if isinstance(footer, Footer):
            with self._lock:
                self.blocks += len(footer.entries)

    def _read_footer(self, pack: Ulid, name: str) -> Footer:
        found = self.listed.get(pack)
        return read_footer(self._backend, pack, found.size_bytes if found is not None else self._backend.size(name))
