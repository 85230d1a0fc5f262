"""The loop's helper: when it saves, what it resumes from, and what it does not let end a training."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import BackendUnavailableError, DamageError, InvalidOptionError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.log.retention.policy import TRIGGERS
from tensorstore_ck.training.checkpointing import TriggerContext
from tests.gc.stores import same
from tests.session.group.pool import Pool, make_store
from tests.training.checkpointing import rank_side

State = dict[str, torch.Tensor]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", codec="raw") as store:
        yield store


def fresh() -> State:
    return {"w": torch.zeros(3000), "n": torch.zeros(3000)}


def train(ckpt: tsck.Checkpointer, state: State, first: int, last: int) -> list[int]:
    saved = []
    for step in range(first, last + 1):
        state["w"] += step
        state["n"].fill_(step)
        if ckpt.step(step, {"loss": 1 / step}) is not None:
            saved.append(step)
    return saved


def expected(step: int) -> State:
    return {"w": torch.full((3000,), float(step * (step + 1) // 2)), "n": torch.full((3000,), float(step))}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_and_resumes(store: tsck.Store, asynchronous: bool) -> None:
    state = fresh()
    options: dict[str, Any] = {"ref": "run", "when": tsck.every_steps(5) | tsck.last(), "asynchronous": asynchronous, "total_steps": 12}
    with tsck.Checkpointer(store, state, keep={"keep_last": 2}, **options) as ckpt:
        assert ckpt.resume() is None
        assert train(ckpt, state, 1, 12) == [5, 10, 12]
    assert [snapshot.step for snapshot in store.log("run")] == [12, 10]
    assert store.log("run")[0].metrics == {"loss": 1 / 12}
    again = fresh()
    with tsck.Checkpointer(store, again, **options) as ckpt:
        found = ckpt.resume()
        assert found is not None
        assert found.step == 12
        assert same(again, expected(12))
        assert train(ckpt, again, 13, 16) == [15]
    noted, before = (store.show(address).metadata["checkpointer"] for address in ("run", "run~1"))
    assert {name: noted[name] for name in ("began_ns", "resumes", "epoch")} == {"began_ns": before["began_ns"], "resumes": 1, "epoch": None}
    assert store.log("run")[0].parent == found.root
    assert noted["costs"]["stall"] == before["costs"]["stall"] > 0, "as the run before had it: there was none since"
    assert noted["costs"]["restart"] > 0
    advice = store.advise("run")
    assert advice.costs.stall == noted["costs"]["stall"]
    assert advice.sources["stall"] == advice.sources["restart"] == advice.sources["mtbf"] == "measured"


def test_what_was_asked_for_is_kept_by_default_and_what_is_periodic_by_a_rule(store: tsck.Store) -> None:
    when = tsck.every_steps(1) | tsck.at_fraction([0.1, 0.25]) | (tsck.every_epochs(1) & tsck.every_steps(6)) | Mine()
    for ref, keep in (("default", {"keep_last": 2}), ("epochs", {"keep_last": 2, "keep_triggers": ["every_epochs"]})):
        state = fresh()
        with tsck.Checkpointer(store, state, ref=ref, when=when, keep=keep, total_steps=20, asynchronous=False) as ckpt:
            for step in range(1, 13):
                state["w"] += 1
                ckpt.step(step, epoch=step / 3)
    assert [snapshot.step for snapshot in store.log("default")] == [12, 11, 5, 2]
    assert [snapshot.step for snapshot in store.log("epochs")] == [12, 11, 6, 5, 2]
    assert store.resolve("epochs@6").triggers == ("every_steps", "every_epochs")
    assert store.resolve("epochs@12").triggers == ("every_steps", "every_epochs", "Mine")
    assert store.resolve("epochs@12").epoch == 4.0


def finished(store: tsck.Store) -> list[tuple[str, str]]:
    """Branch and root of each run whose end is in the log."""
    operations = (op for entry in store.engine.log.entries(1) for op in entry.ops)
    return [(op.fields["ref"], op.fields["root"].hex()) for op in operations if op.name == "finished"]


@pytest.mark.parametrize(("total_steps", "is_preempted"), [(12, False), (None, False), (20, False), (12, True)])
def test_the_end_of_a_complete_run_is_in_the_log(store: tsck.Store, total_steps: int | None, is_preempted: bool) -> None:
    state = fresh()
    with tsck.Checkpointer(store, state, ref="run", when=tsck.every_steps(5), total_steps=total_steps) as ckpt:
        train(ckpt, state, 1, 12)
        ckpt.preempted = is_preempted
    is_complete = total_steps != 20 and not is_preempted
    assert finished(store) == ([("run", store.resolve("run").root)] if is_complete else [])


def test_an_exception_and_a_run_without_saves_end_nothing(store: tsck.Store) -> None:
    state = fresh()
    with contextlib.suppress(KeyError), tsck.Checkpointer(store, state, ref="run", when=tsck.every_steps(5)) as ckpt:
        train(ckpt, state, 1, 12)
        raise KeyError
    with tsck.Checkpointer(store, state, ref="run", when=tsck.every_steps(5)) as ckpt:
        ckpt.resume()
        train(ckpt, state, 13, 14)
    assert finished(store) == []


def test_an_end_that_cannot_be_noted_is_a_warning(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_: str) -> None:
        raise BackendUnavailableError("no answer", object_id="x")

    monkeypatch.setattr(store, "finish", unreachable)
    state = fresh()
    ckpt = tsck.Checkpointer(store, state, ref="run", when=tsck.every_steps(5))
    train(ckpt, state, 1, 5)
    with pytest.warns(UserWarning, match="the end of the run on 'run' is not in the log"):
        ckpt.close(finished=True)


def test_names_of_triggers_beyond_what_a_snapshot_holds_are_cut(store: tsck.Store) -> None:
    when: tsck.Trigger = tsck.every_steps(1)
    for number in range(20):
        when |= type(f"Trigger{number:02}" + "x" * 90, (Always,), {})()
    with tsck.Checkpointer(store, fresh(), ref="run", when=when, asynchronous=False) as ckpt:
        ckpt.step(1)
    names = store.resolve("run").triggers
    assert [name[:9] for name in names] == ["every_ste", *(f"Trigger{number:02}" for number in range(15))]
    assert {len(name) for name in names[1:]} == {64}


class Always(tsck.Trigger):
    def fires(self, moment: TriggerContext) -> bool:
        return True


class Mine(tsck.Trigger):
    def fires(self, moment: TriggerContext) -> bool:
        return moment.step == 12


def test_every_trigger_is_known_to_the_rules() -> None:
    made = (
        *(tsck.every_steps(1), tsck.at_steps([1]), tsck.every_epochs(1), tsck.at_fraction(0.1), tsck.first(), tsck.last()),
        *(tsck.on_improvement("loss"), tsck.on_metric("loss < 1"), tsck.every_seconds(1), tsck.auto()),
    )
    assert {each.name for each in made} | {tsck.on_preemption.__name__} == set(TRIGGERS)


def test_what_the_policy_drops_is_freed_while_the_job_runs(tmp_path: Path) -> None:
    def packs(**options: Any) -> list[int]:
        """How many packs there are after each save."""
        state, found = {"w": torch.zeros(3000)}, []
        with tsck.open(tmp_path / f"store-{len(options)}", create=True, no_sync=True) as store:
            with tsck.Checkpointer(
                store, state, ref="run", when=tsck.every_steps(1), keep={"keep_last": 2}, asynchronous=False, **options
            ) as ckpt:
                for step in range(1, 15):
                    state["w"] += step
                    ckpt.step(step)
                    if ckpt._dropped is not None and ckpt._dropped._thread is not None:
                        ckpt._dropped._thread.join()  # one that is slow frees less often
                    found.append(len([*store.engine.backend.list("packs/")]))
            found.append(len([*store.engine.backend.list("packs/")]))
            assert [snapshot.step for snapshot in store.log("run")] == [14, 13]
            assert store.fsck(read_data=True).ok
        return found

    assert packs() == [*range(1, 15), 14]
    bounded = packs(free_dropped=True)
    assert bounded[-1] == 3, "of two snapshots, and of the layout"
    assert max(bounded) < 9


def test_what_cannot_be_freed_is_a_warning(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(store: tsck.Store, ref: str) -> None:
        raise BackendUnavailableError("injected")

    monkeypatch.setattr(tsck.Store, "free_dropped", fail)
    options: dict[str, Any] = {"ref": "run", "when": tsck.every_steps(1), "keep": {"keep_last": 2}, "free_dropped": True}
    with pytest.warns(UserWarning, match="injected; a later save tries again"):
        save_thrice(store, options)


def save_thrice(store: tsck.Store, options: dict[str, Any]) -> None:
    with tsck.Checkpointer(store, fresh(), **options) as ckpt:
        for step in range(1, 4):
            ckpt.step(step)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_with_a_training_state(store: tsck.Store, asynchronous: bool) -> None:
    def job() -> tuple[nn.Module, tsck.TrainingState]:
        torch.manual_seed(0)
        model = nn.Linear(300, 300)
        return model, tsck.TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    model, training = job()
    with tsck.Checkpointer(store, training, ref="run", when=tsck.every_steps(1), asynchronous=asynchronous) as ckpt:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        ckpt.step(1, epoch=0.5)
    assert (store.resolve("run").triggers, store.resolve("run").epoch) == (("every_steps",), 0.5)
    other, training = job()
    with tsck.Checkpointer(store, training, ref="run", when=tsck.every_steps(1)) as ckpt:
        found = ckpt.resume()
    assert found is not None
    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]


def damage(folder: Path, store: tsck.Store, root: str) -> None:
    """Flips bits all over the pack that this snapshot alone has."""
    others = {name for snapshot in store.log("run") if snapshot.root != root for name in store.show(snapshot.root).packs}
    [ulid] = set(store.show(root).packs) - others
    found = parse_ulid(ulid)
    assert found is not None
    path = folder / "store" / pack_name(found)
    data = bytearray(path.read_bytes())
    for at in range(64, len(data) - 300, 50):
        data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))


def test_damaged_and_marked_snapshots_are_passed_over(store: tsck.Store, tmp_path: Path) -> None:
    state = fresh()
    with tsck.Checkpointer(store, state, ref="run", when=tsck.every_steps(1), asynchronous=False) as ckpt:
        train(ckpt, state, 1, 5)
    store.mark("run@4", "bad", reason="diverged")
    damage(tmp_path, store, store.resolve("run@5").root)
    again = fresh()
    with (
        tsck.open(tmp_path / "store", cache_dir=tmp_path / "other") as other,
        tsck.Checkpointer(other, again, ref="run", when=tsck.every_steps(1)) as ckpt,
    ):
        with pytest.warns(UserWarning, match="was skipped") as caught:
            found = ckpt.resume()
        assert found is not None
        assert (found.step, same(again, expected(3))) == (3, True)
        said = [str(each.message) for each in caught]
        assert "does not match its hash" in said[0]
        assert said[1] == "run@4 was skipped: it is marked bad; resuming from run@3 instead"
        assert train(ckpt, again, 4, 4) == [4]
    assert store.log("run")[0].parent == found.root


def test_it_does_not_start_over_if_all_snapshots_are_damaged_or_marked(store: tsck.Store, tmp_path: Path) -> None:
    state = fresh()
    with tsck.Checkpointer(store, state, ref="run", when=tsck.every_steps(1), asynchronous=False) as ckpt:
        train(ckpt, state, 1, 2)
    store.mark("run@1", "bad")
    damage(tmp_path, store, store.resolve("run").root)
    with (
        tsck.open(tmp_path / "store", cache_dir=tmp_path / "other") as other,
        tsck.Checkpointer(other, fresh(), ref="run", when=tsck.every_steps(1)) as ckpt,
        pytest.raises(
            DamageError, match=r"none of the snapshots of 'run' can be restored.*: run@2: .*its hash.*; run@1: it is marked bad\. Run"
        ),
    ):
        ckpt.resume()


@pytest.mark.parametrize(
    "make",
    [
        lambda store: tsck.Checkpointer(store, {}, ref="run", when=1000),  # type: ignore[arg-type]
        lambda store: tsck.Checkpointer(store, {}, ref="run", when=tsck.first(), lead_steps=0),
        lambda store: tsck.Checkpointer(store, {}, ref="run", when=tsck.first(), keep={"expire_after": "1d"}),
    ],
)
def test_what_makes_no_sense_is_refused(store: tsck.Store, make: Callable[[tsck.Store], object]) -> None:
    with pytest.raises(InvalidOptionError):
        make(store)


def test_steps_that_go_back_are_refused(store: tsck.Store) -> None:
    with tsck.Checkpointer(store, fresh(), ref="run", when=tsck.every_steps(100)) as ckpt:
        ckpt.step(7)
        with pytest.raises(InvalidOptionError, match="step 6 came after step 7"):
            ckpt.step(6)


# --- many ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("steps", [4, 8, 12]),
        ("rank 0's clock", [5, 11]),
        ("a signal to rank 1", [5, 6, 11]),
        ("rank 1's clock, which does not count", [11]),
    ],
)
def test_all_ranks_save_at_the_same_steps(pool: Pool, tmp_path: Path, name: str, steps: list[int]) -> None:
    make_store(tmp_path)
    found = pool.run(rank_side.run, str(tmp_path), name, 2, ranks=2)
    assert found[0] == found[1]
    assert found[0][1] == []
    first, *rest = found[0][0]
    if name == "a signal to rank 1":  # rank 0 sees it at once, or a step later
        assert first in steps[:2]
        assert rest == [11]
    else:
        assert [first, *rest] == steps
    resumed = pool.run(rank_side.resume, str(tmp_path), 2, ranks=2)
    last = steps[-1]
    assert resumed == [(last, 2000.0 * last * (last + 1) / 2, [])] * 2
