"""Signs the refs that a handle moves: the log entry that moves a ref carries a `sign` operation, which covers its new snapshot."""

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from tensorstore_ck.common.ids import Clock, Digest
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import ConflictError, InvalidOptionError, NotFoundError
from tensorstore_ck.format.ref_statement import LogName, RefStatement
from tensorstore_ck.log.field_checks import is_ref_glob
from tensorstore_ck.log.operations import Op

if TYPE_CHECKING:
    from tensorstore_ck.log.ref_table import RefTable

Key = SigningKey | str | os.PathLike[str]
SignOption = Key | Mapping[str, Key] | None
"""A key, or the file of one, for all refs; or globs over refs -> keys, of which the first match counts."""
MOVES: Final = {"put": "ref", "branch": "name", "reset": "name", "tag": "name"}
"""Operation that moves a ref, or makes a tag -> the field that names it."""


class RefSigner:
    """The keys of one handle, for one log."""

    def __init__(self, option: Key | Mapping[str, Key], of: LogName, clock: Clock) -> None:
        """Raises:
        InvalidOptionError: not a key, or a glob is invalid.
        NotFoundError: a file is not there.
        """
        given = option if isinstance(option, Mapping) else {"*": option}
        for glob in given:
            if not isinstance(glob, str) or not is_ref_glob(glob):
                raise InvalidOptionError(f"sign= takes globs over refs, such as 'models/*', not {glob!r}", object_id="sign")
        self._keys = {glob: key if isinstance(key, SigningKey) else SigningKey.load(key) for glob, key in given.items()}
        self._of = of
        self._clock = clock

    def moves(self, view: "RefTable", ops: Sequence[Op]) -> Iterator[Op]:
        """The signatures of the refs that `ops`, which are computed at the head of `view`, move."""
        moved = {str(op.fields[MOVES[op.name]]): Digest(op.fields["root"]) for op in ops if op.name in MOVES}
        steps = {op.fields["root"]: op.fields["step"] for op in ops if op.name == "put"}
        for ref, root in moved.items():
            key, info = self._key_of(ref), None if root in steps else view.by_root(root)
            if key is not None:
                yield self._sign(view, key, ref, root, step=steps[root] if info is None else info.step)

    def head(self, view: "RefTable", ref: str, expect: str) -> Op:
        """The signature of a branch or tag as it is in `view`. `expect`: the first digits of the root that it must have.

        Raises:
            InvalidOptionError: no key is for this ref.
            NotFoundError: there is no such branch or tag.
            ConflictError: it has another root.
        """
        key, branch = self._key_of(ref), view.branch(ref)
        root = branch.root if branch is not None else view.tag(ref)
        info = None if root is None else view.by_root(root)
        if key is None:
            raise InvalidOptionError(f"no signing key is for {ref!r}: its globs in sign= do not match", object_id=ref)
        if info is None:
            raise NotFoundError(f"there is no branch or tag {ref!r}: see `tsck branch` and `tsck tag`", object_id=ref)
        if not info.root.hex().startswith(expect):
            raise ConflictError(f"{ref!r} is at {info.root.hex()[:16]}, not at {expect}: nothing was signed", object_id=ref)
        return self._sign(view, key, ref, info.root, step=info.step)

    def _key_of(self, ref: str) -> SigningKey | None:
        return next((key for glob, key in self._keys.items() if fnmatchcase(ref, glob)), None)

    def _sign(self, view: "RefTable", key: SigningKey, ref: str, root: Digest, *, step: int | None) -> Op:
        head = view.head()
        number = 1 if head is None else head.n + 1
        statement = RefStatement(self._of, ref=ref, root=root, step=step, number=number, time_ns=self._clock())
        return Op.sign(statement, key.public_bytes, key.sign(statement.encode()))
