"""Restores into an existing state: matches names, checks everything, reads, and only then changes values.

Three separate steps: `RestorePlan` walks the target and decides, `read_in_place` fills tensors, and the plan's `Finish` functions put
values and new containers in place.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from math import prod
from typing import Any

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import StoreError, UnsupportedValueError
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves
from tensorstore_ck.format.values import MAX_NESTING, PLAIN_TYPES, encode, key_text
from tensorstore_ck.state.allocate import LeafForm, TensorAllocator, WantedLeaf, form_of, require_memory_for
from tensorstore_ck.state.boxes import CHECKPOINTABLE_MARK
from tensorstore_ck.state.fill_in_place import FillTask, ShareTask, find_conflicts, is_same_tensor, read_in_place
from tensorstore_ck.state.load_report import LoadReport, UnclaimedNames
from tensorstore_ck.state.match_target import (
    children_by_key,
    describe_mismatch,
    describe_target_mismatch,
    has_tensors,
    is_expanded,
    is_whole,
    leaf_name,
    value_conflict,
)
from tensorstore_ck.state.memory_order import in_order_of
from tensorstore_ck.state.optimizer_scalars import with_exact_scalars
from tensorstore_ck.state.plain_memory import PLAIN, has_memory, is_plain, require_plain
from tensorstore_ck.state.rank_shares import RankShare
from tensorstore_ck.state.rebuild_tree import build, replaced, require_buildable
from tensorstore_ck.state.registered_types import encode_torch, registered_class
from tensorstore_ck.state.select import Rename
from tensorstore_ck.state.sharded_tensors import SpreadDescriber, share_of
from tensorstore_ck.state.sharded_wrappers import UnwrappedShards, regrouped, unwrap_shards
from tensorstore_ck.state.standard_types import class_path, is_value
from tensorstore_ck.state.stored_names import SeveralValuesError, StoredNames
from tensorstore_ck.state.unplaced import Later, Unplaced
from tensorstore_ck.state.unsupported_types import LOADED, advice_for
from tensorstore_ck.state.wrapper_subclasses import FLAT, OUTER_KEY, flattened, is_same_form

Finish = Callable[[], Any]
"""Puts restored values in place, and returns the object at this position."""


def restore_into(
    into: object, plan: "RestorePlan", device: torch.device, *, strict: bool, report: LoadReport | None, unclaimed: UnclaimedNames | None
) -> Any:
    """Restores into `into`, and returns it (or its replacement, if it cannot be changed in place). See `restore` for the options."""
    content = plan.content
    finish = plan.visit(into, "", plan.root, 0)
    plan.check(strict=strict, report=report, unclaimed=unclaimed)
    adopted = [leaf for tree in plan.adopted for leaf in require_buildable(tree, content, plan.dtype).items()]
    plan.wanted += adopted if plan.dtype is None else with_exact_scalars(content, adopted)
    require_memory_for(content.layout, plan.wanted, device)
    fresh = TensorAllocator(content.layout, plan.wanted, device)
    plan.tensor_of = fresh.get
    try:
        content.read(fresh.targets)
        read_in_place(content, plan.fills)
        content.read_boxes([box for task in plan.shares for box in task.share.wanted(task.tensor, task.stored)])
        return finish()
    except StoreError as exc:
        raise type(exc)(f"{exc} (the tensors of `into` are now undefined: restore into it again)", object_id=exc.object_id) from exc
    except BaseException as exc:
        exc.add_note("The tensors of `into` are now undefined: restore into it again.")
        raise


class RestorePlan:
    """How `tree`, what is selected of the `whole` tree of a snapshot, is restored into a target.

    `is_missing`: of names that only the target has; None: all of them are.
    """

    def __init__(
        self,
        content: SnapshotContent,
        tree: Tree,
        *,
        whole: Tree,
        is_missing: Callable[[str], bool] | None,
        rename: Rename | None,
        dtype: torch.dtype | None,
        describer: SpreadDescriber | None,
    ) -> None:
        self._describer = describer
        self.fills: list[FillTask] = []
        self.shares: list[ShareTask] = []
        """Of tensors that are spread over ranks."""
        self.wanted: list[WantedLeaf] = []
        self.adopted: list[Tree] = []
        """Stored trees that replace values of the target; their tensors are wanted, too."""
        self.tensor_of: Callable[[Leaf], Any]
        self.content = content
        self._is_missing = is_missing
        self.dtype = dtype
        self._report = LoadReport()
        self._made: dict[tuple[int, int, LeafForm], torch.Tensor] = {}
        """Replacements of meta tensors."""
        self._names = StoredNames(tree, whole, rename)
        self._whole = whole
        self.root = self._names.root
        self._unplaced = Unplaced()

    def check(self, *, strict: bool, report: LoadReport | None, unclaimed: UnclaimedNames | None) -> None:
        """Checks that everything fits. `unclaimed` collects names that this rank does not expect, but another one may."""
        self._unplaced.place(self._place)
        conflicts = find_conflicts(self.fills)
        fill_of = {fill.name: fill for fill in self.fills}
        for name, other in conflicts.items():
            if not is_same_tensor(self.content, fill_of[name], fill_of[other]):
                self._report.mismatched.append(f"{name}: shares memory with {other} here; the snapshot has different values of the two")
        self.fills = [fill for fill in self.fills if fill.name not in conflicts]
        self._report.unexpected += self._names.unused()
        self._report.deliver(strict=strict, report=report, others=unclaimed is not None)
        if unclaimed is not None and strict:
            unclaimed.note((leaf.path for leaf in leaves(self._whole)), [self._names.leaves[name].path for name in self._report.unexpected])

    # --- the walk -----------------------------------------------------------------------------------------------------

    def visit(self, target: Any, path: str, stored: Tree | None, depth: int) -> Finish:
        """Plans for `target`. `path` ends with a dot, or is empty. `stored` is what the snapshot has under its keys."""
        if depth > MAX_NESTING:
            message = f"`into` is nested deeper than {MAX_NESTING} levels; does something contain itself?"
            raise UnsupportedValueError(message, object_id=path[:60])
        if isinstance(stored, Container) and not self._names.is_intact(stored) and not (isinstance(target, dict | list | tuple) and target):
            stored = None  # only dicts and lists with values take what is left of it
        if stored is not None or self._names.lacks(path):
            return self._visit(target, path, stored, depth)
        return self._unplaced.add(Later(target, path, depth))

    def _place(self, later: Later) -> None:
        try:
            later.finish = self._visit(later.target, later.path, None, later.depth)
        except SeveralValuesError as exc:
            self._report.mismatched.append(str(exc))

    def _visit(self, target: Any, path: str, stored: Tree | None, depth: int) -> Finish:
        kind = type(target)
        if kind in PLAIN_TYPES:
            return self._visit_value(target, path, stored)
        if kind is dict or kind is OrderedDict:
            return self._visit_dict(target, path, stored, depth)
        if kind is list or kind is tuple:
            return self._visit_list(target, path, stored, depth)
        if kind in PLAIN and not hasattr(target, CHECKPOINTABLE_MARK):
            return self._visit_tensor(target, path, stored)
        registered = registered_class(kind)
        if registered is not None and registered.wraps:
            return self._visit_wrapped(target, UnwrappedShards(registered, flattened(target)), path, stored, depth=depth)
        if self._describer is not None and (apart := unwrap_shards(self._describer, target, path[:-1])) is not None:
            return self._visit_wrapped(target, apart, path, stored, depth=depth)
        if registered is not None:
            name = stored.node[1] if isinstance(stored, Container) and stored.node[0] == "r" else None
            is_alike = name is not None and (name == registered.name or (issubclass(kind, Enum) and class_path(name) is not None))
            if stored is not None and is_value(kind) and not is_alike:
                return self._visit_value(target, path, stored)
            state = stored.children[0] if isinstance(stored, Container) and name is not None else None
            inner = self.visit(registered.to_state(target), path, state, depth + 1)
            return lambda: registered.from_state(inner())
        share = share_of(self._describer, target, path[:-1])
        if share is not None:
            return self._visit_share(target, share, path, stored)
        if isinstance(target, torch.Tensor | np.ndarray):
            return self._visit_tensor(target, path, stored)
        if (advice := advice_for(target)) is not None:
            what, advised = advice[0], advice[1].replace(*LOADED)
            raise UnsupportedValueError(f"cannot restore into {path[:-1] or '`into`'}: {what}; {advised}", object_id=path[:-1])
        if isinstance(target, dict) and kind is not Counter:
            return self._visit_dict(target, path, stored, depth)
        if isinstance(target, list | tuple) and kind is not torch.Size:
            return self._visit_list(target, path, stored, depth)
        return self._visit_value(target, path, stored)

    def _visit_wrapped(self, target: Any, apart: UnwrappedShards, path: str, stored: Tree | None, *, depth: int) -> Finish:
        """Plans for a wrapper subclass: its inner tensors are filled, and all else must be equal."""
        registered, state = apart
        stored = stored or self._names.find_tree(path)
        if stored is None:
            return self._miss(leaf_name(path), target)
        if not isinstance(stored, Container) or stored.node[0] != "r":
            return self._mismatch_all(path, stored, f"a {registered.name} here, something else in the snapshot", target)
        if stored.node[1] != registered.name:
            return self._mismatch_all(path, stored, f"a {registered.name} here, a {stored.node[1]} in the snapshot", target)
        below = children_by_key(stored)
        outer = below.get(repr(OUTER_KEY))
        own, other = state[OUTER_KEY], outer and self._outer_form(outer)
        if outer is None or not is_same_form(registered.cls, own, other):
            return self._mismatch_all(path, stored, f"a {registered.name} of the form {own} here, {other} in the snapshot", target)
        self._names.use_tree(outer)
        flat = FLAT.get(registered.cls.__name__, ())
        kept = {key: leaf for key, leaf in below.items() if not self._names.is_left_out(leaf)}
        inner = {name: (tensor, kept.get(repr(name))) for name, tensor in state.items() if name != OUTER_KEY}
        finishes = {}
        for name, (tensor, leaf) in inner.items():
            child = self._in_stored_shape(tensor, leaf) if name in flat else tensor
            finishes[name] = (child, self.visit(child, f"{path}{name}.", leaf, depth + 1))

        def finish() -> Any:
            restored = {name: (child, child_finish()) for name, (child, child_finish) in finishes.items()}
            if all(new is child for child, new in restored.values()):
                return target
            return registered.from_state(
                {name: new for name, (_, new) in restored.items()} | {OUTER_KEY: state[OUTER_KEY]}
            )  # it was on meta

        return finish

    def _outer_form(self, tree: Tree) -> Any:
        """The stored `OUTER_KEY` entry of a wrapper subclass, which has no tensors."""
        require_buildable(tree, self.content)
        return build(tree, self.content, lambda leaf: leaf.path)

    def _in_stored_shape(self, tensor: Any, leaf: Tree | None) -> Any:
        """An inner tensor in its stored shape, which may have the dims of the whole tensor."""
        if not isinstance(leaf, Leaf) or leaf.kind != "tensor":
            return tensor
        shape = form_of(self.content.layout, leaf).shape
        if shape == tuple(tensor.shape) or prod(shape) != prod(tensor.shape):
            return tensor
        if isinstance(tensor, RankShare):
            return regrouped(tensor, shape) if tensor.by_blocks else tensor
        return tensor.view(shape)

    def _mismatch(self, name: str, what: str, target: Any) -> Finish:
        """Notes that `name` does not fit; `target` stays."""
        self._names.use([name])
        self._report.mismatched.append(f"{name}: {what}")
        return lambda: target

    def _mismatch_all(self, path: str, stored: Tree, what: str, target: Any) -> Finish:
        """Notes that `path` does not fit, and nothing else about the leaves of `stored`; `target` stays."""
        self._names.use_tree(stored)
        self._report.mismatched.append(f"{leaf_name(path)}: {what}")
        return lambda: target

    def _visit_dict(self, target: dict[Any, Any], path: str, stored: Tree | None, depth: int) -> Finish:
        stored = stored or self._names.find_tree(path, target)
        if not target:
            return self._replace(target, stored) if stored is not None else (lambda: target)
        below = children_by_key(stored)
        children = []
        for key, child in target.items():
            is_text = type(key) is str and key.isascii()
            encoded = key if is_text else encode(key, f"{path}{key!r:.80} (a dict key)", encode_torch)
            text = key if is_text else key_text(encoded)
            children.append((key, child, self.visit(child, f"{path}{text}.", below.get(repr(encoded)), depth + 1)))
        attributes = stored.attributes if isinstance(target, OrderedDict) and isinstance(stored, Container) else None
        if attributes is not None and isinstance(stored, Container) and not self._names.is_all(path, stored):
            attributes = None  # they name what `rename` changes
        if attributes is not None:
            self.adopted.append(attributes)

        def finish() -> Any:
            for key, child, child_finish in children:
                restored = child_finish()
                if restored is not child:
                    target[key] = restored
            if attributes is not None:
                target._metadata = self._build(attributes)  # type: ignore[attr-defined]
            return target

        return finish

    def _visit_list(self, target: list[Any] | tuple[Any, ...], path: str, stored: Tree | None, depth: int) -> Finish:
        stored = stored or self._names.find_tree(path, target)
        is_same_length = isinstance(stored, Container) and len(stored.children) == len(target)
        is_adopted = stored is not None and not is_same_length and not has_tensors(target, depth)
        if stored is not None and is_adopted and (not target or self._names.is_whole(stored)):
            return self._replace(target, stored)
        below = children_by_key(stored)
        fields = getattr(type(target), "_fields", range(len(target)))
        children = [
            (child, self.visit(child, f"{path}{field}.", below.get(repr(field)), depth + 1))
            for field, child in zip(fields, target, strict=True)
        ]

        def finish() -> Any:
            restored = [child_finish() for _, child_finish in children]
            if all(new is old for new, (old, _) in zip(restored, children, strict=True)):
                return target
            if isinstance(target, list):
                target[:] = restored
                return target
            return tuple.__new__(type(target), restored)

        return finish

    def _visit_value(self, target: object, path: str, stored: Tree | None) -> Finish:
        stored = stored or self._names.find_tree(path)
        if stored is None:
            return self._miss(leaf_name(path), target)
        if isinstance(stored, Leaf) and (problem := value_conflict(stored, self.content)) is not None:
            return self._mismatch(self._names.name(stored), problem, target)
        return self._replace(target, stored)

    def _leaf_at(self, path: str, stored: Tree | None) -> tuple[str, Leaf | None]:
        """The leaf for a tensor of the target, and its name there."""
        if isinstance(stored, Leaf):
            return self._names.name(stored), stored
        name = leaf_name(path)
        return name, self._names.find_leaf(name) if stored is None else None

    def _visit_tensor(self, target: Any, path: str, stored: Tree | None) -> Finish:
        name, leaf = self._leaf_at(path, stored)
        is_tensor = isinstance(target, torch.Tensor)
        is_known = target.is_meta or is_plain(target) if is_tensor else type(target) in (np.ndarray, np.memmap)
        if not is_known and (advice := advice_for(target)) is not None:
            raise UnsupportedValueError(f"cannot restore into {name}: {advice[0]}; {advice[1]}", object_id=name)
        if leaf is None:
            return self._miss_tensor(name, path, stored, target)
        if leaf.kind == "value":
            return self._mismatch(name, "a tensor here, a plain value in the snapshot", target)
        self._names.use([name])
        form = form_of(self.content.layout, leaf)
        problem = describe_target_mismatch(target, form, self.dtype)
        if problem is not None:
            return self._mismatch(name, problem, target)
        if not isinstance(target, torch.Tensor) or not target.is_meta:
            if isinstance(target, torch.Tensor) and not (is_known and has_memory(target)):
                require_plain(target, name, "the tensor to restore into")  # raises, and says why
            self.fills.append(FillTask(target, leaf, form, name))
            return lambda: target
        self.wanted.append((leaf, target.dtype))
        made = self._made

        def finish() -> Any:
            """One meta tensor becomes one tensor, if it is also one stored tensor."""
            key = id(target), leaf.index, form
            if key not in made:
                fresh = self.tensor_of(leaf).detach()
                if leaf.kind == "tensor":
                    fresh = in_order_of(target, fresh)
                made[key] = fresh.requires_grad_(target.requires_grad)
                if isinstance(target, torch.nn.Parameter):
                    made[key] = torch.nn.Parameter(fresh, requires_grad=target.requires_grad)
            return made[key]

        return finish

    def _visit_share(self, target: Any, share: RankShare, path: str, stored: Tree | None) -> Finish:
        name, leaf = self._leaf_at(path, stored)
        if leaf is None:
            return self._miss_tensor(name, path, stored, target)
        if leaf.kind == "value":
            return self._mismatch(name, "spread over ranks here, a plain value in the snapshot", target)
        self._names.use([name])
        form = form_of(self.content.layout, leaf)
        problem = describe_mismatch(share.shape, share.dtype, form, self.dtype)
        if problem is None and any(is_expanded(piece.tensor) for piece in share.pieces):
            problem = "the tensor here is expanded: its elements share memory, but not in the snapshot"
        if problem is not None:
            return self._mismatch(name, problem, target)
        if leaf.kind == "view" and not is_whole(form, self.content.layout.tensors[leaf.index]):
            self.wanted.append((leaf, None))
            return lambda: share.fill(self.tensor_of(leaf)) or target
        assert isinstance(form.dtype, torch.dtype)
        self.shares.append(ShareTask(name, leaf.index, form.dtype, share))
        return lambda: target

    # --- stored subtrees ----------------------------------------------------------------------------------------------

    def _replace(self, target: object, stored: Tree) -> Finish:
        self._names.use_tree(stored)
        self.adopted.append(stored)
        return lambda: replaced(target, self._build(stored))

    def _build(self, tree: Tree) -> Any:
        return build(tree, self.content, self.tensor_of)

    def _miss(self, name: str, target: Any) -> Finish:
        """Notes that the snapshot lacks `name`; `target` stays."""
        if self._is_missing is None or self._is_missing(name):
            self._report.missing.append(name)
        return lambda: target

    def _miss_tensor(self, name: str, path: str, stored: Tree | None, target: Any) -> Finish:
        """`_miss`, unless the snapshot has a wrapper subclass there."""
        wrapper = stored or self._names.find_tree(path)
        if isinstance(wrapper, Container) and wrapper.node[0] == "r" and repr(OUTER_KEY) in children_by_key(wrapper):
            return self._mismatch_all(path, wrapper, f"something else here, a {wrapper.node[1]} in the snapshot", target)
        return self._miss(name, target)
