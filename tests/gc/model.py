"""What a store should hold, as dicts and lists: the obvious implementation that the state machine compares with.

Ids of snapshots are what the store says; whether they are the right ones is what the model knows. Times are nanoseconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Content = tuple[int, ...]
"""The numbers of a state's tensors."""
Moves = dict[int, str]
"""Number of the move -> id of the snapshot."""


@dataclass(frozen=True)
class Put:
    """A snapshot."""

    root: str
    content: Content
    step: int | None
    entry: int


@dataclass
class Window:
    """What one entry took from one ref."""

    entry: int
    name: str
    kind: str
    moves: Moves
    time_ns: int


@dataclass
class Model:
    """All that users can see, and no more."""

    puts: dict[str, Put] = field(default_factory=dict)
    branches: dict[str, Moves] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pins: dict[tuple[str, str], int | None] = field(default_factory=dict)
    """(snapshot, owner) -> when it ends."""
    windows: list[Window] = field(default_factory=list)

    # --- look -----------------------------------------------------------------------------------------------------------

    def held(self) -> set[str]:
        """The ids of the snapshots that something holds."""
        moves = [*self.branches.values(), *(window.moves for window in self.windows)]
        return {key for each in moves for key in each.values()} | set(self.tags.values()) | {key for key, _ in self.pins}

    def with_root(self, branch: str, root: str) -> set[str]:
        """The snapshots in a branch's history that have a root: the same training may have been saved twice."""
        return {key for key in self.branches[branch].values() if self.puts[key].root == root}

    def holder_of(self, root: str) -> str | None:
        """The key that a root stands for; None when nothing that is held has that root."""
        held = self.held()
        return max(
            (key for key, put in self.puts.items() if put.root == root and key in held), key=lambda key: self.puts[key].entry, default=None
        )

    def head(self, branch: str) -> str:
        """Where a branch is."""
        moves = self.branches[branch]
        return moves[max(moves)]

    def history(self, branch: str) -> list[str]:
        """Newest first."""
        moves = self.branches[branch]
        return [moves[number] for number in sorted(moves, reverse=True)]

    def of_step(self, branch: str, step: int) -> str | None:
        """The newest of that step."""
        return next((key for key in self.history(branch) if self.puts[key].step == step), None)

    # --- change ---------------------------------------------------------------------------------------------------------

    def move(self, branch: str, key: str) -> None:
        """A save, a new branch, or a reset."""
        number = self.lengths.get(branch, 0)
        self.lengths[branch] = number + 1
        self.branches.setdefault(branch, {})[number] = key

    def unpin(self, root: str, owner: str) -> None:
        """An owner's pins on all snapshots of a root."""
        self.pins = {pin: ends_ns for pin, ends_ns in self.pins.items() if pin[1] != owner or self.puts[pin[0]].root != root}

    def forget(self, taken: dict[str, set[str] | None], entry: int, time_ns: int) -> None:
        """Per ref, what is taken from it: None for all of it."""
        for name, ids in taken.items():
            if name in self.tags:
                self.windows.append(Window(entry, name, "tag", {0: self.tags.pop(name)}, time_ns))
                continue
            gone = {number: key for number, key in self.branches[name].items() if ids is None or key in ids}
            for number in gone:
                del self.branches[name][number]
            if not self.branches[name]:
                del self.branches[name]
            self.windows.append(Window(entry, name, "branch" if ids is None else "snapshots", gone, time_ns))

    def to_undo(self, address: str | None) -> list[tuple[Window, set[str]]]:
        """(window, ids) that undo brings back; the address is a ref or a root."""
        newest_first = sorted(self.windows, key=lambda window: (window.entry, window.name), reverse=True)
        if address is None:
            return [(window, set(window.moves.values())) for window in newest_first if window.entry == newest_first[0].entry]
        for window in newest_first:
            ids = {key for key in window.moves.values() if window.name == address or self.puts[key].root == address}
            if ids:
                return [(window, ids)]
        return []

    def is_taken(self, window: Window) -> bool:
        """Whether another thing has the name now."""
        return window.name in self.tags or (window.kind == "tag" and window.name in self.branches)

    def undo(self, found: Iterable[tuple[Window, set[str]]]) -> None:
        """Brings back."""
        for window, ids in found:
            for number, key in list(window.moves.items()):
                if key in ids:
                    del window.moves[number]
                    if window.kind == "tag":
                        self.tags[window.name] = key
                    else:
                        self.branches.setdefault(window.name, {})[number] = key
            if not window.moves:
                self.windows.remove(window)

    def end(self, now_ns: int, undo_window_seconds: float) -> None:
        """What a run of gc begins with."""
        self.windows = [window for window in self.windows if now_ns - window.time_ns < undo_window_seconds * 1e9]
        self.pins = {key: ends_ns for key, ends_ns in self.pins.items() if ends_ns is None or ends_ns > now_ns}

    def contents(self) -> Iterator[tuple[str, Content]]:
        """(root, content) of all that is held."""
        return ((self.puts[key].root, self.puts[key].content) for key in sorted(self.held()))
