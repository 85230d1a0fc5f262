"""Imports the checkpoints of one run as a history: one snapshot for each, in the order of their training steps.

Checks everything that needs no tensor bytes before the first snapshot. An import that is interrupted and run again skips the steps on the
branch, after comparing the hashes of their files with the snapshots.
"""

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import AmbiguousAddressError, InvalidOptionError, MismatchError, NotFoundError, SnapshotAbortedError
from tensorstore_ck.format.record import check_metrics, encode_metadata
from tensorstore_ck.integrations.importing.compare_snapshot import is_in_snapshot
from tensorstore_ck.integrations.importing.crc_check import with_crc_check
from tensorstore_ck.integrations.importing.import_checkpoint import CheckpointContents, Opened, opened
from tensorstore_ck.integrations.importing.lookup import metric_at, step_at
from tensorstore_ck.integrations.importing.numbers_in_names import steps_of_names
from tensorstore_ck.log import RefTable, validate_ref_name
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import log_of, put_captured, require_opened

KEY: Final = "key:"
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class PlannedImport:
    """A checkpoint of a history, and the data of its future snapshot."""

    path: str
    step: int
    metrics: Mapping[str, float]
    contents: CheckpointContents


@dataclass(frozen=True, slots=True)
class ImportedStep:
    """A checkpoint of a history, and its snapshot."""

    path: str
    snapshot: Snapshot
    was_there: bool
    """Whether it was on the branch before, with the same content."""


@short_errors
@renamed_argument(leave_out="exclude")
def import_history(
    store: Store,
    paths: Paths,
    *,
    ref: str,
    step_from: str,
    metrics: Mapping[str, str | float] | None = None,
    metadata: Mapping[str, object] | None = None,
    exclude: Sequence[str] = (),
    planned: Callable[[Sequence[PlannedImport]], None] = lambda plan: None,
    imported: Callable[[ImportedStep], None] = lambda step: None,
) -> tuple[ImportedStep, ...]:
    """Imports several checkpoints of one run as the next snapshots on a branch, in the order of their steps.

    It can be interrupted and run again at any time: it skips a step that is already on the branch if the file has the hashes of the
    snapshot, and adds metrics that the snapshot lacks. Memory is bounded as in `import_checkpoint`.

    Args:
        store: The store.
        paths: A glob such as ``old/*.pt``, a path, or several of both; each matching file or folder is one checkpoint.
        ref: The branch; created if it does not exist.
        step_from: The source of a checkpoint's step: ``name`` (``step_100.pt``), or ``key:PATH`` for the value at a path inside the
            checkpoint, such as ``key:trainer.global_step``.
        metrics: Name -> ``key:PATH``, or a number for all.
        metadata: For all snapshots.
        exclude: See `import_checkpoint`.
        planned: Called once, with the plan, before anything is stored.
        imported: Called with each step, when it is published or found.

    Raises:
        InvalidOptionError: an argument is invalid, or a step comes before the branch's head; the message names it.
        NotFoundError: nothing matches a path, or a checkpoint lacks a key; the message names the file.
        AmbiguousAddressError: two checkpoints have the same step; the message names both.
        MismatchError: a step is already on the branch, with another content.
        StoreError: see `import_checkpoint`. The files before the failed one are published, and the same call continues after them.
    """
    require_opened(store)
    validate_ref_name(ref)
    encode_metadata(metadata)
    plan = inspect_history(paths, step_from=step_from, metrics=metrics, exclude=exclude)
    _require_order(log_of(store).newest_view(), ref, plan)
    planned(plan)
    done = []
    for item in plan:
        with opened(item.path, exclude) as checkpoint:
            _require_unchanged(item, checkpoint, step_from, metrics or {})
            step = _import_one(store, planned=item, checkpoint=checkpoint, ref=ref, metadata=metadata or {})
        imported(step)
        done.append(step)
    return tuple(done)


@short_errors
@renamed_argument(leave_out="exclude")
def inspect_history(
    paths: Paths, *, step_from: str, metrics: Mapping[str, str | float] | None = None, exclude: Sequence[str] = ()
) -> tuple[PlannedImport, ...]:
    """Returns what `import_history` would import, in order, with the same errors; reads no tensors."""
    _check_arguments(step_from, metrics)
    origins = _expanded(paths)
    step_of = _steps_of_names(origins) if step_from == "name" else {}
    plan: dict[int, PlannedImport] = {}
    for origin in origins:
        with opened(origin, exclude) as checkpoint:
            step = step_of[origin] if step_of else step_at(checkpoint.state, step_from.removeprefix(KEY), origin)
            planned = PlannedImport(origin, step, _metrics(checkpoint, metrics or {}, origin), checkpoint.contents)
        other = plan.setdefault(step, planned)
        if other is not planned:
            raise AmbiguousAddressError(
                f"{other.path} and {origin} both have step {step} (--step-from {step_from}): give only one of them", object_id=origin
            )
    return tuple(plan[step] for step in sorted(plan))


