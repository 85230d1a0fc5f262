"""Restores with a staging disk: of what is staged, here and elsewhere; and what they leave on the disk for the next one."""

from itertools import pairwise
from pathlib import Path

import pytest

from tensorstore_ck.errors import MissingObjectError, NotFoundError
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import UPLOADS, Server, check, ended, leave_staged, process, require_all_well

pytestmark = pytest.mark.usefixtures("quick")


def test_what_is_staged_is_restored_before_it_is_published(server: PieceStore, path: Path, connection: Server) -> None:
    connection.refuse(*UPLOADS)
    leave_staged(server, path, 1, 2)
    with process(server, path, store_faults=connection) as job:
        check(job.store, 2, "job^staged")
        pending = job.stage(3)
        check(job.store, 3, "job^staged")
        with process(server, path.with_name("elsewhere")) as other:
            assert [snapshot.step for snapshot in other.store.log("job")] == [0]
        connection.refuse()
        assert ended(pending) is None
        log = job.store.log("job")
        assert [(snapshot.step, snapshot.parent) for snapshot in log[:-1]] == [(after.step, before.root) for after, before in pairwise(log)]
        check(job.store, 3, "job^staged")
    require_all_well(server, path, [0, 1, 2, 3])


def test_published_while_its_state_is_trained_on(server: PieceStore, path: Path, connection: Server) -> None:
    """By this very process, after it was restored: the next save is on top of it."""
    connection.refuse(*UPLOADS)
    leave_staged(server, path, 1, 2)
    with process(server, path, store_faults=connection) as job:
        check(job.store, 2, "job^staged")
        connection.refuse()
        job.store.drain()
        assert job.error_of_put(3) is None
    require_all_well(server, path, [0, 1, 2, 3])


def test_on_another_host(server: PieceStore, path: Path) -> None:
    """It says what to do, and the branch itself is there."""
    leave_staged(server, path, 1)
    with process(server, path.with_name("elsewhere")) as other:
        with pytest.raises(MissingObjectError, match="is staged, and not completely on this host"):
            other.store.checkout("job^staged")
        check(other.store, 0, "job")
        with pytest.raises(NotFoundError):
            other.store.checkout("nothing^staged")
    with process(server, path) as job:
        check(job.store, 1, "job")
    with process(server, path.with_name("elsewhere")) as other:
        check(other.store, 1, "job^staged")
    require_all_well(server, path, [0, 1])
