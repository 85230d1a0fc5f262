"""Checks and repairs store.json, with what the log confirms.

The first entry of a log continues a hash that is derived from the store's UUID. So the log shows for any UUID whether it is the
store's, and only a UUID that the log confirms is used.
"""

import json
import re
import uuid
from dataclasses import replace
from typing import Final, NamedTuple

from tensorstore_ck.backend import probe_create
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, DamageError, FormatVersionError, NotAStoreError, StoreError
from tensorstore_ck.format.store_config import CONFIG_NAME, MAX_CONFIG_BYTES, StoreConfig, decode_config, new_config
from tensorstore_ck.log import EntryReader, holds_snapshots, logs_in
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, kind_of, require_reachable
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
