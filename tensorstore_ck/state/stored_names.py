"""What a snapshot has at each position of a restore's target, by name: where `rename=` changes names, or keys have another type here.

Names are not unique: the keys 0 and "0" are spelled alike, and so are the key "a.b" and the keys "a" and "b". So a restore goes by keys
first, and a name that could mean several values is an error.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.tree import ROOT, Container, Leaf, Tree, leaves
from tensorstore_ck.state.match_target import LONGEST_PATH, NamesByPrefix, container_paths, is_name, leaves_and_containers, spelled
from tensorstore_ck.state.select import Rename, pruned, renamed_containers, renamed_leaves


class SeveralValuesError(MismatchError):
    """A name of several values cannot be matched."""


class StoredNames:
    """The names that a snapshot's leaves have in the target, and which of them the target has. `tree`: what is selected of `whole`."""

    def __init__(self, tree: Tree, whole: Tree, rename: Rename | None) -> None:
        self._tree = tree
        self._whole = whole
        own_leaves, containers = leaves_and_containers(tree)
        self.leaves = {leaf.path: leaf for leaf in own_leaves}
        """Name in the target -> leaf."""
        self._leafless: dict[str, Container] = {}
        """Without `rename`, keys alone lead to them."""
        self.root: Tree | None = tree
        """What the target has under its keys: the leaves whose names `rename` does not change."""
        if rename is not None:
            self.leaves = renamed_leaves(own_leaves, rename)
            empty = [container for container in containers if not container.children]
            self._leafless = renamed_containers(empty, rename)
            moved = {id(leaf) for leaf in own_leaves if self.leaves.get(leaf.path) is not leaf}
            moved |= {id(container) for container in empty if self._leafless.get(container.path, tree).path != container.path}
            self.root = pruned(tree, lambda item: id(item) not in moved, all)
        self._intact = None if rename is None else {id(container) for container in containers}
        self._names = {leaf.path: name for name, leaf in self.leaves.items()}
        self._below = NamesByPrefix(self.leaves)
        self._every = NamesByPrefix([*self.leaves, *self._leafless]) if self._leafless else self._below
        self._containers = {container.path: container for container in reversed(containers)}
        self._used: set[str] = set()
        self._found: set[str] = set()
        """What was found by name."""
        self._elsewhere: set[str] = set()
        """The paths of leaves that `rename` moves out of a registered type which the target takes whole."""

    @cached_property
    def _ambiguous(self) -> set[str]:
        """The paths of what shares the text of its keys with something else in the snapshot."""
        own = [(name, child.path) for name, child in spelled(self._whole)]
        count = Counter(name for name, _ in own)
        return {either for name, path in own if count[name] > 1 for either in (name, path)}

    @cached_property
    def _whole_containers(self) -> set[int]:
        return {id(container) for container in leaves_and_containers(self._whole)[1]}

    def is_whole(self, tree: Tree) -> bool:
        """Whether all of a stored tree is restored: nothing in it is left out."""
        return isinstance(tree, Leaf) or id(tree) in self._whole_containers

    def is_intact(self, tree: Container) -> bool:
        """Whether `rename` takes nothing from a stored container under the target's keys."""
        return self._intact is None or id(tree) in self._intact

    def is_all(self, path: str, tree: Container) -> bool:
        """Whether `rename` puts nothing below `path` that is not from a stored container there."""
        return self.is_intact(tree) or self._origins(path, self._below.names(path)) <= {tree.path}

    def is_left_out(self, tree: Tree) -> bool:
        """Whether `rename` leaves a leaf out."""
        return isinstance(tree, Leaf) and tree.path not in self._names

    def lacks(self, path: str) -> bool:
        """Whether certainly nothing has a name at or below `path`. If so, that holds of what is below: else a cycle would be long."""
        if len(path) > LONGEST_PATH:
            start = path[:LONGEST_PATH]  # of all names there, which may be shortened
            return is_name(start) and not self._every.any(start)
        name = path[:-1]
        return is_name(path) and name not in self.leaves and name not in self._leafless and not self._every.any(path)

    def name(self, leaf: Leaf) -> str:
        """The name that a leaf has in the target."""
        return self._names.get(leaf.path, leaf.path)

    def use(self, names: Iterable[str]) -> None:
        """Notes that the target has `names`."""
        self._used.update(names)

    def use_tree(self, tree: Tree) -> None:
        """Notes that the target has all leaves of `tree`."""
        self.use(
            self._names[leaf.path]
            for leaf in leaves(tree)
            if leaf.path in self._names and (leaf is tree or leaf.path not in self._elsewhere)
        )

    def unused(self) -> list[str]:
        """The names that the target does not have."""
        return [name for name in self.leaves if name not in self._used]

    def find_leaf(self, name: str) -> Leaf | None:
        """The leaf that has this name, unless the target has it elsewhere.

        Raises:
            SeveralValuesError: several values have this name, in the snapshot or in the target.
        """
        leaf = self.leaves.get(name)
        if leaf is None:
            return None
        if name in self._found or (name not in self._used and leaf.path in self._ambiguous):
            raise SeveralValuesError(
                f"{name}: several values have this name, as their keys are spelled alike (like 0 and '0'): it does not say which is meant; "
                "restore them under the keys that they have in the snapshot, without rename=, or without into=",
                object_id=name,
            )
        if name in self._used:
            return None
        self._found.add(name)
        return leaf

    def find_tree(self, path: str, target: object = None) -> Tree | None:
        """The stored tree of what has names at or below `path`, unless the target has some of it elsewhere.

        For a dict or list `target` with values it has nothing else; otherwise it may have what `rename` leaves out of a registered type.

        Raises `find_leaf`'s error, but not if `target` is an empty dict or list.
        """
        names = self._below.names(path)
        name = path[:-1] if path else ROOT
        if name in self.leaves:
            return self.find_leaf(name) if target is None or target or name not in self._used else None
        if not names:
            return self._leafless.get(name)
        if not self._used.isdisjoint(names):
            return None
        found = self._origins(path, names)
        origin = found.pop() if len(found) == 1 else None
        if origin is None or origin in self._ambiguous:
            return None
        tree = self._tree if origin == "" else self._containers.get(origin)
        own = {self.leaves[name].path for name in names}
        tree = tree and pruned(tree, lambda item: isinstance(item, Container) or item.path in own)
        count = 0 if tree is None else len(leaves_and_containers(tree)[0])
        if tree is not None and count > len(names) and not target:
            self._elsewhere |= {leaf.path for leaf in leaves(tree)} - own
            return tree
        return tree if count == len(names) else None

    def _origins(self, path: str, names: Iterable[str]) -> set[str | None]:
        return container_paths(path, {name: self.leaves[name].path for name in names})
