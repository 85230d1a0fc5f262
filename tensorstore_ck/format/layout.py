"""The layout: the tensors of a state and the tree of containers that holds them. Format: FORMAT.md, "Layouts".

Pure and free of torch. A layout is the same for all ranks of an SPMD job and from step to step: leaves that are not tensors are holes
in its tree, filled by the part's values. It is stored as blocks, so a repeated layout is deduplicated.

Tree nodes (``Node``), as msgpack:

    nil                                        a hole: the next of the part's values, in depth-first order
    int i                                      tensor i, with no flags
    ["t", i, flags]                            tensor i; flags: 1 requires_grad, 2 torch.nn.Parameter
    ["w", i, dtype, shape, strides, offset_bytes, flags]   a view into the memory of tensor i, strides in elements
    ["d", keys, nodes]                         dict; keys are encoded values
    ["o", keys, nodes, attributes]             OrderedDict; attributes: false, or the node of its ``_metadata``
    ["c", keys, nodes]                         collections.Counter
    ["f", factory, keys, nodes]                collections.defaultdict; factory: a name of `registered_types.FACTORIES`, or nil
    ["l", nodes]  ["u", nodes]                 list, tuple
    ["n", "module:qualname", fields, nodes]    namedtuple
    ["r", type_name, node]                     a registered type

A value can be ``["tree", node, values]``: a subtree without tensors that was unknown when the layout was made, with its own values. It
replaces its hole (`tree.expand`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.sealed import Body, ParseBudget, object_hash, seal, take, unseal
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard

MAX_DIMS: Final = 64
ORIGINS: Final = [(0,) * dims for dims in range(MAX_DIMS + 1)]
"""The offsets of a whole tensor, by its dims: one tuple for all tensors of a layout."""
MAX_NAME_BYTES: Final = 1024
MAX_TENSOR_BYTES: Final = 1 << 48
MAX_ITEM_BYTES: Final = 4096
MAX_MESH_DIMS: Final = 16
MAX_RANKS: Final = 1 << 20
"""In a snapshot, and in all meshes of a layout together."""
MAX_BOXES: Final = 4096
"""Boxes of one tensor on one rank, as its placements give."""
MAX_ALL_BOXES: Final = 1 << 16
BOXES_A_TENSOR: Final = 64
"""A rank has at most `MAX_ALL_BOXES` boxes of all tensors, plus `BOXES_A_TENSOR` for each tensor."""
MAX_REGIONS: Final = 1 << 20
"""Regions of one tensor on all ranks, as its placements give."""
INLINE_TENSOR_BYTES: Final = 4096
"""Tensors up to this size are stored inside the part."""
INLINE_VALUE_BYTES: Final = 65536
"""Other values up to this size are stored inside the part."""

Node = Any


def dense_strides(shape: tuple[int, ...], order: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Strides without gaps, in elements. `order`: the dims in memory, outermost first; empty: row-major."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


class TensorSpec(NamedTuple):
    """One tensor that owns its bytes."""

    name: str
    """Path from the state's root: keys and positions joined by ``.``; unique in the layout."""
    dtype: str
    """A torch dtype's name without ``torch.``, or ``np:`` and a numpy dtype string."""
    item_bytes: int
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    """The order of its dims in memory after a restore, outermost first; empty: row-major. Stored bytes are always row-major."""

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the tensor in memory, in elements."""
        return dense_strides(self.shape, self.order)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor, row-major and contiguous."""
        return prod(self.shape) * self.item_bytes

    @property
    def whole(self) -> BoxBounds:
        """The box of all its elements."""
        return BoxBounds(ORIGINS[len(self.shape)], self.shape)


class SharedStorage(NamedTuple):
    """One allocation that holds several tensors, so that a restore makes them share memory again."""

    size_bytes: int
    tensors: tuple[int, ...]
    offsets_bytes: tuple[int, ...]


class Sharding(NamedTuple):
    """How a tensor is spread over a mesh; `format.sharding` computes from it what each rank holds."""

    mesh: int
    """The mesh's position in the layout's list of meshes."""
    placements: tuple[Shard | None, ...]
    """One for each dim of the mesh; None: replicated along it."""


