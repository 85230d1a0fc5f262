"""Many saves of a job whose host's cache breaks: all are published, and at most one warning says what was seen."""

import warnings
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.log.cache import CacheWarning
from tests.end_to_end.crash.cachetroubles import TROUBLES, mounted

SAVES = 24


def state(step: int) -> dict[str, object]:
    return {"weights": torch.full((300,), float(step)), "step": step}


def save(store: tsck.Store, steps: range) -> None:
    for step in steps:
        saved = store.put_snapshot(state(step), ref="job", step=step) if step % 2 else _later(store, step)
        assert saved.step == step


def _later(store: tsck.Store, step: int) -> tsck.Snapshot:
    return store.put_snapshot_async(state(step), ref="job", step=step).wait()


def check(folder: Path, caught: list[warnings.WarningMessage], *, may_warn: int) -> None:
    assert {each.category for each in caught} <= {CacheWarning}, [str(each.message) for each in caught]
    assert len(caught) <= may_warn
    with tsck.open(folder / "store", cache_dir=folder / "another cache") as store:
        assert [each.step for each in store.log("job")] == list(range(SAVES, 0, -1))
        assert store.checkout("job")["step"] == SAVES
        assert store.fsck(read_data=True).ok


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins"), [*zip(TROUBLES, cycle([10, 1]), strict=False)])
def test_while_it_saves(tmp_path: Path, caught: list[warnings.WarningMessage], name: str, begins: int) -> None:
    cache = tmp_path / "cache"
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=cache) as store:
        save(store, range(1, begins + 1))
        with TROUBLES[name](cache):
            save(store, range(begins + 1, SAVES - 5))
        save(store, range(SAVES - 5, SAVES + 1))
    check(tmp_path, caught, may_warn=1)


@pytest.mark.parametrize("name", [name for name in TROUBLES if name != "none"])
def test_when_it_is_opened(tmp_path: Path, caught: list[warnings.WarningMessage], name: str) -> None:
    cache = tmp_path / "cache"
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=cache) as store:
        save(store, range(1, 10))
    with TROUBLES[name](cache), tsck.open(tmp_path / "store", no_sync=True, cache_dir=cache) as store:
        assert store.checkout("job")["step"] == 9
        save(store, range(10, SAVES + 1))
    check(tmp_path, caught, may_warn=1)


@pytest.mark.parametrize("name", ["full", "read-only"])
@pytest.mark.parametrize("begins", [0, 10])
def test_a_disk_of_its_own(tmp_path: Path, caught: list[warnings.WarningMessage], name: str, begins: int) -> None:
    try:
        with mounted(tmp_path / "cache", 1 << 20) as change:
            cache = tmp_path / "cache"
            if begins == 0:
                change(name)
            with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=cache) as store:
                save(store, range(1, begins + 1))
                if begins:
                    change(name)
                save(store, range(begins + 1, SAVES + 1))
    except OSError as exc:
        if "cannot mount" not in str(exc):
            raise
        pytest.skip(str(exc))
    check(tmp_path, caught, may_warn=1)
