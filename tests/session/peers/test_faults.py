"""What goes wrong on one rank costs a copy, and is said; a rank that is lost ends the copying; half a copy never counts."""

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tensorstore_ck.backend.staging.unsent_file import ReadInto, Verify
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError
from tensorstore_ck.session.peers import connect
from tensorstore_ck.session.peers.link import BACK, FORTH
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import GROUPS, Pool, rank_process
from tests.session.peers.sides import (
    PIECE_BYTES,
    Outcome,
    Side,
    bytes_of,
    connected,
    folder_at,
    key_of,
    lies_in,
    name_of,
    put_id,
    side,
    two_exchanges,
)


def _kept_from(base: Path, host: int, source: int) -> tuple[list[str], list[str]]:
    """The objects and manifests of a rank that lie on a host, whole or not."""
    objects, manifests = lies_in(folder_at(base, host))
    theirs = [name_of(source, number) for number in range(100)]
    return [name for name in objects if name in theirs], [key for key in manifests if key.endswith(f"-{source}")]


def _with_a_damaged_disk(base: str) -> tuple[list[str], list[str]]:
    own = side(base, (0, 1), 1)

    def open_verifier(name: str, size_bytes: int, read: ReadInto) -> Verify:
        def verify(offset: int, data: memoryview) -> None:
            if name == name_of(0, 4) and offset:
                raise CorruptObjectError("bytes do not match their hash", object_id=name)

        return verify

    own.folder.open_verifier = open_verifier
    return own.exchange(1, own.stage()), own.warnings


def test_what_the_disk_of_the_sender_damaged_is_no_copy(pool: Pool, tmp_path: Path) -> None:
    (keys_0, said_0), (keys_1, said_1) = pool.run(_with_a_damaged_disk, str(tmp_path), ranks=2)
    assert (keys_0, keys_1) == ([key_of(1)], [])
    assert f"the staging disk damaged {name_of(0, 4)}" in said_0[0]
    assert not said_1
    assert _kept_from(tmp_path, 1, 0) == ([], [])


def _crowded(base: str) -> Outcome:
    return two_exchanges(side(base, (0, 1, 2), 1, capacity_bytes=(200 << 10) if dist.get_rank() == 1 else 1 << 30), (150 << 10,))


def test_a_host_without_space_keeps_no_copy_and_the_others_do(pool: Pool, tmp_path: Path) -> None:
    (keys_0, said_0, later_0), (keys_1, said_1, later_1), (keys_2, said_2, later_2) = pool.run(_crowded, str(tmp_path), ranks=3)
    assert (keys_0, keys_1, keys_2) == ([key_of(2)], [], [key_of(1)])
    assert len(said_0) == 1
    assert "rank 1 keeps no copy of the 150.0 KiB that rank 0 staged: " in said_0[0]
    assert "do not fit into the staging folder" in said_0[0]
    assert not said_1
    assert not said_2
    assert (later_0, later_1, later_2) == ([key_of(2, 2)], [key_of(0, 2)], [key_of(1, 2)])


def _slow(base: str) -> Outcome:
    hours = itertools.count(step=3600.0)
    return two_exchanges(side(base, (0, 1, 2), 1, monotonic=hours.__next__ if dist.get_rank() == 1 else time.monotonic))


def test_a_copy_that_takes_too_long_is_given_up_and_the_others_are_not(pool: Pool, tmp_path: Path) -> None:
    """Each piece came in time; rank 1 keeps what rank 0 has, rank 2 what rank 1 has, and rank 0 what rank 2 has."""
    answers = pool.run(_slow, str(tmp_path), ranks=3)
    assert [keys for keys, _, _ in answers] == [[key_of(2)], [], []]
    said_0, said_1, said_2 = (said for _, said, _ in answers)
    assert "rank 1 keeps no copy of" in said_0[0]
    assert any("rank 1 keeps no copy of" in each and " s between this rank and rank 0" in each for each in said_1)
    assert any("rank 2 keeps no copy of" in each and " s between this rank and rank 2" in each for each in said_1)
    assert not said_2


