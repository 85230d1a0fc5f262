"""Computes, before a training begins, what its snapshots will take: bytes, files, time, space and money. Reads no store and no weights: the
number of parameters comes from a model's ``config.json``, or the index of its safetensors files.

Built on `advise` for the interval and on `log.retention` for what a policy keeps.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, NotFoundError
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.retention import Policy
from tensorstore_ck.log.retention.choose_kept import KeepCandidate, choose
from tensorstore_ck.maintenance.advise import SaveCosts, best, daly, ettr, require_costs, young

MAX_FILE_BYTES: Final = 64 << 20
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NAMES: Final = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
_NOT_GATED: Final = ("gpt2", "gpt_neox", "opt", "bert", "falcon", "bloom", "gptj")


class CountedParameters(NamedTuple):
    """A number of parameters."""

    parameters: int
    how: str
    """The source of the number."""


def count_parameters(path: Path) -> CountedParameters:
    """The parameters of the model that a JSON file, or a folder with one, describes.

    An index has the exact number, or the bytes of all weights, which the ``dtype`` of the config beside it divides. A config alone gives an
    estimate for decoders like Llama, Mistral, Qwen, Mixtral and GPT-2: without biases and norms, which are less than 1 %.

    Raises:
        NotFoundError: there is no such file.
        CorruptObjectError: it is not JSON.
        InvalidOptionError: it says too little.
    """
    index = path / "model.safetensors.index.json" if path.is_dir() else path
    config = path / "config.json" if path.is_dir() else path.parent / "config.json"
    if path.is_dir() and not index.exists():
        index = config
    read = _read(index)
    if "weight_map" not in read:
        return CountedParameters(_of_config(read, index), f"estimated from {index.name}")
    noted = read.get("metadata")
    metadata: Mapping[str, Any] = noted if isinstance(noted, dict) else {}
    exact, size = metadata.get("total_parameters"), metadata.get("total_size")
    if isinstance(exact, int) and exact > 0:
        return CountedParameters(exact, f"total_parameters of {index.name}")
    if not isinstance(size, int | float) or size <= 0:
        raise InvalidOptionError(f"{index} has neither total_parameters nor total_size: give --params", object_id=str(index))
    beside = _read(config) if config.exists() else {}
    dtype = str(beside.get("dtype") or beside.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise InvalidOptionError(f"{config} has the dtype {dtype!r}, whose size is not known: give --params", object_id=str(config))
    return CountedParameters(int(size) // _DTYPE_BYTES[dtype], f"total_size of {index.name} in {dtype}")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(min(MAX_FILE_BYTES + 1, os.fstat(file.fileno()).st_size))
        read = parse_json(data) if len(data) <= MAX_FILE_BYTES else None
    except FileNotFoundError as exc:
        raise NotFoundError(f"there is no file {path}", object_id=str(path)) from exc
    except (OSError, ValueError) as exc:
        raise CorruptObjectError(f"{path} cannot be read as JSON: {exc}", object_id=str(path)) from exc
    if not isinstance(read, dict):
        raise CorruptObjectError(f"{path} is not a JSON object, or larger than {MAX_FILE_BYTES >> 20} MiB", object_id=str(path))
    return read


def _of_config(config: Mapping[str, Any], path: Path) -> int:
    """Embeddings, attention and feed-forward layers of a decoder."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config

    def number(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if type(config.get(name)) is int and 0 < config[name] < 1 << 40), default)
        if found is None:
            raise InvalidOptionError(f"{path} has no {names[0]}, so its parameters cannot be counted: give --params", object_id=str(path))
        return found

    hidden, layers, vocabulary = (number(*_NAMES[name]) for name in ("hidden", "layers", "vocabulary"))
    heads = number(*_NAMES["heads"], default=1)
    head = number("head_dim", default=max(1, hidden // heads))
    key_value = number("num_key_value_heads", default=heads) * head
    attention = 2 * hidden * heads * head + 2 * hidden * key_value
    matrices = 2 if config.get("model_type") in _NOT_GATED else 3
    wide = number(*_NAMES["feed_forward"], default=4 * hidden)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    feed_forward = matrices * hidden * wide
    if experts:
        each = number("moe_intermediate_size", default=wide)
        shared = number("n_shared_experts", default=1) if config.get("n_shared_experts") else 0
        feed_forward = matrices * hidden * each * (experts + shared) + hidden * experts
    tied = config.get("tie_word_embeddings", config.get("model_type") in ("gpt2", "bert", "opt")) is True
    return vocabulary * hidden * (1 if tied else 2) + layers * (attention + feed_forward)


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
DAYS_PER_MONTH: Final = 365 / 12
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
    """The share of wall time that is training, with that interval; see `advise.ettr`."""
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
        infos.append(SnapshotInfo(**of_snapshot, time_ns=time_ns, metrics={}, logical_bytes=0, new_bytes=0))
    verdicts = choose([KeepCandidate(info) for info in infos], [policy], infos[-1].time_ns if infos else 0)
    return sum(verdict.stays for verdict in verdicts)


def _usd(plan: TrainingPlan, size: int) -> float | None:
    return None if plan.usd_per_gb_month is None else size / GB * plan.usd_per_gb_month
