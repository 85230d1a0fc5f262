"""The process groups that one store handle has used: this rank's place in each, and small messages between their ranks."""

import socket
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.events import Event
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS, Group, open_group
from tensorstore_ck.session.group.channel import StoreRunner
from tensorstore_ck.session.group.host_shared_reads import host_key
from tensorstore_ck.session.group.matching_arguments import require_same
from tensorstore_ck.session.group.save_plan import Memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_SECONDS = 600.0


def process_group(group: "ProcessGroup | DeviceMesh | None") -> "ProcessGroup | None":
    """The process group that ``group=`` means: itself, or that of a one-dimensional mesh.

    Raises:
        InvalidOptionError: not a process group that this process is in; or a mesh of several dims, or one that this rank is not in.
    """
    if group is None:
        return None
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - a caller with a group has loaded it

    given: Any = group
    if not isinstance(given, DeviceMesh):
        if callable(getattr(given, "get_group_store", None)):
            return given  # type: ignore[no-any-return]
        raise InvalidOptionError(
            f"group= must be a process group that this rank is in, or a one-dimensional DeviceMesh, not {given!r}: "
            "torch.distributed.new_group gives no group to ranks that are not in it, and they must not make this call",
            object_id="group",
        )
    if given.ndim != 1:
        raise InvalidOptionError(
            f"group= is a DeviceMesh of {given.ndim} dims {given.mesh_dim_names or ''}: pass the group of all ranks that hold the state, "
            "such as torch.distributed.group.WORLD; or one dim of the mesh, mesh[name], where its ranks hold all of it",
            object_id="group",
        )
    if given.get_coordinate() is None:
        raise InvalidOptionError("group= is a DeviceMesh that this rank is not in: only its ranks make this call", object_id="group")
    return given.get_group()


class ProcessGroups:
    """The process groups that one store handle has used."""

    def __init__(self, engine: Engine, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._engine = engine
        self._dead_after_seconds = dead_after_seconds
        self._groups: weakref.WeakKeyDictionary[ProcessGroup, tuple[Group, Memory]] = weakref.WeakKeyDictionary()
        """Each group, with the plans of its saves."""
        self._publishing: weakref.WeakKeyDictionary[ProcessGroup, Group] = weakref.WeakKeyDictionary()
        self._gathered: weakref.WeakKeyDictionary[ProcessGroup, dict[str, list[bytes]]] = weakref.WeakKeyDictionary()

    def all_gather(self, group: "ProcessGroup", title: str, value: Callable[[], bytes], *, timeout_seconds: float) -> list[bytes]:
        """Exchanges values of a few bytes between all ranks of a group, under `title`.

        All ranks meet at each call, even if this one knows the values from an earlier call: another rank may have missed its end.
        """
        known = self._gathered.setdefault(group, {})

        def compare(proposals: list[Body]) -> Body:
            are_known = all(take(proposal, "known", bool) for proposal in proposals)
            return {"values": None if are_known else [take(proposal, "value", bytes) for proposal in proposals]}

        def execute(go: Body) -> None:
            if go["values"] is not None:
                known[title] = take(go, "values", list)

        propose = lambda: {"known": title in known, "value": value()}  # noqa: E731
        self.of(group)[0].meet(title, propose, compare, execute, timeout=timeout_seconds)
        return known[title]

    def broadcast(self, group: "ProcessGroup", title: str, value: Callable[[], bytes], *, timeout_seconds: float) -> bytes:
        """Rank 0's value of a few bytes, on all ranks. Only rank 0 calls `value`."""
        own = self.of(group)[0]
        values: list[bytes] = []

        def compare(proposals: list[Body]) -> Body:
            require_same(proposals, ("title",), own.in_job)
            return {"value": value()}

        own.meet(title, lambda: {"title": title}, compare, lambda go: values.append(take(go, "value", bytes)), timeout=timeout_seconds)
        return values[0]

    def runner(self, group: "ProcessGroup") -> StoreRunner:
        """The runner of calls on the group's key-value store."""
        return self.of(group)[0].run

    def local_ranks(self, group: "ProcessGroup", *, timeout_seconds: float) -> int:
        """The number of ranks of a group on this host, including this one."""
        hosts = self.all_gather(
            group, "the count of the ranks of each host (asynchronous saves begin with it)", host_key, timeout_seconds=timeout_seconds
        )
        return hosts.count(hosts[group.rank()])

    def close(self) -> None:
        """Ends the threads that talk to the groups' stores; a later save or restore starts new ones."""
        for group in (*(own for own, _ in self._groups.values()), *self._publishing.values()):
            group.close()
        for known in (self._groups, self._publishing, self._gathered):
            known.clear()

    def _report_dead(self, own: int, rank: int, host: str, silent_seconds: float) -> None:
        fields: dict[str, int | float | str] = {"dead_rank": rank, "host": host, "silent_seconds": silent_seconds}
        self._engine.observers.emit(Event("rank_dead", "", "", None, own, time.time_ns(), fields))

    def publishing(self, group: "ProcessGroup") -> Group:
        """A second group of the same ranks, for rounds of their publishing threads, in their own order. After a round of `of`."""
        if group not in self._publishing:
            self._publishing[group] = open_group(group, f"{self._engine.config.uuid}/publish", first=self.of(group)[0])
        return self._publishing[group]

    def following(self, group: "ProcessGroup", ref: str, *, timeout_seconds: float) -> tuple[Group, Group]:
        """Two groups of the same ranks for one more feed: its polls and its swaps have an order of their own, and may run in two threads.

        Raises:
            InvalidOptionError: the ranks follow different branches.
            SnapshotAbortedError: a rank did not come.
        """
        own = self.of(group)[0]
        names: list[str] = []

        def compare(proposals: list[Body]) -> Body:
            require_same(proposals, ("ref",), own.in_job)
            return {"name": new_ulid().hex()}

        title = f"the feed of {ref!r}"
        own.meet(title, lambda: {"ref": ref}, compare, lambda go: names.append(take(go, "name", str)), timeout=timeout_seconds)
        scope = f"{self._engine.config.uuid}/follow/{names[0]}"
        return open_group(group, f"{scope}/polls", first=own), open_group(group, f"{scope}/swaps", first=own)

    def of(self, group: "ProcessGroup") -> tuple[Group, Memory]:
        """This rank's `Group` of a process group, and the plans of its saves."""
        if group not in self._groups:
            report = partial(self._report_dead, group.rank())
            place = f"{self._engine.backend.url} on {socket.gethostname()}"
            own = open_group(
                group,
                self._engine.config.uuid,
                dead_after=self._dead_after_seconds,
                place=place,
                staging=_staging(self._engine),
                on_dead=report,
            )
            self._groups[group] = own, {}
        return self._groups[group]


def _staging(engine: Engine) -> str:
    """How this process stages, as far as all ranks must do it in the same way: the arguments of `tensorstore_ck.open`, in words."""
    if engine.tier is None:
        return "without staging="
    return "with staging= and replicate_to_peers=" if engine.tier.options.replicate_to_peers else "with staging="
