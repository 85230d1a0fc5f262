"""Makes and checks proofs that a tensor belongs to a snapshot. To check one needs no store."""

import os
import re
import shlex
import stat
import uuid
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.signing_keys import public_text
from tensorstore_ck.common.similar_names import similar_names
from tensorstore_ck.common.user_frames import short_errors, user_stacklevel
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, MissingExtraError, NotFoundError, UntrustedError
from tensorstore_ck.format.block_assignment import decode_regions, regions_of_rank, writers_of
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.part_index import RegionBytes
from tensorstore_ck.format.proof import NAME, Proof, decode_proof, make_proof
from tensorstore_ck.format.ref_statement import LogName, SignedRef
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.ref_verifier import RefSignature, check_signed_ref, find_signed_ref
from tensorstore_ck.log.trust_file import read_trust
from tensorstore_ck.maintenance.describe.contained import Containment, compare_with_base
from tensorstore_ck.maintenance.describe.contents import OpenSnapshot, Tensor

if TYPE_CHECKING:
    import numpy as np

_ROOT: Final = re.compile("[0-9a-fA-F]{64}")
_CONVERTED: Final = "tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()"
_RANK_STATE: Final = re.compile(r"rank_state\[([0-9]{1,7})\]\..*", re.DOTALL)


class SignedSnapshot(NamedTuple):
    """A snapshot, and a valid signature of it, if there is one for the branch or tag of its address."""

    info: SnapshotRow
    signed: SignedRef | None
    is_trusted: bool
    """The user's trust file names the ref and the key."""


@dataclass(frozen=True, slots=True)
class CheckedProof:
    """A tensor that was shown to belong to a snapshot."""

    root: str
    step: int | None
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    blocks: int
    """How many block ids the proof has for its bytes; 0 where it has the bytes themselves."""
    data_checked: bool
    """The data that was passed is that of the tensor."""
    signature: RefSignature | None
    """The signer of the root, by the trust file; None: the caller passed the root."""
    store: str | None
    """The UUID of the store in which it was signed, which may be any one. None: the caller passed the root."""
    log: str | None
    """The name of that store's log."""


def resolve_signed(engine: Engine, address: str) -> SignedSnapshot:
    """The snapshot at an address, and who signed it. Raises as `Engine.resolve`."""
    view = engine.log.readable_view()
    resolved = resolve(view, address)
    trusted = None if engine.trust is None else engine.trust.check(engine.log, view, resolved)
    of = LogName(uuid.UUID(engine.config.uuid).bytes, engine.config.log)
    try:
        signed = find_signed_ref(engine.log, view, resolved, of, trusted)
    except MissingExtraError as exc:
        warnings.warn(f"the signer of {address} cannot be determined here, and counts as unknown: {exc}", stacklevel=user_stacklevel())
        signed = None
    return SignedSnapshot(resolved.info, signed, trusted is not None)


def prove(engine: Engine, address: str, tensor: str) -> bytes:
    """See `ReadOnlyStore.prove`."""
    found = resolve_signed(engine, address)
    snapshot = OpenSnapshot(engine, found.info)
    reader, number, spec = _find(snapshot, tensor, address)
    held: dict[int, tuple[Part, list[RegionBytes]]] = {}
    for part, region in reader.holding(number):
        held.setdefault(part.rank, (part, []))[1].append(region)
    for part, _ in list(held.values()):
        regions = regions_of_rank(reader.layout, part.rank, reader.ranks, decode_regions(reader.layout, part.regions, tensor))
        for rank in writers_of(reader.layout, regions, number) - held.keys():
            held[rank] = snapshot.part(rank), []
    proof = make_proof(
        snapshot.record,
        [held[rank] for rank in sorted(held)] or [(reader.part, [])],
        layout=reader.encoded_layout(),
        tensor=number,
        block_bytes=engine.config.block_bytes,
        signed=found.signed,
    )
    encoded = proof.encode()
    again = decode_proof(encoded)
    if again.root() != found.info.root or again.verify().spec != spec:
        raise CorruptObjectError(f"no proof of {tensor!r} can be made: its snapshot contradicts itself; run `tsck fsck`", object_id=tensor)
    return encoded


def contains(engine: Engine, address: str, base: str) -> Containment:
    """See `ReadOnlyStore.contains`."""
    found = resolve_signed(engine, base)
    key = None if found.signed is None else public_text(found.signed.key)
    info = engine.resolve(address).info
    return compare_with_base(engine, info, found.info, signed_by=key, is_trusted=found.is_trusted)


