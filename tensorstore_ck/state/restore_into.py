"""Restores into an existing state: matches names, checks everything, reads, and only then changes values.

Three separate steps: `RestorePlan` walks the target and decides, `read_in_place` fills tensors, and the plan's `Finish` functions put
values and new containers in place.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import StoreError, UnsupportedValueError
from tensorstore_ck.format.tree import ROOT, Container, Leaf, LeafNames, Tree, leaves, parse
from tensorstore_ck.format.values import MAX_NESTING, PLAIN_TYPES, encode, key_text
from tensorstore_ck.state.allocate import LeafForm, TensorAllocator, WantedLeaf, form_of, require_memory_for
from tensorstore_ck.state.boxes import CHECKPOINTABLE_MARK
from tensorstore_ck.state.fill_in_place import FillTask, ShareTask, find_conflicts, is_same_tensor, read_in_place
from tensorstore_ck.state.load_report import LoadReport, UnclaimedNames
from tensorstore_ck.state.match_target import (
    STATE,
    Keys,
    NamesByPrefix,
    TreesByKeys,
    container_paths,
    describe_mismatch,
    describe_target_mismatch,
    has_tensors,
    is_expanded,
    is_whole,
    leaves_and_containers,
    value_conflict,
)
from tensorstore_ck.state.memory_order import in_order_of
from tensorstore_ck.state.optimizer_scalars import with_exact_scalars
from tensorstore_ck.state.plain_memory import PLAIN, has_memory, is_plain, require_plain
from tensorstore_ck.state.rank_shares import RankShare
from tensorstore_ck.state.rebuild_tree import build, replaced, require_buildable
from tensorstore_ck.state.registered_types import encode_torch, registered_class
from tensorstore_ck.state.select import Rename, renamed_leaves
from tensorstore_ck.state.sharded_tensors import SpreadDescriber, share_of
from tensorstore_ck.state.sharded_wrappers import UnwrappedShards, regrouped, unwrap_shards
from tensorstore_ck.state.unsupported_types import advice_for
from tensorstore_ck.state.wrapper_subclasses import FLAT, OUTER_KEY, flattened, is_same_form

Finish = Callable[[], Any]
"""Puts restored values in place, and returns the object at this position."""


def restore_into(
    into: object, plan: "RestorePlan", device: torch.device, *, strict: bool, report: LoadReport | None, unclaimed: UnclaimedNames | None
) -> Any:
    """Restores into `into`, and returns it (or its replacement, if it cannot be changed in place). See `restore` for the options."""
    content = plan.content
    finish = plan.visit(into, "", ())
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
    except StoreError as exc:
        raise type(exc)(f"{exc} (the tensors of `into` are now undefined: restore into it again)", object_id=exc.object_id) from exc
    except BaseException as exc:
        exc.add_note("The tensors of `into` are now undefined: restore into it again.")
        raise
    return finish()


class RestorePlan:
    """How the tree of a snapshot is restored into a target. `is_missing`: of names that only the target has; None: all of them are."""

    def __init__(
        self,
        content: SnapshotContent,
        tree: Tree,
        is_missing: Callable[[str], bool] | None,
        rename: Rename | None,
        dtype: torch.dtype | None,
        *,
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
        self._tree = tree
        self._is_missing = is_missing
        self.dtype = dtype
        self._report = LoadReport()
        self._name = LeafNames().at
        self._used: set[str] = set()
        self._made: dict[tuple[int, int, LeafForm], torch.Tensor] = {}
        """Replacements of meta tensors."""
        self._is_renamed = rename is not None
        self._trees = TreesByKeys(None if self._is_renamed else tree)
        self._leafless: list[Callable[[], None]] = []
        """Plan containers without leaves that the snapshot does not have under their keys: what has leaves takes them first."""
        own_leaves, containers = leaves_and_containers(tree)
        self._stored = {leaf.path: leaf for leaf in own_leaves} if rename is None else renamed_leaves(own_leaves, rename)
        """Name in the target -> leaf."""
        self._below = NamesByPrefix(self._stored)
        self._containers = {container.path: container for container in reversed(containers)}

    def check(self, *, strict: bool, report: LoadReport | None, unclaimed: UnclaimedNames | None) -> None:
        """Checks that everything fits. `unclaimed` collects names that this rank does not expect, but another one may."""
        for plan in self._leafless:
            plan()
        conflicts = find_conflicts(self.fills)
        fill_of = {fill.name: fill for fill in self.fills}
        for name, other in conflicts.items():
            if not is_same_tensor(self.content, fill_of[name], fill_of[other]):
                self._report.mismatched.append(f"{name}: shares memory with {other} here; the snapshot has different values of the two")
        self.fills = [fill for fill in self.fills if fill.name not in conflicts]
        self._report.unexpected += [name for name in self._stored if name not in self._used]
        self._report.deliver(strict=strict, report=report, others=unclaimed is not None)
        if unclaimed is not None and strict:
            every = parse(self.content.layout, len(self.content.values))  # with the names that are not selected here
            unclaimed.note((leaf.path for leaf in leaves(every)), [self._stored[name].path for name in self._report.unexpected])

    # --- the walk -----------------------------------------------------------------------------------------------------

    def visit(self, target: Any, path: str, keys: Keys) -> Finish:
        """Plans for `target`. `path` ends with a dot, or is empty. `keys` lead there from the root."""
        if len(keys) > MAX_NESTING:
            message = f"`into` is nested deeper than {MAX_NESTING} levels; does something contain itself?"
            raise UnsupportedValueError(message, object_id=path[:60])
        kind = type(target)
        if kind in PLAIN_TYPES:
            return self._visit_value(target, path)
        if kind is dict or kind is OrderedDict:
            return self._visit_dict(target, path, keys)
        if kind is list or kind is tuple:
            return self._visit_list(target, path, keys)
        if kind in PLAIN and not hasattr(target, CHECKPOINTABLE_MARK):
            return self._visit_tensor(target, self._name(path))
        registered = registered_class(kind)
        if registered is not None and registered.wraps:
            return self._visit_wrapped(target, UnwrappedShards(registered, flattened(target)), path, keys)
        if self._describer is not None and (apart := unwrap_shards(self._describer, target, path[:-1])) is not None:
            return self._visit_wrapped(target, apart, path, keys)
        if registered is not None:
            inner = self.visit(registered.to_state(target), path, (*keys, STATE))
            return lambda: registered.from_state(inner())
        share = share_of(self._describer, target, path[:-1])
        if share is not None:
            return self._visit_share(target, share, self._name(path))
        if isinstance(target, torch.Tensor | np.ndarray):
            return self._visit_tensor(target, self._name(path))
        if (advice := advice_for(target)) is not None:
            raise UnsupportedValueError(f"cannot restore into {path[:-1] or 'this'}: {advice[0]}; {advice[1]}", object_id=path[:-1])
        if isinstance(target, dict) and kind is not Counter:
            return self._visit_dict(target, path, keys)
        if isinstance(target, list | tuple) and kind is not torch.Size:
            return self._visit_list(target, path, keys)
        return self._visit_value(target, path)

    def _visit_wrapped(self, target: Any, apart: UnwrappedShards, path: str, keys: Keys) -> Finish:
        """Plans for a wrapper subclass: its inner tensors are filled, and all else must be equal."""
        registered, state = apart
        stored = self._stored_at(path, keys)
        if stored is None:
            return self._miss(path[:-1] or ROOT, target)
        if not isinstance(stored, Container) or stored.node[0] != "r":
            return self._mismatch_below(path, f"a {registered.name} here, something else in the snapshot", target)
        if stored.node[1] != registered.name:
            return self._mismatch_below(path, f"a {registered.name} here, a {stored.node[1]} in the snapshot", target)
        outer = self._stored_at(f"{path}{OUTER_KEY}.")
        self._used.update(self._below.names(f"{path}{OUTER_KEY}."))
        own, other = state[OUTER_KEY], outer and self._outer_form(outer)
        if outer is None or not is_same_form(registered.cls, own, other):
            return self._mismatch_below(path, f"a {registered.name} of the form {own} here, {other} in the snapshot", target)
        flat = FLAT.get(registered.cls.__name__, ())
        inner = {name: tensor for name, tensor in state.items() if name != OUTER_KEY}
        children = {name: self._in_stored_shape(tensor, f"{path}{name}") if name in flat else tensor for name, tensor in inner.items()}
        finishes = {name: (child, self.visit(child, f"{path}{name}.", (*keys, name))) for name, child in children.items()}

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

    def _in_stored_shape(self, tensor: Any, name: str) -> Any:
        """An inner tensor in its stored shape, which may have the dims of the whole tensor."""
        leaf = self._stored.get(name)
        if leaf is None or leaf.kind != "tensor":
            return tensor
        shape = form_of(self.content.layout, leaf).shape
        if shape == tuple(tensor.shape) or prod(shape) != prod(tensor.shape):
            return tensor
        if isinstance(tensor, RankShare):
            return regrouped(tensor, shape) if tensor.by_blocks else tensor
        return tensor.view(shape)

    def _mismatch(self, name: str, what: str, target: Any) -> Finish:
        """Notes that `name` does not fit; `target` stays."""
        self._used.add(name)
        self._report.mismatched.append(f"{name}: {what}")
        return lambda: target

    def _mismatch_below(self, path: str, what: str, target: Any) -> Finish:
        """Notes that `path` does not fit, and nothing else about the names below it; `target` stays."""
        self._used.update(self._below.names(path) if path else self._stored)
        return self._mismatch(path[:-1] or ROOT, what, target)

    def _visit_dict(self, target: dict[Any, Any], path: str, keys: Keys) -> Finish:
        if not target:
            return self._adopt(target, path, keys) or (lambda: target)
        children = []
        for key, child in target.items():
            is_text = type(key) is str and key.isascii()
            encoded = key if is_text else encode(key, f"{path}{key!r:.80} (a dict key)", encode_torch)
            text = key if is_text else key_text(encoded)
            children.append((key, child, self.visit(child, f"{path}{text}.", (*keys, encoded))))
        stored = self._stored_at(path, keys) if isinstance(target, OrderedDict) else None
        attributes = stored.attributes if isinstance(stored, Container) else None
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

    def _visit_list(self, target: list[Any] | tuple[Any, ...], path: str, keys: Keys) -> Finish:
        stored = self._stored_at(path, keys)
        is_same_length = isinstance(stored, Container) and len(stored.children) == len(target)
        if stored is not None and not is_same_length and not has_tensors(target, len(keys)):
            adopted = self._adopt(target, path, keys)
            if adopted is not None:
                return adopted
        fields = getattr(type(target), "_fields", range(len(target)))
        children = [(child, self.visit(child, f"{path}{field}.", (*keys, field))) for field, child in zip(fields, target, strict=True)]

        def finish() -> Any:
            restored = [child_finish() for _, child_finish in children]
            if all(new is old for new, (old, _) in zip(restored, children, strict=True)):
                return target
            if isinstance(target, list):
                target[:] = restored
                return target
            return tuple.__new__(type(target), restored)

        return finish

    def _visit_value(self, target: object, path: str) -> Finish:
        name = self._name(path)
        leaf = self._stored.get(name)
        if leaf is not None and (problem := value_conflict(leaf, self.content)) is not None:
            return self._mismatch(name, problem, target)
        return self._replace(target, leaf, [name]) if leaf is not None else self._adopt_at(target, path) or self._miss(name, target)

    def _visit_tensor(self, target: Any, name: str) -> Finish:
        is_tensor = isinstance(target, torch.Tensor)
        is_known = target.is_meta or is_plain(target) if is_tensor else type(target) in (np.ndarray, np.memmap)
        if not is_known and (advice := advice_for(target)) is not None:
            raise UnsupportedValueError(f"cannot restore into {name}: {advice[0]}; {advice[1]}", object_id=name)
        leaf = self._stored.get(name)
        if leaf is None:
            return self._miss(name, target)
        if leaf.kind == "value":
            return self._mismatch(name, "a tensor here, a plain value in the snapshot", target)
        self._used.add(name)
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

    def _visit_share(self, target: Any, share: RankShare, name: str) -> Finish:
        leaf = self._stored.get(name)
        if leaf is None:
            return self._miss(name, target)
        if leaf.kind == "value":
            return self._mismatch(name, "spread over ranks here, a plain value in the snapshot", target)
        self._used.add(name)
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

    def _adopt(self, target: object, path: str, keys: Keys) -> Finish | None:
        """Plans to replace a container without tensors by the stored tree there; None if there is none."""
        stored = self._trees.at(keys)
        if stored is not None:
            if isinstance(stored, Leaf):  # such as packed numbers
                self._name(path)  # names of the target are counted as those of the snapshot
            return self._replace(target, stored, self._names_of(stored, path))
        if target:
            return self._adopt_at(target, path)
        planned: list[Finish] = []
        self._leafless.append(lambda: planned.append(self._adopt_at(target, path) or (lambda: target)))
        return lambda: planned[0]()  # noqa: PLW0108 - it is planned later

    def _adopt_at(self, target: object, path: str) -> Finish | None:
        """Plans to replace `target` by the stored tree at `path`, unless another position has it: that of key "0", not 0."""
        stored = self._stored_at(path)
        names = [] if stored is None else self._names_of(stored, path)
        return None if stored is None or not self._used.isdisjoint(names) else self._replace(target, stored, names)

    def _names_of(self, stored: Tree, path: str) -> list[str]:
        """The names in the target of the leaves of the stored tree at `path`."""
        if not self._is_renamed:
            return [leaf.path for leaf in leaves(stored)]
        return self._below.names(path) if isinstance(stored, Container) else [path[:-1] if path else ROOT]

    def _replace(self, target: object, stored: Tree, names: list[str]) -> Finish:
        self._used.update(names)
        self.adopted.append(stored)
        return lambda: replaced(target, self._build(stored))

    def _stored_at(self, path: str, keys: Keys | None = None) -> Tree | None:
        """The stored tree for a position of the target: under `keys`, else at `path`, a leaf or the container of all names below it."""
        if keys is not None and (tree := self._trees.at(keys)) is not None:
            return tree
        if not path:
            return self._tree
        leaf = self._stored.get(path[:-1])
        if leaf is not None:
            return leaf
        paths = container_paths(path, {name: self._stored[name].path for name in self._below.names(path)})
        if not paths:
            return self._containers.get(path[:-1])
        container_path = paths.pop() if len(paths) == 1 else None
        return self._tree if container_path == "" else self._containers.get(container_path) if container_path else None

    def _build(self, tree: Tree) -> Any:
        return build(tree, self.content, self.tensor_of)

    def _miss(self, name: str, target: Any) -> Finish:
        """Notes that the snapshot lacks `name`; `target` stays."""
        wrapped = self._stored_at(f"{name}.")
        if isinstance(wrapped, Container) and wrapped.node[0] == "r" and self._below.names(f"{name}.{OUTER_KEY}."):
            return self._mismatch_below(f"{name}.", f"something else here, a {wrapped.node[1]} in the snapshot", target)
        if self._is_missing is None or self._is_missing(name):
            self._report.missing.append(name)
        return lambda: target
