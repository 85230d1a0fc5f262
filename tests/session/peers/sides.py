"""What ranks do in the tests: each has a staging folder, files in it, and a replicator."""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.session.peers import PeerLink, Replicator, connect, host_of_folder
from tensorstore_ck.session.staging.manifest import manifest_key
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS

STORE: Final = "11111111-2222-3333-4444-555555555555"
PIECE_BYTES: Final = 4096
SIZES: Final = (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 7)
CAPACITY_BYTES: Final = 1 << 30

Files = dict[str, bytes]
Hook = Callable[[], object]


def put_id(number: int) -> Ulid:
    """The transaction of the test's n-th save."""
    return Ulid(number.to_bytes(16, "big"))


def name_of(rank: int, number: int) -> str:
    """Of a rank's n-th object."""
    folder = ("packs", "parts", "snapshots")[number % 3]
    return f"{folder}/{number:02}/{ulid_text(Ulid((1000 * rank + number).to_bytes(16, 'big')))}"


def bytes_of(name: str, size: int) -> bytes:
    """What the test expects in an object."""
    return random.Random(f"{name}{size}").randbytes(size)


def manifest_of(rank: int, put: int) -> bytes:
    """Of more than one piece."""
    return f"manifest of rank {rank}, put {put} ".encode() * 300


def folder_at(base: Path | str, host: int, capacity_bytes: int = CAPACITY_BYTES) -> StagingFolder:
    """The staging folder of one host of a test."""
    return StagingFolder(f"{base}/host-{host}", STORE, capacity_bytes)


def lies_in(folder: StagingFolder) -> tuple[Files, Files]:
    """The objects and the manifests of a folder; of an object, whatever has its name."""
    found: tuple[Files, Files] = {}, {}
    for kind, files in zip(("unsent", "staged"), found, strict=True):
        root = Path(folder.path) / kind
        files.update({str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()})
    return found


@dataclass
class Side:
    """One rank's."""

    rank: int
    folder: StagingFolder
    replicator: Replicator
    warnings: list[str] = field(default_factory=list)
    sent_bytes: int = 0

    def stage(self, sizes: Sequence[int] = SIZES, first: int = 0) -> list[str]:
        """Writes objects as a save would."""
        names = [name_of(self.rank, first + number) for number in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            self.folder.unsent.put(name, bytes_of(name, size))
        return names

    def exchange(self, put: int, names: Sequence[str], *, hook: Callable[[], object] = lambda: None) -> list[str]:
        """With a manifest; `hook` is called after each piece that was sent."""
        manifest = manifest_of(self.rank, put)
        self.folder.write_manifest(manifest_key(put_id(put), self.rank), manifest)

        def sent(count: int) -> None:
            self.sent_bytes += count
            hook()

        return self.replicator.exchange(put_id(put), manifest, names, warn=self.warnings.append, on_bytes=sent)


def key_of(rank: int, put: int = 1) -> str:
    """Of a rank's manifest of the test's n-th save."""
    return manifest_key(put_id(put), rank)


Outcome = tuple[list[str], list[str], list[str]]
"""What `two_exchanges` returns."""


def two_exchanges(own: Side, sizes: Sequence[int] = SIZES, **options: Any) -> Outcome:
    """The manifests that one exchange left here, what was said of it, and those of the next."""
    first = own.exchange(1, own.stage(sizes), **options)
    said = list(own.warnings)
    return first, said, own.exchange(2, own.stage((100,), first=50))


def connected(base: str, hosts: Sequence[int], copies: int = 1, group: Any = None) -> tuple[PeerLink, list[bytes]]:
    """A link between ranks on these hosts, and the hosts' keys."""
    for host in hosts:
        os.makedirs(folder_at(base, host).path, exist_ok=True)
    keys = [host_of_folder(folder_at(base, host).path) for host in hosts]
    return connect(group or GROUPS[len(hosts)], keys, copies, base, timeout_seconds=TIMEOUT_SECONDS), keys


def side(
    base: str,
    hosts: Sequence[int],
    copies: int,
    *,
    group: Any = None,
    damage: tuple[int, int] | None = None,
    capacity_bytes: int = CAPACITY_BYTES,
    piece_bytes: int = PIECE_BYTES,
    answer_seconds: float = TIMEOUT_SECONDS,
    monotonic: Callable[[], float] = time.monotonic,
) -> Side:
    """This process's; `hosts` are the numbers of the ranks' hosts, `damage` is what `DamagingGroup` takes."""
    link, keys = connected(base, hosts, copies, group)
    gloo = link.gloo if damage is None else DamagingGroup(link.gloo, *damage)
    link = PeerLink(gloo, link.ranks, link.rank, link.key, answer_seconds)
    folder = folder_at(base, hosts[link.rank], capacity_bytes)
    return Side(link.rank, folder, Replicator(link, folder, keys, copies, piece_bytes=piece_bytes, monotonic=monotonic))


class DamagingGroup:
    """A gloo group on whose way in the last byte of the n-th message of more than `least_bytes` changes."""

    def __init__(self, group: Any, number: int, least_bytes: int) -> None:
        self._group = group
        self._left = number
        self._least_bytes = least_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv(self, tensors: list[Any], source: int, tag: int) -> Any:
        work = self._group.recv(tensors, source, tag)
        if tensors[0].numel() <= self._least_bytes:
            return work
        self._left -= 1
        return _Damaging(work, tensors[0]) if self._left == 0 else work


class _Damaging:
    def __init__(self, work: Any, tensor: Any) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, timeout: Any) -> None:
        self._work.wait(timeout)
        self._tensor[-1] ^= 1
