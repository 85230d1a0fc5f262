"""What users do with a store besides putting and restoring: refs, what stays and what goes.

What takes long to load is loaded only by the methods that need it, so that a command starts fast. Knows no torch.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from functools import wraps
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.units import parse_seconds
from tensorstore_ck.engine.engine import Engine, current_user
from tensorstore_ck.engine.reachability import revive
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.codec import check_recode_mode
from tensorstore_ck.format.record import check_metrics
from tensorstore_ck.log import Op, RefTable, SnapshotInfo, validate_ref_name
from tensorstore_ck.log.address import Resolved, resolve
from tensorstore_ck.log.snapshot import PinnedSnapshot, Snapshot, pinned_snapshots, pinned_with_root
from tensorstore_ck.maintenance import forget as forgetting
from tensorstore_ck.session.ref_fence import RefFence

if TYPE_CHECKING:
    from tensorstore_ck.gc import GcOptions, GcReport
    from tensorstore_ck.gc.recode import RecodeReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.tiering import TierReport
    from tensorstore_ck.log.retention import Policy
    from tensorstore_ck.maintenance.apply_policies import RetentionReport
    from tensorstore_ck.maintenance.forget import Forgotten


Method = TypeVar("Method", bound=Callable[..., Any])


def changes(method: Method) -> Method:
    """Marks a method that changes the store: on one that was opened to look at it is refused, unless it is a dry run."""

    @wraps(method)
    def checked(self: "KeepingStore", *args: Any, **kwargs: Any) -> Any:
        if self._engine.read_only and not kwargs.get("dry_run"):
            self._engine.require_writable(f"{method.__name__}()")
        return method(self, *args, **kwargs)

    return cast(Method, checked)


class KeepingStore:
    """An open store, as far as refs, policies and gc go: the base of `ManagedStore`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = RefFence()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self._engine.backend.url

    @property
    def engine(self) -> Engine:
        """For what is built on top of a store: see `integrations`."""
        return self._engine

    @property
    def seen(self) -> RefFence:
        """What this handle has seen of refs, likewise."""
        return self._seen

    def close(self) -> None:
        """Releases connections and the cache; idempotent."""
        self._engine.close()

    # --- refs ---------------------------------------------------------------------------------------------------------

    @changes
    def branch(self, name: str, at: str) -> Snapshot:
        """Makes branch `name` at a snapshot."""
        validate_ref_name(name)
        return self._move(lambda root: Op.branch(name, root), at, name)

    @changes
    def reset(self, name: str, to: str) -> Snapshot:
        """Moves an existing branch to any snapshot, from wherever it is; its history keeps where it was."""
        validate_ref_name(name)
        return self._move(lambda root: Op.reset(name, root), to, name)

    @changes
    def tag(self, name: str, at: str) -> Snapshot:
        """Names a snapshot for good: a tag never moves."""
        validate_ref_name(name)
        return self._move(lambda root: Op.tag(name, root), at, None)

    @changes
    def untag(self, name: str) -> None:
        """Removes a tag; what nothing else holds goes like what is forgotten."""
        self._engine.require_writable()
        self._engine.log.append(lambda view: [Op.untag(name, view)])

    def branches(self) -> dict[str, Snapshot]:
        """Every branch, and where it is."""
        view = self._synced()
        return {name: Snapshot.from_info(resolve(view, name).info) for name in view.branches()}

    def tags(self) -> dict[str, Snapshot]:
        """Every tag, and where it is."""
        view = self._synced()
        return {name: Snapshot.from_info(resolve(view, name).info) for name in view.tags()}

    @changes
    def annotate(self, address: str, metrics: Mapping[str, float]) -> Snapshot:
        """Adds metrics that came later than the put; a name that is there already gets the new number."""
        checked = check_metrics(metrics)
        return self._move(lambda root: Op.annotate(root, checked), address, None)

    @changes
    def mark(self, address: str, mark: str = "bad", *, reason: str = "") -> Snapshot:
        """Marks a snapshot ``bad``, so that `checkout` refuses it; the empty mark takes that back."""
        if mark not in ("bad", ""):
            raise InvalidOptionError(f"mark must be 'bad' or '', not {mark!r}", object_id="mark")
        return self._move(lambda root: Op.mark(root, mark, reason), address, None)

    # --- what stays, and what goes ------------------------------------------------------------------------------------

    @changes
    def pin(self, address: str, *, reason: str = "", owner: str | None = None, expires: "str | float | None" = None) -> Snapshot:
        """Holds a snapshot until it is unpinned or `expires` has passed. An owner's second pin replaces the first.

        Args:
            address: The snapshot.
            reason: For those who wonder later.
            owner: Who holds it; by default this user.
            expires: For how long: ``"30d"``, or seconds.
        """
        seconds = None if expires is None else parse_seconds(expires, "expires")
        expires_ns = None if seconds is None else self._engine.clock() + int(seconds * 1e9)
        return self._move(lambda root: Op.pin(root, owner or current_user(), reason, expires_ns), address, None)

    @changes
    def unpin(self, address: str, *, owner: str | None = None) -> None:
        """Takes this user's pin, or `owner`'s, from a snapshot, and from any other one that has the same root."""
        self._engine.require_writable()
        who = owner or current_user()
        self._engine.log.append(
            lambda view: [Op.unpin(ulid, who, view) for ulid in pinned_with_root(view, resolve(view, address).info, who)]
        )

    def pins(self) -> tuple[PinnedSnapshot, ...]:
        """Every pin."""
        return pinned_snapshots(self._synced())

    def watch(self, ref: str, **options: Any) -> Generator[Snapshot]:
        """The snapshots that are put to a branch from now on, each pinned until the next one is asked for: for evaluation jobs.

        Args:
            ref: The branch; it need not be there yet.
            options: ``since_step=0``: also those that are there already, from that step on; ``newest_only=True``: of several that came
                meanwhile only the newest; ``pin_for="1d"``: how long a pin holds at most, None: nothing is pinned; ``poll_seconds=2.0``;
                ``until=``: a function that ends it.
        """
        from tensorstore_ck.maintenance.watch import watch  # noqa: PLC0415

        with closing(watch(self._engine.of_store(), ref, **options)) as found:
            for info in found:
                yield Snapshot.from_info(info)

    @changes
    def forget(self, *addresses: str) -> "tuple[Forgotten, ...]":
        """Takes snapshots out of their branches' histories, or whole branches and tags. `gc` frees them after the undo window.

        Args:
            addresses: ``ref@step``, ``ref~n`` or a root for one snapshot; a ref for all of it. Tags, pins and other branches go on
                holding what they hold.
        """
        found = forgetting.forget(self._engine, addresses)
        for one in found:
            if one.kind == "branch":
                self._seen.drop(one.ref)
        return found

    @changes
    def set_policy(self, glob: str, **rules: object) -> "Policy":
        """Says what stays of the histories of branches, in the store: applied with each put, by whomever, and by `retain`.

        What any rule keeps stays, of any policy that is for a branch, as far as the limits let it; besides, always: the newest snapshot,
        the newest other one that is not marked, and all that is tagged or pinned. What goes can be brought back for a day (`undo`).

        Args:
            glob: Which branches, e.g. ``runs/*``. A policy for the same glob is replaced.
            rules: ``keep_last=5``; ``keep_best=(3, "val_loss", "min")``, or several of these; ``keep_every=1000`` steps: the first at or
                after each multiple; ``keep_every_seconds="6h"``; ``keep_steps=[1000, 5000]``; ``keep_first=True``; ``keep_younger="7d"``.
                Limits: ``expire_after="30d"``; ``max_bytes="2TB"`` of the store, of which the oldest go first (by `retain` only).
                Ageing, by `tier`: ``recode_after="7d"``; ``move_after=("30d", "s3://cold/ckpt")``, or several of these.

        Raises:
            InvalidOptionError: an unknown rule, one that makes no sense, rules that contradict each other, or that keep nothing.
        """
        from tensorstore_ck.log.retention import Policy  # noqa: PLC0415
        from tensorstore_ck.maintenance import apply_policies  # noqa: PLC0415

        policy = Policy.of(**rules)
        apply_policies.set_policy(self._engine, glob, policy)
        return policy

    def kept_by(self, ref: str) -> dict[str, tuple[str, ...]]:
        """Id of each snapshot of a branch -> the tags, pins and rules that keep it. Limits of bytes are not looked at."""
        from tensorstore_ck.maintenance import apply_policies  # noqa: PLC0415

        self._engine.log.sync()
        return apply_policies.kept_by(self._engine, ref)

    @changes
    def remove_policy(self, glob: str) -> None:
        """Takes a policy back: what it did not let go stays."""
        from tensorstore_ck.maintenance import apply_policies  # noqa: PLC0415

        apply_policies.set_policy(self._engine, glob, None)

    def policies(self) -> "dict[str, Policy]":
        """Glob -> policy."""
        from tensorstore_ck.maintenance import apply_policies  # noqa: PLC0415

        self._engine.log.sync()
        return apply_policies.policies(self._engine)

    @changes
    def retain(self, *refs: str, dry_run: bool = False, rules: Mapping[str, object] | None = None) -> "RetentionReport":
        """Lets go what the policies let go, in one log entry; says of each snapshot why it stays or goes, and what that frees.

        Args:
            refs: These branches; none: all.
            dry_run: Only look.
            rules: Look what these would do, instead of the policies that are set; needs `dry_run`.
        """
        from tensorstore_ck.log.retention import Policy  # noqa: PLC0415
        from tensorstore_ck.maintenance import apply_policies  # noqa: PLC0415

        if rules is not None and not dry_run:
            raise InvalidOptionError("rules that are not set as a policy can only be tried: pass dry_run=True", object_id="rules")
        self._engine.log.sync()
        return apply_policies.retain(self._engine.of_store(), refs, dry_run=dry_run, instead=None if rules is None else Policy.of(**rules))

    @changes
    def undo(self, address: str | None = None) -> "tuple[Forgotten, ...]":
        """Brings back what was forgotten last, or last of a ref, or one snapshot: until gc ends the undo window."""
        return forgetting.undo(self._engine, address)

    def forgotten(self) -> "tuple[Forgotten, ...]":
        """What `undo` can bring back, newest first."""
        self._engine.log.sync()
        return forgetting.forgotten(self._engine)

    @changes
    def gc(self, options: "GcOptions | None" = None, *, dry_run: bool = False, progress: "GcProgress | None" = None) -> "GcReport":
        """Frees what nothing holds any more; from any host, beside writers and readers. With `dry_run` tells what would go.

        Raises:
            UnreadableError: something that is held cannot be read; nothing was freed.
            GcRefusedError: more than `options.max_delete` of all bytes would go.
        """
        from tensorstore_ck.gc import run_gc  # noqa: PLC0415

        return run_gc(self._engine.of_store(), options, dry_run=dry_run, **({"progress": progress} if progress else {}))

    @changes
    def recode(
        self,
        *addresses: str,
        codec: str = "small",
        older_than: "str | float | None" = None,
        dry_run: bool = False,
        max_bytes_per_second: float | None = None,
        progress: "GcProgress | None" = None,
    ) -> "RecodeReport":
        """Encodes snapshots anew so that they take less room: those that are kept and seldom read. Roots stay as they are.

        What they took is condemned, and freed by the next `gc`; until then the store takes more.

        Args:
            addresses: A branch for all of its history, any other address for one snapshot; none: everything that is held.
            codec: ``small`` or ``fast``.
            older_than: Only snapshots that were put longer ago, e.g. ``"7d"`` or seconds.
            dry_run: Only tell what would be gained, by some blocks of each pack.
            max_bytes_per_second: Reads no more than that, and writes no more.
            progress: Called with (what is being done, done, of how many).
        """
        from tensorstore_ck.gc.recode import run_recode  # noqa: PLC0415

        mode = check_recode_mode(codec)
        before_ns = self._engine.clock() - int(parse_seconds(older_than, "older_than") * 1e9) if older_than is not None else None

        def choose(view: RefTable) -> list[SnapshotInfo]:
            found = {info.ulid: info for address in addresses for info in _all_at(view, address)}
            chosen = found.values() if addresses else view.snapshots()
            return [info for info in chosen if before_ns is None or info.time_ns <= before_ns]

        engine = self._engine.of_store().limited_to(max_bytes_per_second)
        return run_recode(engine, choose, mode, dry_run=dry_run, **({"progress": progress} if progress else {}))

    @changes
    def tier(
        self,
        *,
        dry_run: bool = False,
        take_places: bool = False,
        max_bytes_per_second: float | None = None,
        progress: "GcProgress | None" = None,
    ) -> "TierReport":
        """Does what policies say of age: encodes what is old enough smaller (``recode_after``), and moves it to colder places
        (``move_after``), or back where something younger needs it. From any host, beside jobs; may be killed and run again.

        Addresses and roots stay as they are, and what was moved is read where it lies, through this store. What was replaced is freed by
        the next `gc`; until then it takes room at both places.

        Args:
            dry_run: Only tell what would be done.
            take_places: The packs that were moved belong to the store here from now on: it was itself moved, or restored, and no other
                copy of its files is in use.
            max_bytes_per_second: Reads no more than that, and writes no more.
            progress: Called with (what is being done, done, of how many).

        Raises:
            GcRefusedError: a store elsewhere, of which this may be a copy, moved the packs.
            PlaceUnavailableError: a place cannot be used, or is not mounted.
        """
        from tensorstore_ck.gc.tiering import run_tiering  # noqa: PLC0415

        engine = self._engine.of_store().limited_to(max_bytes_per_second)
        return run_tiering(engine, dry_run=dry_run, take_places=take_places, **({"progress": progress} if progress else {}))

    # --- inner --------------------------------------------------------------------------------------------------------

    def _synced(self) -> RefTable:
        self._engine.log.sync()
        return self._engine.log.view()

    def _resolve(self, address: str) -> Resolved:
        return resolve(self._synced(), address)

    def _move(self, make: Callable[[Digest], Op], address: str, branch: str | None) -> Snapshot:
        """Appends one operation on the snapshot at `address`, and notes where `branch` is now."""
        self._engine.require_writable()
        found: list[SnapshotInfo] = []

        def build(view: RefTable) -> list[Op]:
            found[:] = [resolve(view, address).info]
            operation = make(found[0].root)
            operation.check(view)
            return [operation, *revive(self._engine, view, found[0])]

        self._engine.log.append(build)
        if branch is not None:
            self._seen.note(branch, found[0].root, found[0].root)
        info = self._engine.log.view().snapshot(found[0].ulid)
        return Snapshot.from_info(info or found[0])


def _all_at(view: RefTable, address: str) -> Iterable[SnapshotInfo]:
    """The history of a branch; the one snapshot at any other address."""
    return view.history(address) if view.branch(address) is not None else [resolve(view, address).info]
