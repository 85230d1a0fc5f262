"""What commands print of the space that gc can free."""

from collections.abc import Iterable

from tensorstore_ck.cli.options import StoreChoice
from tensorstore_ck.cli.output import printable


def space_lines(choice: StoreChoice, said: Iterable[str]) -> list[str]:
    """Lines with commands in them; their storage options may be secrets, and are not repeated."""
    lines = [printable(line) for line in said]
    return [*lines, "(add the --storage-option of this command to each of these)"] if lines and choice.storage_options else lines
