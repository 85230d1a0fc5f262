"""`Session`: an open store as a job uses it: its engine, what it has seen of refs, its process groups and its queue of saves.

torch is imported only by the methods that take tensors.
"""

import itertools
import os
import shlex
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from tensorstore_ck.common.host_memory import default_limit_bytes, memory_error
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS, DIFFERENT_CALLS
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, ProcessGroups, process_group
from tensorstore_ck.session.ref_fence import RefFence
from tensorstore_ck.session.save import OnFull, PendingSnapshot, SaveQueue
from tensorstore_ck.session.save.capture_budget import check_on_full
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.drain_report import Staying
from tensorstore_ck.session.save.process_end import finish_at_exit
from tensorstore_ck.session.save.resume_staged import resume_alone, resume_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from tensorstore_ck.session.save.save import Coordination, Save, StateArguments
    from tensorstore_ck.state import StateCheck
    from tensorstore_ck.state.capture_copy import Arena


class Session:
    """What one `Store` holds open. Thread-safe."""

    def __init__(self, engine: Engine, *, host_memory_bytes: int | None = None, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        if host_memory_bytes is not None and host_memory_bytes <= 0:
            raise InvalidOptionError(f"host_memory_bytes must be more than 0, not {host_memory_bytes}", object_id="host_memory_bytes")
        if not dead_after_seconds >= 1:
            raise InvalidOptionError(f"dead_after_seconds must be at least 1, not {dead_after_seconds}", object_id="dead_after_seconds")
        self.engine = engine
        self.fence = RefFence()
        self.groups = ProcessGroups(engine, float(dead_after_seconds))
        resume = ["tsck", "staging", "resume", "--staging", os.path.dirname(engine.tier.folder.path)] if engine.tier is not None else []
        stays = Staying(lambda: self.context.is_store_gone(), shlex.join([*resume, "-s", engine.backend.url]))  # noqa: PLW0108 - made below
        self.queue = SaveQueue(self._open_arena, engine.observers, stays)
        self.context = SaveContext(engine, self.fence, self.groups, self.queue.wait_for_upload)
        self._host_memory_bytes = host_memory_bytes
        self._local_ranks = 1
        self._numbers = itertools.count(1)
        self._resumed_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        if engine.tier is not None:
            finish_at_exit(self.queue)
            for staged in resume_alone(self.context, engine.tier):
                self.queue.resume(staged, staged.ref, staged.step, staged.rank)

    def put(
        self,
        state: object,
        ref: str,
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        **given: "Unpack[StateArguments]",
    ) -> Snapshot:
        """See `Store.put_snapshot`; `state` may be a `CapturedState`."""
        torch_group = None if group is None else process_group(group)
        if torch_group is not None:
            self.queue.require_no_worker()
        try:
            self.queue.wait_idle()
            called = time.monotonic()
            save = self._new_save(state, ref=ref, group=torch_group, timeout_seconds=timeout_seconds, given=given)
            if torch_group is None:  # with ranks this happens in the round, so that an error reaches all at once
                save.check()
                save.capture()
            queued = self.queue.begin_waited(save, called)
            del save  # so that the queue has the only reference: it drops what the state holds before anybody knows of the end
            return self.queue.finish(queued)
        except (MemoryError, RuntimeError) as exc:
            raise memory_error(exc, f"the save to {ref!r}") from exc.__cause__

    def put_async(
        self,
        state: object,
        ref: str,
        *,
        group: "ProcessGroup | DeviceMesh | None",
        on_full: OnFull,
        timeout_seconds: float,
        optimizers: object,
        **given: "Unpack[StateArguments]",
    ) -> PendingSnapshot:
        """See `Store.put_snapshot_async`; `optimizers` is its `changed_by`."""
        if type(optimizers) is not tuple or optimizers:
            given["changed_by"] = _optimizers(optimizers)
        torch_group = None if group is None else process_group(group)
        check_on_full(on_full)
        self.queue.require_no_worker()
        called = time.monotonic()
        try:
            if torch_group is not None:
                state = self._count_local_ranks(state, torch_group, timeout_seconds)
            save = self._new_save(state, ref=ref, group=torch_group, timeout_seconds=timeout_seconds, given=given)
            if torch_group is None and self.queue.is_quiet():
                save.check_branch()
            save.check_and_capture()
            return self.queue.submit(save, on_full, called)
        except (MemoryError, RuntimeError) as exc:
            raise memory_error(exc, f"the save to {ref!r}") from exc.__cause__

    def prepare(
        self,
        state: object,
        *,
        group: "ProcessGroup | DeviceMesh | None",
        frozen: "Sequence[str]",
        changed_by: object,
        timeout_seconds: float,
    ) -> None:
        """See `Store.prepare`."""
        import torch  # noqa: PLC0415 - takes a second

        from tensorstore_ck.session.save.prepare_memory import prepare  # noqa: PLC0415 - loads torch

        torch_group, optimizers = process_group(group), _optimizers(changed_by)
        if torch.cuda.is_available():
            if torch_group is not None:
                self._local_ranks = self.groups.local_ranks(torch_group, timeout_seconds=timeout_seconds)
            self.queue.prepare(*prepare(self.context, state, torch_group, frozen, optimizers))

    def check(
        self, state: object, *, group: "ProcessGroup | DeviceMesh | None", rank_state: object, timeout_seconds: float
    ) -> "StateCheck":
        """See `Store.check`."""
        torch_group = process_group(group)
        if torch_group is None:
            from tensorstore_ck.state import check_state  # noqa: PLC0415 - loads torch

            if rank_state is not None:
                raise _rank_state_error()
            return check_state(state, self.engine.backend)
        from tensorstore_ck.session.save.dry_run import check_ranks  # noqa: PLC0415 - loads torch

        return check_ranks(
            self.engine, groups=self.groups, group=torch_group, state=state, rank_state=rank_state, timeout_seconds=timeout_seconds
        )

    def close(self) -> None:
        """See `Store.close`."""
        try:
            self.queue.close()
        except Exception:  # the error of a save; after Ctrl-C the store stays open, as its saves go on
            self._close_engine()
            raise
        self._close_engine()

    def _close_engine(self) -> None:
        if self.context.step_gates is not None:
            self.context.step_gates.close()
        self.groups.close()
        self.engine.close()

    def resume_ranks(self, group: "ProcessGroup", timeout_seconds: float) -> None:
        """At the first use of a group, continues the saves that its ranks staged before."""
        if self.engine.tier is not None and group not in self._resumed_groups:
            for staged in resume_ranks(self.context, self.engine.tier, group, timeout_seconds):
                self.queue.resume(staged, staged.ref, staged.step, staged.rank)
            if self.engine.tier.options.replicate_to_peers:
                self.context.connect_peers(self.engine.tier, group, timeout_seconds)
            self._resumed_groups.add(group)

    def _count_local_ranks(self, state: object, group: "ProcessGroup", timeout_seconds: float) -> object:
        """Counts the ranks that share this host's memory; returns the state.

        Even if host_memory_bytes is given: other ranks may not have it, and all must take part. After an error the other ranks may know
        it and begin the save, so that this one must fail it.
        """
        from tensorstore_ck.session.save.rank_round import UnpreparedState  # noqa: PLC0415 - loads torch

        try:
            self._local_ranks = self.groups.local_ranks(group, timeout_seconds=timeout_seconds)
        except StoreError as exc:
            if exc.object_id == DIFFERENT_CALLS:
                raise
            return UnpreparedState(exc)
        return state

    def _new_save(self, state: object, ref: str, group: "ProcessGroup | None", timeout_seconds: float, given: "StateArguments") -> "Save":
        from tensorstore_ck.session.save.rank_round import RankRound  # noqa: PLC0415 - loads torch
        from tensorstore_ck.session.save.save import Alone, Save  # noqa: PLC0415 - loads torch

        coordination: Coordination
        if group is None:
            if given.get("rank_state") is not None:
                raise _rank_state_error()
            coordination = Alone(self.context, next(self._numbers))
        else:
            self.engine.writes.share(group.size())
            self.resume_ranks(group, timeout_seconds)
            coordination = RankRound(self.context, group, ref, timeout_seconds)
        return Save(self.context, coordination, state, ref=ref, **given)

    def _open_arena(self) -> "Arena":
        import torch  # noqa: PLC0415 - takes a second

        from tensorstore_ck.state.capture_copy import Arena  # noqa: PLC0415 - loads torch

        if self.engine.tier is None:
            finish_at_exit(self.queue)
        limit_bytes = self._host_memory_bytes or default_limit_bytes(self._local_ranks)
        return Arena(limit_bytes, pinned=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _optimizers(changed_by: object) -> "Sequence[Optimizer]":
    optimizers: Sequence[Any] = changed_by if isinstance(changed_by, list | tuple) else [changed_by]
    if not all(hasattr(optimizer, "register_step_pre_hook") for optimizer in optimizers):
        raise InvalidOptionError("changed_by must be a torch optimizer, or several in a list", object_id="changed_by")
    return optimizers


def _rank_state_error() -> InvalidOptionError:
    return InvalidOptionError("rank_state= needs group=: one process puts everything into the state", object_id="rank_state")
