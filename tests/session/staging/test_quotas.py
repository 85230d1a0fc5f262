"""Quotas and staged saves: refused when they begin, before anything is staged; published once they are."""

from pathlib import Path

import pytest

from tensorstore_ck.errors import QuotaExceededError
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import SECONDS, UPLOADS, Server, check, leave_staged, leftovers, process, published, require_all_well

pytestmark = pytest.mark.usefixtures("quick")


def test_a_save_is_refused_before_it_is_staged(server: PieceStore, path: Path) -> None:
    with published(server, path) as job:
        job.store.set_quota("*", refuse=1)
        error = job.error_of_put(1)
        assert isinstance(error, QuotaExceededError), error
        assert job.told("staged")[-1].step == 0
        assert leftovers(job.folder) == []
    require_all_well(server, path, [0])


def test_what_was_staged_before_is_published_after(server: PieceStore, path: Path) -> None:
    leave_staged(server, path, 1)
    with process(server, path.with_name("operator")) as operator:
        operator.store.set_quota("*", refuse=1)
    with process(server, path) as job:
        job.store.finish_staged("job")
        check(job.store, 1, "job")
    require_all_well(server, path, [0, 1])


def test_a_store_that_does_not_answer_is_not_asked(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job:
        job.store.set_quota("*", refuse="1TB")
        connection.refuse("get log", "create log", "get_log", *UPLOADS)
        pending = job.stage(1)
        connection.refuse()
        pending.wait(SECONDS)
        assert job.store.quotas()["*"].used_bytes > 0