Spread = Sharding | Literal["boxes", "flat"] | None
"""How a tensor is spread over the ranks that have a layout. None: each rank holds all of it. ``boxes``, ``flat``: each part lists the
boxes of the tensor, or intervals of the flattened tensor, that its rank holds."""


class ExplicitRegions(NamedTuple):
    """The regions of one tensor that one rank holds, where they do not follow from the layout: boxes, or intervals of the flat tensor."""

    tensor: int
    boxes: tuple[BoxBounds, ...]


@dataclass(frozen=True)
class Layout:
    """The tensors, the tree that holds them, the allocations they share, and how they are spread over ranks."""

    tensors: Sequence[TensorSpec]
    tree: Node
    storages: Sequence[SharedStorage] = ()
    meshes: Sequence[Mesh] = ()
    spreads: Sequence[Spread] = ()
    """One for each tensor; empty where every rank holds every tensor."""

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([prod(spec.shape) * spec.item_bytes for spec in self.tensors])

    @cached_property
    def encoded(self) -> bytes:
        """The sealed layout object; its seal is the layout id.

        Raises:
            UnsupportedValueError: a tensor is spread over more pieces than a reader accepts.
        """
        tensors = self.tensors[:]
        try:
            _check_spreads(self.spreads, self.meshes, tensors)
        except ValueError as exc:
            raise UnsupportedValueError(f"the state cannot be stored: {exc}; redistribute such tensors to fewer pieces") from exc
        dtypes = sorted({(spec.dtype, spec.item_bytes) for spec in tensors})
        number_of = {dtype: number for number, dtype in enumerate(dtypes)}
        return seal(
            "layout",
            {
                "names": [spec.name for spec in tensors],
                "dtypes": dtypes,
                "dtype_of": np.array([number_of[spec.dtype, spec.item_bytes] for spec in tensors], "<u2").tobytes(),
                "dims_of": np.array([len(spec.shape) for spec in tensors], "u1").tobytes(),
                "shapes": np.array([extent for spec in tensors for extent in spec.shape], "<i8").tobytes(),
                "storages": [list(storage) for storage in self.storages],
                "tree": self.tree,
                "mesh": [[list(mesh.shape), np.array(mesh.ranks, "<u4").tobytes()] for mesh in self.meshes] or None,
                "placements": _encode_spreads(self.spreads) if self.spreads else None,
                **_encode_orders(tensors),
            },
        )


def _encode_orders(tensors: Sequence[TensorSpec]) -> Body:
    """Adds no key if every tensor is row-major: builds without this key give such layouts the same id."""
    members: dict[tuple[int, ...], list[int]] = {}
    for number, spec in enumerate(tensors):
        if spec.order:
            members.setdefault(spec.order, []).append(number)
    return {"orders": [[bytes(order), np.array(numbers, "<u4").tobytes()] for order, numbers in members.items()]} if members else {}


def _encode_spreads(spreads: Sequence[Spread]) -> Body:
    kinds = list(dict.fromkeys(spreads))
    number_of = {kind: number for number, kind in enumerate(kinds)}
    packed = [[kind.mesh, [shard and list(shard) for shard in kind.placements]] if isinstance(kind, Sharding) else kind for kind in kinds]
    return {"kinds": packed, "of": np.array([number_of[spread] for spread in spreads], "<u2").tobytes()}


layout_id = object_hash
"""The layout id of a sealed layout."""


def decode_layout(data: bytes, name: str, budget: ParseBudget | None = None) -> Layout:
    """Decodes and checks a sealed layout. `budget` is the snapshot's.

    Raises:
        CorruptObjectError: not a layout, or one that contradicts itself.
    """
    body = unseal("layout", data, name, budget)
    try:
        return _checked(body)
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise CorruptObjectError(f"{name} is not a valid layout: {exc!r}", object_id=name) from exc


