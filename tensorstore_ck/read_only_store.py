"""What `tensorstore_ck.open(..., read_only=True)` gives, as a type: all of a `Store` that changes nothing in it."""
# ruff: noqa: D102 - `Store` documents the methods

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log.snapshot import PinnedSnapshot, Snapshot, SnapshotDetails
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, ProcessGroups
from tensorstore_ck.session.ref_fence import RefFence
from tensorstore_ck.session.restoring import Restoring

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.gc import GcOptions, GcReport
    from tensorstore_ck.gc.recode import RecodeReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.tiering import TierReport
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.log.retention import Policy
    from tensorstore_ck.maintenance.advise import Advice
    from tensorstore_ck.maintenance.apply_policies import RetentionReport
    from tensorstore_ck.maintenance.describe import SnapshotDiff
    from tensorstore_ck.maintenance.forget import Forgotten
    from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport
    from tensorstore_ck.session.manage import Progress
    from tensorstore_ck.state import LazySnapshot, LoadReport

T = TypeVar("T")


class ReadOnlyStore(Protocol):
    """An open store to look at. At run time it is a `Store` that refuses all other methods with a `PermissionDeniedError`."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None: ...
    @property
    def url(self) -> str: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def seen(self) -> RefFence: ...
    @property
    def groups(self) -> ProcessGroups: ...

    # --- restore ------------------------------------------------------------------------------------------------------

    def checkout(
        self,
        address: str,
        *,
        into: object = None,
        select: Sequence[str] | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        device: "str | torch.device" = "cpu",
        report: "LoadReport | None" = None,
        allow_bad: bool = False,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any: ...
    def restoring(
        self,
        address: str,
        read: Callable[[Restoring], T],
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        allow_bad: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> tuple[T, Snapshot]: ...
    def rank_state(
        self,
        address: str,
        rank: int | None = None,
        *,
        rank_state_map: Callable[[int, int], int | Iterable[int]] | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any: ...
    def streams(
        self, address: str, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Streams: ...
    def retrying(self, call: Callable[[], T], *, attempts: int = 3, pause_seconds: float = 1.0) -> T: ...
    def open_snapshot(self, address: str) -> "AbstractContextManager[LazySnapshot]": ...
    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None: ...

    # --- look ---------------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot: ...
    def log(self, ref: str | None = None, *, limit: int | None = None) -> list[Snapshot]: ...
    def show(self, address: str) -> SnapshotDetails: ...
    def diff(self, old: str, new: str) -> "SnapshotDiff": ...
    def usage(self, *, per_snapshot: bool = False) -> "Usage": ...
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
    ) -> "Advice": ...
    def fsck(
        self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: "Progress | None" = None
    ) -> "FsckReport": ...
    def branches(self) -> dict[str, Snapshot]: ...
    def tags(self) -> dict[str, Snapshot]: ...
    def pins(self) -> tuple[PinnedSnapshot, ...]: ...
    def policies(self) -> "dict[str, Policy]": ...
    def kept_by(self, ref: str) -> dict[str, tuple[str, ...]]: ...
    def forgotten(self) -> "tuple[Forgotten, ...]": ...
    def watch(self, ref: str, *, pin_for: None, **options: Any) -> Generator[Snapshot]: ...

    # --- what would be done -------------------------------------------------------------------------------------------

    def retain(self, *refs: str, dry_run: Literal[True], rules: Mapping[str, object] | None = None) -> "RetentionReport": ...
    def gc(self, options: "GcOptions | None" = None, *, dry_run: Literal[True], progress: "GcProgress | None" = None) -> "GcReport": ...
    def recode(
        self,
        *addresses: str,
        codec: str = "small",
        older_than: "str | float | None" = None,
        dry_run: Literal[True],
        max_bytes_per_second: float | None = None,
        progress: "GcProgress | None" = None,
    ) -> "RecodeReport": ...
    def tier(
        self, *, dry_run: Literal[True], max_bytes_per_second: float | None = None, progress: "GcProgress | None" = None
    ) -> "TierReport": ...
