"""Checks and repairs the modes and groups of a store in a folder: if not those of its root folder, users are locked out, or let in."""

import os
import stat
from typing import Final

from tensorstore_ck.backend.local_modes import files_unlike_root
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.log.store_folders import store_folders
from tensorstore_ck.maintenance.fsck.findings import Findings
from tensorstore_ck.maintenance.fsck.repairable import repair_command

MODE: Final = "mode"
"""Kind of the finding; a notice, since nothing is lost."""


def check_modes(backend: Backend, findings: Findings) -> None:
    """Adds one finding for all files and folders, named by the first."""
    names = _unlike_root(backend)
    if names:
        root, more = os.stat(backend.url), len(names) - 1
        which = f"this and {more:,} more files and folders lack" if more else "this file or folder lacks"
        findings.add(
            MODE,
            names[0],
            f"{which} the mode and group of {backend.url} "
            f"({stat.filemode(root.st_mode)}, group {root.st_gid}), so not the same users may use them: {repair_command()}, run by root or "
            "by each owner, changes that",
            severity="notice",
            repairable=True,
        )


def repair_modes(backend: Backend) -> dict[str, str]:
    """Gives them the mode and group of the root folder, as far as this user may: name of the first -> what was done."""
    done = _unlike_root(backend, change=True)
    return {done[0]: f"{len(done):,} modes and groups set to those of the root folder"} if done else {}


def _unlike_root(backend: Backend, *, change: bool = False) -> list[str]:
    if not backend.is_local or not os.path.isdir(backend.url):
        return []
    return files_unlike_root(backend.url, [CONFIG_NAME, *store_folders(backend)], change=change)
