"""Checks and repairs everything around the objects: store.json, modes of files, markers of cold locations, unfinished uploads.

Also says when gc frees the objects that nothing refers to, by gc's own plan.

The first entry of a log continues a hash that is derived from the store's UUID. So the log shows for any UUID whether it is the
store's, and only a UUID that the log confirms is used.
"""

import contextlib
import json
import os
import re
import stat
import uuid
from dataclasses import replace
from typing import Final, NamedTuple

from tensorstore_ck.backend import probe_create
from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME
from tensorstore_ck.backend.local_modes import files_unlike_root
from tensorstore_ck.backend.probe import PROBE_FOLDER
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, DamageError, FormatVersionError, NotAStoreError, StoreError
from tensorstore_ck.format.store_config import CONFIG_NAME, MAX_CONFIG_BYTES, StoreConfig, decode_config, new_config
from tensorstore_ck.gc.plan import GcPlan, plan_gc
from tensorstore_ck.gc.report import Freeable
from tensorstore_ck.log import EntryReader, ObjectKey, RefTable, holds_snapshots, logs_in, store_folders
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, Findings, kind_of, require_reachable
from tensorstore_ck.maintenance.fsck.repairable import repair_command

MAX_CANDIDATES: Final = 16
_UUID: Final = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class FoundConfig(NamedTuple):
    """The content that store.json should have."""

    config: StoreConfig
    is_sure: bool
    """False: a stand-in, good only for looking at the store."""


def is_of_log(backend: Backend, config: StoreConfig) -> bool | None:
    """Whether the log in `backend` belongs to the store that `config` names; None if its first entries do not tell."""
    chain = EntryReader(backend, uuid=uuid.UUID(config.uuid).bytes, prefix=config.log)
    try:
        first = chain.read(1)
        if first is None or first.prev == chain.genesis:
            return None if first is None else True
        second = chain.read(2)
    except StoreError as exc:
        require_reachable(backend, exc)
        return None
    return False if second is None or second.prev == first.hash else None  # else the first entry is not of this log


def confirmed(backend: Backend, data: bytes, config: StoreConfig) -> StoreConfig | None:
    """`config` with a UUID found in a damaged store.json, if the log confirms it."""
    for text in dict.fromkeys(_UUID.findall(data)[:MAX_CANDIDATES]):
        candidate = replace(config, uuid=text.decode("ascii"))
        if is_of_log(backend, candidate):
            return candidate
    return None


