"""Computes, before a training begins, what its snapshots will take: bytes, files, time, space and money. Pure: reads no store.

Built on `optimal_interval` for the interval and on `log.retention` for what a policy keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.retention import Policy
from tensorstore_ck.log.retention.choose_kept import KeepCandidate, choose
from tensorstore_ck.maintenance.optimal_interval import SaveCosts, best, daly, ettr, require_costs, young

DTYPES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
OPTIMIZERS: Final[Mapping[str, tuple[float, str]]] = {
    "adamw": (8.0, "two moments in fp32"),
    "adamw8bit": (2.0, "two moments in 8 bits"),
    "lion": (4.0, "one moment in fp32"),
    "momentum": (4.0, "one moment in fp32"),
    "sgd": (0.0, "no moments"),
}
"""Name -> bytes a parameter, and what they are."""
FP32_BYTES: Final = 4
DEVICE_HOURS_PER_FAILURE: Final = 50_000
"""Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4)."""
RESTART_SECONDS: Final = 300.0
"""Detection, new hosts, start of the program: assumed, without the restore."""
COPY_BYTES_PER_SECOND: Final = 10e9
"""From a device to pinned memory, of each rank: assumed."""
SMALL_SHARE: Final = 0.67
"""The share of the raw size with ``codec="small"`` and deltas: AdamW, 10 steps between saves (benches/RESULTS.md, "Codecs")."""
PACK_BYTES: Final = 64 << 20
MAX_SAVES: Final = 100_000
LEAST_INTERVAL_SECONDS: Final = 60.0
"""The shortest interval that a plan chooses: small models would otherwise save each second."""
GB: Final = 10**9
_NS: Final = 10**9


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The training, and where it saves."""

    parameters: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    master: bool = True
    """Whether the optimizer keeps weights in fp32 besides those in a shorter type."""
    ranks: int = 1
    days: float = 14.0
    every_seconds: float | None = None
    """None: the best interval, or a minute if that is longer."""
    keep_last: int = 5
    keep_every_seconds: float = 0.0
    mtbf_seconds: float | None = None
    """None: by `DEVICE_HOURS_PER_FAILURE`."""
    write_bytes_per_second: float = 1e9
    """The bandwidth of all ranks together."""
    read_bytes_per_second: float = 1e9
    commit_seconds: float = 0.0
    stall_seconds: float | None = None
    """None: the time to copy a rank's share from its device."""
    usd_per_gb_month: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedSaves:
    """The result. Times in seconds."""

    parameters: int
    bytes_per_parameter: float
    parts: Mapping[str, float]
    """The parts of the bytes of a parameter."""
    bytes_per_snapshot: int
    files_per_snapshot: int
    save_seconds: float
    restore_seconds: float
    costs: SaveCosts
    assumed: tuple[str, ...]
    """The costs that were assumed, since nobody gave or measured them."""
    interval: float
    """The time of training between two saves."""
    training_share: float
    """The share of wall time that is training, with that interval; see `optimal_interval.ettr`."""
    stall_share: float
    """The share of wall time in which saves hold up the training."""
    best_interval: float
    best_training_share: float
    young_interval: float
    daly_interval: float
    saves: int
    """The number of saves in the whole run."""
    kept: int
    """The number of snapshots that the policy keeps at the end of the run."""
    written_bytes: int
    kept_bytes: int
    """The bytes of the kept snapshots, if no two share a block."""
    kept_bytes_small: int
    """The same with ``codec="small"`` and deltas."""
    usd_per_month: float | None
    usd_per_month_small: float | None
    too_slow: bool
    """Whether a save takes longer than the interval."""


