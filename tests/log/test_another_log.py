"""A store.json that names another log than this user has seen: salvage made it, or somebody copied a part of the old one there."""

import shutil
from dataclasses import replace

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import GcRefusedError, LogChangedError
from tensorstore_ck.format.store_config import decode_config
from tensorstore_ck.log import LogChangedWarning
from tensorstore_ck.log.entry import entry_name
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.stores import AT_ONCE
from tests.log.test_rollback import Host


def test_a_log_that_somebody_else_salvaged_is_accepted_once(host: Host) -> None:
    (host.store / entry_name("log", 2)).unlink()
    salvage(LocalBackend(str(host.store), sync=False))
    with pytest.warns(LogChangedWarning, match="`tsck salvage`"):
        assert host.steps() == [6, 5, 4, 3, 2, 1]
    with pytest.raises(LogChangedError, match=r"names the log log-\w+, and this user has seen the log log of this store, up to entry 6"):
        host.steps(rollback="error")
    with pytest.warns(LogChangedWarning), host.open() as store, pytest.raises(GcRefusedError, match="`tsck accept-log -s "):
        store.gc(AT_ONCE)
    with pytest.warns(LogChangedWarning):
        host.put(7)
    gone = host.accept()
    assert gone is not None
    assert gone.n == 6
    host.put(8, rollback="error")
    assert host.steps(rollback="error") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert host.accept() is None


def test_a_part_of_the_log_under_another_prefix_is_no_way_back(host: Host) -> None:
    for n in range(1, 4):
        copy = host.store / entry_name("log-01", n)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(host.store / entry_name("log", n), copy)
    shutil.rmtree(host.store / "log")
    config = host.store / "store.json"
    changed = replace(decode_config(config.read_bytes(), "here"), log="log-01").encode()
    LocalBackend(str(host.store), sync=False).replace("store.json", changed)
    before = host.files()
    with pytest.warns(LogChangedWarning, match="names the log log-01"):
        assert host.steps() == [3, 2, 1]
    with pytest.warns(LogChangedWarning), host.open() as store, pytest.raises(GcRefusedError):
        store.gc(AT_ONCE)
    assert host.files() == before


def test_gc_frees_nothing_by_a_log_that_went_back(host: Host) -> None:
    host.attack("truncated")
    before = host.files()
    with pytest.warns(LogChangedWarning), host.open() as store, pytest.raises(GcRefusedError, match="differs from what this user has seen"):
        store.gc(AT_ONCE)
    assert host.files() == before
