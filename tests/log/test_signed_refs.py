"""Refs that are signed, against somebody who may append any entry to the log, or takes entries away."""

import shutil
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.signing_keys import SigningKey, is_signed_by
from tensorstore_ck.errors import LogChangedError, UntrustedError
from tensorstore_ck.format.ref_statement import LogName, RefStatement
from tensorstore_ck.log import Entry, LogChangedWarning, Op, RefTable, fold, ref_verifier
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.checkpoint import checkpoint_name, dump
from tensorstore_ck.log.entry import decode_entry, entry_name, seal_entry
from tensorstore_ck.log.ref_signer import SignOption
from tests.gc.forged import forge

REF, OTHER = "models/base", "models/other"
KEY, OTHER_KEY = SigningKey.generate(), SigningKey.generate()


class World:
    """A store with one signed branch, of two steps; its users have the trust file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trust = folder / "trust.toml"
        self.trusting(KEY)
        with self.open(sign=KEY) as store:
            for step in (1, 2):
                self.put(store, step)
            self.old, self.new = store.resolve("models/base@1").root, store.resolve(REF).root

    def trusting(self, *keys: SigningKey, revoked: Sequence[SigningKey] = (), refs: str = "models/*") -> None:
        names = ", ".join(f'"{key.public}"' for key in keys)
        gone = ", ".join(f'"{key.public}"' for key in revoked)
        self.trust.write_text(f'revoked = [{gone}]\n[[trust]]\nrefs = ["{refs}"]\nkeys = [{names}]\n')

    def open(self, url: Path | None = None, *, sign: SignOption = None, host: str = "host", trusts: bool = False) -> tsck.Store:
        folder = self.folder / host
        return tsck.open(
            url or self.folder / "ck",
            create=True,
            no_sync=True,
            cache_dir=folder / "cache",
            state_dir=folder / "state",
            sign=sign,
            trust=self.trust if trusts else None,
        )

    def put(self, store: tsck.Store, step: int, ref: str = REF) -> None:
        store.put_snapshot({"w": torch.full((4,), float(step))}, ref=ref, step=step, expect=tsck.ANY)

    def forge(self, make: Callable[[RefTable], Sequence[Op]]) -> None:
        with self.open() as store:
            forge(store.engine, make)

    def signature(self, root: str, number: int | None = None) -> dict[str, Any]:
        """The fields of the true signature of a root, or of an entry."""
        with self.open() as store:
            signed = [op.fields for entry in store.engine.log.entries() for op in entry.ops if op.name == "sign"]
        (found,) = (fields for fields in signed if fields["root"].hex() == root and number in (None, fields["number"]))
        return dict(found)

    def check(self, address: str = REF, host: str = "new") -> Any:
        """Restores, on a host that has not seen the store."""
        with self.open(host=host, trusts=True) as store:
            return store.checkout(address)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def reset(world: World, *ops: Op) -> None:
    world.forge(lambda _: [Op.reset(REF, Digest(bytes.fromhex(world.old))), *ops])


def put_without_key(world: World) -> None:
    with world.open() as store:
        world.put(store, 3)


def put_with_another_key(world: World) -> None:
    with world.open(sign=OTHER_KEY) as store:
        world.put(store, 3)


def repeat_the_old_one(world: World) -> None:
    reset(world, Op(world.signature(world.old)))


def renumber_the_old_one(world: World) -> None:
    reset(world, Op({**world.signature(world.old), "number": 3}))


def forge_a_signature(world: World) -> None:
    reset(world, Op({**world.signature(world.old), "number": 3, "signature": bytes(64)}))


def use_that_of_another_ref(world: World) -> None:
    with world.open(sign={OTHER: KEY}) as store:
        store.branch(OTHER, f"{REF}@1")
        fields = world.signature(world.old, 3)
    reset(world, Op({**fields, "ref": REF, "number": 4}))


def use_that_of_another_store(world: World) -> None:
    with world.open(world.folder / "another", sign=KEY) as store:
        for step in (1, 2, 1):
            world.put(store, step)
        (*_, newest) = (op.fields for entry in store.engine.log.entries() for op in entry.ops if op.name == "sign")
    assert (newest["root"].hex(), newest["number"]) != (world.old, 3)  # its parent is another snapshot
    with world.open(world.folder / "twin", sign=KEY) as store:
        world.put(store, 1)
        store.branch("x", REF)
        store.reset(REF, REF)
        (*_, twin) = (op.fields for entry in store.engine.log.entries() for op in entry.ops if op.name == "sign")
    assert (twin["root"].hex(), twin["number"], twin["ref"]) == (world.old, 3, REF)
    reset(world, Op(twin))


def forget_and_bring_back_the_old_one(world: World) -> None:
    with world.open() as store:
        old = next(move.ulid for move in store.engine.log.newest_view().moves(REF) if move.root.hex() == world.old)
    world.forge(lambda _: [Op.expire(REF, None)])
    world.forge(lambda _: [Op.undo(3, REF, [old])])


def forge_a_checkpoint(world: World) -> None:
    """It says of the true last entry that the branch is still at the snapshot before."""
    with world.open() as store:
        first, second = store.engine.log.entries()
        table = MemoryTable()
        with table.batch() as batch:
            fold(first, batch)
            fold(Entry(2, second.prev, bytes(16), 0, "", (), second.hash, 0), batch)
            forged = dump(batch, 2, second.hash)
        assert forged is not None
        store.engine.backend.create(checkpoint_name("log", 2), forged)


def strip_signatures(world: World) -> None:
    """Somebody who may also delete writes the whole log again, without signatures."""
    with world.open() as store:
        backend, prev = store.engine.backend, store.engine.log.chain.genesis
        for entry in [*store.engine.log.entries()]:
            ops = [op for op in entry.ops if op.name != "sign"]
            sealed, new = seal_entry(entry.n, prev, ops, write_id=entry.write_id, time_ns=entry.time_ns, actor=entry.actor)
            backend.delete([entry_name("log", entry.n)])
            backend.create(entry_name("log", entry.n), sealed)
            prev = new.hash


ATTACKS: dict[str, tuple[Callable[[World], object], str]] = {
    "a writer without a key saves": (put_without_key, "no log entry since it was moved there has a signature"),
    "a writer without a key moves it back": (reset, "no log entry since it was moved there has a signature"),
    "a key that is not trusted": (put_with_another_key, "with the key ed25519:.* which is not trusted for 'models/base'"),
    "a signature that is repeated": (repeat_the_old_one, "the signature in entry 3 repeats that of entry 1"),
    "an edited number": (renumber_the_old_one, "the signature in entry 3 is forged, or was made for another"),
    "a forged signature": (forge_a_signature, "the signature in entry 3 is forged"),
    "the signature of another ref": (use_that_of_another_ref, "the signature in entry 4 is forged, or was made for another"),
    "the signature of another store": (use_that_of_another_store, "the signature in entry 3 is forged, or was made for another store"),
    "stripped signatures": (strip_signatures, "no log entry since it was moved there has a signature"),
    "an undo": (forget_and_bring_back_the_old_one, "its newest signature, in entry 2, is of root [0-9a-f]{16}, step 2"),
    "a checkpoint": (forge_a_checkpoint, "its newest signature, in entry 2, is of root [0-9a-f]{16}, step 2"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_entry_of_somebody_without_a_trusted_key_moves_a_trusted_ref(world: World, attack: str) -> None:
    assert torch.equal(world.check(host="before")["w"], torch.full((4,), 2.0))
    act, why = ATTACKS[attack]
    act(world)
    with pytest.raises(UntrustedError, match=rf"'models/base' \(root [0-9a-f]{{16}}, step \d\) is not trusted: .*{why}"):
        world.check()
    if act is forge_a_checkpoint:
        return  # the way out of that is `tsck fsck --repair`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogChangedWarning)
        with world.open(sign=KEY) as store:  # what the message says
            store.sign(REF)
    world.check()


def test_a_revoked_key_counts_no_longer(world: World) -> None:
    world.trusting(KEY, OTHER_KEY, revoked=[KEY])
    with pytest.raises(UntrustedError, match=r"signed in entry 2 with the revoked key ed25519:"):
        world.check()
    with world.open(sign=OTHER_KEY) as store:
        store.sign(REF, world.new[:8])
    world.check()


@pytest.mark.parametrize(("rollback", "is_forked"), [("warn", False), ("warn", True), ("error", True)])
def test_a_log_that_goes_back_is_an_error_for_trusted_refs_whatever_the_option(world: World, rollback: Any, is_forked: bool) -> None:
    world.check(host="seen")
    shutil.copytree(world.folder / "ck", world.folder / "backup")
    with world.open(sign=KEY) as store:
        world.put(store, 3)
        world.put(store, 3, "runs/free")
    world.check(host="seen")
    shutil.rmtree(world.folder / "ck")
    (world.folder / "backup").rename(world.folder / "ck")
    if is_forked:
        with world.open(host="another") as store:
            for step in range(3):
                world.put(store, step, "runs/other")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogChangedWarning)
        with world.open(host="seen", trusts=True) as store:
            store.engine.log._watermark.rollback = rollback
            with pytest.raises(LogChangedError, match=r"accept its log with `tsck accept-log|accept it with `tsck accept-log"):
                store.checkout(REF)
            store.engine.log._watermark.rollback = "warn"
            store.engine.log.accept()
            store.checkout(REF)


def test_a_broken_log_does_not_take_a_trusted_ref_back(world: World) -> None:
    """Readers of other refs go on, with what is before the break."""
    with world.open(sign=KEY) as store:
        world.put(store, 3)
    world.check(host="seen")
    with world.open() as store:
        for n in (2, 3):
            store.engine.backend.delete([entry_name("log", n)])
        store.engine.backend.create(entry_name("log", 2), b"junk")
    shutil.rmtree(world.folder / "seen" / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tsck.BrokenLogWarning)
        with world.open(host="seen") as store:
            assert store.resolve(REF).root == world.old
        with pytest.raises(LogChangedError, match="'models/base' may be an older snapshot than this user has seen"):
            world.check(host="seen")


def test_a_save_of_another_thread_is_no_log_that_went_back(world: World) -> None:
    with world.open(sign=KEY, trusts=True) as store:
        view = store.engine.log.newest_view()
        world.put(store, 3)
        assert store.engine.resolve(REF, view).info.root.hex() == world.new


def test_what_a_handle_with_a_key_moves_is_signed(world: World) -> None:
    with world.open(sign={"models/*": KEY}) as store:
        store.tag("models/v1", REF)
        store.branch("models/fork", f"{REF}@1")
        store.reset(REF, f"{REF}@1")
        store.put_snapshot_async({"w": torch.zeros(4)}, ref="models/fork", step=9, expect=tsck.ANY).wait()
        world.put(store, 1, "runs/free")
    with world.open(host="new", trusts=True) as store:
        signed = {name: store.signature(name) for name in ("models/v1", "models/fork", REF, "models/fork@1", "models/fork~1", f"{REF}@2")}
        roots = {name: signature.root for name, signature in signed.items() if signature is not None}
        assert roots == {name: store.resolve(name).root for name in signed}
        assert {signature.key for signature in signed.values() if signature is not None} == {KEY.public}
        assert [signed[name].number for name in ("models/v1", "models/fork", REF)] == [3, 6, 5]  # type: ignore[union-attr]
        assert store.signature("runs/free") is None
        assert store.signature(world.new) is None, "a root names the content itself"
    with world.open(sign={"models/*": KEY}) as store:
        assert [op.name for entry in store.engine.log.entries(7) for op in entry.ops] == ["put"], "no glob matches runs/free"
        with pytest.raises(tsck.InvalidOptionError, match="no signing key is for 'runs/free'"):
            store.sign("runs/free")
        with pytest.raises(tsck.ConflictError, match="nothing was signed"):
            store.sign(REF, "0" * 8)
        with pytest.raises(tsck.NotFoundError):
            store.sign("models/none")


def test_a_step_that_somebody_else_saved_is_not_trusted(world: World) -> None:
    with world.open() as store:
        world.put(store, 7)
    with world.open(sign=KEY) as store:
        world.put(store, 8)
    world.check()
    with pytest.raises(UntrustedError, match="no log entry has a signature of it"):
        world.check(f"{REF}@7")
    with pytest.raises(UntrustedError, match="no log entry has a signature of it"):
        world.check(f"{REF}~1")


def test_without_a_trust_file_and_for_other_refs_nothing_changes(world: World) -> None:
    put_without_key(world)
    with world.open(host="new") as store:
        store.checkout(REF)
        assert store.signature(REF) is None
    world.trusting(KEY, refs="release/*")
    world.check()


def test_a_forger_does_not_make_readers_check_thousands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**world.signature(world.new), "signature": bytes(64), "number": 3}
    world.forge(lambda _: [Op(fields) for _ in range(1000)])
    checked: list[bytes] = []

    def check(key: bytes, signature: bytes, message: bytes) -> bool:
        checked.append(signature)
        return is_signed_by(key, signature, message)

    monkeypatch.setattr(ref_verifier, "is_signed_by", check)
    world.check()
    assert len(checked) == 2


def test_a_server_that_polls_reads_each_entry_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.open(trusts=True, sign=KEY) as store:
        read, names = store.engine.log.chain.read, list[int]()

        def counted(n: int) -> Entry | None:
            names.append(n)
            return read(n)

        store.resolve(REF)
        monkeypatch.setattr(store.engine.log.chain, "read", counted)
        store.resolve(REF)
        polled = len(names)
        for number in range(5):
            store.tag(f"t{number}", REF)
        names.clear()
        store.resolve(REF)
        names.clear()
        store.resolve(REF)
        assert len(names) == polled
        put_without_key(world)
        with pytest.raises(UntrustedError):
            store.resolve(REF)


def test_a_copy_takes_trusted_refs_alone_and_signs_with_a_key_of_its_own(world: World) -> None:
    with world.open() as store:
        world.put(store, 1, OTHER)
        world.put(store, 1, "runs/free")
    target = world.folder / "target"
    with world.open(host="new", trusts=True) as source, world.open(target, host="two", sign=OTHER_KEY) as copied:
        with pytest.raises(UntrustedError, match=OTHER):
            tsck.copy(source, copied)
        assert {*copied.branches()} == {REF, "runs/free"}
    world.trusting(OTHER_KEY)
    with world.open(target, host="three", trusts=True) as store:
        assert store.resolve(REF).root == world.new


def test_a_build_that_does_not_know_signatures_folds_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstore_ck.log import operations

    with world.open(host="new") as store:
        known = [*store.engine.log.newest_view().items()]
    monkeypatch.setattr(operations, "SCHEMA", {name: each for name, each in operations.SCHEMA.items() if name != "sign"})
    with world.open(host="old") as store:
        assert [*store.engine.log.newest_view().items()] == known
        store.tag("kept", REF)


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBER = st.integers(0, (1 << 63) - 1)
STATEMENTS = st.builds(
    RefStatement,
    of=st.builds(LogName, store=st.binary(min_size=16, max_size=16), log=TEXT),
    ref=TEXT,
    root=st.binary(min_size=32, max_size=32).map(Digest),
    step=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    number=NUMBER,
    time_ns=NUMBER,
)


def decoded(data: bytes) -> RefStatement:
    """A second reading of FORMAT.md, "Signatures"."""
    prefix, fixed = b"tensorstore_ck v1 signed ref\0", struct.Struct("<16s32sQQ?q")
    assert data.startswith(prefix)
    at = len(prefix)
    store, root, number, time_ns, has_step, step = fixed.unpack_from(data, at)
    at, texts = at + fixed.size, []
    for _ in range(2):
        size = int.from_bytes(data[at : at + 2], "little")
        texts.append(data[at + 2 : at + 2 + size].decode())
        at += 2 + size
    assert at == len(data)
    return RefStatement(LogName(store, texts[1]), texts[0], Digest(root), step if has_step else None, number, time_ns)


@settings(max_examples=30)
@given(STATEMENTS)
def test_different_statements_have_different_bytes(statement: RefStatement) -> None:
    assert decoded(statement.encode()) == statement


@settings(max_examples=20)
@given(NUMBER, st.none() | st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_signature_survives_the_log(number: int, step: int | None) -> None:
    statement = RefStatement(LogName(bytes(16), "log"), REF, Digest(bytes(32)), step, number, 5)
    op = Op.sign(statement, KEY.public_bytes, KEY.sign(statement.encode()))
    sealed, _ = seal_entry(1, Digest(bytes(32)), [op], write_id=bytes(16), time_ns=0, actor="")
    (read,) = decode_entry(sealed, "entry", 1).ops
    assert (dict(read.fields), read.critical) == (dict(op.fields), False)
