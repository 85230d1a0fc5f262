"""Which snapshots of a branch led to its last one: training that goes back leaves the others behind."""

from collections.abc import Iterable

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.log.ref_table import SnapshotRow


def training_line(visits: Iterable[SnapshotRow]) -> list[SnapshotRow]:
    """The snapshots of a branch that led to its last one: without those from which training was taken back to an earlier one.

    It was taken back if the next snapshot is an earlier one again, or continues from one; or, if the one that it continues from is not
    kept, if its step is not higher.
    """
    line, numbers = list[SnapshotRow](), dict[Digest, int]()
    for info in visits:
        if (at := numbers.get(info.root)) is not None:
            keep = at
        elif info.parent is not None and (at := numbers.get(info.parent)) is not None:
            keep = at + 1
        else:
            keep = len(line)
            while keep and info.step is not None and (step := line[keep - 1].step) is not None and step >= info.step:
                keep -= 1
        for gone in line[keep:]:
            del numbers[gone.root]
        line[keep:] = [info]
        numbers[info.root] = keep
    return line