def _checked(body: Body) -> Layout:
    names = take(body, "names", list)
    dtypes = [_dtype(item) for item in take(body, "dtypes", list)]
    dtype_of = np.frombuffer(take(body, "dtype_of", bytes), "<u2").tolist()
    dims_of = np.frombuffer(take(body, "dims_of", bytes), "u1").tolist()
    extents = np.frombuffer(take(body, "shapes", bytes), "<i8").tolist()
    if not len(names) == len(dtype_of) == len(dims_of) or sum(dims_of) != len(extents):
        raise ValueError("its tables differ in length")
    if max(dims_of, default=0) > MAX_DIMS or min(extents, default=0) < 0 or len(set(names)) != len(names):
        raise ValueError("a shape is impossible, or two tensors have one name")
    orders = _orders(take(body, "orders", list), dims_of) if "orders" in body else {}
    tensors, shapes = [], dict[tuple[int, ...], tuple[int, ...]]()
    position = 0
    for number, (tensor_name, dtype_number, dims) in enumerate(zip(names, dtype_of, dims_of, strict=True)):
        if type(tensor_name) is not str or len(tensor_name) > MAX_NAME_BYTES:
            raise ValueError("a tensor's name is malformed")
        dtype, item_bytes = dtypes[dtype_number]
        shape = tuple(extents[position : position + dims])
        spec = TensorSpec(
            name=tensor_name,
            dtype=dtype,
            item_bytes=item_bytes,
            shape=shapes.setdefault(shape, shape),  # one tuple for all: the collector of garbage counts them
            order=orders.get(number, ()),
        )
        # Zero extents are left out: the strides of an empty tensor must be computable, too.
        size = item_bytes * prod(spec.shape if 0 not in spec.shape else filter(None, spec.shape))
        if size > (MAX_TENSOR_BYTES if 0 not in spec.shape else (1 << 63) - 1):
            raise ValueError(f"tensor {tensor_name!r} is too large")
        tensors.append(spec)
        position += dims
    meshes = [] if body.get("mesh") is None else list(_meshes(take(body, "mesh", list)))
    spreads = [] if body.get("placements") is None else _spreads(take(body, "placements", dict), meshes)
    if len(spreads) != (0 if body.get("placements") is None else len(tensors)) or (meshes and not spreads):
        raise ValueError("not every tensor has a placement")
    _check_spreads(spreads, meshes, tensors)
    return Layout(
        tensors=tensors, tree=body["tree"], storages=_storages(take(body, "storages", list), tensors), meshes=meshes, spreads=spreads
    )


