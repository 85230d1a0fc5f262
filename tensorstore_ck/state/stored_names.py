"""What a snapshot has at each position of a restore's target, by name: where `rename=` changes names, or keys have another type here.

Names are not unique: the keys 0 and "0" are spelled alike, and so are the key "a.b" and the keys "a" and "b". So a restore goes by keys
first, and a name that could mean several values is an error.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.tree import Container, Leaf, LeafNames, Tree, leaves
from tensorstore_ck.format.values import key_text
from tensorstore_ck.state.match_target import NamesByPrefix, container_paths, leaves_and_containers
from tensorstore_ck.state.select import Rename, pruned, renamed_containers, renamed_leaves


def leaf_name(path: str) -> str:
    """The name of the leaf at `path`, which ends with a dot, or is empty at the root."""
    return LeafNames().at(path)


class StoredNames:
    """The names that a snapshot's leaves have in the target, and which of them the target has. `tree`: what is selected of `whole`."""

    def __init__(self, tree: Tree, whole: Tree, rename: Rename | None) -> None:
        self._whole = whole
        own_leaves, containers = leaves_and_containers(tree)
        self.leaves = {leaf.path: leaf for leaf in own_leaves}
        """Name in the target -> leaf."""
        leafless = {}
        if rename is not None:
            self.leaves = renamed_leaves(own_leaves, rename)
            kept = {leaf.path for leaf in self.leaves.values()}
            leafless = renamed_containers([container for container in containers if not container.children], rename)
            tree = pruned(tree, lambda item: isinstance(item, Container) or item.path in kept) or tree
            _, containers = leaves_and_containers(tree)
        self._leafless: dict[str, Container] = leafless
        """Without `rename`, keys alone lead to them."""
        self.tree = tree
        """Without what `rename` leaves out."""
        self._names = {leaf.path: name for name, leaf in self.leaves.items()}
        self._below = NamesByPrefix(self.leaves)
        self._containers = {container.path: container for container in reversed(containers)}
        self._used: set[str] = set()
        self._found: set[str] = set()
        """What was found by name."""

    @cached_property
    def _ambiguous(self) -> set[str]:
        """The paths of what shares the text of its keys with something else in the snapshot."""
        own = [
            (leaf_name(f"{container.path}.{key_text(key)}." if container.path else f"{key_text(key)}."), child.path)
            for container in leaves_and_containers(self._whole)[1]
            for key, child in zip(container.keys, container.children, strict=False)
        ]
        count = Counter(name for name, _ in own)
        return {either for name, path in own if count[name] > 1 for either in (name, path)}

    @cached_property
    def _whole_containers(self) -> set[int]:
        return {id(container) for container in leaves_and_containers(self._whole)[1]}

    def is_whole(self, tree: Tree) -> bool:
        """Whether all of a stored tree is restored: nothing in it is left out."""
        return isinstance(tree, Leaf) or id(tree) in self._whole_containers

    def name(self, leaf: Leaf) -> str:
        """The name that a leaf has in the target."""
        return self._names.get(leaf.path, leaf.path)

    def use(self, names: Iterable[str]) -> None:
        """Notes that the target has `names`."""
        self._used.update(names)

    def use_tree(self, tree: Tree) -> None:
        """Notes that the target has all leaves of `tree`."""
        self.use(map(self.name, leaves(tree)))

    def use_below(self, path: str) -> None:
        """Notes that the target has all names that begin with `path`."""
        self.use(self._below.names(path))

    def unused(self) -> list[str]:
        """The names that the target does not have."""
        return [name for name in self.leaves if name not in self._used]

    def find_leaf(self, name: str) -> Leaf | None:
        """The leaf that has this name, unless the target has it elsewhere.

        Raises:
            MismatchError: several values have this name, in the snapshot or in the target.
        """
        leaf = self.leaves.get(name)
        if leaf is None:
            return None
        if name in self._found or (name not in self._used and leaf.path in self._ambiguous):
            raise MismatchError(
                f"{name!r} is the name of several values, whose keys are spelled alike (as 0 and '0' are): they cannot be matched by name. "
                "Restore them under the keys that they have in the snapshot, without rename=, or without into=",
                object_id=name,
            )
        if name in self._used:
            return None
        self._found.add(name)
        return leaf

    def find_tree(self, path: str, target: object = True) -> Tree | None:
        """The stored tree that has all names at or below `path`, and no others, unless the target has some of it elsewhere.

        Raises `find_leaf`'s error, but not if `target` is empty and has no values.
        """
        names = self._below.names(path)
        if path and path[:-1] in self.leaves:
            return self.find_leaf(path[:-1]) if target or path[:-1] not in self._used else None
        if not names:
            return self._leafless.get(path[:-1])
        if not self._used.isdisjoint(names):
            return None
        if not path:
            same = all(leaf.path == name for name, leaf in self.leaves.items())
            return self.tree if same else None
        paths = container_paths(path, {name: self.leaves[name].path for name in names})
        found = paths.pop() if len(paths) == 1 else None
        if found in self._ambiguous:
            return None
        tree = self.tree if found == "" else None if found is None else self._containers.get(found)
        return tree if tree is not None and len(leaves_and_containers(tree)[0]) == len(names) else None