def find_config(backend: Backend, other: StoreConfig | None, *, is_writable: bool) -> FoundConfig:
    """The content that a damaged store.json should have; `other` is the configuration of a possible copy of this store.

    `is_writable`: a probe may be written, to find out whether the backend creates exclusively. Raises `NotAStoreError` if there is none.
    """
    data, is_newer = b"", False
    try:
        data = backend.get(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
        decode_config(data, backend.url)
    except DamageError as exc:
        require_reachable(backend, exc)
    except FormatVersionError:
        is_newer = True
    logs = logs_in(backend)
    if not holds_snapshots(backend):
        raise NotAStoreError(f"there is no store at {backend.url}", object_id=backend.url)
    exclusive = probe_create(backend) if is_writable else True
    config = replace(new_config(exclusive_create=exclusive), log=logs[-1] if logs else "log")
    is_named = len(logs) == 1 or (other is not None and other.log == config.log) or json.dumps(config.log).encode() in data
    own = confirmed(backend, data, config) if not is_newer else None  # a newer build may have written it: only a copy can tell
    candidates = [own, None if other is None else replace(config, uuid=other.uuid)]
    sure = next((candidate for candidate in candidates if candidate is not None and is_named and is_of_log(backend, candidate)), None)
    return FoundConfig(sure or own or config, sure is not None)


class ConfigProblem(NamedTuple):
    """Why store.json is unusable."""

    error: StoreError
    advice: str
    is_repairable: bool
    """From this store alone."""
    is_kept: bool = False
    """Whether it may still be right; then it is never overwritten."""


def config_problem(engine: Engine) -> ConfigProblem | None:
    """The problem of store.json, if any."""
    try:
        config = decode_config(engine.backend.get(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES), engine.backend.url)
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        error = exc
    else:
        is_own = is_of_log(engine.backend, config)
        if is_own is not False:
            if config == engine.config:
                return None if is_own else _lost_log(engine)
            error = CorruptObjectError(f"{CONFIG_NAME} was replaced since this store was opened", object_id=CONFIG_NAME)
            return ConfigProblem(error, "open it again", is_repairable=False, is_kept=True)
        error = CorruptObjectError(
            f"{CONFIG_NAME} names the store {config.uuid}, but the log in {config.log} belongs to another store", object_id=CONFIG_NAME
        )
    if is_of_log(engine.backend, engine.config) and not isinstance(error, FormatVersionError):
        return ConfigProblem(error, f"the log confirms its content: {repair_command()} writes it again", is_repairable=True)
    advice = f"{repair_command()[:-1]} --from OTHER_STORE` takes it from a copy of this store; without one, `tsck salvage` makes a new one"
    return ConfigProblem(error, advice, is_repairable=False)


def _lost_log(engine: Engine) -> ConfigProblem | None:
    """The problem if the log that store.json names is missing: elsewhere the store would count as empty."""
    own = engine.placed.at(None)  # logs are in the store itself: cold locations, which may be unusable, are not listed
    if not is_log_lost(own, engine.config):
        return None
    log, logs = engine.config.log, logs_in(own)
    error = CorruptObjectError(f"{CONFIG_NAME} names the log {log}, which is not there; found: {', '.join(logs)}", object_id=CONFIG_NAME)
    advice = "restore it, or that log, from a copy of this store; without one, `tsck salvage` makes a new log from what is left"
    return ConfigProblem(error, advice, is_repairable=False, is_kept=True)


def is_log_lost(backend: Backend, config: StoreConfig) -> bool:
    """Whether there are logs, but not the one that store.json names."""
    logs = logs_in(backend)
    return bool(logs) and config.log not in logs


def repair_config(engine: Engine, other: Engine | None) -> bool:
    """Writes the store.json with which this process opened the store, if it is missing, damaged or another store's; whether it did.

    A store.json of a newer format is replaced only if a copy of the store, `other`, disproves it.
    """
    problem, own = config_problem(engine), engine.config
    if problem is None or problem.is_kept or kind_of(problem.error) == UNREADABLE or is_of_log(engine.backend, own) is False:
        return False
    if isinstance(problem.error, FormatVersionError) and (other is None or (other.config.uuid, other.config.log) != (own.uuid, own.log)):
        return False
    if any(log > own.log for log in logs_in(engine.backend)):
        return False  # salvage may have made a new log since
    engine.backend.replace(CONFIG_NAME, own.encode())
    return True


MODE: Final = "mode"
"""Kind of the finding; a notice, since nothing is lost."""


def check_modes(backend: Backend, findings: Findings) -> None:
    """Adds one finding for all files and folders, named by the first."""
    names = _unlike_root(backend)
    if names:
        root, more = os.stat(backend.url), len(names) - 1
        which = f"this and {more:,} more files and folders lack" if more else "this file or folder lacks"
        findings.add(
            MODE,
            names[0],
            f"{which} the mode and group of {backend.url} "
            f"({stat.filemode(root.st_mode)}, group {root.st_gid}), so not the same users may use them: {repair_command()}, run by root or "
            "by each owner, changes that",
            severity="notice",
            repairable=True,
        )


def repair_modes(backend: Backend) -> dict[str, str]:
    """Gives them the mode and group of the root folder, as far as this user may: name of the first -> what was done."""
    done = _unlike_root(backend, change=True)
    return {done[0]: f"{len(done):,} modes and groups set to those of the root folder"} if done else {}


def _unlike_root(backend: Backend, *, change: bool = False) -> list[str]:
    if not backend.is_local or not os.path.isdir(backend.url):
        return []
    return files_unlike_root(backend.url, [CONFIG_NAME, *store_folders(backend)], change=change)


_CLAIM: Final = "if no copy of this store's files uses that location, `tsck tier --claim-locations` writes it again"


def check_markers(placed: ColdLocations, findings: Findings) -> None:
    """Adds the damaged markers. Raises `PlaceUnavailableError` if a location cannot be used."""
    for url, marker in placed.markers().items():
        if marker.is_damaged:
            is_ours = marker.owner is not None
            advice = f"{repair_command()} writes it again" if is_ours else _CLAIM
            findings.add(CorruptObjectError.kind, marker_at(url), f"it was damaged; {advice}", repairable=is_ours)


def repair_markers(placed: ColdLocations) -> list[str]:
    """Writes again what `check_markers` reports as repairable; returns their names."""
    return [marker_at(url) for url in placed.rewrite_damaged_markers()]


def marker_at(url: str) -> str:
    """Its name in reports."""
    return f"{url.partition('?')[0]}/{MARKER_NAME}"


STALE_SECONDS: Final = 24 * 3600
_NS: Final = 1_000_000_000


def stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Names of unfinished writes that are older than this."""
    before_ns = engine.clock() - older_than_seconds * _NS
    listed = engine.backend.list_uploads([*store_folders(engine.backend), PROBE_FOLDER])
    return [upload.name for upload in listed if upload.modified_ns < before_ns]


def abort_stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Aborts them; returns their names."""
    names = stale_uploads(engine, older_than_seconds)
    for name in names:
        engine.backend.abort_upload(name)
    return names


def why_unreferenced(view: RefTable, key: ObjectKey) -> str:
    """Why nothing refers to an object, according to the log."""
    if view.object_state(key) is not None:
        return "nothing needs it any more"
    if key.kind == "pack" and view.relocations(key.ulid):
        return "nothing refers to it any more: its blocks are in other packs"
    return "nothing refers to it: it belongs to an interrupted or a running save"


class FreeableObjects:
    """The objects that gc would free now or later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plan: GcPlan | None = None
        self._has_plan = False

    @property
    def freeable(self) -> Freeable | None:
        """The part of a report that says what gc can free; None if `when` was never called, or gc cannot run."""
        return self._plan.freeable if self._plan is not None else None

    def when(self, key: ObjectKey) -> str:
        """When gc frees an object."""
        if not self._has_plan:
            self._has_plan = True
            with contextlib.suppress(StoreError):  # if gc cannot run, another finding says why
                self._plan = plan_gc(self._engine)
        plan = self._plan
        if plan is None:
            return "; gc frees it after the damage has been repaired"
        if key in plan.young:
            return f"; gc frees it {plan.when_old(key)}"
        return f"; `{plan.freeable.command}` frees it" if key in plan.doomed else ""
