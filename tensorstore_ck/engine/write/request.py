"""What a save says besides the state, as of one moment: which ref moves from where, and how blocks are encoded and checked."""

from typing import NamedTuple

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.publish import Expected
from tensorstore_ck.engine.write.sampled_checks import Sampling, turn_of
from tensorstore_ck.engine.write.suspicious_save import SaveChecks, SaveClaim, SaveFindings, judge
from tensorstore_ck.format.codec import Coding
from tensorstore_ck.format.record import SaveOrigin, with_store_metadata
from tensorstore_ck.log import RefTable


class SaveRequest(NamedTuple):
    """What a save says besides the state."""

    ref: str
    step: int | None
    parent: Digest | None
    """What the new snapshot continues: part of its root."""
    expect: Expected
    metadata: bytes
    metrics: dict[str, float]
    coding: Coding = Coding("raw")
    base: Digest | None = None
    """A snapshot that is more likely than the parent to have the same blocks."""
    checks: SaveChecks = SaveChecks()
    began_ns: int | None = None
    """When the save began, by the clock of this host; None: nobody wants to know."""
    origin: SaveOrigin = SaveOrigin()

    @property
    def nearest(self) -> Digest | None:
        """The snapshot in which blocks are looked up first: a hint that does not affect the root."""
        return self.base or self.parent

    @property
    def sampling(self) -> Sampling:
        """What of the state is sampled."""
        return Sampling(turn_of(self.parent, self.step), self.checks.verify_capture)

    @property
    def claim(self) -> SaveClaim:
        """What the save claims of its place in the training."""
        return SaveClaim(self.ref, self.step, self.parent)

    def judged(self, engine: Engine, view: RefTable, found: SaveFindings) -> "SaveRequest":
        """Judges what all ranks found; returns the same request, with the share of numbers that are not finite in its metadata.

        Raises:
            SuspiciousSaveError: it must not be published.
        """
        judge(engine, view, found, self.checks, self.claim)
        if not found.non_finite:
            return self
        return self._replace(metadata=with_store_metadata(self.metadata, {"non_finite": found.finiteness.share}))
