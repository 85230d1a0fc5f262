"""Checks and repairs everything around the objects: modes of files, markers of cold locations, unfinished uploads.

Also says when gc frees the objects that nothing refers to, by gc's own plan.
"""

import contextlib
import os
import stat
from typing import Final

from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME
from tensorstore_ck.backend.local_io import try_again
from tensorstore_ck.backend.local_modes import files_unlike_root
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.backend.probe import PROBE_FOLDER
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.gc.plan import GcPlan, plan_gc
from tensorstore_ck.gc.report import Freeable
from tensorstore_ck.log import ObjectKey, RefTable, store_folders
from tensorstore_ck.maintenance.fsck.findings import Findings
from tensorstore_ck.maintenance.fsck.repairable import repair_command

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
    names = [CONFIG_NAME, *store_folders(backend)]
    with os_errors("look at the modes in", backend.url):
        return try_again(backend.url, lambda: files_unlike_root(backend.url, names, change=change))


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
