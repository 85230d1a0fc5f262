"""The options ``select=`` and ``rename=``: which leaves are restored, and under which names. Pure: trees and names in and out."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves
from tensorstore_ck.state.rebuild_tree import UNSELECTED

Rename = Mapping[str, str] | Callable[[str], str | None]


class Selection:
    """Globs over leaf paths. ``*`` matches dots, too; a glob that matches a container's path selects all of it."""

    def __init__(self, select: Sequence[str] | str) -> None:
        globs = [select] if isinstance(select, str) else list(select)
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
        """The selected tree: other dict entries are dropped, other elements of lists and tuples become None; None if nothing is left.

        A registered type is kept or dropped as a whole, and so are an OrderedDict's attributes.
        """
        if isinstance(tree, Leaf):
            return tree if self.fits(tree.path) else None
        if not tree.children:
            return tree if self.fits(tree.path) else None
        tag = tree.node[0]
        if tag == "r":
            return tree if any(self.fits(leaf.path) for leaf in leaves(tree)) else None
        kept = [self.prune(child) for child in tree.children]
        if not any(kept):
            return None
        if tag in ("l", "u", "n"):
            return Container(
                node=tree.node, path=tree.path, keys=tree.keys, children=[child or UNSELECTED for child in kept], attributes=None
            )
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
    prefixes = sorted(((old.rstrip("."), new.rstrip(".")) for old, new in rename.items()), key=lambda pair: -len(pair[0]))

    def renamed(name: str) -> str:
        for old, new in prefixes:
            if _is_below(name, old):
                return _moved(name, old, new)
        return name

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


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _moved(name: str, old: str, new: str) -> str:
    rest = name if not old else name[len(old) + 1 :]
    return f"{new}.{rest}" if new and rest else new or rest


def missing_names(selection: Selection, rename: Rename | None, stored: Tree) -> Callable[[str], bool]:
    """Returns whether a name in the target that no selected leaf gets is missing in the snapshot; else `selection` leaves it out.

    `rename` gives names of the snapshot, to which globs apply, other names in the target. What a function of the name would have renamed
    is unknown: then only names that the snapshot has are left out.
    """
    if rename is None:
        return selection.fits
    if isinstance(rename, Mapping):
        prefixes = rename
        return lambda name: any(map(selection.fits, _former_names(prefixes, name)))
    new_name = rename

    @cache
    def left_out() -> set[str]:
        names: set[str] = set()
        for path in (leaf.path for leaf in leaves(stored) if not selection.fits(leaf.path)):
            name: str | None = path
            with suppress(Exception):  # a function need not know the names that are not selected
                name = new_name(path)
            names.update(_with_containers(name or path))
        return names

    return lambda name: name not in left_out()


def _with_containers(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _former_names(rename: Mapping[str, str], name: str) -> Iterator[str]:
    """The names that `rename` turns into `name`."""
    new_name = renamer(rename)
    formers = [_moved(name, new.rstrip("."), old.rstrip(".")) for old, new in rename.items() if _is_below(name, new.rstrip("."))]
    return (former for former in (*formers, name) if new_name(former) == name)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Text of at most `most` names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
