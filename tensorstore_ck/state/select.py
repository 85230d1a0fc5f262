"""The options ``select=`` and ``rename=``: which leaves are restored, and under which names. Pure: trees and names in and out."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves
from tensorstore_ck.state.match_target import spelled
from tensorstore_ck.state.rebuild_tree import UNSELECTED

Rename = Mapping[str, str] | Callable[[str], str | None]


class Selection:
    """Globs over leaf paths. ``*`` matches dots, too; a glob that matches a container's path selects all of it."""

    def __init__(self, select: Sequence[str] | str) -> None:
        globs = [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else []
        if not globs or not all(isinstance(glob, str) for glob in globs):
            raise InvalidOptionError(f"select must be globs such as 'model.*', not {select!r}", object_id="select")
        self._patterns = {glob: re.compile(f"{fnmatch.translate(glob)}|{fnmatch.translate(glob + '.*')}") for glob in globs}

    def fits(self, path: str) -> bool:
        """Whether any glob matches."""
        return any(pattern.match(path) for pattern in self._patterns.values())

    def fitting(self, paths: Sequence[str]) -> list[int]:
        """The positions of the paths that `fits`."""
        return [position for position, path in enumerate(paths) if self.fits(path)]

    def require_used(self, tree: Tree) -> None:
        """Checks that each glob matches a leaf.

        Raises:
            MismatchError: some do not; the message names them, and the names in the snapshot.
        """
        names = [leaf.path for leaf in leaves(tree)]
        unused = [glob for glob, pattern in self._patterns.items() if not any(map(pattern.match, names))]
        if unused:
            there = sorted({name.partition(".")[0] + (".*" if "." in name else "") for name in names})
            raise MismatchError(
                f"nothing in the snapshot fits {', '.join(map(repr, unused))}; there is {listed(there, 12)}", object_id=unused[0]
            )

    def prune(self, tree: Tree) -> Tree | None:
        """`pruned`, to what `fits`."""
        return pruned(tree, lambda item: self.fits(item.path))


def pruned(tree: Tree, fits: Callable[[Tree], bool], registered: Callable[[Iterable[bool]], bool] = any) -> Tree | None:
    """The tree with the leaves, and the containers without children, that `fits` accepts; None if nothing is left.

    Other dict entries are dropped, other elements of lists and tuples become None. A registered type is kept or dropped as a whole, and so
    are an OrderedDict's attributes. A container of which nothing is left out stays the same object. `registered`: `all` if a registered
    type is dropped unless all its leaves fit.
    """
    if isinstance(tree, Leaf) or not tree.children:
        return tree if fits(tree) else None
    tag = tree.node[0]
    if tag == "r":
        return tree if registered(map(fits, leaves(tree))) else None
    kept = [pruned(child, fits, registered) for child in tree.children]
    if not any(kept):
        return None
    if all(child is own for child, own in zip(kept, tree.children, strict=True)):
        return tree
    if tag in ("l", "u", "n"):
        return Container(node=tree.node, path=tree.path, keys=tree.keys, children=[child or UNSELECTED for child in kept], attributes=None)
    keys = [key for key, child in zip(tree.keys, kept, strict=True) if child]
    return Container(node=tree.node, path=tree.path, keys=keys, children=[child for child in kept if child], attributes=tree.attributes)


def renamer(rename: Rename) -> Callable[[str], str | None]:
    """A function from stored names to names in the target (None: leave it out).

    In a mapping the longest prefix wins, and a prefix ends at a dot: ``{"module": "model"}`` does not change ``module_ema.w``.
    """
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise InvalidOptionError(f"rename must be a mapping of prefixes or a function, not {rename!r}", object_id="rename")
        return rename
    if not all(isinstance(text, str) for pair in rename.items() for text in pair):
        raise InvalidOptionError("rename must map strings to strings", object_id="rename")
    prefixes = {old.rstrip("."): new.rstrip(".") for old, new in reversed([*rename.items()])}

    def renamed(name: str) -> str:
        old = next((prefix for prefix in _prefixes(name) if prefix in prefixes), None)
        return name if old is None else _moved(name, old, prefixes[old])

    return renamed


def renamed_leaves(stored: Iterable[Leaf], rename: Rename) -> dict[str, Leaf]:
    """Name in the target -> leaf.

    Raises:
        InvalidOptionError: `rename` gives what is not a name.
        MismatchError: it gives two leaves the same name.
    """
    found: dict[str, Leaf] = {}
    new_name = renamer(rename)
    for leaf in stored:
        name = new_name(leaf.path)
        if name is None:
            continue
        if not isinstance(name, str):
            raise InvalidOptionError(f"rename gave {name!r} for {leaf.path!r}: it must give a name, or None", object_id="rename")
        if name in found:
            raise MismatchError(f"rename gives {found[name].path!r} and {leaf.path!r} the same name {name!r}", object_id=name)
        found[name] = leaf
    return found


def renamed_containers(stored: Iterable[Container], rename: Rename) -> dict[str, Container]:
    """Name in the target -> container. A function of the name need not know those of containers: then they keep theirs."""
    found: dict[str, Container] = {}
    new_name = renamer(rename)
    for container in reversed([*stored]):
        name: str | None = None
        with suppress(Exception):
            name = new_name(container.path)
        found[name if isinstance(name, str) else container.path] = container
    return found


def _moved(name: str, old: str, new: str) -> str:
    rest = name if not old else name[len(old) + 1 :]
    return f"{new}.{rest}" if new and rest else new or rest


def missing_names(selection: Selection, rename: Rename | None, stored: Tree) -> Callable[[str], bool]:
    """Returns whether a name in the target that no selected leaf gets is missing in the snapshot; else `selection` leaves it out.

    `rename` gives names of the snapshot, to which globs apply, other names in the target. What a function of the name would have renamed
    is unknown: then only names that the snapshot has are left out.
    """
    is_missing = _missing_names(selection, rename, stored)

    @cache
    def alike() -> set[str]:
        """What the keys of leaves spell that are not selected: of values, or if the leaf has another name, as others are spelled alike."""
        names = set[str]()
        for name, leaf in spelled(stored):
            if isinstance(leaf, Leaf) and (leaf.path != name or leaf.kind == "value") and not selection.fits(leaf.path):
                with suppress(Exception):
                    names.add((renamer(rename)(name) if rename is not None else name) or name)
        return names

    # one value may be a list, whose items have names in the target
    return lambda name: is_missing(name) and alike().isdisjoint(_prefixes(name))


def _missing_names(selection: Selection, rename: Rename | None, stored: Tree) -> Callable[[str], bool]:
    if rename is None:
        return selection.fits
    if isinstance(rename, Mapping):
        former_names = _former_names(rename)
        return lambda name: any(map(selection.fits, former_names(name)))
    new_name = rename

    @cache
    def left_out() -> set[str]:
        names: set[str] = set()
        for path in (leaf.path for leaf in leaves(stored) if not selection.fits(leaf.path)):
            name: str | None = path
            with suppress(Exception):  # a function need not know the names that are not selected
                name = new_name(path)
            names.update(filter(None, _prefixes(name or path)))
        return names

    return lambda name: name not in left_out()


def _prefixes(name: str) -> Iterator[str]:
    """A name, and those of the containers around it; the root, which has none, is the last one."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _former_names(rename: Mapping[str, str]) -> Callable[[str], Iterator[str]]:
    """Returns the names that `rename` turns into a name."""
    new_name, former_prefixes = renamer(rename), defaultdict[str, list[str]](list)
    for old, new in rename.items():
        former_prefixes[new.rstrip(".")].append(old.rstrip("."))

    def former_names(name: str) -> Iterator[str]:
        formers = [_moved(name, new, old) for new in _prefixes(name) if new in former_prefixes for old in former_prefixes[new]]
        return (former for former in (*formers, name) if new_name(former) == name)

    return former_names
