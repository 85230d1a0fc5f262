"""Proofs of tensors in real stores, with signatures; and which part of a fine-tune is its base."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import ZERO_DIGEST
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import (
    CorruptObjectError,
    InvalidOptionError,
    MismatchError,
    MissingExtraError,
    MissingObjectError,
    NotFoundError,
    UntrustedError,
)
from tensorstore_ck.format import block_assignment
from tensorstore_ck.format.proof import decode_proof
from tensorstore_ck.maintenance.describe import contained
from tensorstore_ck.maintenance.describe.contained import ContainedTensor
from tests.feed.versions import REF, first_state, follower, save, train
from tests.gc.stores import open_store
from tests.session.group.built import BUILT, INFOS, tensors
from tests.session.group.states import Spreading, captured, whole
from tests.session.group.stores import put_all

KEY, OTHER_KEY = SigningKey.generate(), SigningKey.generate()
BASE, TUNED = "models/base", "runs/ft"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def trust(folder: Path, *keys: SigningKey, revoked: SigningKey | None = None, refs: str = "models/*") -> Path:
    path = folder / "trust.toml"
    gone = f'"{revoked.public}"' if revoked else ""
    path.write_text(f'revoked = [{gone}]\n[[trust]]\nrefs = ["{refs}"]\nkeys = [{", ".join(f"{key.public!r}" for key in keys)}]\n')
    return path


def opened(folder: Path, *, sign: SigningKey | None = None, trusted: Path | None = None) -> tsck.Store:
    cache, state = folder / "cache", folder / "state"
    return tsck.open(folder / "ck", create=True, no_sync=True, sign=sign, trust=trusted, cache_dir=cache, state_dir=state)


@pytest.fixture(autouse=True)
def no_trust_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


# --- proofs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_that_ranks_hold_in_pieces(name: str) -> None:
    """Sharded, replicated and both, by four ranks, each of which has a part of its own."""
    store, info = open_store(BUILT), INFOS[1]
    data, root = tensors(2)[name].whole, info.root.hex()
    proof = store.prove(root, name)
    found = tsck.check_proof(proof, data=data, root=root)
    assert (found.root, found.step, found.name, found.shape, found.size_bytes) == (root, 2, name, data.shape, data.nbytes)
    data.reshape(-1)[-1] ^= 1
    with pytest.raises(MismatchError, match=f"the data is not that of '{name}'"):
        tsck.check_proof(proof, data=data, root=root)


def test_a_proof_has_the_part_of_a_rank_that_may_have_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two replicas, which divide their bytes in the middle of the tensor, the first one has its only block."""
    monkeypatch.setattr(block_assignment, "MIN_RUN_BYTES", 10_000)
    values = {name: Spreading(whole((count,), count), None) for name, count in (("a", 3000), ("w", 2000), ("c", 2100))}
    backend = MemoryBackend()
    info = put_all(backend, 2, lambda rank: captured(values, (), rank, 2, named=True))
    store, root = open_store(backend), info.root.hex()
    proof = store.prove(root, "w")
    assert len(decode_proof(proof).parts) == 2
    assert tsck.check_proof(proof, data=values["w"].whole, root=root).blocks == 1


def test_a_tensor_of_a_ranks_own_state() -> None:
    store, root = open_store(BUILT), INFOS[0].root.hex()
    found = tsck.check_proof(store.prove(root, "rank_state[2].rng"), data=whole((2000,), 102), root=root)
    assert (found.name, found.blocks) == ("rank_state[2].rng", 1)
    for missing in ("rank_state[4].rng", "rank_state[x].rng", "rng"):
        with pytest.raises(NotFoundError, match="there is no tensor"):
            store.prove(root, missing)


def test_a_shared_tensor_with_the_name_of_one_of_a_rank(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        root = store.put_snapshot({"rank_state[2]": {"rng": torch.ones(3)}}, ref=TUNED).root
        assert tsck.check_proof(store.prove(TUNED, "rank_state[2].rng"), root=root, data=bytes_of(torch.ones(3))).data_checked


def test_a_tensor_whose_blocks_are_stored_as_differences() -> None:
    store, state = follower(MemoryBackend()), first_state()
    sizes = []
    for step in range(2):
        sizes.append(save(store, state, step).new_bytes)
        if step == 0:
            train(state, 0, 0.01)
    assert sizes[1] < sizes[0] / 5
    root = store.resolve(REF).root
    for name, tensor in list(store.open_snapshot(REF).items())[:2]:
        assert tsck.check_proof(store.prove(REF, name), data=bytes_of(tensor[:]), root=root).data_checked


def test_a_proof_is_small_and_a_tensor_without_elements_has_one(tmp_path: Path) -> None:
    large, empty, scalar = torch.zeros(2000, 1500), torch.zeros(0, 3), torch.tensor(2.0, dtype=torch.bfloat16)
    state = {"large": large, "empty": empty, "scalar": scalar, "others": [torch.full((2000,), float(at)) for at in range(200)]}
    with opened(tmp_path) as store:
        root = store.put_snapshot(state, ref=TUNED).root
        with pytest.raises(InvalidOptionError, match=r"the data is a Tensor, not bytes: of a tensor pass tensor\.cpu\(\)"):
            tsck.check_proof(store.prove(TUNED, "large"), data=large, root=root)  # type: ignore[arg-type]
        for name, tensor in (("large", large), ("empty", empty), ("scalar", scalar)):
            proof = store.prove(TUNED, name)
            assert len(proof) < 16_000
            (tmp_path / "a.proof").write_bytes(proof)
            found = tsck.check_proof(tmp_path / "a.proof", data=bytes_of(tensor), root=root)
            assert (found.dtype, found.shape, found.step) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), None)
        with pytest.raises(NotFoundError, match="did you mean 'large' or"):
            store.prove(TUNED, "larg")
    with pytest.raises(InvalidOptionError, match="not contiguous"):
        tsck.check_proof(proof, data=large.numpy()[:, ::2], root=root)


