"""`Session`: an open store as a job uses it: its engine, what it has seen of refs, its process groups and its queue of saves.

torch is imported only by the methods that take tensors.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorstore_ck.common.host_memory import default_limit_bytes, memory_errors
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.log.address import Resolved, is_staged_address, resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.process_groups import ProcessGroups, process_group
from tensorstore_ck.session.ref_fence import PutOptions, RefFence, check_put_options
from tensorstore_ck.session.save import OnFull, PendingSnapshot, SaveQueue
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.process_end import finish_at_exit
from tensorstore_ck.session.save.resume_staged import resume_alone, resume_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.session.group.rank_put import RankStates
    from tensorstore_ck.session.save.put import SinglePut
    from tensorstore_ck.state import StateCheck
    from tensorstore_ck.state.capture_copy import Arena
    from tensorstore_ck.state.sharded_tensors import SpreadDescriber


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
        self.queue = SaveQueue(self._open_arena, engine.observers)
        self.context = SaveContext(engine, self.fence, self.groups, self.queue.wait_for_upload)
        self._host_memory_bytes = host_memory_bytes
        self._local_ranks = 1
        self._numbers = itertools.count(1)
        self._resumed_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        if engine.tier is not None:
            finish_at_exit(self.queue)
            for put in resume_alone(self.context, engine.tier):
                self.queue.resume(put)

    def resolve(self, address: str) -> Resolved:
        """What an address means at the newest entry of the log."""
        return resolve(self.engine.log.newest_view(), address)

    def put(self, state: object, ref: str, *, group: "ProcessGroup | DeviceMesh | None", **options: Any) -> Snapshot:
        """See `Store.put_snapshot`, for the options too."""
        ranks = process_group(group)
        if ranks is not None:
            self.queue.require_no_worker()
        with memory_errors(f"the save to {ref!r}"):
            return self.queue.run(lambda: self._put(state, ref, ranks, **options))

    def put_captured(self, captured: CapturedState, ref: str, *, step: int | None, **options: Any) -> Snapshot:
        """Saves a state that was taken apart already; `options` as of `Store.put_snapshot`."""
        from tensorstore_ck.session.group.rank_put import RankStates  # noqa: PLC0415 - loads torch

        check_options = partial(check_put_options, self.engine, ref, step=step, **options)
        return self.queue.run(lambda: self._single(check_options, lambda: RankStates(captured, None), ref, step))

    def put_async(
        self,
        state: object,
        ref: str,
        *,
        group: "ProcessGroup | DeviceMesh | None",
        on_full: OnFull,
        timeout_seconds: float,
        **options: Any,
    ) -> PendingSnapshot:
        """See `Store.put_snapshot_async`, for the options too."""
        from tensorstore_ck.session.save.group_put import UnpreparedState  # noqa: PLC0415 - loads torch

        ranks = process_group(group)

        def make() -> "SinglePut":
            captured = state
            if ranks is not None:  # even if host_memory_bytes is given: other ranks may not have it, and all must take part
                try:
                    self._local_ranks = self.groups.local_ranks(ranks, timeout_seconds=timeout_seconds)
                except StoreError as exc:  # the other ranks may know it, and begin the save
                    captured = UnpreparedState(exc)
            put = self._put(captured, ref, ranks, timeout_seconds=timeout_seconds, **options)
            if ranks is not None:
                put.prepare()
            elif self.queue.is_quiet():
                put.check_known()
            return put

        with memory_errors(f"the save to {ref!r}"):
            return self.queue.submit(make, on_full)

    def check(
        self, state: object, *, group: "ProcessGroup | DeviceMesh | None", rank_state: object, timeout_seconds: float
    ) -> "StateCheck":
        """See `Store.check`."""
        ranks = process_group(group)
        if ranks is None:
            from tensorstore_ck.state import check_state  # noqa: PLC0415 - loads torch

            _require_no_rank_state(rank_state)
            return check_state(state, self.engine.backend)
        from tensorstore_ck.session.save.check import check_ranks  # noqa: PLC0415 - loads torch

        return check_ranks(self.engine, self.groups, ranks, state, rank_state, timeout_seconds=timeout_seconds)

    def finish_staged(self, address: str, group: "ProcessGroup | None", timeout_seconds: float) -> None:
        """See `Store.finish_staged`."""
        self._resume(group, timeout_seconds)
        self.queue.wait_idle(uploads=self.engine.tier is None or not self._is_staged(address))

    def close(self) -> None:
        """See `Store.close`."""
        try:
            self.queue.close()
        except Exception:  # of a save; after Ctrl-C the store stays open, as its saves go on
            self._close_engine()
            raise
        self._close_engine()

    def _close_engine(self) -> None:
        self.groups.close()
        self.engine.close()

    def _is_staged(self, address: str) -> bool:
        """Whether the address means a snapshot that is staged and not published yet."""
        if is_staged_address(address):
            return True
        try:
            view = self.engine.log.view()
            return view.staged(resolve(view, address).info.ulid) is not None
        except StoreError:
            return False

    def _resume(self, group: "ProcessGroup | None", timeout_seconds: float) -> None:
        """At the first use of a group: continues what its ranks staged before."""
        if group is not None and self.engine.tier is not None and group not in self._resumed_groups:
            for put in resume_ranks(self.context, self.engine.tier, group, timeout_seconds):
                self.queue.resume(put)
            if self.engine.tier.options.replicate_to_peers:
                self.context.connect_peers(self.engine.tier, group, timeout_seconds)
            self._resumed_groups.add(group)

    def _put(
        self,
        state: object,
        ref: str,
        group: "ProcessGroup | None",
        *,
        rank_state: object,
        frozen: Sequence[str],
        timeout_seconds: float,
        **options: Any,
    ) -> "SinglePut":
        from tensorstore_ck.session.group.rank_put import RankStates  # noqa: PLC0415 - loads torch
        from tensorstore_ck.session.save.group_put import GroupPut, UnpreparedState  # noqa: PLC0415 - likewise
        from tensorstore_ck.state.capture import capture  # noqa: PLC0415 - likewise
        from tensorstore_ck.state.sharded_tensors import describer_of  # noqa: PLC0415 - likewise

        if group is None:
            _require_no_rank_state(rank_state)
        elif self.engine.limit is not None:
            self.engine.limit.share(group.size())
        self._resume(group, timeout_seconds)
        check_options = partial(check_put_options, self.engine, ref, **options)

        def taken_apart(describer: "SpreadDescriber | None" = None, scope: bytes = b"") -> CapturedState:
            captured = capture(state, describer)
            return self.context.frozen.mark(captured, frozen, scope)

        if group is None:
            return self._single(check_options, lambda: RankStates(taken_apart(), None), ref, options["step"])

        def take_apart() -> RankStates:
            if isinstance(state, UnpreparedState):
                raise state.error
            shared = taken_apart(describer_of(group), self.groups.of(group)[0].nonce)
            return RankStates(shared, None if rank_state is None else capture(rank_state))

        return GroupPut(self.context, group, check_options, take_apart, ref=ref, step=options["step"], timeout_seconds=timeout_seconds)

    def _single(
        self, check_options: Callable[[], PutOptions], take_apart: "Callable[[], RankStates]", ref: str, step: int | None
    ) -> "SinglePut":
        from tensorstore_ck.session.save.put import SinglePut  # noqa: PLC0415 - loads torch

        put = SinglePut(self.context, next(self._numbers), check_options, take_apart, ref=ref, step=step)
        put.prepare()
        return put

    def _open_arena(self) -> "Arena":
        import torch  # noqa: PLC0415 - takes a second

        from tensorstore_ck.state.capture_copy import Arena  # noqa: PLC0415 - loads torch

        if self.engine.tier is None:
            finish_at_exit(self.queue)
        limit_bytes = self._host_memory_bytes or default_limit_bytes(self._local_ranks)
        return Arena(limit_bytes, pinned=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _require_no_rank_state(rank_state: object) -> None:
    if rank_state is not None:
        raise InvalidOptionError("rank_state= needs group=: one process puts everything into the state", object_id="rank_state")
