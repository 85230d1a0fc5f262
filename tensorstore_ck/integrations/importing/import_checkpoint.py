"""Imports a checkpoint as one save: all of it becomes visible, or nothing."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.publish import AnyHead
from tensorstore_ck.format.record import NOTE
from tensorstore_ck.integrations.importing.crc_check import watched
from tensorstore_ck.integrations.importing.detect_format import find_state
from tensorstore_ck.integrations.importing.mapped_files import Files
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.resolve_placeholders import settle
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.ref_fence import LAST_SEEN, LastSeen
from tensorstore_ck.state import capture
from tensorstore_ck.store import Store


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What a checkpoint holds, and how it was imported."""

    path: str
    format: str
    tensors: int
    tensor_bytes: int
    values: int
    step: int | None
    """The step that the checkpoint names."""
    metadata: Mapping[str, object]
    """What it says about itself."""
    converted: Mapping[str, int]
    """A description of objects that are stored in another form -> how many."""
    left_out: tuple[str, ...]
    """Paths that were excluded."""
    skipped: Mapping[str, str]
    """Other files in the folder -> why they are not part of it."""


class Imported(NamedTuple):
    """What an import did."""

    snapshot: Snapshot
    contents: CheckpointContents


def import_checkpoint(
    store: Store,
    path: str | os.PathLike[str],
    *,
    ref: str,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, object] | None = None,
    leave_out: Sequence[str] = (),
    as_one: bool = False,
    expect: str | Snapshot | AnyHead | LastSeen | None = LAST_SEEN,
    parent: str | Snapshot | LastSeen | None = LAST_SEEN,
    started: Callable[[CheckpointContents], None] = lambda contents: None,
) -> Imported:
    """Saves the checkpoint of another library as the next snapshot on a branch: the tree that its own reader returns.

    Files are mapped, never loaded as a whole, and no code in them is run: names in their pickles are looked up in a fixed list, and others
    are rejected with their path.

    Args:
        store: The store.
        path: A file of torch.save, Lightning or safetensors; an index or folder of such files; a folder of torch.distributed.checkpoint.
        ref: The branch to save it to; made if it does not exist.
        step: The training step, instead of the one that the checkpoint names.
        metrics: Numbers to rank by.
        metadata: What the run knows, in addition to what the checkpoint says about itself.
        leave_out: Globs over paths such as ``hyper_parameters.*``: what matches is not imported.
        as_one: Import a folder as one snapshot even if its files are checkpoints of several steps.
        expect: As in `Store.put_snapshot`.
        parent: As in `Store.put_snapshot`.
        started: Called with the contents before the bytes are read.

    Raises:
        NotFoundError: there is no checkpoint.
        SeveralStepsError: a folder of checkpoints of several steps: see `import_history`.
        UnsupportedValueError: it has an unknown format, or an object that cannot be stored; the message has the path.
        CorruptObjectError: it is damaged, incomplete, or contradicts itself. Nothing was saved.
        ConflictError: the ref is elsewhere; nothing was saved.
    """
    with opened(path, leave_out, as_one=as_one) as (contents, captured, files, _):
        started(contents)
        snapshot = put_captured(
            store,
            watched(captured, files.expected),
            ref=ref,
            step=contents.step if step is None else step,
            metrics=metrics,
            metadata={**contents.metadata, **(metadata or {})},
            expect=expect,
            parent=parent,
        )
    return Imported(snapshot, contents)


def inspect_checkpoint(path: str | os.PathLike[str], *, leave_out: Sequence[str] = (), as_one: bool = False) -> CheckpointContents:
    """What `import_checkpoint` would import, with the same errors; checksums of tensors aside, which only an import reads."""
    with opened(path, leave_out, as_one=as_one) as found:
        return found.contents


class Opened(NamedTuple):
    """A checkpoint, taken apart."""

    contents: CheckpointContents
    captured: CapturedState
    files: Files
    state: Any


@contextmanager
def opened(path: str | os.PathLike[str], leave_out: Sequence[str] = (), *, as_one: bool = False) -> Iterator[Opened]:
    """A checkpoint, taken apart; its bytes are read when they are stored, which must be before the context ends."""
    origin = os.path.abspath(os.fspath(path))
    with Files() as files:
        known = PickleAllowlist()
        found = find_state(files, origin, known, as_one=as_one)
        settled = settle(found.state, leave_out, found.unknown, origin, known.parsed_bytes)
        captured = capture(settled.state)
        tensors = captured.layout.tensors
        contents = CheckpointContents(
            origin,
            found.format,
            len(tensors),
            sum(spec.size_bytes for spec in tensors),
            len(captured.values),
            found.step,
            {key: value for key, value in found.metadata.items() if key != NOTE},
            dict(known.converted),
            tuple(settled.left_out),
            dict(found.skipped),
        )
        yield Opened(contents, captured, files, settled.state)


def put_captured(store: Store, captured: CapturedState, *, ref: str, step: int | None, **options: Any) -> Snapshot:
    """`Store.put_snapshot` of a captured state; its content and step are the checkpoint's, and are not checked."""
    return store.session.put_captured(captured, ref, step=step, any_step=True, unchanged="ok", verify_capture=0.0, **options)