# --- what makes a root trusted ------------------------------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path: Path) -> bytes:
    """A proof from a signed branch."""
    with opened(tmp_path, sign=KEY) as store:
        store.put_snapshot({"w": torch.ones(4)}, ref=BASE, step=3)
        store.branch("runs/copy", BASE)
        return store.prove(BASE, "w")


def test_a_signed_root_is_trusted_by_the_trust_file(signed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tsck.check_proof(signed, trust=trust(tmp_path, OTHER_KEY, KEY))
    assert found.signature is not None
    assert (found.signature.ref, found.signature.key, found.signature.step) == (BASE, KEY.public, 3)
    own = tmp_path / "config" / "tensorstore_ck"
    own.mkdir(parents=True)
    trust(own, KEY)
    assert tsck.check_proof(signed).signature == found.signature
    assert tsck.check_proof(signed, root=found.root.upper()).signature is None


def test_a_signature_of_any_store_counts_and_the_store_is_named(signed: bytes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with opened(other, sign=KEY) as store:
        store.put_snapshot({"w": torch.zeros(4)}, ref=BASE, step=3)
        found = tsck.check_proof(store.prove(BASE, "w"), trust=trust(tmp_path, KEY))
        assert (found.store, found.log) == (store.engine.config.uuid, store.engine.config.log)
    first = tsck.check_proof(signed, trust=trust(tmp_path, KEY))
    assert first.store != found.store
    assert tsck.check_proof(signed, root=first.root).store is None


def test_without_the_extra_a_signature_that_nobody_demands_is_left_out(
    signed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("cryptography."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with opened(tmp_path) as store:
        with pytest.warns(UserWarning, match=f"the signer of {BASE} cannot be determined here"):
            assert decode_proof(store.prove(BASE, "w")).signed is None
        with pytest.warns(UserWarning, match=f"the signer of {BASE} cannot be determined here"):
            assert store.contains(BASE, BASE).signed_by is None
    with opened(tmp_path, trusted=trust(tmp_path, KEY)) as store, pytest.raises(MissingExtraError):
        store.prove(BASE, "w")


UNTRUSTED: dict[str, tuple[Callable[[Path], Path | None], str]] = {
    "no trust file": (lambda folder: None, f"a signature for '{BASE}' with the key {KEY.public}, and no trust file names that ref"),
    "a trust file for others": (lambda folder: trust(folder, KEY, refs="runs/*"), "no trust file names that ref"),
    "another key": (lambda folder: trust(folder, OTHER_KEY), f"which is not trusted for '{BASE}'"),
    "a revoked key": (lambda folder: trust(folder, KEY, revoked=KEY), "with the revoked key"),
}


@pytest.mark.parametrize(("make", "why"), UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_root_that_nothing_says_to_trust_is_refused(make: Callable[[Path], Path | None], why: str, signed: bytes, tmp_path: Path) -> None:
    with pytest.raises(UntrustedError) as caught:
        tsck.check_proof(signed, trust=make(tmp_path))
    assert why.replace("'", "") in str(caught.value).replace("'", "")
    assert f"the proof is of root {decode_proof(signed).root().hex()}, step 3" in str(caught.value)
    assert "in entry" not in str(caught.value)  # of a log that the reader does not have


def test_a_forged_signature_is_refused(signed: bytes, tmp_path: Path) -> None:
    proof, file = decode_proof(signed), trust(tmp_path, KEY)
    assert proof.signed is not None
    statement = proof.signed.statement
    for changed in (statement._replace(ref="models/other"), statement._replace(number=2), statement._replace(time_ns=1)):
        forged = proof._replace(signed=proof.signed._replace(statement=changed))
        with pytest.raises(UntrustedError, match="is forged, or was made for another"):
            tsck.check_proof(forged.encode(), trust=file)
    for changed in (statement._replace(root=ZERO_DIGEST), statement._replace(step=4)):
        forged = proof._replace(signed=proof.signed._replace(statement=changed))
        with pytest.raises(CorruptObjectError, match="a signature of another snapshot"):
            tsck.check_proof(forged.encode(), trust=file)
    with pytest.raises(UntrustedError, match="it has no signature"):
        tsck.check_proof(proof._replace(signed=None).encode(), trust=file)


def test_the_root_that_a_caller_trusts(signed: bytes, tmp_path: Path) -> None:
    with pytest.raises(UntrustedError, match="not of " + "0" * 64):
        tsck.check_proof(signed, root="0" * 64)
    with pytest.raises(InvalidOptionError, match="all of its 64 hex digits"):
        tsck.check_proof(signed, root=decode_proof(signed).root().hex()[:16])
    with pytest.raises(NotFoundError, match=r"there is no proof missing\.proof"):
        tsck.check_proof("missing.proof")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(NotFoundError):
        tsck.check_proof(tmp_path / "loop")
    with pytest.raises(MissingObjectError, match="a folder is there instead of a file"):
        tsck.check_proof(tmp_path)


def test_the_signature_is_of_the_ref_and_valid(signed: bytes, tmp_path: Path) -> None:
    """Without a trust file, the newest valid signature of the ref by any key gets into a proof; with one, those by its keys alone."""
    with opened(tmp_path, sign=OTHER_KEY) as store:
        for ref in (BASE, "runs/copy"):
            assert decode_proof(store.prove(ref, "w")).signed.statement.ref == ref  # type: ignore[union-attr]
        assert decode_proof(store.prove(store.resolve(BASE).root, "w")).signed is None
        store.sign(BASE)
        assert decode_proof(store.prove(BASE, "w")).signed.key == OTHER_KEY.public_bytes  # type: ignore[union-attr]
    with opened(tmp_path) as store:
        store.put_snapshot({"w": torch.zeros(4)}, ref=TUNED)
        assert decode_proof(store.prove(TUNED, "w")).signed is None
    with opened(tmp_path, trusted=trust(tmp_path, KEY)) as store:
        assert decode_proof(store.prove(BASE, "w")).signed.key == KEY.public_bytes  # type: ignore[union-attr]
    with opened(tmp_path, trusted=trust(tmp_path, KEY, revoked=KEY)) as store, pytest.raises(UntrustedError):
        store.prove(BASE, "w")


# --- which part of a fine-tune is its base ------------------------------------------------------------------------------


def test_which_part_of_a_fine_tune_is_its_base(tmp_path: Path) -> None:
    rows = 4096
    large = torch.arange(rows * 1500, dtype=torch.float32).reshape(rows, 1500)
    changed = large.clone()
    changed[0] = -1
    base = {"large": large, "bias": torch.ones(8), "head": torch.ones(9), "kept": torch.ones(10), "left": torch.ones(5)}
    tuned = {"model": {"large": changed, "kept": torch.ones(10)}, "bias": torch.ones(8), "head": torch.ones(9).to(torch.float64)}
    with opened(tmp_path, sign=KEY) as store:
        store.put_snapshot(base, ref=BASE)
        store.put_snapshot({**tuned, "lora": torch.zeros(6)}, ref=TUNED)
        found = store.contains(TUNED, BASE)
        block = 4096 * 1024 // 1500 // 4  # rows of the first block are a power of two of them
        block_bytes = (1 << (block.bit_length() - 1)) * 1500 * 4
        assert {tensor.name: tensor for tensor in found.tensors} == {
            "model.large": ContainedTensor("model.large", "partly", large.nbytes - block_bytes, large.nbytes, "large"),
            "model.kept": ContainedTensor("model.kept", "equal", 40, 40, "kept"),
            "bias": ContainedTensor("bias", "equal", 32, 32, "bias"),
            "head": ContainedTensor("head", "none", 0, 72, None),
            "lora": ContainedTensor("lora", "none", 0, 24, None),
        }
        assert found.equal_bytes == large.nbytes - block_bytes + 72
        assert (found.tensor_bytes, found.base_bytes) == (large.nbytes + 40 + 32 + 72 + 24, large.nbytes + 32 + 36 + 40 + 20)
        assert (found.signed_by, found.is_trusted) == (KEY.public, False)
    with opened(tmp_path, trusted=trust(tmp_path, KEY)) as store:
        assert store.contains(TUNED, BASE).is_trusted
        assert store.contains(BASE, TUNED).signed_by is not None
        assert store.contains(BASE, store.resolve(TUNED).root).signed_by is None


def test_a_tensor_of_the_base_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tensors have the same bytes, such as zeros: each of the base is that of one of the fine-tune."""
    monkeypatch.setattr(contained, "MAX_CANDIDATES", 1)
    with opened(tmp_path) as store:
        store.put_snapshot({name: torch.zeros(4) for name in "abc"}, ref=BASE)
        store.put_snapshot({"x": {name: torch.zeros(4) for name in "vwyz"}, "b": torch.zeros(4)}, ref=TUNED)
        found = {tensor.name: tensor.base for tensor in store.contains(TUNED, BASE).tensors}
    assert found == {"x.v": "a", "x.w": "c", "x.y": None, "x.z": None, "b": "b"}
