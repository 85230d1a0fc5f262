"""Checks refs against the user's trust file, by the signatures in the log.

It reads the log itself, and not its fold, since anybody who may create objects can forge a checkpoint. The signature of a ref counts in the
entry for which it was made, and the newest one of a ref must name the snapshot at which the ref is. So no entry by somebody without a key
moves a trusted ref, neither forwards nor back; and where the log itself goes back, this host has seen more of it.
"""

import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.signing_keys import is_signed_by, public_text
from tensorstore_ck.errors import LogChangedError, UntrustedError
from tensorstore_ck.format.ref_statement import LogName, RefStatement, SignedRef
from tensorstore_ck.log.address import Resolved
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.log import Log
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.trust_file import TrustFile


class RefSignature(NamedTuple):
    """A valid signature of a ref by a trusted key."""

    ref: str
    root: str
    step: int | None
    key: str
    """The public key, as in the trust file."""
    number: int
    """The number of its log entry."""
    time_ns: int


class _Known(NamedTuple):
    """The newest signature of a branch or tag, up to one entry of the log."""

    moved_n: int
    """The entry that moved it."""
    until: int
    signature: RefSignature


class _Found(NamedTuple):
    signature: RefSignature | None
    problem: str
    """Why there is none."""


class RefVerifier:
    """A trust file, for the refs of one log."""

    def __init__(self, trust: TrustFile, of: LogName) -> None:
        self._trust = trust
        self._of = of
        self._known: dict[str, _Known] = {}
        """Of each ref, so that a server which polls a branch reads no entry twice."""

    def check(self, log: Log, view: RefTable, resolved: Resolved) -> RefSignature | None:
        """The signature of a snapshot that was resolved in `view`; None if the address goes through no ref that the trust file names.

        Raises:
            UntrustedError: it has no valid signature.
            LogChangedError: the log lacks entries that this user has seen, so that the ref may be an older one.
            BrokenLogError: the log cannot be read.
        """
        ref = resolved.branch or resolved.tag
        if ref is None or self._trust.keys_of(ref) is None:
            return None
        if resolved.is_staged:
            raise UntrustedError(
                f"the snapshot staged for {ref!r} (root {resolved.info.root.hex()[:16]}, step {resolved.info.step}) is not trusted: it is "
                f"signed when it is published, and {self._trust.path} says which keys must sign {ref!r}. Read {ref!r}, or wait until it is "
                f"published",
                object_id=ref,
            )
        self._require_all(log, view, ref)
        head = view.branch(ref) if resolved.branch else view.tag_row(ref)
        is_head = head is not None and head.ulid == resolved.info.ulid
        root = resolved.info.root
        if is_head and head is not None:
            found = self._newest(log, view, ref, root=root, moved_n=head.n)
        else:
            same = [info.n for ulid in view.with_root(root) if (info := view.snapshot(ulid)) is not None]
            found = self._any(log, view, ref, root=root, start=min([resolved.info.n, *same]))
        if found.signature is not None and found.signature.step != resolved.info.step:
            found = _Found(None, f"its signature, in entry {found.signature.number}, is of step {found.signature.step}: the log was forged")
        if found.signature is None:
            at, name = f"root {root.hex()[:16]}, step {resolved.info.step}", shlex.quote(ref)
            raise UntrustedError(
                f"{ref!r} ({at}) is not trusted: {found.problem}. {self._trust.path} says which keys must sign it. See who moved it with "
                f"`tsck log {name}`. If this snapshot is right, the holder of a key signs it with `tsck sign {name} --sign KEY`; if not, "
                f"it moves the ref back with `tsck reset {name} ROOT --sign KEY`",
                object_id=ref,
            )
        return found.signature

    def signed(self, log: Log, view: RefTable, branch: str) -> frozenset[tuple[str, int | None]] | None:
        """(root, step) of each snapshot that `check` admits at `branch@STEP`, by one pass over the log; None: it is not named.

        Raises:
            BrokenLogError: the log cannot be read.
        """
        if self._trust.keys_of(branch) is None:
            return None
        head = view.head()
        start = min((info.n for move in view.moves(branch) if (info := view.snapshot(move.ulid)) is not None), default=1)
        found = (self._verify(*each)[0] for each in signatures(log, branch, start, head.n if head is not None else 0))
        return frozenset((signature.root, signature.step) for signature in found if signature is not None)

    def newest(self, entries: Iterable[Entry]) -> dict[str, str]:
        """Ref -> the root in its newest valid signature among `entries`, which may be what is left of a log."""
        found = {}
        for entry in entries:
            for op in entry.ops:
                signature = self._verify(entry, op.fields)[0] if op.name == "sign" else None
                if signature is not None:
                    found[signature.ref] = signature.root
        return found

    def _require_all(self, log: Log, view: RefTable, ref: str) -> None:
        seen, head = log.seen(), view.head()
        is_gone = log.is_changed
        if seen is not None and seen.n > (head.n if head is not None else 0):  # another thread was faster, or the log is broken
            entry = log.chain.read(seen.n)
            is_gone = is_gone or entry is None or entry.hash != seen.hash
        if is_gone:
            raise LogChangedError(
                f"{ref!r} may be an older snapshot than this user has seen: the log went back, was forked or is damaged, and "
                f"{self._trust.path} names this ref. Check the store, and accept its log with `tsck accept-log`",
                object_id=ref,
            )

    def _newest(self, log: Log, view: RefTable, ref: str, root: Digest, moved_n: int) -> _Found:
        """The newest valid signature of a ref from entry `moved_n` on, which moved it: it must be of `root`."""
        head, known = view.head(), self._known.get(ref)
        last, problem = head.n if head is not None else 0, "no log entry since it was moved there has a signature of it"
        is_known = known is not None and known.moved_n == moved_n and known.signature.root == root.hex() and known.until <= last
        found, start = (known.signature, known.until + 1) if is_known and known is not None else (None, moved_n)
        for entry, fields in signatures(log, ref, start, last):
            signature, why = self._verify(entry, fields)
            if signature is not None:
                found, why = signature, ""
            problem = why or problem
        if found is None:
            return _Found(None, problem)
        if found.root != root.hex():
            return _Found(None, f"its newest signature, in entry {found.number}, is of root {found.root[:16]}, step {found.step}")
        self._known[ref] = _Known(moved_n, last, found)
        return _Found(found, "")

    def _any(self, log: Log, view: RefTable, ref: str, root: Digest, start: int) -> _Found:
        """A valid signature of a ref at `root`, from entry `start` on, which published that."""
        head, problem = view.head(), "no log entry has a signature of it"
        for entry, fields in signatures(log, ref, start, head.n if head is not None else 0):
            if fields["root"] == root:
                signature, problem = self._verify(entry, fields)
                if signature is not None:
                    return _Found(signature, "")
        return _Found(None, problem)

    def _verify(self, entry: Entry, fields: Any) -> tuple[RefSignature | None, str]:
        """The signature in `fields`, if it is valid and trusted; else why not."""
        signed = _signed(self._of, fields)
        found, problem = check_signed_ref(self._trust, signed, f" in entry {entry.n}")
        if found is not None and found.number != entry.n:
            return None, f"the signature in entry {entry.n} repeats that of entry {found.number}"
        return found, problem


