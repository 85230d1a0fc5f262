"""The kind of a folder's filesystem, and the kinds that are reached over a network."""

import re
from pathlib import Path
from typing import Final

NETWORK_FILESYSTEM: Final = re.compile(
    r"nfs\d*|lustre|ceph|cifs|smb\w*|fuse(\..*|blk)?|9p|virtiofs|gpfs|beegfs\w*|afs|ocfs2|gfs2|pvfs2|orangefs|glusterfs|panfs|wekafs"
)


def filesystem_of(folder: Path) -> str:
    """The type of the filesystem that holds `folder`; empty if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path = str(folder.resolve())
    longest, kind = 0, ""
    for line in lines:
        # https://docs.kernel.org/filesystems/proc.html (3.5): id parent dev root mount-point options [tags] - type source options
        before, _, after = line.partition(" - ")
        mount = before.split(" ")[4]
        if "\\" in mount:
            mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), mount)
        is_above = path == mount or path.startswith(f"{mount.rstrip('/')}/")
        if is_above and len(mount) >= longest:  # the last of several on one mount point hides the others
            longest, kind = len(mount), after.split(" ", 1)[0]
    return kind
