"""Imports a checkpoint as one snapshot: all of it becomes visible, or nothing."""

import glob
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.common.units import listed
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.request import LAST_SEEN, AnyHead, LastSeen
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.record import STORE_KEY
from tensorstore_ck.integrations.importing.crc_check import with_crc_check
from tensorstore_ck.integrations.importing.detect_format import find_state
from tensorstore_ck.integrations.importing.malformed import printable
from tensorstore_ck.integrations.importing.mapped_files import Files
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.resolve_placeholders import resolve_placeholders
from tensorstore_ck.integrations.weight_names import read_names
from tensorstore_ck.integrations.weight_names.states import convert_state
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.state import capture
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import put_captured, require_opened


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The contents of a checkpoint, and how they are imported."""

    path: str
    format: str
    tensors: int
    tensor_bytes: int
    values: int
    step: int | None
    """The checkpoint's own step."""
    metadata: Mapping[str, object]
    """The checkpoint's own metadata."""
    converted: Mapping[str, int]
    """Conversions to other types, in words -> how often."""
    left_out: tuple[str, ...]
    """Excluded paths."""
    skipped: Mapping[str, str]
    """Files next to it that are not imported -> why."""
    missing: tuple[str, ...] = ()
    """Files that belong to it, and are not there."""


class Imported(NamedTuple):
    """The result of an import."""

    snapshot: Snapshot
    contents: CheckpointContents


@short_errors
@renamed_argument(leave_out="exclude")
def import_checkpoint(
    store: Store,
    path: str | os.PathLike[str],
    *,
    ref: str,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, object] | None = None,
    exclude: Sequence[str] = (),
    as_one: bool = False,
    partial: bool = False,
    names: str | os.PathLike[str] | None = None,
    expect: str | Snapshot | AnyHead | LastSeen | None = LAST_SEEN,
    parent: str | Snapshot | LastSeen | None = LAST_SEEN,
    started: Callable[[CheckpointContents], None] = lambda contents: None,
) -> Imported:
    """Imports a checkpoint of another library as the next snapshot on a branch, with the tree that the library's reader returns.

    Files are mapped, never loaded as a whole, and nothing in them is run: names in their pickles are looked up in a fixed list, and
    objects with other names are rejected by their path.

    Args:
        store: The store.
        path: A file of torch.save, Lightning or safetensors; an index or folder of such files; a folder of torch.distributed.checkpoint.
        ref: The branch; created if it does not exist.
        step: The training step; by default the checkpoint's own.
        metrics: Numbers to rank by.
        metadata: Added to the checkpoint's own metadata.
        exclude: Globs over paths such as ``hyper_parameters.*``, which are not imported.
        as_one: Import a folder as one snapshot even if its files are checkpoints of several steps.
        partial: Import a checkpoint of which files are missing, such as ``model-00001-of-00003.safetensors`` alone; the snapshot's
            metadata then says so, as ``partial``.
        names: A file of weight names: import the tensors of a model of Hugging Face under the names of Megatron-core, or the other way
            round, and nothing else. See the guide "Import and export".
        expect: See `Store.put_snapshot`.
        parent: See `Store.put_snapshot`.
        started: Called before the tensors are read.

    Raises:
        NotFoundError: there is no checkpoint.
        SeveralStepsError: the folder has checkpoints of several steps: see `import_history`.
        UnsupportedValueError: the format is unknown, or an object cannot be stored; the message has its path.
        CorruptObjectError: the checkpoint is damaged, incomplete or inconsistent. Nothing was stored.
        MismatchError: a glob of `exclude` matches nothing, or `names` does not fit the tensors. Nothing was stored.
        ConflictError: the ref is elsewhere; nothing was stored.
    """
    require_opened(store)
    with opened(path, exclude, as_one=as_one, partial=partial, names=names) as (contents, captured, files, _):
        started(contents)
        snapshot = put_captured(
            store,
            with_crc_check(captured, files.expected),
            ref=ref,
            step=contents.step if step is None else step,
            metrics=metrics,
            metadata={**contents.metadata, **(metadata or {})},
            expect=expect,
            parent=parent,
            made_ns=files.newest_ns,
        )
    return Imported(snapshot, contents)


@short_errors
@renamed_argument(leave_out="exclude")
def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    exclude: Sequence[str] = (),
    as_one: bool = False,
    partial: bool = False,
    names: str | os.PathLike[str] | None = None,
) -> CheckpointContents:
    """Returns what `import_checkpoint` would import, with the same errors, except for checksums of tensors."""
    with opened(path, exclude, as_one=as_one, partial=partial, names=names) as checkpoint:
        return checkpoint.contents


class Opened(NamedTuple):
    """A parsed checkpoint."""

    contents: CheckpointContents
    captured: CapturedState
    files: Files
    state: Any


@contextmanager
def opened(
    path: str | os.PathLike[str],
    exclude: Sequence[str] = (),
    *,
    as_one: bool = False,
    partial: bool = False,
    names: str | os.PathLike[str] | None = None,
) -> Iterator[Opened]:
    """A parsed checkpoint; its tensors are read while they are stored, which must be before the context ends."""
    origin = os.path.abspath(local_path(path, "what an import reads"))
    with Files() as files:
        known = PickleAllowlist()
        found = find_state(files, origin, known, as_one=as_one)
        lacks = f"lacks {listed(list(map(printable, found.missing)))}"
        if found.missing and not partial:
            raise CorruptObjectError(
                f"{origin} is not the whole checkpoint, it {lacks}: get all files and import their folder, or import what is there with "
                "--partial (partial=True)",
                object_id=origin,
            )
        state, left_out = resolve_placeholders(
            found.state, exclude=exclude, unknown=found.unknown, origin=origin, parsed_bytes=known.parsed_bytes, dropped=known.dropped
        )
        if names is not None:
            state, others = convert_state(read_names(names), state)
            left_out = [*left_out, *others]
        try:
            captured = capture(state)
        except UnsupportedValueError as exc:
            pattern = shlex.quote(glob.escape(exc.object_id))
            raise UnsupportedValueError(
                f"{Exception.__str__(exc)}, or exclude it (--exclude {pattern}) from the import of {origin}", object_id=exc.object_id
            ) from exc
        tensors = captured.layout.tensors
        contents = CheckpointContents(
            path=origin,
            format=found.format,
            tensors=len(tensors),
            tensor_bytes=sum(spec.size_bytes for spec in tensors),
            values=len(captured.values),
            step=found.step,
            metadata={key: value for key, value in found.metadata.items() if key != STORE_KEY}
            | ({"partial": lacks} if found.missing else {}),
            converted=dict(known.converted),
            left_out=tuple(left_out),
            skipped=dict(found.skipped),
            missing=found.missing,
        )
        yield Opened(contents, captured, files, state)