def _import_one(store: Store, planned: PlannedImport, checkpoint: Opened, ref: str, metadata: Mapping[str, object]) -> ImportedStep:
    view = log_of(store).newest_view()
    captured = with_crc_check(checkpoint.captured, checkpoint.files.expected)
    ulid = view.newest_with_step(ref, planned.step)
    there = view.snapshot(ulid) if ulid is not None else None
    if there is None:
        branch = view.branch(ref)
        put = partial(
            put_captured, store, captured, ref=ref, step=planned.step, metrics=planned.metrics, made_ns=checkpoint.files.newest_ns
        )
        head = branch.root.hex() if branch else None
        snapshot = put(metadata={**checkpoint.contents.metadata, **metadata}, expect=head, parent=head)
        return ImportedStep(planned.path, snapshot, was_there=False)
    if not is_in_snapshot(store, captured, there):
        raise MismatchError(
            f"{ref}@{planned.step} is already on the branch, and differs from {planned.path}: it came from elsewhere, the file has "
            "changed, or other values were excluded. Import to another ref, or omit this file",
            object_id=planned.path,
        )
    missing = {name: value for name, value in planned.metrics.items() if name not in there.metrics}
    root = there.root.hex()
    return ImportedStep(planned.path, store.annotate(root, missing) if missing else Snapshot.from_info(there), was_there=True)


# --- arguments -------------------------------------------------------------------------------------------------------


def _check_arguments(step_from: object, metrics: object) -> None:
    is_key = isinstance(step_from, str) and step_from.startswith(KEY) and step_from != KEY
    if step_from != "name" and not is_key:
        raise InvalidOptionError(
            f"step_from must be 'name' or 'key:PATH', such as 'key:global_step', not {step_from!r}", object_id="step_from"
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidOptionError(f"metrics must be a dict of names to 'key:PATH' or numbers, not {metrics!r}", object_id="metrics")
    for name, source in (metrics or {}).items():
        if isinstance(source, str) and (not source.startswith(KEY) or source == KEY):
            raise InvalidOptionError(f"metrics[{name!r}] must be 'key:PATH' or a number, not {source!r}", object_id="metrics")
    check_metrics({name: 0.0 if isinstance(source, str) else source for name, source in (metrics or {}).items()})


def _expanded(paths: Paths) -> list[str]:
    """The absolute path of each checkpoint, each once."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if isinstance(paths, Iterable) else [paths]
    if not all(isinstance(path, str | os.PathLike) for path in several):
        raise InvalidOptionError(f"paths must be a glob, a path, or a list of them, not {paths!r}", object_id="paths")
    if not several:
        raise InvalidOptionError("paths is empty: give a glob such as 'old/*.pt', or paths of checkpoints", object_id="paths")
    origins: dict[str, None] = {}
    for path in [local_path(path, "what an import reads") for path in several]:
        fitting = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
        if not fitting:
            what = "nothing matches" if glob.has_magic(path) else "there is no file"
            raise NotFoundError(f"{what} {path}: give a glob such as 'old/*.pt', or paths of checkpoints", object_id=path)
        origins.update(dict.fromkeys(map(os.path.abspath, fitting)))
    return list(origins)


def _steps_of_names(origins: Sequence[str]) -> dict[str, int]:
    names = [os.path.basename(origin) for origin in origins]
    by_name = steps_of_names(names)
    steps: dict[str, int] = {}
    for origin, name in zip(origins, names, strict=True):
        step = by_name[name]
        if step is None:
            raise InvalidOptionError(
                f"the name of {origin} does not contain its step, as step_100.pt does: omit it from the paths, or take the step from "
                "inside the checkpoints with --step-from key:PATH",
                object_id=origin,
            )
        steps[origin] = step
    return steps


def _metrics(checkpoint: Opened, metrics: Mapping[str, str | float], origin: str) -> dict[str, float]:
    return {
        name: metric_at(checkpoint.state, source.removeprefix(KEY), origin) if isinstance(source, str) else float(source)
        for name, source in metrics.items()
    }


# --- checks -----------------------------------------------------------------------------------------------------------


def _require_order(view: RefTable, ref: str, plan: Sequence[PlannedImport]) -> None:
    """Rejects a step that would come after a later one."""
    branch = view.branch(ref)
    if branch is None or branch.step is None:
        return
    late = next((planned for planned in plan if planned.step < branch.step and view.newest_with_step(ref, planned.step) is None), None)
    if late is not None:
        raise InvalidOptionError(
            f"{late.path} has step {late.step}, and {ref} is already at step {branch.step}: a history is imported in order. "
            "Use another ref, or omit the file",
            object_id=late.path,
        )


def _require_unchanged(planned: PlannedImport, checkpoint: Opened, step_from: str, metrics: Mapping[str, str | float]) -> None:
    step = planned.step if step_from == "name" else step_at(checkpoint.state, step_from.removeprefix(KEY), planned.path)
    now = _metrics(checkpoint, metrics, planned.path)
    if step != planned.step or repr(now) != repr(planned.metrics):  # as text: NaN is equal to itself
        raise SnapshotAbortedError(
            f"{planned.path} changed during the import: wait until its writer is done, and import again", object_id=planned.path
        )
