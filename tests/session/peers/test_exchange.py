"""What ranks stage lies on other hosts too: over gloo, between real processes, each with a folder as if on a host of its own."""

import time
import tracemalloc
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.session.peers import targets_of
from tensorstore_ck.session.peers.held_copies import HeldCopies
from tests.session.group.pool import Pool
from tests.session.peers.sides import PIECE_BYTES, SIZES, Side, bytes_of, folder_at, key_of, lies_in, manifest_of, name_of, put_id, side


def _once(base: str, hosts: Sequence[int], copies: int) -> tuple[list[str], list[str], int]:
    own = side(base, hosts, copies)
    keys = own.exchange(1, own.stage())
    return keys, own.warnings, own.sent_bytes


def _keys(ranks: Sequence[int], put: int = 1) -> list[str]:
    return sorted(key_of(rank, put) for rank in ranks)


def _sources(rank: int, hosts: Sequence[int], copies: int) -> list[int]:
    keys = [bytes([host]) for host in hosts]
    return [source for source in range(len(hosts)) if rank in targets_of(source, keys, copies)]


@pytest.mark.parametrize(
    ("hosts", "copies"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), 3),
        ((0, 0, 0, 1), 1),
        ((0, 1, 0, 1, 2, 0, 0, 2), 2),
    ],
)
def test_every_ranks_files_lie_byte_for_byte_on_other_hosts(pool: Pool, tmp_path: Path, hosts: Sequence[int], copies: int) -> None:
    answers = pool.run(_once, str(tmp_path), hosts, copies, ranks=len(hosts))
    manifest_bytes = len(manifest_of(0, 1))
    for rank, (keys, missing, sent_bytes) in enumerate(answers):
        assert sorted(keys) == _keys(_sources(rank, hosts, copies))
        assert not missing
        assert sent_bytes == copies * (sum(SIZES) + manifest_bytes)
    for host in set(hosts):
        own = [rank for rank in range(len(hosts)) if hosts[rank] == host]
        there = own + [source for rank in own for source in _sources(rank, hosts, copies)]
        objects, manifests = lies_in(folder_at(tmp_path, host))
        names = [(name_of(rank, number), size) for rank in there for number, size in enumerate(SIZES)]
        assert objects == {name: bytes_of(name, size) for name, size in names}
        assert manifests == {key_of(rank): manifest_of(rank, 1) for rank in there}