def check_signed_ref(trust: TrustFile, signed: SignedRef, where: str = "") -> tuple[RefSignature | None, str]:
    """The signature, if it is valid and trusted; else why not. `where`: where it was found, for the message."""
    statement, key, shown = signed.statement, signed.key, public_text(signed.key)
    if key in trust.revoked:
        return None, f"it is signed{where} with the revoked key {shown}"
    if key not in (trust.keys_of(statement.ref) or ()):
        return None, f"it is signed{where} with the key {shown}, which is not trusted for {statement.ref!r}"
    if not is_signed_by(key, signed.signature, statement.encode()):
        return None, f"the signature{where} is forged, or was made for another store, log, ref or snapshot"
    made = {"number": statement.number, "time_ns": statement.time_ns}
    return RefSignature(statement.ref, statement.root.hex(), statement.step, shown, **made), ""


def find_signed_ref(log: Log, view: RefTable, resolved: Resolved, of: LogName, trusted: RefSignature | None) -> SignedRef | None:
    """The newest valid signature of a snapshot, for the branch or tag that its address goes through: `trusted`, or one by any key."""
    ref, head = resolved.branch or resolved.tag, view.head()
    if ref is None or head is None or resolved.is_staged:
        return None
    start, last = (trusted.number, trusted.number) if trusted is not None else (resolved.info.n, head.n)
    found = None
    for entry, fields in signatures(log, ref, start, last):
        signed = _signed(of, fields)
        is_of_it = (signed.statement.root, signed.statement.step) == (resolved.info.root, resolved.info.step)
        if is_of_it and signed.statement.number == entry.n and is_signed_by(signed.key, signed.signature, signed.statement.encode()):
            found = signed
    return found


def signatures(log: Log, ref: str, start: int, last: int) -> Iterator[tuple[Entry, Any]]:
    """The first signature of a ref in each entry: a writer adds one, and a forger must not make readers check thousands."""
    for batch in log.chain.entries(start - 1, None, at_least=last) if start <= last else ():
        for entry in batch:
            if entry.n > last:
                return
            first = next((op.fields for op in entry.ops if op.name == "sign" and op.fields["ref"] == ref), None)
            if first is not None:
                yield entry, first


def _signed(of: LogName, fields: Any) -> SignedRef:
    said = {name: fields[name] for name in ("ref", "root", "step", "number", "time_ns")}
    return SignedRef(RefStatement(of, **said), fields["key"], fields["signature"])
