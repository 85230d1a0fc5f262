"""What a store handle gives to all of its saves, those of one process and those of many ranks."""

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.common.printed_commands import name_store
from tensorstore_ck.common.retry import next_delay
from tensorstore_ck.common.threads import ProcessLock, cpu_threads
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import BackendUnavailableError, NoSpaceError, StoreError, UndecidedError
from tensorstore_ck.events import Event
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.session.group.process_groups import ProcessGroups
from tensorstore_ck.session.ref_fence import RefFence
from tensorstore_ck.session.save.frozen_tensors import FrozenTensors
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.staging.store_contact import StoreContact

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from tensorstore_ck.session.peers import Replicator
    from tensorstore_ck.state.device.kept_tensors import StoredTensors
    from tensorstore_ck.state.device.optimizer_step_gates import StepGate, StepGates
    from tensorstore_ck.state.tensor_table import RecentLayouts

T = TypeVar("T")

_logger: Final = logging.getLogger("tensorstore_ck")
LONGEST_PAUSE_SECONDS: Final = 30.0
PEER_SECONDS: Final = 600.0
"""How long a rank may take to connect, or to send or receive a piece."""


@dataclass(slots=True)
class SaveContext:
    """What a store handle gives to its saves."""

    engine: Engine
    fence: RefFence
    groups: ProcessGroups
    wait_for_upload: Callable[[], bool]
    """Waits until a staged save has ended; False if there are none."""
    contact: StoreContact = field(default_factory=StoreContact)
    """Asks the store for what a save needs before it is staged."""
    frozen: FrozenTensors | None = None
    """None: no save has named frozen tensors yet."""
    replicators: "weakref.WeakKeyDictionary[ProcessGroup, Replicator]" = field(default_factory=weakref.WeakKeyDictionary)
    """By group, if its ranks keep copies of each other's staged files."""
    noted_waits: int = 0
    """How often writes had waited because of a rate limit when the last save ended."""
    step_gates: "StepGates | None" = None
    """The gates of optimizers whose tensors are copied from devices until the next step; made at the first such save."""

    known_tensors: "StoredTensors | None" = None
    """Tensors on devices that the next save need not copy; made at the first asynchronous save of such tensors."""
    recent_layouts: "RecentLayouts | None" = None
    """The layouts of the last saves; made at the first save."""
    common_ranks: int = 0
    """Of how many other ranks at once DCP's coordinator has found in the store what they wrote: see `require_common_store`."""
    _frozen_lock: ProcessLock = field(default_factory=ProcessLock)

    def is_store_gone(self) -> bool:
        """Whether the store answers nothing or takes no upload, and all saves that wait for it are safe on the staging disk."""
        return self.engine.tier is not None and self.contact.is_gone(partial(self.engine.backend.size, CONFIG_NAME))

    def gates_of(self, optimizers: "Sequence[Optimizer]") -> "list[StepGate]":
        """The gates of these optimizers' steps."""
        from tensorstore_ck.state.device.optimizer_step_gates import StepGates  # noqa: PLC0415 - loads torch

        if self.step_gates is None:
            self.step_gates = StepGates()
        return self.step_gates.of(optimizers)

    def stored_tensors(self) -> "StoredTensors":
        """The tensors on devices that the next save need not copy."""
        from tensorstore_ck.state.device.kept_tensors import StoredTensors  # noqa: PLC0415 - loads torch

        if self.known_tensors is None:
            self.known_tensors = StoredTensors()
        return self.known_tensors

    def make_frozen(self) -> None:
        """Makes `frozen`, the same one for all threads."""
        made = FrozenTensors()
        with self._frozen_lock.here:
            if self.frozen is None:
                self.frozen = made

    def forget_frozen(self) -> None:
        """Drops what is known of frozen tensors: somebody may have written to them."""
        if self.frozen is not None:
            self.frozen.forget()

    def note_speed(self, status: SaveStatus) -> None:
        """Notes how long a remote store took to write a save, so that the next ones can choose a codec.

        Ignores saves that a rate limit slowed.
        """
        writes, waits_before = self.engine.writes, self.noted_waits
        self.noted_waits = writes.waits
        if writes.rate < math.inf or writes.waits > waits_before:
            return
        meter, cores = status.meter, cpu_threads()
        hashing = meter.seconds_per_byte("hash", cores)
        if hashing:
            self.engine.codecs.note_written(meter.snapshot().stage_bytes["write"], meter.seconds_per_byte("write", cores) / hashing)

    def reserve_on(self, tier: StagingTier, needed_bytes: int) -> None:
        """Makes space for a save on the staging disk: may evict copies, and wait for staged saves.

        Raises:
            NoSpaceError: there is not enough.
        """
        has_more = True
        while True:
            try:
                tier.folder.evict(needed_bytes)
            except NoSpaceError:
                if not has_more:
                    raise
                has_more = self.wait_for_upload()  # if not, the last one may have ended since
            else:
                return

    def explained(self, error: StoreError) -> StoreError:
        """The error of a save with complete commands; a `NoSpaceError` also says what gc would free, in gc's words.

        It says that only of a store in a folder: other stores are expensive to list.
        """
        name_store(error, self.engine.backend.url)
        hints = self._freeing_hints() if isinstance(error, NoSpaceError) else []
        if not hints:
            return error
        more = NoSpaceError(". ".join([str(error), *hints]), object_id=error.object_id)
        more.__cause__ = error
        return more

    def _freeing_hints(self) -> list[str]:
        if self.engine.tier is not None or not self.engine.backend.is_local:
            return []
        from tensorstore_ck.gc.plan import plan_gc  # noqa: PLC0415 - only for a full disk

        try:
            return plan_gc(self.engine.of_store()).freeable.describe(is_full=True)
        except (StoreError, OSError):  # the cache may be full, too
            return []

    def retry_until_dropped(self, status: SaveStatus, what: str, action: Callable[[], T]) -> T:
        """Calls `action` until the backend answers, or the save is asked to give up; returns the result."""
        for attempt in range(1_000_000):
            try:
                result = action()
            except (BackendUnavailableError, UndecidedError) as exc:
                if isinstance(exc, UndecidedError) and self.engine.single_writer:
                    raise  # without exclusive creates, nothing may be retried before a person has looked
                delay = next_delay(attempt, 0.5, LONGEST_PAUSE_SECONDS, least=0.5)
                self.retried(status, what, exc, delay)
                status.pause(delay)
            else:
                self.contact.upload_moved()
                return result
        raise AssertionError("unreachable")

    def retried(self, status: SaveStatus, what: str, error: Exception, delay_seconds: float) -> None:
        """Emits an event for a transient error, and notes that the store did not take what was sent."""
        self.contact.upload_failed()
        fields: dict[str, float | str] = {"what": what, "error": str(error), "delay_seconds": delay_seconds}
        self.engine.observers.emit(Event("retried", status.id, status.ref, status.step, status.rank, time.time_ns(), fields))

    def connect_peers(self, tier: StagingTier, group: "ProcessGroup", timeout_seconds: float) -> None:
        """Connects this rank to the ranks that keep copies of its staged files; all ranks of `group` call it, once.

        Without a connection there are no copies, and no save fails because of that.
        """
        from tensorstore_ck.session.peers import Replicator, connect, host_of_folder  # noqa: PLC0415 - loads torch

        title = "the search for the hosts of each rank's staging disk"
        hosts = self.groups.all_gather(group, title, lambda: host_of_folder(tier.folder.path), timeout_seconds=timeout_seconds)
        copies = tier.options.replicate_to_peers
        name = f"{self.engine.config.uuid}/{ulid_text(self.groups.of(group)[0].nonce)}"
        try:
            link = connect(group, hosts, copies, name, timeout_seconds=min(timeout_seconds, PEER_SECONDS))
        except BackendUnavailableError as exc:
            _logger.warning("%s", exc)
            return
        self.replicators[group] = Replicator(link, tier.folder, hosts, copies)
