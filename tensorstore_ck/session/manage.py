"""What users see of a store, and how it is checked: histories, contents, sizes, damage.

What looks at a store is loaded only by the methods that look, so that a command starts fast. Knows no torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.snapshot import Snapshot, SnapshotDetails
from tensorstore_ck.session.keeping import KeepingStore, changes

if TYPE_CHECKING:
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.maintenance.advise import Advice
    from tensorstore_ck.maintenance.describe import SnapshotDiff
    from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport, RepairReport

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class ManagedStore(KeepingStore):
    """An open store, without tensors: the base of `Store`."""

    def resolve(self, address: str) -> Snapshot:
        """The snapshot at an address."""
        return Snapshot.from_info(self._resolve(address).info)

    def log(self, ref: str | None = None, *, limit: int | None = None) -> list[Snapshot]:
        """The history of a branch (a tag: its one snapshot), newest first; of all branches together without `ref`."""
        view = self._synced()
        if ref is None:
            infos = [info for name in view.branches() for info in view.history(name, limit=limit)]
            infos = sorted({info.ulid: info for info in infos}.values(), key=lambda info: -info.n)
        elif view.branch(ref) is not None:
            infos = list(view.history(ref, limit=limit))
        else:
            infos = [resolve(view, ref).info]
        return [Snapshot.from_info(info) for info in infos[:limit]]

    def show(self, address: str) -> SnapshotDetails:
        """Metadata, tensors and values of a snapshot."""
        from tensorstore_ck.maintenance.describe import describe  # noqa: PLC0415

        return describe(self._engine, self._resolve(address).info)

    def diff(self, old: str, new: str) -> "SnapshotDiff":
        """Which tensors and values differ between two snapshots, and how many of their bytes.

        Reads no tensor data, but where other ranks or placements cut a tensor at other borders.
        """
        from tensorstore_ck.maintenance.describe import diff_snapshots  # noqa: PLC0415

        return diff_snapshots(self._engine, self._resolve(old).info, self._resolve(new).info)

    def usage(self, *, per_snapshot: bool = False) -> "Usage":
        """Logical, unique, stored, shared and exclusive bytes, per ref, job and pack, and in all; reads no tensor data.

        Args:
            per_snapshot: Also what each snapshot takes, and what forgetting it would free.
        """
        from tensorstore_ck.gc.usage import measure_usage  # noqa: PLC0415

        self._engine.log.sync()
        return measure_usage(self._engine.of_store(), per_snapshot=per_snapshot)

    def advise(
        self,
        ref: str,
        *,
        stall: float | None = None,
        lag: float | None = None,
        restart: float | None = None,
        mtbf: float | None = None,
        bytes_per_second: float | None = None,
        bytes_per_day: float | None = None,
    ) -> "Advice":
        """How often the job of a branch should save, so that it loses least time: by its history, and what was measured of it.

        Args:
            ref: The branch.
            stall: Seconds that a save holds the training up for; None: as `Checkpointer` measured and noted it with the newest snapshot.
            lag: From then until the snapshot is published; None: likewise, or none.
            restart: From a failure until training goes on; None: likewise, of the restore alone, or five minutes.
            mtbf: Mean time between failures; None: by how often the run was resumed, or else four hours.
            bytes_per_second: What the store can take: then it is told whether that is enough.
            bytes_per_day: What the store may grow by.
        """
        from tensorstore_ck.maintenance.advise import advise  # noqa: PLC0415

        self._engine.log.sync()
        return advise(
            self._engine,
            ref,
            stall=stall,
            lag=lag,
            restart=restart,
            mtbf=mtbf,
            bytes_per_second=bytes_per_second,
            bytes_per_day=bytes_per_day,
        )

    def fsck(self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: Progress | None = None) -> "FsckReport":
        """Checks the whole store's structure, and as much data as asked for: `read_data`, or more in `options`. Changes nothing."""
        from tensorstore_ck.maintenance.fsck import run_fsck  # noqa: PLC0415

        return run_fsck(self._engine.of_store(), options, read_data=read_data, progress=progress)

    @changes
    def repair(self, *, read_data: bool = False, other: "ManagedStore | None" = None) -> "RepairReport":
        """Mends what `fsck` finds: makes anew what is derived, and damaged objects from other copies, here or in another store.

        Snapshots that stay damaged are marked, so that `checkout` refuses them. Nothing is deleted.
        """
        from tensorstore_ck.maintenance.fsck import FsckOptions, run_repair  # noqa: PLC0415

        return run_repair(self._engine.of_store(), FsckOptions(read_data), other=other._engine.of_store() if other is not None else None)