@short_errors
def check_proof(
    proof: bytes | str | os.PathLike[str],
    *,
    data: "Buffer | np.ndarray[Any, Any] | None" = None,
    root: str | None = None,
    trust: str | os.PathLike[str] | None = None,
) -> CheckedProof:
    """Checks, without a store, that a tensor belongs to a snapshot.

    A proof shows that its tensor belongs to a root, whoever made it. So the root must be one that the caller trusts: `root`, or one that a
    key of the trust file has signed. A signature shows that the ref was at the snapshot, and not that it still is. A signature of any store
    counts: if a key signs refs of one name in several stores, compare `CheckedProof.store`.

    Args:
        proof: What `ReadOnlyStore.prove` returned, or the path of such a file.
        data: The tensor's bytes, row-major, such as ``tensor.contiguous().reshape(-1).view(torch.uint8).numpy()``: they must be the
            proven ones.
        root: The 64 hex digits of the snapshot's root.
        trust: The trust file, by default the user's own. Not read if `root` is given.

    Raises:
        CorruptObjectError: the proof is damaged or forged.
        UntrustedError: the root is not `root`, or nobody signed it whom the trust file names for its ref.
        MismatchError: `data` is not that of the tensor.
        NotFoundError: there is no such file.
        FormatVersionError: a newer version of tensorstore_ck made the proof.
        InvalidOptionError: `root` is no root; `data` is no contiguous buffer; the trust file is malformed.
        MissingExtraError: the signature is needed, and `cryptography` is not installed.
    """
    opened = decode_proof(proof if isinstance(proof, bytes) else _read(proof))
    found, step = opened.root(), opened.step()
    signed = opened.signed
    if signed is not None and (signed.statement.root, signed.statement.step) != (found, step):
        raise CorruptObjectError(f"{NAME} has a signature of another snapshot: it was damaged or forged", object_id=NAME)
    if root is not None and not _ROOT.fullmatch(root):
        raise InvalidOptionError(f"{root!r} is no root: give all of its 64 hex digits", object_id="root")
    if root is not None and root.lower() != found.hex():
        raise UntrustedError(f"the proof is of root {found.hex()}, not of {root}", object_id=found.hex())
    signature = None if root is not None else _require_trusted(opened, trust)
    tensor = opened.verify()
    if data is not None:
        try:
            view = memoryview(cast("Buffer", data))
        except TypeError as exc:
            message = f"the data is a {type(data).__name__}, not bytes: of a tensor pass {_CONVERTED}"
            raise InvalidOptionError(message, object_id="data") from exc
        if not view.c_contiguous:
            raise InvalidOptionError("the data is not contiguous: pass a contiguous array of bytes", object_id="data")
        tensor.require_data(view)
    return CheckedProof(
        root=found.hex(),
        step=step,
        name=tensor.name,
        dtype=tensor.spec.dtype,
        shape=tensor.spec.shape,
        size_bytes=tensor.spec.size_bytes,
        blocks=sum(not block.is_inline for block in tensor.blocks),
        data_checked=data is not None,
        signature=signature,
        store=None if signature is None or signed is None else str(uuid.UUID(bytes=signed.statement.of.store)),
        log=None if signature is None or signed is None else signed.statement.of.log,
    )


def _require_trusted(proof: Proof, path: str | os.PathLike[str] | None) -> RefSignature:
    """The signature in the proof, which a key of the trust file must have made."""
    trust, signed = read_trust(path), proof.signed
    is_named = trust is not None and signed is not None and trust.keys_of(signed.statement.ref) is not None
    signature, problem = None, ""
    if trust is not None and signed is not None and is_named:
        signature, problem = check_signed_ref(trust, signed)
    elif signed is None:
        problem = "it has no signature"
    else:
        ref, key = signed.statement.ref, public_text(signed.key)
        problem = f"it has a signature for {ref!r} with the key {key}, and no trust file names that ref"
    if signature is None:
        root, step = proof.root().hex(), proof.step()
        raise UntrustedError(
            f"the proof is of root {root}, step {step}, and nothing says that this root is to be trusted: {problem}. Compare the root with "
            "one that you trust (`--root`, root=), or name the ref and its keys in a trust file (`--trust`, trust=)",
            object_id=root,
        )
    return signature


def _find(snapshot: OpenSnapshot, name: str, address: str) -> Tensor:
    tensors = snapshot.shared.tensors
    of_rank = None if name in tensors else _RANK_STATE.fullmatch(name)
    if of_rank is not None:
        tensors = snapshot.rank_state(int(of_rank[1])).tensors
    if name not in tensors:
        meant = " or ".join(map(repr, similar_names(name, tensors)))
        what = f"there is no tensor {name!r} in {address}{f': did you mean {meant}?' if meant else ''}"
        raise NotFoundError(f"{what}; `tsck show {shlex.quote(address)}` lists them", object_id=name)
    return tensors[name]


def _read(path: str | os.PathLike[str]) -> bytes:
    if not os.path.exists(path):
        raise NotFoundError(f"there is no proof {path}", object_id=str(path))
    with os_errors("read", os.fspath(path)), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        return file.read(min(MAX_OBJECT_BYTES, status.st_size) + 1 if stat.S_ISREG(status.st_mode) else MAX_OBJECT_BYTES + 1)
