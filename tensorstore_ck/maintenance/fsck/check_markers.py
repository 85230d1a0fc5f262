"""Checks and repairs the markers that name the store whose packs lie at a cold location."""

from typing import Final

from tensorstore_ck.backend.cold.cold_backend import ColdTierBackend
from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.maintenance.fsck.findings import Findings
from tensorstore_ck.maintenance.fsck.repairable import repair_command

_CLAIM: Final = "if no copy of this store's files uses that location, `tsck tier --claim-locations` writes it again"


def check_markers(placed: ColdTierBackend, findings: Findings) -> None:
    """Adds the damaged markers. Raises `PlaceUnavailableError` if a location cannot be used."""
    for url, marker in placed.markers().items():
        if marker.is_damaged:
            is_ours = marker.owner is not None
            advice = f"{repair_command()} writes it again" if is_ours else _CLAIM
            findings.add(CorruptObjectError.kind, marker_at(url), f"it was damaged; {advice}", repairable=is_ours)


def repair_markers(placed: ColdTierBackend) -> list[str]:
    """Writes again what `check_markers` reports as repairable; returns their names."""
    return [marker_at(url) for url in placed.rewrite_damaged_markers()]


def marker_at(url: str) -> str:
    """Its name in reports."""
    return f"{url.partition('?')[0]}/{MARKER_NAME}"
