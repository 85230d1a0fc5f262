"""Events of saves and of waits for the store, their observers, and the line of text of each event in the log.

A save emits events; logging, `integrations.otel`, the progress line and the user's callbacks consume them. A consumer cannot disturb a
save, and delays it only by the time of its callback. "Saved" always means durable and published.

The logger is "tensorstore_ck", without a handler: where logging is not set up, Python prints its warnings and errors to stderr, so that
no failed or dropped snapshot goes unnoticed.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.redaction import one_line, redacted

Kind = Literal["captured", "staged", "published", "failed", "dropped", "stalled", "retried", "waiting", "rank_dead", "fetched", "swapped"]
Reason = Literal["skipped", "replaced", "cancelled", "abandoned"]

_STAGE_SECONDS: Final = {
    f"{stage}_seconds": f"in which at least one thread worked on {what}; stages overlap, and do not add up to the total"
    for stage, what in {
        "capture": "copying the state",
        "hash": "block ids",
        "encode": "compression",
        "write": "packs and part, to the staging disk if there is one, else to the store",
        "upload": "from the staging disk to the store",
        "commit": "record, ranks and log entry",
    }.items()
}
_IN_USE: Final = {
    "queue_depth": "saves of this handle in flight after this event",
    "memory_bytes": "host memory held for them then, and kept for the next ones",
}

KINDS: Final[Mapping[Kind, Mapping[str, str]]] = {
    "captured": {
        "capture_seconds": "copying the state",
        "stall_seconds": "that training was blocked: the wait for memory and the capture",
        "captured_bytes": "copied",
        "frozen_bytes": "not copied, because the user declared them frozen",
        **_IN_USE,
    },
    "staged": {
        "write_seconds": "until everything was durable on the staging disk",
        "new_bytes": "written to the staging disk",
    },
    "published": {
        "root": "of the snapshot, in hex",
        "snapshot": "its ULID",
        "total_seconds": "from the call to the durable log entry",
        "stall_seconds": "that training was blocked",
        "queued_seconds": "from the capture to the first block",
        **_STAGE_SECONDS,
        "logical_bytes": "of the state",
        "hashed_bytes": "that were hashed",
        "new_bytes": "by which the store grew",
        "dedup_ratio": "the share of the hashed bytes that was in the store already: 0.0 to 1.0",
        "compression_ratio": "raw bytes of the new blocks per stored byte; 1.0 if none is new",
        **_IN_USE,
    },
    "failed": {
        "error": "its message",
        "error_kind": "`StoreError.kind`, or the name of another exception's type",
        "is_waited_for": "1 if the caller gets the error as an exception as well",
        "total_seconds": "from the call to the failure",
        "queued_seconds": "from the capture to the first block, as far as it came",
        **_STAGE_SECONDS,
        **_IN_USE,
    },
    "dropped": {
        "reason": "a `Reason`",
        **_IN_USE,
    },
    "stalled": {
        "stall_seconds": "that the save waited for memory before its capture",
        "queue_depth": "saves that it waited for",
    },
    "retried": {
        "what": "is retried, such as `upload of packs/...`",
        "error": "that it failed with",
        "delay_seconds": "before the next try",
    },
    "waiting": {
        "what": "is waited for, such as `read store.json in s3://bucket/runs`; not tied to a save, ref or step",
        "try_number": "of the current try, from 1",
        "wait_seconds": "without a byte, or since the first failure if a try failed",
        "error": "that the last try failed with; empty in the first",
    },
    "rank_dead": {
        "dead_rank": "of the job, that another rank gave up while it waited for it in a save or a restore; not tied to a save, ref or step",
        "host": "that it ran on, as its system names it",
        "silent_seconds": "that it was not heard of: at least `dead_after_seconds` of `open`",
    },
    "fetched": {
        "root": "of the version that a follower has staged, in hex; not tied to a save, as `swapped`",
        "age_seconds": "since the version was made",
        "fetch_seconds": "from the look at the branch until all of it was verified",
        "read_bytes": "stored bytes of the blocks that were read",
        "changed_bytes": "raw bytes of the blocks that the follower did not hold",
        "staged_bytes": "host memory that the staged changes take",
    },
    "swapped": {
        "root": "of the version that the follower's tensors are now, in hex",
        "age_seconds": "since the version was made",
        "pause_seconds": "that the swap took",
    },
}
"""The fields of each kind of event."""

LEVELS: Final[Mapping[Kind, int]] = {
    "captured": logging.DEBUG,
    "staged": logging.DEBUG,
    "published": logging.INFO,
    "failed": logging.ERROR,
    "dropped": logging.WARNING,
    "stalled": logging.WARNING,
    "retried": logging.WARNING,
    "waiting": logging.WARNING,
    "rank_dead": logging.WARNING,
    "fetched": logging.DEBUG,
    "swapped": logging.INFO,
}
_REASONS: Final[Mapping[str, str]] = {
    "skipped": "no memory was free for it",
    "replaced": "a newer one replaced it before it was written",
    "cancelled": "it was cancelled",
    "abandoned": "the process ended before it was published",
}

_logger: Final = logging.getLogger("tensorstore_ck")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a save, or to a request to the store."""

    kind: Kind
    put: str
    """The id of the save, which groups its events; empty without one."""
    ref: str
    step: int | None
    rank: int
    time_ns: int
    """Since 1970."""
    fields: Mapping[str, int | float | str]
    """As in `KINDS`; their names contain the units. Texts are without the secrets of URLs."""

    def __post_init__(self) -> None:
        fields = {name: redacted(value) if isinstance(value, str) else value for name, value in self.fields.items()}
        object.__setattr__(self, "fields", fields)

    @property
    def address(self) -> str:
        """``ref@step``, or the ref alone."""
        return self.ref if self.step is None else f"{self.ref}@{self.step}"


