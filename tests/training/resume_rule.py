"""The rule by which every door resumes, as one table: what there is in the store, and what a resume makes of it."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.errors import BackendUnavailableError, DamageError, RetryableError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.training import resume_search

Save = Callable[[tsck.Store], object]
Resume = Callable[[tsck.Store, str | None], int | None]
"""Resumes from an address, or from what the door takes without one; returns the step of the restored snapshot."""

NEWEST: Final = ("sound", "newest damaged", "newest marked", "newest unreadable", "all damaged")
"""For doors that take no address."""
ALL: Final = (*NEWEST, "named and damaged", "the branch is named")


def check_door(case: str, folder: Path, patch: pytest.MonkeyPatch, ref: str, *, save: Save, resume: Resume) -> None:
    """`save` saves two snapshots or more to `ref`; `resume` gets the store as a new process has it."""
    with tsck.open(folder / "store", create=True, no_sync=True, cache_dir=folder / "cache") as store:
        save(store)
        history = store.log(ref)
        packs = [{pack_name(parse_ulid(name) or Ulid(b"")) for name in store.show(each.root).packs} for each in history]
        if case == "newest marked":
            store.mark(ref, "bad")
    newest = packs[0] - packs[1]
    assert newest
    for name in set[str]().union(*packs) if case == "all damaged" else newest if "named" in case or case == "newest damaged" else ():
        path = folder / "store" / name
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
    if case == "newest unreadable":
        _make_unreadable(newest, patch)
    first, second = (f"{ref}@{each.step}" for each in history[:2])
    address = {"named and damaged": first, "the branch is named": ref}.get(case)
    with (
        tsck.open(folder / "store", cache_dir=folder / "again") as store,
        warnings.catch_warnings(record=True) as caught,
        resumes_logged() as logged,
    ):
        warnings.simplefilter("always")
        if case == "newest unreadable":
            with pytest.raises(RetryableError, match="injected"):
                resume(store, address)
        elif case == "all damaged":
            with pytest.raises(DamageError, match=f"none of the snapshots of '{ref}' can be restored"):
                resume(store, address)
        elif case == "named and damaged":
            with pytest.raises(DamageError) as raised:
                resume(store, address)
            assert "none of the snapshots" not in str(raised.value)
        else:
            assert resume(store, address) == history[0 if case == "sound" else 1].step
    said = [str(each.message) for each in caught if "was skipped" in str(each.message)]
    if case in ("newest damaged", "newest marked", "the branch is named"):
        assert len(said) == 1
        assert said[0].startswith(f"{first} was skipped: ")
        assert said[0].endswith(f"; resuming from {second} instead")
    elif case != "all damaged":
        assert said == []
    tried = {
        "named and damaged": [],
        "newest marked": history[1:2],
        "all damaged": history,
        "sound": history[:1],
        "newest unreadable": history[:1],
    }
    names = [f"{ref}@{each.step} (root {each.root[:12]})" for each in tried.get(case, history[:2])]
    assert logged == [f"resuming from {name} in {folder / 'store'}" for name in names]


@contextmanager
def resumes_logged() -> Iterator[list[str]]:
    """The lines of the log that say from where a run resumes."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(line for line in [record.getMessage()] if "resum" in line)

    logger, handler = logging.getLogger("tensorstore_ck"), Kept(logging.INFO)  # debug lines have paths, whatever is in them
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _make_unreadable(packs: set[str], patch: pytest.MonkeyPatch) -> None:
    read_into = LocalBackend.read_into

    def fail(self: LocalBackend, name: str, offset: int, target: memoryview) -> None:
        if name in packs:
            raise BackendUnavailableError("injected")
        read_into(self, name, offset, target)

    patch.setattr(LocalBackend, "read_into", fail)
    patch.setattr(resume_search, "PAUSE_SECONDS", 0.0)
