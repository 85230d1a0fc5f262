"""Ranks whose states differ save one snapshot, in one layout: restored by one process, and by ranks that are spread in other ways."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.session.group import duplicate_regions, merge_layouts
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, local_of, opened

RANKS = 4


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on(ranks: list[Any], full: torch.Tensor, *placements: Any) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
    return distribute_tensor(full, mesh, list(placements), src_data_rank=None)


EMBED, WEIGHT, NORM, EXPERT = numbers(1, 30, 40), numbers(2, 64, 40), numbers(3, 1500), numbers(4, 8, 300)
GRID = [[0, 1], [2, 3]]
ALL = [0, 1, 2, 3]


def spanning(rank: int) -> dict[str, Any]:
    """What makes any difference between the ranks a matter of all of them."""
    return {"w": on(GRID, WEIGHT, Shard(0), Shard(1))}


def norm_outside_tp(rank: int) -> dict[str, Any]:
    return spanning(rank) | {"norm": on([rank % 2, rank % 2 + 2], NORM, Shard(0))}


def experts_of_each(rank: int) -> dict[str, Any]:
    return spanning(rank) | {"experts": {f"{rank}.w": EXPERT[rank] + 0}, "norm": NORM + 0}


def experts_on_submeshes(rank: int) -> dict[str, Any]:
    pair = [0, 1] if rank < 2 else [2, 3]
    return spanning(rank) | {"experts": {f"{pair[0]}": on(pair, EXPERT + pair[0], Shard(0))}}


def something_on_one(rank: int) -> dict[str, Any]:
    extras: dict[int, dict[str, Any]] = {0: {"epoch": 3}, 2: {"log": "x" * 200_000, "seen": NORM[:20] + 0}}
    return spanning(rank) | extras.get(rank, {})


def in_another_order(rank: int) -> dict[str, Any]:
    state = spanning(rank) | {"norm": NORM + 0, "embed": on(ALL, EMBED, Shard(0))}
    return dict(reversed(state.items())) if rank == 1 else state


def with_grad_on_one(rank: int) -> dict[str, Any]:
    return spanning(rank) | {"norm": (NORM + 0).requires_grad_(rank == 2)}


def tied_on_one(rank: int) -> dict[str, Any]:
    embed = EMBED + 0
    return spanning(rank) | {
        "embed": embed,
        "head": embed.detach() if rank == 3 else EMBED + 0,
        "row": embed[3] if rank == 3 else EMBED[3] + 0,
    }


def stages_that_share(rank: int) -> dict[str, Any]:
    """Stages of one rank and of three."""
    state: dict[str, Any] = {"global": on(ALL, WEIGHT, Shard(0))}
    embed = EMBED + 0 if rank == 0 else on([1, 2, 3], EMBED, Shard(1))
    return state | {"embed": embed, f"layer of {min(rank, 1)}": NORM + min(rank, 1)}


def flat_beside_an_extra(rank: int) -> dict[str, Any]:
    flat = WEIGHT.flatten()
    start, stop = (0, 700, 900, 2560, 2560)[rank : rank + 2]
    return {"w": tsck.FlatShard(flat[start:stop].clone(), tuple(WEIGHT.shape), start)} | ({"epoch": 1} if rank == 0 else {})


def flat_on_several(rank: int) -> dict[str, Any]:
    """Each half on two ranks."""
    flat, half = WEIGHT.flatten(), rank % 2 * 1280
    return {"w": tsck.FlatShard(flat[half : half + 1280].clone(), tuple(WEIGHT.shape), half)}


def tied_flat_on_several(rank: int) -> dict[str, Any]:
    """Tied on even ranks only; each half on two ranks."""
    flat, half = WEIGHT.flatten(), rank // 2 * 1280
    share = tsck.FlatShard(flat[half : half + 1280].clone(), tuple(WEIGHT.shape), half)
    return {"embed": share, "head": share} if rank % 2 == 0 else {"head": share}


def flat_tied_in_another_order(rank: int) -> dict[str, Any]:
    share = flat_on_several(rank)["w"]
    return {"embed": share, "head": share, "own": 1} if rank == 0 else {"head": share, "embed": share}


def paths_alike(rank: int) -> dict[str, Any]:
    """One text for two positions."""
    return {"a.b": NORM + 0} if rank else {"a": {"b": NORM + 1}}


def a_view_before_its_tensor(rank: int) -> dict[str, Any]:
    """On one rank: what version 1 has always stored in separate layouts."""
    norm = NORM + 0
    return {"row": norm[10:20], "norm": norm} if rank == 0 else {"norm": norm}


def layers_in_boxes(rank: int) -> dict[str, Any]:
    """As Megatron's ShardedTensor has them: a stage's layers along a prepended dim, cut by tensor parallelism, and what two ranks hold."""
    stage, half = rank // 2, rank % 2 * 150
    boxes = [tsck.Box(EXPERT[layer, half : half + 150].clone()[None], (8, 300), (layer, half)) for layer in range(4 * stage, 4 * stage + 4)]
    same = tsck.Box(NORM[750 * stage : 750 * stage + 750].clone(), (1500,), (750 * stage,))
    return {"layers": tsck.Boxes(boxes), "norm": same}


def replicated_here_whole_there(rank: int) -> dict[str, Any]:
    return spanning(rank) | {"norm": on([0, 1], NORM, Replicate()) if rank < 2 else NORM + 0}


STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        norm_outside_tp, experts_of_each, experts_on_submeshes, something_on_one, in_another_order, with_grad_on_one, tied_on_one,
        stages_that_share, flat_beside_an_extra, flat_on_several, tied_flat_on_several, flat_tied_in_another_order,
        a_view_before_its_tensor, layers_in_boxes,
        replicated_here_whole_there,
    )
}  # fmt: skip
EXPECTED: dict[str, dict[str, Any]] = {
    "norm_outside_tp": {"w": WEIGHT, "norm": NORM},
    "experts_of_each": {"w": WEIGHT, "experts": {f"{rank}.w": EXPERT[rank] for rank in ALL}, "norm": NORM},
    "experts_on_submeshes": {"w": WEIGHT, "experts": {"0": EXPERT, "2": EXPERT + 2}},
    "something_on_one": {"w": WEIGHT, "epoch": 3, "log": "x" * 200_000, "seen": NORM[:20]},
    "in_another_order": {"w": WEIGHT, "norm": NORM, "embed": EMBED},
    "with_grad_on_one": {"w": WEIGHT, "norm": NORM},
    "tied_on_one": {"w": WEIGHT, "embed": EMBED, "head": EMBED, "row": EMBED[3]},
    "stages_that_share": {"global": WEIGHT, "embed": EMBED, "layer of 0": NORM, "layer of 1": NORM + 1},
    "flat_beside_an_extra": {"w": WEIGHT, "epoch": 1},
    "flat_on_several": {"w": WEIGHT},
    "tied_flat_on_several": {"embed": WEIGHT, "head": WEIGHT},
    "flat_tied_in_another_order": {"embed": WEIGHT, "head": WEIGHT, "own": 1},
    "a_view_before_its_tensor": {"row": NORM[10:20], "norm": NORM},
    "layers_in_boxes": {"layers": EXPERT, "norm": NORM},
    "replicated_here_whole_there": {"w": WEIGHT, "norm": NORM},
}


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(value, two[key]) for key, value in one.items())
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


def put(folder: str, name: str, step: int, is_async: bool = False) -> str:
    state, store, group = STATES[name](torch.distributed.get_rank()), opened(folder, RANKS), GROUPS[RANKS]
    if is_async:
        handle = store.put_snapshot_async(state, ref=name, step=step, group=group, timeout_seconds=TIMEOUT_SECONDS, unchanged="ok")
        return handle.wait().root
    return store.put_snapshot(state, ref=name, step=step, group=group, timeout_seconds=TIMEOUT_SECONDS, unchanged="ok").root


def zeroed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, tsck.FlatShard):
        return tsck.FlatShard(torch.zeros_like(state.local), state.shape, state.start)
    if isinstance(state, tsck.Boxes):
        return tsck.Boxes([zeroed(box) for box in state.boxes])
    if isinstance(state, tsck.Box):
        return tsck.Box(torch.zeros_like(state.local), state.global_shape, state.offsets)
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else type(state)()


def restore_alike(folder: str, name: str) -> None:
    state = STATES[name](torch.distributed.get_rank())
    target = zeroed(state)
    opened(folder, RANKS).checkout(name, into=target, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    require_same(target, state)


def require_same(found: Any, expected: Any) -> None:
    for key, value in expected.items():
        if isinstance(value, dict):
            require_same(found[key], value)
        elif isinstance(value, torch.Tensor | tsck.FlatShard | tsck.Box | tsck.Boxes):
            assert all(map(torch.equal, local_of(found[key]), local_of(value))), key
        else:
            assert found[key] == value


def restore_on_two(folder: str, name: str) -> None:
    """All of it on each of two ranks, as shards where it has rows enough."""

    def spread(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spread(each) for key, each in value.items()}
        if not isinstance(value, torch.Tensor):
            return type(value)()
        return on([1, 0], torch.zeros_like(value), Shard(0))

    target = spread(EXPECTED[name])
    opened(folder, 2).checkout(name, into=target, group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS)

    def require(found: Any, expected: Any) -> None:
        if isinstance(expected, dict):
            for key in expected:
                require(found[key], expected[key])
        elif isinstance(expected, torch.Tensor):
            assert torch.equal(found.to_local(), on([1, 0], expected, Shard(0)).to_local())
        else:
            assert found == expected

    require(target, EXPECTED[name])


@pytest.mark.parametrize("name", STATES)
def test_states_that_differ_by_rank(pool: Pool, folder: Path, name: str) -> None:
    (first,) = set(pool.run(put, str(folder), name, 1, ranks=RANKS))
    (second,) = set(pool.run(put, str(folder), name, 2, True, ranks=RANKS))  # by the plan that is known by now
    assert first != second
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert equal(EXPECTED[name], store.checkout(name))
        assert store.fsck(read_data=True).ok
    pool.run(restore_alike, str(folder), name, ranks=RANKS)
    pool.run(restore_on_two, str(folder), name, ranks=2)


def test_what_can_be_in_layouts_of_their_own_is(pool: Pool, folder: Path) -> None:
    (root,) = set(pool.run(put, str(folder), "a_view_before_its_tensor", 3, ranks=RANKS))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        part = store.engine.read_part(store.engine.read_record(store.engine.resolve(root).info), 0)
        assert part.layout_of == bytes([0, 0, 1, 0, 1, 0, 1, 0])


# --- what cannot be right is refused before a byte is written ------------------------------------------------------------


def without_it(rank: int) -> dict[str, Any]:
    return {"norm": NORM + 0} | ({} if rank == 1 else {"w": on(ALL, WEIGHT, Shard(0))})


def a_hole(rank: int) -> dict[str, Any]:
    start = (0, 100, 200, 300)[rank]
    return {"w": tsck.FlatShard(WEIGHT.flatten()[start : start + 90].clone(), tuple(WEIGHT.shape), start)} | {f"of {rank}": 1}


def an_overlap(rank: int) -> dict[str, Any]:
    start = rank * 640 - (10 if rank == 3 else 0)
    return {"w": tsck.FlatShard(WEIGHT.flatten()[start : start + 640].clone(), tuple(WEIGHT.shape), start)}


def boxes_with_a_hole(rank: int) -> dict[str, Any]:
    return {"w": tsck.Box(torch.ones(2, 3)[: 2 * (rank == 0)], (4, 3), (0, 0))}


def boxes_that_overlap(rank: int) -> dict[str, Any]:
    return {"w": tsck.Box(torch.ones(3, 3), (4, 3), (rank % 2, 0))}


REFUSED: dict[str, tuple[Callable[[int], dict[str, Any]], list[str]]] = {
    "a tensor that a rank of its mesh lacks": (
        without_it,
        ["'w'", "ranks 0, 2-3: split along dim 0 on the mesh of ranks 0-3; rank 1: no such tensor"],
    ),
    "a hole": (a_hole, ["'w'", "no rank holds 2200 of 2560 elements"]),
    "an overlap": (an_overlap, ["'w'", "ranks 2-3 hold some elements twice"]),
    "a hole between boxes": (boxes_with_a_hole, ["no rank holds 6 of 12 elements of tensor 'w', of shape [4, 3]"]),
    "an overlap of boxes": (boxes_that_overlap, ["hold some elements twice of tensor 'w'"]),
    "one path for two places": (paths_alike, ["'a.b'", "ranks 1-3"]),
}


def refuse(folder: str, name: str) -> str:
    state, store = REFUSED[name][0](torch.distributed.get_rank()), opened(folder, RANKS)

    def data() -> set[Path]:
        return {path for path in (Path(folder) / "store").rglob("*") if path.is_file() and {"packs", "parts", "snapshots"} & {*path.parts}}

    before = data()
    try:
        store.put_snapshot(state, ref="refused", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    except tsck.StoreError as exc:
        torch.distributed.barrier(GROUPS[RANKS])
        assert before == data()
        return str(exc)
    raise AssertionError("it was put")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right(pool: Pool, folder: Path, name: str) -> None:
    for text in pool.run(refuse, str(folder), name, ranks=RANKS):
        assert not [each for each in REFUSED[name][1] if each not in text], text


def put_unequal(folder: str, name: str) -> str:
    rank = torch.distributed.get_rank()
    state = {**STATES[name](rank), "another": "layout"}  # replicas are compared with the first save of one
    if rank == 3:
        found = state["w" if name == "flat_on_several" else "norm"]
        local_of(found)[0][-1] += 1
    return opened(folder, RANKS).put_snapshot(state, ref="unequal", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS).root


@pytest.mark.parametrize("name", ["flat_on_several", "norm_outside_tp", "experts_of_each", "replicated_here_whole_there"])
def test_what_should_be_equal_and_is_not(pool: Pool, folder: Path, name: str) -> None:
    for error in pool.ask(put_unequal, str(folder), name, ranks=RANKS):
        assert "differ in '" in str(error) or "'norm' is not the same on all of ranks 0-3" in str(error), error


def put_what_drifts(folder: str, name: str) -> list[str]:
    """Equal once, and later not: with each save some of it is compared, here all."""
    rank = torch.distributed.get_rank()
    state = {**STATES[name](rank), "another": "layout, too"}
    found = state["w" if name == "flat_on_several" else "embed"]
    (local,) = local_of(found)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(duplicate_regions, "SHARES", 1)
        for step in (1, 2):
            put = opened(folder, RANKS).put_snapshot
            snapshot = put(state, ref=f"drifts-{name}", step=step, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS, unchanged="ok")
            local[-1] += rank == 3
    marks = [str(each.message) for each in caught if "is marked as drift" in str(each.message)]
    assert bool(marks) == (rank == 0)
    return [snapshot.root, *marks]


@pytest.mark.parametrize("name", ["flat_on_several", "stages_that_share"])
def test_copies_that_are_no_longer_equal_are_found(pool: Pool, folder: Path, name: str) -> None:
    root, mark = pool.run(put_what_drifts, str(folder), name, ranks=RANKS)[0]
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert store.resolve(root).mark == "drift"
        assert store.resolve(f"drifts-{name}@1").mark == ""
        assert store.resolve(root).reason in mark


def put_frozen(folder: str) -> str:
    """What two ranks hold alike is stored by either of them, as the rest of the state has it."""
    rank = torch.distributed.get_rank()
    parts = [tsck.Box(WEIGHT[:32].clone(), (64, 40), (0, 0)), tsck.Box(WEIGHT[32:].clone(), (64, 40), (32, 0))]
    options: dict[str, Any] = {"ref": "frozen", "group": GROUPS[2], "timeout_seconds": TIMEOUT_SECONDS, "frozen": ["w"], "unchanged": "ok"}
    state: dict[str, Any] = {"w": tsck.Boxes(parts)}
    opened(folder, 2).put_snapshot(state, step=1, **options)
    more = NORM[:500] + 0 if rank == 0 else NORM[:0]  # smaller than one of the boxes: the ranks swap
    state["more"] = tsck.FlatShard(more, (500,), 0 if rank == 0 else 500)
    return opened(folder, 2).put_snapshot(state, step=2, **options).root


def test_a_frozen_tensor_of_which_others_store_what(pool: Pool, folder: Path) -> None:
    (root,) = set(pool.run(put_frozen, str(folder), ranks=2))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert torch.equal(store.checkout(root)["w"], WEIGHT)


def put_cut_elsewhere(folder: str) -> str:
    root = ""
    for step, cut in enumerate((10, 30)):
        boxes = [tsck.Box(WEIGHT[:, :cut] + step, (64, 40), (0, 0)), tsck.Box(WEIGHT[:, cut:] + step, (64, 40), (0, cut))]
        options: dict[str, Any] = {"ref": "cut", "group": GROUPS[2], "timeout_seconds": TIMEOUT_SECONDS}
        root = opened(folder, 2).put_snapshot({"w": tsck.Boxes(boxes)}, step=step, **options).root
    return root


def test_a_tensor_that_is_cut_elsewhere_than_in_the_save_before(pool: Pool, folder: Path) -> None:
    (root,) = set(pool.run(put_cut_elsewhere, str(folder), ranks=2))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert torch.equal(store.checkout(root)["w"], WEIGHT + 1)


def put_after_a_refusal(folder: str) -> str:
    rank = torch.distributed.get_rank()
    put = opened(folder, 2).put_snapshot
    options: dict[str, Any] = {"ref": "after", "group": GROUPS[2], "timeout_seconds": TIMEOUT_SECONDS}
    with pytest.raises(tsck.MismatchError, match=r"'lr' together: rank 0: 0.25; rank 1: 0.5"):
        put({"w": NORM + 0, "lr": 0.5 if rank else 0.25}, **options)
    return put({"w": NORM + 0, "lr": 0.5}, **options).root


def test_a_save_after_a_refusal(pool: Pool, folder: Path) -> None:
    assert len(set(pool.run(put_after_a_refusal, str(folder), ranks=2))) == 1


def put_unchecked(folder: str) -> str:
    """As a build might that took a gap for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_layouts.ReportedRegionsTensor, "check", lambda self: None)
        state = a_hole(torch.distributed.get_rank())
        return opened(folder, RANKS).put_snapshot(state, ref="unchecked", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS).root


def test_what_no_rank_has_saved_is_never_restored(pool: Pool, folder: Path) -> None:
    (root,) = set(pool.run(put_unchecked, str(folder), ranks=RANKS))
    with (
        tsck.open(folder / "store", cache_dir=folder / "cache") as store,
        pytest.raises(tsck.CorruptObjectError, match="no rank has saved all of 'w'"),
    ):
        store.checkout(root)