Callback = Callable[[Event], object]


class Observed(Protocol):
    """Anything that emits events: a `Store`."""

    def on_event(self, callback: Callback, /) -> Callable[[], None]:
        """Calls `callback` with each event from now on, until the returned function is called."""


@dataclass(slots=True, eq=False)
class _Subscription:
    callback: Callback
    has_failed: bool = False


class Observers:
    """The subscribers to the events of one store handle. Thread-safe."""

    def __init__(self, *, is_logged: bool = False) -> None:
        """`is_logged`: the events also go to the log."""
        self._lock = threading.Lock()
        self._log = (_Subscription(log_event),) if is_logged else ()
        self._subscriptions: tuple[_Subscription, ...] = ()

    def wants(self, kind: Kind) -> bool:
        """Whether anybody takes an event of this kind, so that it must be made."""
        return bool(self._subscriptions) or (bool(self._log) and _logger.isEnabledFor(LEVELS[kind]))

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback` with each event on the event's thread, perhaps on several at once. Returns a function that unsubscribes."""
        subscription = _Subscription(callback)
        with self._lock:
            self._subscriptions += (subscription,)

        def end() -> None:
            with self._lock:
                self._subscriptions = tuple(other for other in self._subscriptions if other is not subscription)

        return end

    def emit(self, event: Event) -> None:
        """Writes the event to the log, and calls each subscriber, in order of subscription. Raises nothing."""
        for subscription in self._log + self._subscriptions:
            try:
                subscription.callback(event)
            except BaseException:  # an observer must not make a save fail
                if not subscription.has_failed:
                    subscription.has_failed = True
                    _logger.exception(
                        "%r raised on the event %r; the save goes on, and this callback's errors are not logged again",
                        subscription.callback,
                        event.kind,
                    )


def logged_observers() -> Observers:
    """Observers whose events also go to the log."""
    return Observers(is_logged=True)


def log_event(event: Event, logger: logging.Logger = _logger) -> None:
    """Writes one line to the log."""
    level = LEVELS[event.kind] if not event.fields.get("is_waited_for") else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event_text(event))


def event_text(event: Event) -> str:
    """One line for people."""

    def of(name: str) -> str:
        value = event.fields[name]
        if name.endswith("_bytes"):
            return human_bytes(int(value))
        return f"{value:.{2 if float(value) < 1 else 1}f} s" if name.endswith("_seconds") else str(value)

    name = event.address + (f" (rank {event.rank})" if event.rank else "")
    match event.kind:
        case "captured":
            text = f"captured {name}: {of('captured_bytes')} in {of('capture_seconds')}, {of('frozen_bytes')} frozen, "
            text += f"training blocked for {of('stall_seconds')}; {of('queue_depth')} in flight, {of('memory_bytes')} of memory in use"
        case "staged":
            text = f"staged {name}, not yet published: {of('new_bytes')} new in {of('write_seconds')}"
        case "published":
            text = f"saved {name}: {of('logical_bytes')}, {of('new_bytes')} new, in {of('total_seconds')}, "
            text += f"training blocked for {of('stall_seconds')}"
        case "failed":
            text = f"saving {name} failed after {of('total_seconds')}: {of('error')}"
        case "dropped":
            text = f"dropped {name}: {_REASONS.get(of('reason'), of('reason'))}"
        case "stalled":
            text = f"training waited {of('stall_seconds')} for memory before {name} could be captured, with {of('queue_depth')} in flight; "
            text += "save less often, raise host_memory_bytes, or pass on_full='skip' or 'replace'"
        case "retried":
            text = f"{of('what')} of {name} failed, next try in {of('delay_seconds')}: {of('error')}"
        case "waiting":
            text = f"still waiting after {of('wait_seconds')} to {of('what')} (try {of('try_number')}"
            text += f"; the last one failed: {of('error')})" if event.fields["error"] else ")"
        case "rank_dead":
            text = f"rank {of('dead_rank')} on {of('host')} is dead: not heard of for {of('silent_seconds')}"
        case "fetched":
            text = f"fetched {name}: {of('changed_bytes')} changed, {of('read_bytes')} read in {of('fetch_seconds')}"
        case "swapped":
            text = f"swapped to {name}, {of('age_seconds')} old, in {of('pause_seconds')}"
    return one_line(text)