def _orders(items: list[Any], dims_of: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Tensor number -> order of its dims."""
    orders: dict[int, tuple[int, ...]] = {}
    for packed, numbers in items:
        order = tuple(packed)
        if type(packed) is not bytes or type(numbers) is not bytes or sorted(order) != list(range(len(order))) or len(order) < 2:
            raise ValueError("a memory order is malformed")
        for number in np.frombuffer(numbers, "<u4").tolist():
            if number in orders or dims_of[number] != len(order):
                raise ValueError("a memory order does not fit its tensor")
            orders[number] = order
    return orders


def _meshes(items: list[Any]) -> Iterator[Mesh]:
    left = MAX_RANKS
    for item in items:
        mesh = _mesh(item)
        yield mesh
        left -= len(mesh.ranks)
        if left < 0:
            raise ValueError(f"its meshes have more than {MAX_RANKS} ranks together")


def _mesh(item: Any) -> Mesh:
    shape, packed = item
    if type(shape) is not list or len(shape) > MAX_MESH_DIMS or any(type(extent) is not int or extent < 1 for extent in shape):
        raise ValueError("the shape of a mesh is malformed")
    if type(packed) is not bytes or len(packed) != 4 * prod(shape) or prod(shape) > MAX_RANKS:
        raise ValueError("the shape of a mesh does not fit its ranks")
    ranks = np.frombuffer(packed, "<u4")
    if int(ranks.max()) >= MAX_RANKS or len(np.unique(ranks)) != len(ranks):
        raise ValueError("the ranks of a mesh are malformed")
    return Mesh(tuple(shape), tuple(ranks.tolist()))


def _spreads(body: Body, meshes: Sequence[Mesh]) -> list[Spread]:
    kinds = [_spread(item, meshes) for item in take(body, "kinds", list)]
    return [kinds[number] for number in np.frombuffer(take(body, "of", bytes), "<u2").tolist()]


def _check_spreads(spreads: Sequence[Spread], meshes: Sequence[Mesh], tensors: Sequence[TensorSpec]) -> None:
    """Limits the boxes per rank and in all: they are computed, not stored, so a small forged layout could ask for any number."""
    if sum(len(mesh.ranks) for mesh in meshes) > MAX_RANKS:
        raise ValueError(f"its meshes have more than {MAX_RANKS} ranks together")
    every = 0
    for spread, spec in zip(spreads, tensors, strict=bool(spreads)):
        if not isinstance(spread, Sharding):
            continue
        if any(shard is not None and shard.dim >= len(spec.shape) for shard in spread.placements):
            raise ValueError(f"tensor {spec.name!r} is sharded along a dim that it does not have")
        shape = meshes[spread.mesh].shape
        on_rank, ranks = _most_boxes(spread, spec), prod(extent for extent, shard in zip(shape, spread.placements, strict=True) if shard)
        if on_rank > MAX_BOXES or on_rank * ranks > MAX_REGIONS:
            raise ValueError(f"tensor {spec.name!r} is sharded into up to {on_rank} boxes on each of {ranks} ranks")
        every += on_rank
    if every > MAX_ALL_BOXES + BOXES_A_TENSOR * len(tensors):
        raise ValueError(f"its {len(tensors)} tensors are sharded into up to {every} boxes on a rank")


def _most_boxes(sharding: Sharding, spec: TensorSpec) -> int:
    """An upper bound of the boxes of a tensor that a rank holds."""
    pieces = [1] * len(spec.shape)
    for shard in sharding.placements:
        if shard is not None:
            pieces[shard.dim] *= shard.split_factor
    return prod(min(several, max(extent, 1)) for several, extent in zip(pieces, spec.shape, strict=True))


def _spread(item: Any, meshes: Sequence[Mesh]) -> Spread:
    if item is None or item in ("boxes", "flat"):
        return item  # type: ignore[no-any-return]
    mesh, placements = item
    if type(mesh) is not int or not 0 <= mesh < len(meshes) or type(placements) is not list or len(placements) != len(meshes[mesh].shape):
        raise ValueError("a placement does not fit its mesh")
    return Sharding(mesh, tuple(map(_shard, placements)))


def _shard(item: Any) -> Shard | None:
    if item is None:
        return None
    dim, split_factor = item
    if type(item) is not list or type(dim) is not int or type(split_factor) is not int or dim < 0:
        raise ValueError("a placement is malformed")
    if not 1 <= split_factor <= MAX_RANKS:
        raise ValueError("a split factor is out of bounds")
    return Shard(dim, split_factor)


def _dtype(item: Any) -> tuple[str, int]:
    dtype, item_bytes = item
    if type(dtype) is not str or len(dtype) > 64 or type(item_bytes) is not int or not 0 < item_bytes <= MAX_ITEM_BYTES:
        raise ValueError("a dtype is malformed")
    return dtype, item_bytes


def _storages(items: list[Any], tensors: Sequence[TensorSpec]) -> list[SharedStorage]:
    storages = []
    seen: set[int] = set()
    for size, members, offsets in items:
        numbers = (size, *members, *offsets)
        if any(type(number) is not int for number in numbers) or min(numbers) < 0 or size > MAX_TENSOR_BYTES:
            raise ValueError("a shared storage is malformed")
        end = 0
        for offset, tensor in sorted(zip(offsets, members, strict=True)):
            if offset < end or tensor in seen:
                raise ValueError("tensors of a shared storage overlap")
            end = offset + tensors[tensor].size_bytes
            seen.add(tensor)
        if end > size:
            raise ValueError("a shared storage does not hold its tensors")
        storages.append(SharedStorage(size, tuple(members), tuple(offsets)))
    return storages