def _damaged(base: str, number: int) -> Outcome:
    return two_exchanges(side(base, (0, 1), 1, damage=(number, PIECE_BYTES // 2) if dist.get_rank() == 1 else None))


@pytest.mark.parametrize(
    ("number", "what"), [(1, name_of(0, 2)), (8, name_of(0, 5)), (10, key_of(0))], ids=["first piece", "last piece", "manifest"]
)
def test_bytes_that_change_on_the_way_are_noticed(pool: Pool, tmp_path: Path, number: int, what: str) -> None:
    sender, receiver = pool.run(_damaged, str(tmp_path), number, ranks=2)
    assert sender[0] == [key_of(1)]
    assert receiver[0] == []
    assert "rank 1 keeps no copy of the" in sender[1][0]
    assert f"{what} was damaged on the way" in receiver[1][0]
    assert (sender[2], receiver[2]) == ([key_of(1, 2)], [key_of(0, 2)])
    assert _kept_from(tmp_path, 1, 0) == ([name_of(0, 50)], [key_of(0, 2)])


def _taken(base: str) -> tuple[list[str], list[str]]:
    own = side(base, (0, 1), 1)
    names = own.stage((10, 5 * PIECE_BYTES))
    if own.rank == 1:
        own.folder.unsent.put(name_of(0, 1), b"mine")
    return own.exchange(1, names), own.warnings


def test_no_peer_overwrites_what_is_there(pool: Pool, tmp_path: Path) -> None:
    sender, receiver = pool.run(_taken, str(tmp_path), ranks=2)
    assert sender[0] == [key_of(1)]
    assert receiver[0] == []
    assert "rank 1 keeps no copy of the 20.0 KiB that rank 0 staged: it could not" in sender[1][0]
    assert "rank 1 keeps no copy of the 20.0 KiB that rank 0 staged: cannot write" in receiver[1][0]
    objects, manifests = lies_in(folder_at(tmp_path, 1))
    assert objects[name_of(0, 1)] == b"mine"
    assert name_of(0, 0) not in objects
    assert list(manifests) == [key_of(1)]


def _cut_short(base: str) -> tuple[list[str], list[str]]:
    own = side(base, (0, 1), 1)
    names = own.stage((100, 9 * PIECE_BYTES))
    path = f"{own.folder.path}/unsent/{names[1]}"
    keys = own.exchange(1, names, hook=lambda: os.truncate(path, 5000) if own.rank == 0 else None)
    return keys, own.warnings


def test_a_file_that_cannot_be_read_is_a_missing_copy(pool: Pool, tmp_path: Path) -> None:
    sender, receiver = pool.run(_cut_short, str(tmp_path), ranks=2)
    assert sender[0] == [key_of(1)]
    assert "rank 1 keeps no copy of the 36.1 KiB that rank 0 staged: " in sender[1][0]
    assert "ends at 5,000" in sender[1][0]
    assert receiver == ([], [])
    assert _kept_from(tmp_path, 1, 0) == ([], [])


OFFERS: Sequence[dict[str, Any]] = [
    {"sizes": {"../../evil": 10}, "manifest_bytes": 10},
    {"sizes": {"packs/../../evil": 10}, "manifest_bytes": 10},
    {"sizes": {"/evil": 10}, "manifest_bytes": 10},
    {"sizes": {"packs/.tmp-1": 10}, "manifest_bytes": 10},
    {"sizes": {"store.json": 10}, "manifest_bytes": 10},
    {"sizes": {"log/1/1": 10}, "manifest_bytes": 10},
    {"sizes": {"packs/a": -1}, "manifest_bytes": 10},
    {"sizes": {"packs/a": 1 << 62}, "manifest_bytes": 10},
    {"sizes": {"packs/a": True}, "manifest_bytes": 10},
    {"sizes": {"packs/a": 10}, "manifest_bytes": 1 << 40},
    {"sizes": {"packs/a": 10}},
    {"sizes": ["packs/a"], "manifest_bytes": 10},
]


def _hostile(base: str, offers: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Rank 0 sends offers that no replicator makes; rank 1 is one."""
    if dist.get_rank() == 1:
        own = side(base, (0, 1), 1)
        keys = [key for put in range(len(offers)) for key in own.exchange(put, own.stage((10,), first=put))]
        return keys, own.warnings
    link, _ = connected(base, (0, 1))
    refused = []
    for put, offer in enumerate(offers):
        link.send_record(1, FORTH, {"txn": put_id(put), **offer})
        refused.append(link.receive_record(1, BACK)["refused"])
        link.receive_record(1, FORTH)
        link.send_record(1, BACK, {"refused": "\x1b[31mnot \ud800 today".encode("utf-8", "replace").decode() * 1000})
    return refused, []


def test_an_offer_that_no_rank_makes_is_refused(pool: Pool, tmp_path: Path) -> None:
    (refused, _), (keys, said) = pool.run(_hostile, str(tmp_path), OFFERS, ranks=2)
    assert len(refused) == len(said) == len(OFFERS)
    assert keys == []
    assert all("\x1b" not in each and len(each) < 4000 for each in said)
    assert not (tmp_path / "evil").exists()
    objects, _ = lies_in(folder_at(tmp_path, 1))
    assert sorted(objects) == sorted(name_of(1, put) for put in range(len(OFFERS)))


def _late(base: str) -> str:
    """Rank 0 comes to an exchange, and rank 1 when that has ended."""
    own = side(base, (0, 1), 1, answer_seconds=0.3)
    names = own.stage()
    if own.rank == 1:
        dist.barrier(GROUPS[2])
    try:
        own.exchange(1, names)
    except BackendUnavailableError as exc:
        said = str(exc)
    if own.rank == 0:
        dist.barrier(GROUPS[2])
    assert own.replicator.is_broken
    assert own.exchange(2, names) == []
    return said


def test_a_rank_that_does_not_come_ends_it_and_that_is_said_once(pool: Pool, tmp_path: Path) -> None:
    for rank, said in enumerate(pool.run(_late, str(tmp_path), ranks=2)):
        assert f"saves that rank {rank} stages get no more copies on other hosts" in said
        assert f"rank {1 - rank} does not answer: " in said
        assert _kept_from(tmp_path, rank, 1 - rank) == ([], [])


def _mixed_up(base: str) -> None:
    own = side(base, (0, 1), 1)
    with pytest.raises(BackendUnavailableError, match=r"stages another snapshot|does not answer"):
        own.exchange(1 + own.rank, own.stage())


def test_ranks_that_are_at_different_saves_end_it(pool: Pool, tmp_path: Path) -> None:
    pool.run(_mixed_up, str(tmp_path), ranks=2)
    for rank in (0, 1):
        assert _kept_from(tmp_path, rank, 1 - rank) == ([], [])


def _alone(base: str) -> None:
    if dist.get_rank() == 0:
        with pytest.raises(BackendUnavailableError, match=r"rank 0 could not connect .*, \[0, 1\]: .*; staged saves get no copies"):
            connect(GROUPS[2], [b"a", b"b"], 1, base, timeout_seconds=0.3)


def test_a_rank_that_does_not_connect_is_said(pool: Pool, tmp_path: Path) -> None:
    pool.run(_alone, str(tmp_path), ranks=2)


KILLED, RANKS = 3, 5


def _until_killed(base: str, rank: int, port: int, ends: "Queue[tuple[int, str]]") -> None:
    store = dist.TCPStore("127.0.0.1", port)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_SECONDS))
    own: Side = side(base, range(RANKS), 1, group=dist.group.WORLD)
    own.exchange(1, own.stage((100,), first=50))

    def hook() -> None:
        if rank == KILLED and own.sent_bytes > 20 * PIECE_BYTES:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        own.exchange(2, own.stage((10, 8 * PIECE_BYTES, 40 * PIECE_BYTES)), hook=hook)
        end = str(own.exchange(3, []))
    except BackendUnavailableError as exc:
        end = str(exc)
    ends.put((rank, end))


@pytest.mark.race
def test_a_rank_that_is_killed_ends_it_in_its_block_and_half_a_copy_does_not_count(tmp_path: Path) -> None:
    """The blocks are 0 and 1; and 2, 3 and 4."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ends: Queue[tuple[int, str]] = context.Queue()
    processes = [rank_process(_until_killed, str(tmp_path), rank, store.port, ends) for rank in range(RANKS)]
    for process in processes:
        process.start()
    said = dict(ends.get(timeout=PATIENCE_SECONDS) for _ in range(RANKS - 1))
    for process in processes:
        process.join(PATIENCE_SECONDS)
        process.kill()
    assert (said[0], said[1]) == (str([key_of(1, 3)]), str([key_of(0, 3)]))
    assert all("get no more copies on other hosts" in said[rank] for rank in (2, 4))
    assert _kept_from(tmp_path, 4, KILLED) == ([name_of(KILLED, 50)], [key_of(KILLED)])
    objects, manifests = _kept_from(tmp_path, 2, 4)
    if key_of(4, 2) in manifests:  # else it was not begun, or the other side broke off
        assert len(objects) == 4
        assert lies_in(folder_at(tmp_path, 2))[0][name_of(4, 2)] == bytes_of(name_of(4, 2), 40 * PIECE_BYTES)
