"""`Writer`: what ``dcp.save`` and ``dcp.async_save`` write through.

DCP's coordinator assigns the items; each rank writes its part as in any group save (`DcpSave`), and the coordinator publishes the parts.

What ranks must know of each other is in DCP's plans, since DCP may reuse plans of an earlier save, with another writer. Their layout has
names and forms only: the coordinator adds the values when it has those of all ranks.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.request import SaveRequest, Unchanged, require_checks
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE, turn_of
from tensorstore_ck.engine.write.suspicious_save import SuspiciousSaveWarning
from tensorstore_ck.errors import InvalidOptionError, SnapshotAbortedError
from tensorstore_ck.format.layout import layout_id
from tensorstore_ck.integrations.dcp.dcp_save import Begun, DcpSave, WriterReport, coordinators_request, ranks_request
from tensorstore_ck.integrations.dcp.duplicate_items import DuplicateItems, differences, explain, hash_copies, local_items
from tensorstore_ck.integrations.dcp.flat_layout import build_flat_layout, items_of_plans
from tensorstore_ck.integrations.dcp.plans import Role, Tiny, assign_roles, flat_layout_of, resolve_items, with_tiny
from tensorstore_ck.integrations.dcp.target import CheckpointId, DcpTarget
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group.rank_messages import describe_ranks
from tensorstore_ck.session.save.queued_save import QueuedSave
from tensorstore_ck.state.opaque_item import OpaqueItem
from tensorstore_ck.store import OpenOptions, Store
from tensorstore_ck.store.internals import save_context, save_queue

T = TypeVar("T")


class _Saving(threading.local):
    """The save of one thread: ``dcp.async_save`` runs each in its own, and some users do not wait for the previous one."""

    def __init__(self) -> None:
        self.checkpoint_id: CheckpointId = None
        self.ref = ""
        self.step: int | None = None
        self.rank = 0
        self.turn: int | None = None
        """Selects the duplicate items that are compared; None: all."""
        self.local_plan: SavePlan | None = None
        self.save: DcpSave | None = None
        """Until `finish` on the coordinator."""
        self.queued: QueuedSave | None = None
        """The same, for the save queue."""


@short_errors
class Writer(StorageWriter):
    """A `StorageWriter` over a store: ``dcp.save(state, storage_writer=Writer("./ckpt", ref="runs/gpt"), checkpoint_id="step-1000")``.

    The result is a snapshot like any other: when ``dcp.save`` returns it is durable and published; after a failure nothing is visible.

    If several ranks have a plain tensor or value under one name, DCP saves one rank's copy. If the copies differ, a
    `SuspiciousSaveWarning` names them, their ranks and the saved one before anything is published. A writer's first save compares all;
    later saves compare values, tensors up to 4 KiB, and about one in as many of the others as there are ranks. A broken tie cannot be seen
    here: where torch makes two parameters of an embedding and its head (`parallelize_module` before `fully_shard`), both are saved as they
    are. A `Reader` warns when it loads them into one tensor.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        ref: str | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        unchanged: Unchanged = "warn",
        verify_capture: float = SAMPLE_SHARE,
        **open_options: Unpack[OpenOptions],
    ) -> None:
        """Opens nothing yet.

        Args:
            store: The store's URL (created if missing), or an open `Store`. With a URL, a `Writer` continues from the branch's head at
                its first save; keep one for the whole run, so that a job presumed dead cannot overwrite its successor's work. (With
                `AsyncCheckpointerType.PROCESS` each save continues from the current head.) With a `Store`, the coordinator's store
                fences the saves as `Store.put_snapshot` does.
            ref: The branch; by default taken from each save's ``checkpoint_id``, such as ``"runs/gpt@1000"``.
            step: The training step; by default the number at the end of the ``checkpoint_id``.
            metrics: Numbers to rank by.
            metadata: Anything to note about the run.
            unchanged: See `Store.put_snapshot`.
            verify_capture: See `Store.put_snapshot`.
            open_options: For `tensorstore_ck.open`.
        """
        if not isinstance(store, Store):
            open_options.setdefault("create", True)
        self._target = DcpTarget(store, ref, open_options)
        self._step = step
        self._metrics = metrics
        self._metadata = metadata
        self._checks = require_checks(unchanged, verify_capture)
        self._saving = _Saving()
        self._saves = 0
        self._named: set[str] = set()
        """Names whose different copies were already reported."""
        self.snapshot: Snapshot | None = None
        """The last published snapshot; on the coordinator only."""

    def __getstate__(self) -> dict[str, Any]:
        """For another process."""
        return {name: value for name, value in vars(self).items() if name != "_saving"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _saving=_Saving(), _saves=1)  # DCP's save process gets a copy for each save: never the first

    # --- called by DCP, in this order ---------------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it can be a checkpoint id."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """A new save begins."""
        self._saving.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On every rank.

        Raises:
            InvalidOptionError: DCP uses no collectives, so no rank could publish a common snapshot.
            ConflictError: the ref is not where it must be.
        """
        if not kwargs.get("use_collectives", True):
            raise InvalidOptionError(
                "use_collectives=False would make a checkpoint of each rank instead of a common one: leave it out",
                object_id="use_collectives",
            )
        saving = self._saving
        saving.ref, step = self._target.ref_and_step(saving.checkpoint_id)
        saving.checkpoint_id = saving.save = saving.queued = saving.local_plan = None  # of this save only
        saving.rank = kwargs.get("rank", 0)
        saving.step = step if self._step is None else self._step
        saving.turn = None if not self._saves else self._saves if saving.step is None else turn_of(None, saving.step)
        self._saves += 1
        if is_coordinator:  # the others open the store when it is there
            self._begin(self._coordinators_request)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On every rank.

        Raises:
            UnsupportedValueError: a tensor cannot be stored. Here, since a plan that fails later leaves DCP's plan cache half filled.
        """
        build_flat_layout(*items_of_plans([plan]), in_boxes=True)
        self._saving.local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: assigns the parts to ranks."""
        return assign_roles(plans, self._saving.rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: everything is durable when it returns.

        Raises:
            UnsupportedValueError: an item cannot be stored; the message names it.
            CaptureChangedError: a tensor changed meanwhile; the message names it.
        """
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.write(plan, planner)[1])
        return done

    def write(self, plan: SavePlan, planner: SavePlanner) -> tuple[Begun | None, list[WriteResult]]:
        """`write_data`; returns the written part, if this rank has one, and the results for DCP."""
        role, saving = plan.storage_data, self._saving
        if not isinstance(role, Role):
            if plan.items or saving.save is not None:
                raise InvalidOptionError(
                    "DCP reused a plan that was made for another storage writer: use a separate planner class for each writer, or "
                    "enable_plan_caching=False",
                    object_id="planner",
                )
            return None, self._look_at_copies(planner)  # other ranks write all its items
        captured, results = resolve_items(plan, planner, role)
        if saving.save is not None:
            begun = self._stored(lambda put, meter: put.write_tensors(role, captured, meter))
        else:
            self._begin(lambda: ranks_request(save_context(self._target.store), saving.ref, saving.step, self._checks))
            begun, report = self._stored(lambda put, meter: put.write_part(role, captured, meter))
            results.append(WriteResult(MetadataIndex(""), 0, report))
        return begun, [*results, *self._look_at_copies(planner)]

    def _look_at_copies(self, planner: SavePlanner) -> list[WriteResult]:
        copies = hash_copies(local_items(self._saving.local_plan, planner), planner, self._saving.turn)
        return [] if copies is None else [WriteResult(MetadataIndex(""), 0, copies)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: publishes the snapshot.

        Raises:
            ConflictError: the ref moved meanwhile; nothing is visible.
            SuspiciousSaveError: with ``unchanged="error"``; nothing is visible.
        """
        put, queued = self._saving.save, self._saving.queued
        assert put is not None
        assert queued is not None
        self._saving.save = self._saving.queued = None
        try:
            put.gathered = self._gather(put, metadata, results)
        except BaseException as exc:  # noqa: BLE001 - `finish` raises it, with the events of a save that failed
            put.fail(exc)
        del put  # the queue drops the state before it reports the end
        self.snapshot = save_queue(self._target.store).finish(queued)

    # --- the work -----------------------------------------------------------------------------------------------------

    def _gather(self, put: DcpSave, metadata: Metadata, results: list[list[WriteResult]]) -> tuple[CapturedState, list[WriterReport]]:
        """Collects the parts that the ranks have written, checked against DCP's metadata; warns of differing copies."""
        parts: dict[int, WriterReport] = {}
        values: dict[str, OpaqueItem] = {}
        tiny: list[Tiny] = []
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, WriterReport):
                parts[result.storage_data.part] = result.storage_data
            elif isinstance(result.storage_data, OpaqueItem):
                values[result.index.fqn] = result.storage_data
            elif isinstance(result.storage_data, Tiny):
                tiny.append(result.storage_data)
        calls = [next((each.storage_data for each in of_rank if isinstance(each.storage_data, WriterReport)), put) for of_rank in results]
        if len({call.ref for call in calls}) > 1 or len({call.step for call in calls} - {None}) > 1:
            saves = describe_ranks({rank: f"{call.ref!r}, step {call.step}" for rank, call in enumerate(calls)})
            raise InvalidOptionError(
                f"the ranks save different snapshots ({saves}): all must make the same calls of DCP in the same order; one that left a "
                "call out, for example after an exception that it caught, stays behind until the job is restarted",
                object_id="step",
            )
        begun = put.begun
        assert begun is not None
        captured = with_tiny(_filled(begun, metadata, values), tiny)
        if sorted(parts) != list(range(1, begun.role.parts)) or {report.layout for report in parts.values()} - {
            layout_id(begun.role.layout)
        }:
            raise SnapshotAbortedError(
                "the ranks did not write parts of one plan: DCP's plan cache is out of step; use a planner with enable_plan_caching=False",
                object_id=put.ref,
            )
        self._compare_copies(put, metadata, results)
        return captured, [report for _, report in sorted(parts.items())]

    def _compare_copies(self, put: DcpSave, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Warns of differing copies, once for each name."""
        copies = {
            at: result.storage_data
            for at, of_rank in enumerate(results)
            for result in of_rank
            if isinstance(result.storage_data, DuplicateItems)
        }

        def writer_of(fqn: str) -> int | None:
            return next(
                (copies[at].rank for at, of_rank in enumerate(results) if at in copies for one in of_rank if one.index.fqn == fqn), None
            )

        differing = [
            item for item in differences([*copies.values()], metadata.state_dict_metadata, writer_of) if item.fqn not in self._named
        ]
        if differing:
            self._named |= {item.fqn for item in differing}
            address = put.ref if put.step is None else f"{put.ref}@{put.step}"
            warnings.warn(f"{address}: {explain(differing)}", SuspiciousSaveWarning, stacklevel=2)

    def _begin(self, make_request: Callable[[], SaveRequest]) -> None:
        """This rank's save begins, after the saves in progress of the same store handle."""
        store, saving = self._target.store, self._saving
        queue = save_queue(store)
        queue.wait_idle()
        called = time.monotonic()
        saving.save = DcpSave(save_context(store), make_request(), saving.rank)
        saving.queued = queue.begin_waited(saving.save, called)

    def _stored(self, write: Callable[[DcpSave, SaveMeter], T]) -> T:
        """Returns the result of `write`; if it raises, the save has failed."""
        put, queued = self._saving.save, self._saving.queued
        assert put is not None
        assert queued is not None
        try:
            return write(put, queued.status.meter)
        except BaseException as exc:
            put.fail(exc)
            save_queue(self._target.store).finish(queued)
            raise

    def _coordinators_request(self) -> SaveRequest:
        return coordinators_request(
            save_context(self._target.store),
            self._saving.ref,
            step=self._saving.step,
            metrics=self._metrics,
            metadata=self._metadata,
            checks=self._checks,
            adopts_head=not self._target.is_shared,
        )


def _filled(begun: Begun, metadata: Metadata, values: Mapping[str, OpaqueItem]) -> CapturedState:
    """The coordinator's state, with the values of all ranks. Raises `SnapshotAbortedError` if DCP's metadata is of another plan."""
    flat = flat_layout_of(metadata, begun.role.parts)
    if flat.layout.encoded != begun.role.layout or not {fqn for fqn in flat.holes if fqn is not None} <= values.keys():
        raise SnapshotAbortedError("DCP's metadata is not from the plan that the ranks wrote: check the planner", object_id="planner")
    blobs: list[bytes] = []
    filled = [None if fqn is None else values[fqn].hole(blobs) for fqn in flat.holes]
    return begun.captured._replace(values=filled, blobs=blobs)