def plan_training(plan: TrainingPlan) -> PlannedSaves:
    """What the snapshots of a training will take.

    Raises:
        InvalidOptionError: a number is out of range, or the dtype or the optimizer is not known.
    """
    _check(plan)
    parts = bytes_of_parameter(plan)
    size = int(plan.parameters * sum(parts.values()))
    save = size / plan.write_bytes_per_second + plan.commit_seconds
    restore = size / plan.read_bytes_per_second
    costs, assumed = _costs(plan, size, save, restore)
    wanted = best(costs)
    interval = max(wanted, LEAST_INTERVAL_SECONDS) if plan.every_seconds is None else plan.every_seconds
    period = interval + costs.stall
    saves = int(plan.days * 86_400 / period)
    if saves > MAX_SAVES:
        raise InvalidOptionError(f"{saves:,} saves are too many to plan (at most {MAX_SAVES:,}): save less often", object_id="every")
    kept = _kept(plan, saves, period)
    small = int(kept * size * SMALL_SHARE)
    return PlannedSaves(
        parameters=plan.parameters,
        bytes_per_parameter=sum(parts.values()),
        parts=parts,
        bytes_per_snapshot=size,
        files_per_snapshot=plan.ranks * (1 + max(1, -(-size // plan.ranks // PACK_BYTES))) + 2,
        save_seconds=save,
        restore_seconds=restore,
        costs=costs,
        assumed=assumed,
        interval=interval,
        training_share=ettr(interval, costs),
        stall_share=costs.stall / period,
        best_interval=wanted,
        best_training_share=ettr(wanted, costs),
        young_interval=young(costs),
        daly_interval=daly(costs),
        saves=saves,
        kept=kept,
        written_bytes=saves * size,
        kept_bytes=kept * size,
        kept_bytes_small=small,
        usd_per_month=_usd(plan, kept * size),
        usd_per_month_small=_usd(plan, small),
        too_slow=save > period,
    )


def bytes_of_parameter(plan: TrainingPlan) -> dict[str, float]:
    """The values that are stored for each parameter, and their bytes."""
    per_weight, (moments, what) = DTYPES[plan.dtype], OPTIMIZERS[plan.optimizer]
    parts = {f"weight in {plan.dtype}": float(per_weight)}
    if plan.master and per_weight < FP32_BYTES:
        parts["master weight in fp32"] = float(FP32_BYTES)
    return {**parts, f"{plan.optimizer}: {what}": moments} if moments else parts


def _check(plan: TrainingPlan) -> None:
    for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
        if getattr(plan, name) not in known:
            raise InvalidOptionError(f"{name} must be one of {', '.join(known)}, not {getattr(plan, name)!r}", object_id=name)
    above_0 = ("parameters", "ranks", "days", "keep_last", "write_bytes_per_second", "read_bytes_per_second")
    for name in (*above_0, *(name for name in ("every_seconds", "mtbf_seconds") if getattr(plan, name) is not None)):
        if not 0 < getattr(plan, name) < float("inf"):
            raise InvalidOptionError(f"{name} must be above 0, not {getattr(plan, name)!r}", object_id=name)
    if plan.usd_per_gb_month is not None and not 0 <= plan.usd_per_gb_month < float("inf"):
        raise InvalidOptionError(f"a price must be 0 or more, not {plan.usd_per_gb_month!r}", object_id="price")


def _costs(plan: TrainingPlan, size: int, save: float, restore: float) -> tuple[SaveCosts, tuple[str, ...]]:
    stall = size / plan.ranks / COPY_BYTES_PER_SECOND if plan.stall_seconds is None else plan.stall_seconds
    mtbf = DEVICE_HOURS_PER_FAILURE * 3600 / plan.ranks if plan.mtbf_seconds is None else plan.mtbf_seconds
    assumed = {"stall": plan.stall_seconds is None, "restart": True, "mtbf": plan.mtbf_seconds is None}
    costs = SaveCosts(stall=stall, lag=save, restart=RESTART_SECONDS + restore, mtbf=mtbf)
    return require_costs(costs), tuple(name for name, is_assumed in assumed.items() if is_assumed)


def _kept(plan: TrainingPlan, saves: int, period: float) -> int:
    """How many snapshots the policy keeps when the last one is saved."""
    policy = Policy.of(keep_last=plan.keep_last, keep_every_seconds=plan.keep_every_seconds or None)
    infos = []
    for number in range(1, saves + 1):
        ulid, root, time_ns = Ulid(number.to_bytes(16, "big")), Digest(number.to_bytes(32, "big")), int(number * period * _NS)
        of_snapshot: dict[str, Any] = {"ulid": ulid, "root": root, "record": root, "parent": None, "ref": "run", "step": None, "n": number}
        infos.append(SnapshotRow(**of_snapshot, time_ns=time_ns, metrics={}, logical_bytes=0, new_bytes=0))
    verdicts = choose([KeepCandidate(info) for info in infos], [policy], infos[-1].time_ns if infos else 0)
    return sum(verdict.stays for verdict in verdicts)


def _usd(plan: TrainingPlan, size: int) -> float | None:
    return None if plan.usd_per_gb_month is None else size / GB * plan.usd_per_gb_month
