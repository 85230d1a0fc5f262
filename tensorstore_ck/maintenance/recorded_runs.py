"""Runs gc, fsck or repair, and notes the outcome in the log: one entry for each run, so that others see when it ran and what it found.

If the note fails, the run has the same result, which says why the log lacks it. Nothing is appended to a log that is damaged: the
entry would take a number that a lost entry had. Nothing begins a log either: an empty one may be a lost one, at which gc refuses.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from tensorstore_ck.common.executor import Executor
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import BackendUnavailableError, BrokenLogError, GcRefusedError, StoreError, UnsafeBackendError
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.gc import GcOptions, GcReport, run_gc
from tensorstore_ck.gc.report import Progress as GcProgress
from tensorstore_ck.log import FOLDERS, Op
from tensorstore_ck.log.field_checks import MAX_COUNTS, MAX_MESSAGE_CHARS
from tensorstore_ck.log.maintenance_outcome import FAILED, FINDINGS, OK, REFUSED
from tensorstore_ck.redaction import redacted

if TYPE_CHECKING:
    from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport, RepairReport

GC: Final = "gc"
FSCK: Final = "fsck"
UNREFERENCED: Final = ("grace", "age", "packs in use")
"""The reasons for which gc frees unheld objects only later."""


def recorded_gc(
    engine: Engine,
    options: GcOptions | None = None,
    *,
    dry_run: bool = False,
    progress: GcProgress | None = None,
    executor: Executor | None = None,
) -> GcReport:
    """As `run_gc`; notes also that it was refused or failed. A dry run is not noted."""
    if dry_run:
        return run_gc(engine, options, dry_run=True, progress=progress, executor=executor)
    began_ns = engine.clock()
    try:
        report = run_gc(engine, options, progress=progress, executor=executor)
    except (BackendUnavailableError, BrokenLogError, UnsafeBackendError):
        raise
    except StoreError as exc:
        outcome = REFUSED if isinstance(exc, GcRefusedError) else FAILED
        _record(engine, run=GC, began_ns=began_ns, outcome=outcome, counts={}, message=redacted(str(exc)))
        raise
    return replace(report, not_recorded=_record(engine, run=GC, began_ns=began_ns, outcome=OK, counts=_gc_counts(report)))


def recorded_fsck(engine: Engine, options: "FsckOptions | None" = None, *, executor: Executor | None = None) -> "FsckReport":
    """As `run_fsck`; a check that does not end is not noted."""
    from tensorstore_ck.maintenance.fsck import run_fsck  # noqa: PLC0415 - gc needs nothing of fsck

    began_ns = engine.clock()
    report = run_fsck(engine, options, executor=executor)
    return replace(report, not_recorded=_record_fsck(engine, began_ns, report, _fsck_counts(report, report)))


def recorded_repair(engine: Engine, options: "FsckOptions | None" = None, *, other: Engine | None = None) -> "RepairReport":
    """As `run_repair`; records a run of fsck with the findings that remain."""
    from tensorstore_ck.maintenance.fsck import run_repair  # noqa: PLC0415

    began_ns = engine.clock()
    report = run_repair(engine, options, other=other)
    repaired = {"repaired": len(report.mended), "marked": len(report.marked), "unmarked": len(report.unmarked)}
    not_recorded = _record_fsck(engine, began_ns, report.after, repaired | _fsck_counts(report.after, report.before))
    return replace(report, after=replace(report.after, not_recorded=not_recorded))


def _record_fsck(engine: Engine, began_ns: int, report: "FsckReport", counts: Mapping[str, int]) -> str:
    for finding in report.findings:
        is_of_log = finding.kind == BrokenLogError.kind or finding.object.startswith(f"{engine.config.log}/")
        if finding.severity == "error" and (is_of_log or finding.object == CONFIG_NAME):
            return f"{finding.object} is unreadable or damaged, and nothing is appended to a damaged log"
    return _record(engine, run=FSCK, began_ns=began_ns, outcome=OK if report.ok else FINDINGS, counts=counts)


def _record(engine: Engine, run: str, began_ns: int, outcome: str, counts: Mapping[str, int], *, message: str = "") -> str:
    """Appends the entry; returns why it did not, or nothing."""
    op = Op.report(run, outcome, max(0, engine.clock() - began_ns), counts, message[:MAX_MESSAGE_CHARS])
    try:
        engine.require_writable("an entry of the log")
        engine.log.sync()
        if engine.log.is_changed:
            return "the log is not what this user has seen of it: see `tsck accept-log`"
        appended = engine.log.append(lambda view: [op] if (head := view.head()) is not None and head.n else [])
    except StoreError as exc:
        return str(exc)
    return "" if appended.ops else "the log is empty"


def _gc_counts(report: GcReport) -> dict[str, int]:
    stored_bytes = report.total_bytes - report.deleted_bytes + report.written_bytes
    unreferenced_bytes = sum(later.bytes for later in report.later if later.why in UNREFERENCED)
    undo_bytes = sum(later.bytes for later in report.later if later.why == "undo window")
    return {
        "snapshots": len(report.snapshots),
        **{f"deleted_{folder}": report.deleted.get(kind, 0) for kind, folder in FOLDERS.items()},
        "deleted_bytes": report.deleted_bytes,
        "written_bytes": report.written_bytes,
        "rewritten_packs": len(report.rewritten),
        "waiting": report.waiting,
        "young": report.young,
        "stored_bytes": stored_bytes,
        "live_bytes": max(0, stored_bytes - unreferenced_bytes - undo_bytes),
        "unreferenced_bytes": unreferenced_bytes,
        "undo_bytes": undo_bytes,
    }


def _fsck_counts(report: "FsckReport", looked_at: "FsckReport") -> dict[str, int]:
    """`report` lists the damage that is left; `looked_at` what was read to find it."""
    errors = sum(finding.severity == "error" for finding in report.findings)
    counts = {
        "errors": errors,
        "notices": len(report.findings) - errors,
        "repairable": sum(finding.repairable and finding.severity == "error" for finding in report.findings),
        "log_entries": report.log_entries,
        "snapshots": report.snapshots,
        "packs": report.packs,
        "blocks": report.blocks,
        "read_bytes": looked_at.data_bytes,
        "read_packs": looked_at.read_packs,
        "never_verified_packs": looked_at.never_verified,
    }
    if looked_at.oldest_verified_ns is not None:
        counts["oldest_verified_ns"] = looked_at.oldest_verified_ns
    kinds = Counter(f"{finding.severity}.{finding.kind}" for finding in report.findings)
    return counts | dict(islice(kinds.most_common(), MAX_COUNTS // 2))
