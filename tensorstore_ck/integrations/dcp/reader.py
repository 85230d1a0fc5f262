"""`Reader`: lets ``dcp.load`` read any snapshot, however it was saved.

DCP plans its reads from metadata that is made from the layout: one box per tensor, however it was sharded, which keeps plans small. The
layout gives the blocks of each box, as in any restore.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any, Final, Unpack

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.interfaces import SnapshotContent, WantedBox
from tensorstore_ck.errors import ConflictError, MismatchError, StoreError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import REQUIRES_GRAD, Container, Leaf, Tree, leaves, parse
from tensorstore_ck.format.values import decode
from tensorstore_ck.integrations.dcp.byte_items import torch_zip
from tensorstore_ck.integrations.dcp.target import CheckpointId, DcpTarget
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked
from tensorstore_ck.state.allocate import TensorAllocator, form_of
from tensorstore_ck.state.byte_sources import source_of, target_of
from tensorstore_ck.state.load_report import LoadWarning
from tensorstore_ck.state.plain_memory import require_plain
from tensorstore_ck.state.rebuild_tree import build, require_buildable
from tensorstore_ck.state.registered_types import decode_torch
from tensorstore_ck.state.wrapper_subclasses import OUTER_KEY
from tensorstore_ck.store import OpenOptions, ReadOnlyStore
from tensorstore_ck.store.internals import note_restored, open_content, resolve
from tensorstore_ck.training.rank_group import rank_and_world_size

_CPU: Final = torch.device("cpu")


@short_errors
@renamed_argument(allow_bad="allow_marked")
class Reader(StorageReader):
    """A `StorageReader` over a store: ``dcp.load(state, storage_reader=Reader("./ckpt", "runs/gpt@1000"))``.

    Tied tensors, such as an embedding and its head, may be two tensors in the snapshot, if torch broke the tie. If those differ, the last
    one is loaded and a `LoadWarning` names them. This goes undetected if `state` has copies of the model's tensors
    (``StateDictOptions(cpu_offload=True)``).
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | ReadOnlyStore,
        address: str | None = None,
        *,
        allow_marked: bool = False,
        **open_options: Unpack[OpenOptions],
    ) -> None:
        """Opens nothing yet.

        Args:
            store: The store's URL, or an open `Store`.
            address: A branch, tag, root, ``ref@step`` or ``ref~n``; by default the ``checkpoint_id``. With a branch here, a
                ``checkpoint_id`` that ends with a number means that step of it.
            allow_marked: Also read a snapshot that is marked ``bad`` or ``damaged``.
            open_options: For `tensorstore_ck.open`.
        """
        self._target = DcpTarget(store, address, open_options)
        self._allow_marked = allow_marked
        self._checkpoint_id: CheckpointId = None
        self.snapshot: Snapshot | None = None
        """The snapshot that is read, once it is known."""
        self._content: SnapshotContent
        self._tree: Tree
        self._paths: Mapping[str, Sequence[str | int]]
        self._leaves: Mapping[str, Leaf]
        """fqn -> tensor."""
        self._children: dict[int, dict[str, Tree]] = {}
        """id of a branch -> its children by their keys."""
        self._zips: dict[bytes, bytes] = {}
        """Encoded value -> its zip."""

    # --- called by DCP, in this order ---------------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it can be a checkpoint id."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """A new load begins."""
        self._checkpoint_id = checkpoint_id
        self.snapshot = None

    def read_metadata(self) -> Metadata:  # with kwargs, DCP would continue without the other ranks on failure
        """On every rank: the snapshot as DCP would describe it. An error is raised later, on the first use of the result.

        Raises (then, and from `set_up_storage_reader`):
            NotFoundError: there is no snapshot at the address.
            SnapshotMarkedBadError: it is marked ``bad`` or ``damaged``.
        """
        try:
            return self._metadata()
        except StoreError as exc:  # DCP drops its type, and in older versions its message
            return _NoMetadata(exc)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On every rank."""
        if isinstance(metadata, _NoMetadata):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """On every rank: adds the root of the snapshot that it found."""
        assert self.snapshot is not None
        return replace(plan, storage_data=self.snapshot.root)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator. Raises `ConflictError` if the ref moved between the reads of the ranks."""
        roots = {plan.storage_data for plan in plans}
        if len(roots) > 1:
            address = self._target.address(self._checkpoint_id)
            raise ConflictError(
                f"the ranks found different snapshots at {address!r} ({', '.join(sorted(root[:16] for root in roots))}): it moved "
                "meanwhile; load again, or name the step, as in 'runs/gpt@1000'",
                object_id=address,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """On every rank: reads and verifies the planned items, each block once.

        Raises:
            MismatchError: the planner's tensors do not fit its plan.
            DamageError: stored data is damaged.
        """
        boxes = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [_target(planner, item) for item in boxes]
        wanted = []
        memory, tied = self._separate_memory(targets)
        for item, target in zip(boxes, memory, strict=True):
            leaf = self._leaves[item.storage_index.fqn]
            if tuple(target.shape) != tuple(item.lengths):
                name = item.storage_index.fqn
                raise MismatchError(f"{name}: shape {list(target.shape)} here, {list(item.lengths)} in the load plan", object_id=name)
            if leaf.kind == "view":
                where = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True))
                whole = self._read([leaf]).get(leaf)
                assert isinstance(whole, torch.Tensor)
                target.copy_(whole[where])
            elif 0 not in item.lengths:
                dtype = form_of(self._content.layout, leaf).dtype
                assert isinstance(dtype, torch.dtype)
                box = BoxBounds(tuple(item.storage_offsets), tuple(item.lengths))
                wanted.append(WantedBox(leaf.index, box, target_of(target, dtype)))
        self._content.read_boxes(wanted)
        _warn_of_untied(boxes, memory, tied)
        for item, target in zip(boxes, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, BytesIO(self._zip(item.storage_index.fqn)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # --- the work -----------------------------------------------------------------------------------------------------

    def _separate_memory(self, targets: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, int]]:
        """Memory for each box, since only the last of several boxes with one target gets it; and the last one, for each of the others."""
        last = {place: number for number, target in enumerate(targets) if (place := _memory_of(target)) is not None}
        memory, tied = [*targets], dict[int, int]()
        for number, target in enumerate(targets):
            place = _memory_of(target)
            if place is not None and last[place] != number:
                tied[number] = last[place]
                memory[number] = torch.empty_like(target)
        return memory, tied

    def _metadata(self) -> Metadata:
        store, address = self._target.store, self._target.address(self._checkpoint_id)
        resolved = resolve(store, address)
        snapshot = Snapshot.from_info(resolved.info)
        if not self._allow_marked:
            refuse_marked(snapshot, address, "pass allow_marked=True")
        self._content = open_content(store, resolved.info, rank_and_world_size())
        metadata = self._describe(address)
        self.snapshot = snapshot
        note_restored(store, resolved)
        return metadata

    def _describe(self, address: str) -> Metadata:
        """Flattens the state as DCP would, with tensors without data. Items of DCP stay one item."""
        content = self._content
        self._tree = _unwrap(parse(content.layout, len(content.values)))
        self._children, self._zips = {}, {}
        require_buildable(self._tree, content)
        leaf_of: dict[int, Leaf] = {}

        def without_data(leaf: Leaf) -> object:
            if isinstance(leaf.node, Container):
                return object()
            form = form_of(content.layout, leaf)
            stand_in = torch.empty(form.shape, dtype=form.dtype, device="meta") if isinstance(form.dtype, torch.dtype) else object()
            leaf_of[id(stand_in)] = leaf
            return stand_in

        state = build(_with_items(self._tree, getattr(content, "subtrees", frozenset())), content, without_data)
        if not isinstance(state, dict):
            raise MismatchError(f"{address} is not a dict, and DCP supports nothing else: restore it with checkout", object_id=address)
        try:
            items, self._paths = flatten_state_dict(state)
        except ValueError as exc:
            raise MismatchError(
                f"{address} has names that are the same to DCP ({exc}): restore it with checkout, or select= what you need",
                object_id=address,
            ) from exc
        self._leaves = {fqn: leaf_of[id(item)] for fqn, item in items.items() if isinstance(item, torch.Tensor)}
        described: dict[str, STORAGE_TYPES] = {
            fqn: _described(item, requires_grad=bool(self._leaves[fqn].flags & REQUIRES_GRAD))
            if isinstance(item, torch.Tensor)
            else BytesStorageMetadata()
            for fqn, item in items.items()
        }
        return Metadata(described, planner_data=self._paths)

    def _zip(self, fqn: str) -> bytes:
        """A byte item in the form that DCP's planners take; reads its tensors and arrays now."""
        tree = self._tree
        for key in self._paths[fqn]:
            tree = self._child(tree, str(key))
        if isinstance(tree, Container) or tree.kind != "value":
            return torch_zip(build(tree, self._content, self._read([leaf for leaf in leaves(tree) if leaf.kind != "value"]).get))
        encoded = pack_body(self._content.values[tree.index])
        if encoded not in self._zips:  # thousands of items may be equal, such as an optimizer's hyperparameters
            self._zips[encoded] = torch_zip(build(tree, self._content, self._read([]).get))
        return self._zips[encoded]

    def _child(self, tree: Tree, key: str) -> Tree:
        assert isinstance(tree, Container)
        if id(tree) not in self._children:
            texts = (own if type(own) is str else str(decode(own, decode_other=decode_torch)) for own in tree.keys)
            self._children[id(tree)] = dict(zip(texts, tree.children, strict=True))
        return self._children[id(tree)][key]

    def _read(self, wanted: Sequence[Leaf]) -> TensorAllocator:
        fresh = TensorAllocator(self._content.layout, ((leaf, None) for leaf in wanted), _CPU)
        self._content.read(fresh.targets)
        return fresh


def _memory_of(target: torch.Tensor) -> tuple[object, ...] | None:
    """Identifies its memory; None for an empty tensor."""
    return (target.device, target.data_ptr(), target.dtype, target.shape, target.stride()) if target.numel() else None


def _warn_of_untied(boxes: Sequence[ReadItem], memory: Sequence[torch.Tensor], tied: Mapping[int, int]) -> None:
    names: dict[str, dict[str, None]] = {}
    for number, last in tied.items():
        own, others = (source_of(tensor).read(0, tensor.nbytes) for tensor in (memory[number], memory[last]))
        if own != others:
            names.setdefault(boxes[last].storage_index.fqn, {})[boxes[number].storage_index.fqn] = None
    if names:
        shown = "; ".join(f"{', '.join(map(repr, [*others, name]))} (now that of {name!r})" for name, others in names.items())
        warnings.warn(
            f"tied tensors are several in the snapshot, and differ: {shown}. They were saved by a run in which they were "
            "not tied, as by parallelize_module before fully_shard: untie them here, or tie them there",
            LoadWarning,
            stacklevel=2,
        )


class _NoMetadata(Metadata):
    """Metadata that could not be read."""

    def __init__(self, error: StoreError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> dict[str, STORAGE_TYPES]:  # type: ignore[override]
        raise self.error


def _with_items(tree: Tree, subtrees: frozenset[int]) -> Tree:
    """The tree, with a leaf instead of each subtree."""
    if isinstance(tree, Leaf) or not subtrees:
        return tree
    if id(tree.node) in subtrees:
        return Leaf(tree.path, "tensor", -1, tree)
    return _converted(tree, lambda child: _with_items(child, subtrees))


def _unwrap(tree: Tree) -> Tree:
    """The tree, with wrapper subclasses replaced by their inner tensors, which DCP loads by their own names."""
    if isinstance(tree, Leaf):
        return tree
    if tree.node[0] == "r" and isinstance(tree.children[0], Container) and OUTER_KEY in tree.children[0].keys:
        return _unwrap(tree.children[0])
    return _converted(tree, _unwrap)


def _converted(tree: Container, convert: Callable[[Tree], Tree]) -> Container:
    children = [convert(child) for child in tree.children]
    return Container(node=tree.node, path=tree.path, keys=tree.keys, children=children, attributes=tree.attributes)


def _target(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    target = planner.resolve_tensor(item)
    require_plain(target, item.dest_index.fqn, "the tensor to load into")
    return target.detach()


def _described(stand_in: torch.Tensor, *, requires_grad: bool) -> TensorStorageMetadata:
    box = ChunkStorageMetadata(torch.Size([0] * stand_in.dim()), stand_in.size())
    properties = TensorProperties.create_from_tensor(stand_in)  # from torch 2.15 on with strides
    return TensorStorageMetadata(replace(properties, requires_grad=requires_grad), stand_in.size(), [box])
