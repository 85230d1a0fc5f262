"""Merges the states of ranks of several kinds into one layout, before they are saved: dicts at the same path become one.

The same path means the same thing on all ranks. A value must be equal on all ranks that have it, and a tensor must be held in full by the
ranks that hold some of it. Knows no torch, and no bytes: `duplicate_regions` compares tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tensorstore_ck.format.layout import Layout, Node, Sharding, SharedStorage, TensorSpec
from tensorstore_ck.format.layout import Spread as LayoutSpread
from tensorstore_ck.format.sharding import BoxBounds, Mesh
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves, parse
from tensorstore_ck.format.values import describe
from tensorstore_ck.session.group.rank_kinds import RankKind, ReportedBoxes
from tensorstore_ck.session.group.rank_messages import describe_ranks
from tensorstore_ck.session.group.region_claims import CompleteCut, Held, MeshSpread, NotOneTensorError, Spread, cuts_of, gap, once

_DICTS: Final = ("d", "o", "f")
_TYPED: Final = ("r", "n", "f")
BY_NAME: Final = (
    "key an optimizer's state by names, with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict and "
    "flatten_optimizer_state_dict=True"
)
RANK_STATE: Final = "put values of one rank into rank_state="


class LayoutMismatchError(Exception):
    """The ranks cannot save one snapshot together. The message says what differs, where, and what to do. Never leaves this package."""

    def __init__(self, path: str, text: str, advice: str) -> None:
        super().__init__(f"the ranks cannot save {path!r} together: {text}; {advice}")
        self.path = path


class ValueHole(NamedTuple):
    """A value: its path, and where it is in each kind that has it."""

    path: str
    places: tuple[tuple[int, int], ...]
    """(kind, number of the value there)."""


class ComparedTensor(NamedTuple):
    """A tensor that ranks hold in several ways, each in full. The first one is stored, and the others must be equal."""

    tensor: int
    cuts: tuple[CompleteCut, ...]


class ReportedRegionsTensor(NamedTuple):
    """A tensor whose regions ranks report."""

    spec: TensorSpec
    spread: Literal["boxes", "flat"]
    boxes: Mapping[int, Sequence[BoxBounds]]
    """Rank -> its regions, in order."""

    @property
    def held(self) -> list[Held]:
        """Its regions, and the ranks that hold them."""
        return [(rank, box) for rank, boxes in sorted(self.boxes.items()) for box in boxes]

    def check(self) -> None:
        """Checks that the ranks hold all of it.

        Raises:
            LayoutMismatchError: they do not.
        """
        problem = gap(self.spec, once(self.held), is_flat=self.spread == "flat")
        if problem:
            raise LayoutMismatchError(self.spec.name, problem, "a region that several ranks hold is the same region on each of them")


class UnitedState(NamedTuple):
    """The merged state of all ranks."""

    layout: Layout
    holes: Sequence[ValueHole]
    compared: Sequence[ComparedTensor]
    reported: Sequence[ReportedRegionsTensor]
    """In the order of the layout."""


@dataclass(slots=True)
class _Member:
    """A tensor of the merged layout."""

    spec: TensorSpec
    sides: dict[int, Leaf] = field(default_factory=dict)
    """Kind -> the leaf there: a tensor, or a view that becomes one."""


def unite(kinds: Sequence[RankKind], reported: ReportedBoxes) -> UnitedState:
    """The merged state of all ranks.

    Raises:
        LayoutMismatchError: they have different things at one path, or do not hold a tensor in full.
    """
    return _Uniting(kinds, reported).result()


class _Uniting:
    def __init__(self, kinds: Sequence[RankKind], reported: ReportedBoxes) -> None:
        self._kinds = kinds
        self._boxes = {rank: {regions.tensor: regions.boxes for regions in explicit} for rank, explicit in reported.items()}
        self._members: list[_Member] = []
        self._number_of: dict[tuple[int, int], int] = {}
        """(kind, its tensor) -> the merged tensor with its name."""
        self._holes: list[ValueHole] = []
        self._visited: list[list[tuple[int, Leaf]]] = []
        """The leaves of all kinds, in the order of the merged tree."""
        self._item_bytes = {spec.dtype: spec.item_bytes for kind in kinds for spec in kind.layout.tensors}
        self._trees = [parse(kind.layout, len(kind.values), f"the layout of {kind.name}") for kind in kinds]
        self._names = [frozenset(leaf.path for leaf in leaves(tree) if leaf.kind != "value") for tree in self._trees]

    def result(self) -> UnitedState:
        tree = self._node(list(enumerate(self._trees)), is_numbered=False)
        parsed = parse(Layout([member.spec for member in self._members], tree), len(self._holes))
        names: dict[int, str] = {}
        for leaf, sides in zip(leaves(parsed), self._visited, strict=True):
            other = next((side for side, own in sides if own.path != leaf.path), None)
            if other is not None:  # such as the keys "a.b", and "a" over "b": a restore matches by paths
                who = self._kinds[other].name
                raise LayoutMismatchError(leaf.path.partition("#")[0], f"{who} had it at another path of the state", "rename one of them")
            if leaf.kind == "tensor":
                names.setdefault(leaf.index, leaf.path)
        taken = {leaf.path for leaf in leaves(parsed)}
        tensors, spreads, compared, reported = [], list[LayoutSpread](), [], list[ReportedRegionsTensor]()
        meshes: dict[Mesh, int] = {}
        found: dict[tuple[tuple[int, LayoutSpread], ...], tuple[list[CompleteCut], LayoutSpread]] = {}
        """Cached: many tensors are held in the same way, and a mesh may have thousands of ranks."""
        for number, member in enumerate(self._members):
            name = names.get(number) or _free(member.spec.name, taken)
            spec = member.spec._replace(name=name)
            key = tuple((side, self._layout_spread(side, leaf)) for side, leaf in member.sides.items())
            if key not in found:
                cuts = self._cuts(spec, member)
                found[key] = cuts, self._as_stored(cuts[0], meshes)
            cuts, spread = found[key]
            reported += self._reported(spec, member, cuts)
            if len(cuts) > 1:
                compared.append(ComparedTensor(number, tuple(cuts)))
            spreads.append(spread)
            tensors.append(spec)
        layout = Layout(
            tensors=tensors,
            tree=tree,
            storages=self._storages(),
            meshes=list(meshes),
            spreads=spreads if any(spread is not None for spread in spreads) else (),
        )
        return UnitedState(layout, self._holes, compared, reported)

    def _node(self, trees: Sequence[tuple[int, Tree]], *, is_numbered: bool) -> Node:
        """The node at one path of some kinds. `is_numbered`: below a dict with numbers as keys."""
        first = trees[0][1]
        if isinstance(first, Leaf):
            self._check_same_kind(trees, lambda other: isinstance(other, Leaf) and (other.kind == "value") == (first.kind == "value"))
            sides = [(number, other) for number, other in trees if isinstance(other, Leaf)]
            self._visited.append(sides)
            if first.kind != "value":
                return self._tensor(sides)
            self._holes.append(ValueHole(first.path, tuple((number, leaf.index) for number, leaf in sides)))
            return None
        tag, *rest = first.node
        is_dict = tag in _DICTS
        self._check_same_kind(
            trees,
            lambda other: (
                isinstance(other, Container)
                and other.node[0] == tag
                and (tag not in _TYPED or other.node[1] == first.node[1])
                and (is_dict or [*map(repr, other.keys)] == [*map(repr, first.keys)])
            ),
        )
        branches = [(number, branch) for number, branch in trees if isinstance(branch, Container)]
        children: dict[str, list[tuple[int, Tree]]] = {}
        keys: dict[str, Any] = {}
        for number, branch in branches:
            for at, child in enumerate(branch.children):
                key = branch.keys[at] if branch.keys else at
                keys.setdefault(repr(key), key)
                children.setdefault(repr(key), []).append((number, child))
        if not is_numbered and is_dict and any(type(key) is int for key in keys.values()):
            is_numbered = True
            self._check_numbers(first.path, branches)
        nodes = [self._node(several, is_numbered=is_numbered) for several in children.values()]
        match tag:
            case "l" | "u":
                return [tag, nodes]
            case "r":
                return [tag, rest[0], nodes[0]]
            case "n" | "f":
                return [tag, rest[0], list(keys.values()), nodes]
            case "o":
                attributes = [(number, branch.attributes) for number, branch in branches if branch.attributes is not None]
                return [tag, list(keys.values()), nodes, self._node(attributes, is_numbered=is_numbered) if attributes else False]
        return [tag, list(keys.values()), nodes]

    def _check_same_kind(self, trees: Sequence[tuple[int, Tree]], is_same: Callable[[Tree], bool]) -> None:
        if not all(map(is_same, (tree for _, tree in trees))):
            advice = f"what differs in length or kind needs a dict with names as keys; or {RANK_STATE}"
            raise LayoutMismatchError(_path(trees), _each(self._kinds, {side: _what(tree) for side, tree in trees}), advice)

    def _check_numbers(self, path: str, branches: Sequence[tuple[int, Container]]) -> None:
        """Refuses numbers that may mean different parameters on different ranks."""
        first: dict[tuple[frozenset[str], frozenset[str]], int] = {}
        for side, branch in branches:
            first.setdefault((frozenset(leaf.path for leaf in leaves(branch) if leaf.kind != "value"), self._names[side]), side)
        for ((one, its_names), side), ((two, other_names), other) in combinations(first.items(), 2):
            if not one.isdisjoint(two) and (one != two or not (its_names <= other_names or its_names >= other_names)):
                who, others = self._kinds[side].name, self._kinds[other].name
                text = f"the same number may mean different parameters on {who} and on {others}, which have other tensors"
                raise LayoutMismatchError(path, text, BY_NAME)

    def _tensor(self, sides: Sequence[tuple[int, Leaf]]) -> Node:
        side, first = sides[0]
        flags = first.flags
        if all(leaf.kind == "view" and leaf.node[2:-1] == first.node[2:-1] for _, leaf in sides) and self._have_one_base(sides):
            base = self._known(sides)
            if base is None:
                base = self._add(sides, self._kinds[side].layout.tensors[first.index], are_views=False)
            return ["w", base, *first.node[2:-1], flags]
        known = self._known(sides) if all(leaf.kind == "tensor" for _, leaf in sides) else None
        number = self._add(sides, self._spec(first, side), are_views=True) if known is None else known
        return ["t", number, flags] if flags else number

    def _have_one_base(self, sides: Sequence[tuple[int, Leaf]]) -> bool:
        """Whether the views have bases of the same form in all kinds."""
        return len({self._kinds[side].layout.tensors[leaf.index][1:] for side, leaf in sides}) == 1

    def _known(self, sides: Sequence[tuple[int, Leaf]]) -> int | None:
        numbers = {self._number_of.get((side, leaf.index)) for side, leaf in sides}
        return numbers.pop() if len(numbers) == 1 else None

    def _add(self, sides: Sequence[tuple[int, Leaf]], spec: TensorSpec, *, are_views: bool) -> int:
        """`are_views`: views become separate tensors; otherwise their bases are added."""
        number = len(self._members)
        member = _Member(spec)
        for side, leaf in sides:
            own = self._spec(leaf, side) if are_views else self._kinds[side].layout.tensors[leaf.index]
            if (own.dtype, own.shape) != (spec.dtype, spec.shape):
                what = {sides[0][0]: f"{spec.dtype} {list(spec.shape)}", side: f"{own.dtype} {list(own.shape)}"}
                advice = f"give what differs by rank names of its own, or {RANK_STATE}"
                raise LayoutMismatchError(leaf.path, _each(self._kinds, what), advice)
            is_whole = leaf.kind == "tensor" or not are_views
            member.sides[side] = Leaf(leaf.path, "tensor", leaf.index, leaf.index) if is_whole else leaf
            if is_whole:
                self._number_of.setdefault((side, leaf.index), number)
        self._members.append(member)
        return number

    def _spec(self, leaf: Leaf, side: int) -> TensorSpec:
        if leaf.kind == "tensor":
            return self._kinds[side].layout.tensors[leaf.index]
        dtype, shape = leaf.node[2], tuple(leaf.node[3])
        item_bytes = self._item_bytes.get(dtype) or (np.dtype(dtype[3:]).itemsize if dtype.startswith("np:") else 0)
        if not item_bytes:
            text = "it shares memory with another tensor in different ways on the ranks"
            raise LayoutMismatchError(leaf.path, text, "save copies (.clone())")
        return TensorSpec(leaf.path, dtype, item_bytes, shape)

    def _cuts(self, spec: TensorSpec, member: _Member) -> list[CompleteCut]:
        """The ways in which the ranks hold a tensor, each in full."""
        sides = [(self._kinds[side].ranks, self._spread(side, leaf)) for side, leaf in member.sides.items()]
        try:
            return cuts_of(sides)
        except NotOneTensorError as exc:
            raise LayoutMismatchError(spec.name, str(exc), "all ranks of a mesh save its tensors, under one name") from exc

    def _as_stored(self, cut: CompleteCut, meshes: dict[Mesh, int]) -> LayoutSpread:
        if not isinstance(cut.spread, MeshSpread):
            return cut.spread
        if not any(cut.spread.placements) and len(cut.ranks) == sum(len(kind.ranks) for kind in self._kinds):
            return None
        return Sharding(meshes.setdefault(cut.spread.mesh, len(meshes)), cut.spread.placements)

    def _reported(self, spec: TensorSpec, member: _Member, cuts: Sequence[CompleteCut]) -> list[ReportedRegionsTensor]:
        tensors = []
        for cut in cuts:
            if not isinstance(cut.spread, MeshSpread):
                sides = [(side, leaf) for side, leaf in member.sides.items() if self._layout_spread(side, leaf) == cut.spread]
                boxes = {rank: self._boxes[rank].get(leaf.index, ()) for side, leaf in sides for rank in self._kinds[side].ranks}
                tensors.append(ReportedRegionsTensor(spec, cut.spread, boxes))
                tensors[-1].check()
        return tensors

    def _layout_spread(self, side: int, leaf: Leaf) -> LayoutSpread:
        spreads = self._kinds[side].layout.spreads
        return spreads[leaf.index] if leaf.kind == "tensor" and spreads else None

    def _spread(self, side: int, leaf: Leaf) -> Spread:
        spread = self._layout_spread(side, leaf)
        return MeshSpread(self._kinds[side].layout.meshes[spread.mesh], spread.placements) if isinstance(spread, Sharding) else spread

    def _storages(self) -> list[SharedStorage]:
        """The shared allocations that are the same in all kinds that have their tensors."""
        kinds: dict[SharedStorage, set[int]] = {}
        for side, kind in enumerate(self._kinds):
            for storage in kind.layout.storages:
                numbers = [self._number_of.get((side, tensor)) for tensor in storage.tensors]
                if None not in numbers:
                    kinds.setdefault(storage._replace(tensors=tuple(number for number in numbers if number is not None)), set()).add(side)
        return [storage for storage, sides in kinds.items() if all(set(self._members[number].sides) == sides for number in storage.tensors)]


def difference(one: RankKind, other: RankKind) -> LayoutMismatchError:
    """The error for two kinds with the same layout and different values."""
    paths = [leaf.path for leaf in leaves(parse(one.layout, len(one.values), one.name)) if leaf.kind == "value"]
    for number, path in enumerate(paths):
        try:
            _check_value(ValueHole(path, ((0, number), (1, number))), [one, other])
        except LayoutMismatchError as exc:
            return exc
    return LayoutMismatchError("the state", f"{one.name} and {other.name} have different values", RANK_STATE)


def values_of(united: UnitedState, kinds: Sequence[RankKind]) -> tuple[list[Any], list[bytes]]:
    """The values of a merged state, and its large ones.

    Raises:
        LayoutMismatchError: ranks have different values at one path.
    """
    values: list[Any] = []
    blobs: list[bytes] = []
    bytes_of = {kind.blob_ids[number]: blob for kind in kinds for number, blob in kind.blobs.items()}
    for hole in united.holes:
        _check_value(hole, kinds)
        side, number = hole.places[0]
        value = kinds[side].values[number]
        if _is_large(value):
            blobs.append(bytes_of[kinds[side].blob_ids[value[2]]])
            value = ["b", value[1], len(blobs) - 1]
        values.append(value)
    return values, blobs


def _check_value(hole: ValueHole, kinds: Sequence[RankKind]) -> None:
    if len({_said(kinds[at], kinds[at].values[number]) for at, number in hole.places}) > 1:
        shown = {at: _shown(kinds[at], kinds[at].values[number]) for at, number in hole.places}
        raise LayoutMismatchError(hole.path, _each(kinds, shown), BY_NAME if "param_groups" in hole.path else RANK_STATE)


def _said(kind: RankKind, value: Any) -> str:
    """A key that is equal for equal values only: in Python 1, True and 1.0 are equal, and NaN is not equal to itself."""
    return repr((value[1], kind.blob_ids[value[2]])) if _is_large(value) else repr(value)


def _is_large(value: object) -> bool:
    return type(value) is list and bool(value) and value[0] == "b"


def _shown(kind: RankKind, value: Any) -> str:
    return f"a large value with the hash {kind.blob_ids[value[2]].hex()[:16]}" if _is_large(value) else f"{describe(value)!r:.100}"


def _path(trees: Sequence[tuple[int, Tree]]) -> str:
    return next((tree.path for _, tree in trees if tree.path), "the state")


def _each(kinds: Sequence[RankKind], what: Mapping[int, str]) -> str:
    return describe_ranks({rank: text for side, text in what.items() for rank in kinds[side].ranks})


def _what(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return "a value" if tree.kind == "value" else "a tensor"
    names = {"d": "a dict", "o": "an OrderedDict", "c": "a Counter", "f": "a defaultdict", "l": "a list", "u": "a tuple"}
    what = names.get(tree.node[0], f"a {tree.node[1]}")
    return f"{what} of {len(tree.children)}" if tree.node[0] in ("l", "u") else what


def _free(name: str, taken: set[str]) -> str:
    unique, again = name, 1
    while unique in taken:
        again += 1
        unique = f"{name}#{again}"
    taken.add(unique)
    return unique