def _with_warnings(base: str, hosts: Sequence[int], copies: int) -> tuple[list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        own = side(base, hosts, copies)
    return own.exchange(1, own.stage()), [str(each.message) for each in caught]


def test_fewer_hosts_than_copies_are_said_once_and_all_of_them_used(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(_with_warnings, str(tmp_path), (0, 1, 2), 5, ranks=3)
    assert [sorted(keys) for keys, _ in answers] == [_keys([1, 2]), _keys([0, 2]), _keys([0, 1])]
    (said,) = answers[0][1]
    assert "replicate_to_peers=5 needs 6 hosts, and the job has 3: staged saves have 2 copies" in said
    assert not answers[1][1]
    assert not answers[2][1]
    answers = pool.run(_with_warnings, str(tmp_path / "one"), (0, 0), 1, ranks=2)
    assert [keys for keys, _ in answers] == [[], []]
    assert "have no copies" in answers[0][1][0]


def _chain(base: str) -> list[tuple[int, list[str], list[str]]]:
    """Two saves, the second of which names objects of the first; then the first is forgotten, and the second."""
    own = side(base, (0, 1, 2), 1)
    seen = []

    def look() -> None:
        objects, manifests = lies_in(own.folder)
        seen.append((own.sent_bytes, sorted(objects), sorted(manifests)))

    first = own.stage((100, 200))
    own.exchange(1, first)
    look()
    own.exchange(2, [*own.stage((300,), first=2), first[1]])
    look()
    for put in (1, 2):
        own.replicator.forget(put_id(put))
        look()
    own.replicator.forget(put_id(7))
    return seen


def test_an_object_travels_once_and_stays_until_no_save_names_it(pool: Pool, tmp_path: Path) -> None:
    for rank, seen in enumerate(pool.run(_chain, str(tmp_path), ranks=3)):
        source = (rank - 1) % 3
        own = [name_of(rank, number) for number in range(3)]
        theirs = [name_of(source, number) for number in range(3)]
        manifests = [key_of(rank, put) for put in (1, 2)]
        manifest_bytes = len(manifest_of(rank, 1)) + len(manifest_of(rank, 2))
        (_, *_), second, one_left, none_left = seen
        assert second[0] == 100 + 200 + 300 + manifest_bytes
        assert second[1] == sorted(own + theirs)
        assert second[2] == sorted(manifests + _keys([source]) + _keys([source], put=2))
        assert one_left[1:] == (sorted(own + theirs[1:]), sorted(manifests + _keys([source], put=2)))
        assert none_left[1:] == (sorted(own), sorted(manifests))


def _publishing(base: str) -> list[str]:
    own = side(base, (0, 1), 1)
    names = own.stage()
    own.folder.publish(names[:2])
    return own.exchange(1, names, hook=lambda: own.folder.publish(names)) + own.warnings


def test_what_is_in_the_store_needs_no_copy_and_what_gets_there_meanwhile_is_no_fault(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(_publishing, str(tmp_path), ranks=2)
    assert answers == [_keys([1]), _keys([0])]
    objects, _ = lies_in(folder_at(tmp_path, 0))
    assert sorted(objects) == sorted(name_of(1, number) for number in range(2, len(SIZES)))


def _forgetting(base: str) -> tuple[list[str], list[str]]:
    own = side(base, (0, 1), 1)

    def forget() -> None:
        own.replicator.forget(put_id(1))
        (Path(base) / f"forgotten-{own.rank}").touch()
        while not (Path(base) / f"forgotten-{1 - own.rank}").exists():  # neither has sent all before both forgot
            time.sleep(0.001)

    keys = own.exchange(1, own.stage(), hook=forget)
    objects, manifests = lies_in(own.folder)
    return keys, [*objects, *manifests]


def _forgetting_at_once(base: str) -> tuple[list[str], list[str]]:
    own = side(base, (0, 1), 1)
    held = own.replicator._kept

    def begin(held: HeldCopies, txn: Ulid, key: str, sizes: Mapping[str, int]) -> list[str]:
        held.forget(txn)  # before the offer is looked at
        return HeldCopies.begin(held, txn, key, sizes)

    held.begin = partial(begin, held)  # type: ignore[method-assign]
    keys = own.exchange(1, own.stage())
    objects, manifests = lies_in(own.folder)
    return keys, [*objects, *manifests]


@pytest.mark.parametrize("forgetting", [_forgetting, _forgetting_at_once])
def test_a_save_that_is_forgotten_while_it_travels_leaves_nothing(
    pool: Pool, tmp_path: Path, forgetting: Callable[[str], tuple[list[str], list[str]]]
) -> None:
    for rank, (keys, left) in enumerate(pool.run(forgetting, str(tmp_path), ranks=2)):
        assert keys == []
        assert sorted(left) == sorted([*(name_of(rank, number) for number in range(len(SIZES))), *_keys([rank])])


def _measured(base: str, size_bytes: int) -> int:
    own: Side = side(base, (0, 1), 1, piece_bytes=16 * PIECE_BYTES)
    name = name_of(own.rank, 0)
    writer = own.folder.unsent.open_writer(name)
    for _ in range(size_bytes >> 20):
        writer.append([bytes(1 << 20)])
    writer.close()
    tracemalloc.start()
    try:
        assert own.exchange(1, [name]) == _keys([1 - own.rank])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_files(pool: Pool, tmp_path: Path) -> None:
    small, large = (max(pool.run(_measured, str(tmp_path / str(size)), size << 20, ranks=2)) for size in (1, 12))
    assert large < small + (1 << 20)
    assert large < 4 << 20
