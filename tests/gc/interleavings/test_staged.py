"""Staged saves during gc, forget and each other: small cases completely, with every crash.

The staging disk is a process's own, so it is no step that others could notice; what lies on it survives. The upload is plain: an object
after the other.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.request import ANY, SaveRequest
from tensorstore_ck.engine.write.write_and_commit import write_and_commit
from tensorstore_ck.errors import ConflictError, NotFoundError, SnapshotAbortedError, SnapshotExpiredError
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.staged_chain import StagedChain
from tensorstore_ck.session.staging.staged_entries import announce, publish_staged
from tensorstore_ck.session.staging.staging_destination import StagingDestination
from tests.gc.interleavings.actor import Actor, Process
from tests.gc.interleavings.scenes import FAILED, Scene, captured, collector, user
from tests.gc.interleavings.schedule import FAULTS, explore

pytestmark = [pytest.mark.slow, pytest.mark.race]

GONE: Final = (*FAILED, SnapshotExpiredError, NotFoundError, ConflictError, SnapshotAbortedError)


class Disk:
    """As much of a staging folder as the first step needs, in memory."""

    def __init__(self) -> None:
        self.unsent = MemoryBackend()
        self.manifests: dict[str, bytes] = {}

    def write_manifest(self, key: str, data: bytes) -> None:
        self.manifests[key] = data

    def delete_manifest(self, key: str) -> None:
        self.manifests.pop(key, None)


def stage(engine: Engine, disk: Disk, ref: str, labels: str) -> Manifest:
    """The first step of a save."""
    words = labels.split()

    tier: Any = SimpleNamespace(folder=disk, uploader=SimpleNamespace(drop=disk.unsent.delete))
    with StagingDestination(engine, tier, StagedChain(), engine.new_id()) as destination:
        view = engine.log.newest_view()
        branch = view.branch(ref)
        parent = branch.root if branch else None
        request = SaveRequest(ref, None, parent, ANY, encode_metadata({"labels": words}), {}, nearest=parent)
        write_and_commit(destination, captured(words), request, SaveMeter(), view)
    assert destination.manifest is not None
    return destination.manifest


def finish(engine: Engine, disk: Disk, manifest: Manifest) -> SnapshotRow:
    """The second step, from what lies on the disk."""
    assert manifest.lead is not None
    announce(engine, manifest.lead, manifest.txn, manifest.ref)
    upload(engine, disk, manifest.names)
    publish_staged(engine, manifest.lead, manifest.txn, engine.new_id(), manifest.ref)
    info = engine.log.view().snapshot(manifest.txn)
    assert info is not None
    return info


def upload(engine: Engine, disk: Disk, names: Iterable[str]) -> None:
    for name in names:
        engine.backend.replace(name, disk.unsent.get(name, max_bytes=1 << 20))


def stager(name: str, ref: str, labels: str, table: MemoryTable, may_raise: tuple[type[BaseException], ...] = GONE) -> Actor:
    """Both steps, one after the other."""

    def run(process: Process) -> SnapshotRow:
        engine, disk = process.engine(), Disk()
        return finish(engine, disk, stage(engine, disk, ref, labels))

    return Actor(name, run, table, may_raise)


def resumer(name: str, disk: Disk, manifest: Manifest, table: MemoryTable) -> Actor:
    """The second step of what another process left."""
    return Actor(name, lambda process: finish(process.engine(), disk, manifest), table, GONE)


def shared() -> tuple[Scene, MemoryTable]:
    """A snapshot whose blocks a staged save shares, and that is not the head of its branch."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "z", step=1)
    return scene, scene.host()


def dying() -> tuple[Scene, MemoryTable]:
    scene, _ = shared()
    scene.forget("job@0")
    return scene, scene.host()


def test_gc_during_a_staged_save() -> None:
    """What it shares is pinned before it is acknowledged; where that comes too late, it is written again."""
    scene, host = dying()
    case = scene.case(collector("G", table=host), stager("A", "job", "x z q", host))
    assert explore(case._replace(max_switches=3)).states > 1000


def test_gc_and_faults_during_a_staged_save() -> None:
    scene, host = dying()
    case = scene.case(collector("G", table=host), stager("A", "job", "x z q", host), faults=FAULTS)
    assert explore(case._replace(max_switches=1)).states > 500


def test_two_processes_go_on_with_one_staged_save() -> None:
    """It is published once, whichever process does it."""
    scene, _ = shared()
    disk = Disk()
    manifest = stage(scene.engine, disk, "job", "z q")
    host = scene.host()
    case = scene.case(resumer("A", disk, manifest, host), resumer("B", disk, manifest, host))
    assert explore(case).states > 100


def test_gc_while_something_is_left_staged() -> None:
    """The head that it shares with is forgotten with its branch, and freed if nothing pins it."""
    scene, _ = shared()
    disk = Disk()
    manifest = stage(scene.engine, disk, "job", "z q")
    scene.forget("job")
    scene.purge()
    host = scene.host()
    case = scene.case(collector("G", table=host, settle=True), resumer("A", disk, manifest, host))
    assert explore(case).states > 100


def test_a_staged_save_during_one_that_is_not() -> None:
    scene, host = dying()
    other = user("B", lambda store: store.branch("again", "job@1"), table=host, may_raise=GONE)
    case = scene.case(collector("G", table=host, settle=True), stager("A", "job", "x z q", host), other)
    assert explore(case._replace(max_switches=2)).states > 1000
