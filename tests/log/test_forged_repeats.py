"""Log entries that repeat a snapshot with a signed root: with another step, as a staged one, or on the way into a ref that is signed."""

from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import UntrustedError
from tensorstore_ck.format.record import record_name
from tensorstore_ck.log import Op, RefTable
from tensorstore_ck.maintenance.copy_store import copy_histories
from tensorstore_ck.maintenance.copy_store.branch_plan import BranchPlan, plan_branch
from tests.log.test_signed_refs import KEY, OTHER, REF, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def repeat(world: World, root: str, *, step: int, ref: str = "runs/junk", is_new: bool = False, is_staged: bool = False) -> None:
    """Saves or stages a snapshot again, under its own ULID or a new one; the log then says that its root is of another step."""
    with world.open() as store:
        engine = store.engine
        info = engine.log.newest_view().by_root(bytes.fromhex(root))
        assert info is not None
        record, txn, ulid = engine.read_record(info), engine.new_id(), engine.new_id() if is_new else info.ulid
        sealed = engine.backend.get(record_name(info.ulid), max_bytes=1 << 20)

    def make(view: RefTable) -> list[Op]:
        head = view.head()
        assert head is not None
        if is_staged:
            op = Op.staged(ref, ulid, record, sealed, txn=txn)
            return [Op({**op.fields, "step": step, "parent": Digest(bytes.fromhex(world.new))})]
        return [Op({**Op.put(ref, ulid, record, sealed, txn=txn, anchor=head.n).fields, "step": step})]

    world.forge(make)


@pytest.mark.parametrize(("address", "is_new"), [(REF, False), (f"{REF}@2", False), (f"{REF}^staged", False), (f"{REF}~1", True)])
def test_a_signature_covers_the_step(world: World, address: str, is_new: bool) -> None:
    repeat(world, world.old if is_new else world.new, step=7777, is_new=is_new)
    with (
        world.open(host="new", trusts=True) as store,
        pytest.raises(UntrustedError, match=r"step 7777\) is not trusted: .* is of step [12]"),
    ):
        store.signature(address)


def test_a_staged_snapshot_of_a_trusted_ref_is_refused_whatever_was_signed(world: World) -> None:
    repeat(world, world.old, step=9, ref=REF, is_staged=True)
    with pytest.raises(UntrustedError, match=r"the snapshot staged for 'models/base' \(root [0-9a-f]{16}, step 9\) is not trusted"):
        world.check(f"{REF}^staged")
    world.check()
    with world.open(host="without-trust") as store:
        assert store.resolve(f"{REF}^staged").root == world.old


@pytest.mark.parametrize("move", ["tag", "branch", "reset"])
def test_a_signed_ref_is_not_moved_to_a_snapshot_of_an_untrusted_one(world: World, move: str) -> None:
    with world.open() as store:
        world.put(store, 3)
    with world.open(sign=KEY, trusts=True) as store:
        with pytest.raises(UntrustedError, match=r"'models/base' .*step 3.* is not trusted"):
            getattr(store, move)(REF if move == "reset" else OTHER, REF)
        store.mark(REF, reason="nobody knows who saved it")
        getattr(store, move)(REF if move == "reset" else OTHER, f"{REF}@2")
    with world.open(host="new", trusts=True) as store:
        assert store.resolve(REF if move == "reset" else OTHER).root == world.new


def copy(world: World) -> tuple[list[int | None], list[str]]:
    """Copies the branch to a store where its moves are signed: the steps there that are trusted, and the warnings."""
    with world.open(host="new", trusts=True) as source, world.open(world.folder / "target", host="two", sign=KEY) as target:
        warned = tsck.copy(source, target, refs=REF).warnings
    with world.open(world.folder / "target", host="three", trusts=True) as store:
        steps = [snapshot.step for snapshot in store.log(REF)]
        for step in steps:
            store.checkout(f"{REF}@{step}")
    return steps, list(warned)


def test_a_copy_signs_no_snapshot_that_the_source_has_not_signed(world: World) -> None:
    with world.open() as store:
        world.put(store, 666)
    with world.open(sign=KEY) as store:
        world.put(store, 3)
    assert copy(world) == ([3, 2, 1], ["snapshots of 'models/base' without a valid signature were left out: 1"])
    with world.open(sign=KEY) as store:
        world.put(store, 4)
    assert copy(world) == ([4, 3, 2, 1], [])


def test_a_copy_takes_what_it_has_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody moves the branch between the check and the comparison with the target."""

    def check_first(*args: Any) -> BranchPlan:
        with world.open() as store:
            world.put(store, 666)
        args[0].log.sync()
        return plan_branch(*args)

    monkeypatch.setattr(copy_histories, "plan_branch", check_first)
    assert copy(world) == ([2, 1], [])
