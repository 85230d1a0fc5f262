"""MoE experts in DeepSpeed's files, by their numbers over all ranks.

``layer_L_expert_E_mp_rank_00_model_states.pt`` has the weights of expert E under its number over all ranks. Everything else, such as the
shapes of parameters, has the numbers that experts have on the first rank: each rank begins at 0. Rank R is number R % ep_size of those
that share out the experts.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tensorstore_ck.integrations.importing.malformed import MalformedError, printable

FILE: Final = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_00_model_states\.pt")
OPTIMIZER_FILE: Final = re.compile(r"expp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
_NAME: Final = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.|deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..*)")
_GROUP: Final = re.compile(r"ep_size_(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model; none, if it has no such layers."""

    weights: dict[str, Any] = field(default_factory=dict)
    """Parameters and buffers, by global name."""
    counts: dict[str, int] = field(default_factory=dict)
    """The beginning of an expert's name -> how many there are."""

    def global_name(self, name: str, ep_size: int, ep_rank: int) -> str:
        """The name of a parameter that the given of the ranks that share out the experts calls `name`."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise MalformedError(f"{printable(name, 80)} is in a group of experts, and is none")
        begin, number, rest = match.groups()
        count, left = divmod(self.counts.get(begin, 0), ep_size)
        if left or int(number) >= count:
            raise MalformedError(f"{printable(name, 80)} is not one of {self.counts.get(begin, 0)} experts on {ep_size} ranks")
        return f"{begin}{ep_rank * count + int(number)}{rest}"

    def buffers(self, names: Iterable[str]) -> set[str]:
        """The buffers of all experts; the first rank has those in `names`."""
        ends = {(match[1], match[3]) for name in names if (match := _NAME.fullmatch(name))}
        return {name for name in self.weights if (match := _NAME.fullmatch(name)) and (match[1], match[3]) in ends}

    def of_rank(self, ep_size: int, ep_rank: int) -> dict[str, Any]:
        """The weights that the given of the ranks has."""
        own = {}
        for name, tensor in self.weights.items():
            if match := _NAME.fullmatch(name):
                count, left = divmod(self.counts[match[1]], ep_size)
                if left:
                    raise MalformedError(
                        f"{self.counts[match[1]]} experts of {printable(match[1], 80)} are not shared out to {ep_size} ranks"
                    )
                if int(match[2]) // count == ep_rank:
                    own[name] = tensor
        return own


def is_expert(name: str) -> bool:
    """Whether a parameter is one of an expert."""
    return _NAME.fullmatch(name) is not None


def ep_size_of(group: Mapping[Any, Any], ranks: int) -> int:
    """Over how many ranks the experts in a group of the optimizer are spread; 1: it has none."""
    if group.get("moe") is not True:
        return 1
    match = _GROUP.fullmatch(str(group.get("name"))[:40])
    size = int(match[1]) if match else 0
    if not size or ranks % size:
        raise MalformedError(f"its group of experts {printable(group.get('name'), 40)} does not fit {ranks} ranks")
    return size


def read_experts(names: Sequence[str], numbers: object, read: Callable[[str], dict[str, Any]]) -> Experts:
    """Reads the files of all experts among `names`; each layer has `numbers`. Raises `MalformedError` if one is missing or bad."""
    files = {(int(match[1]), int(match[2])): name for name in names if (match := FILE.fullmatch(name))}
    if not files and not numbers and not any(OPTIMIZER_FILE.fullmatch(name) for name in names):
        return Experts()
    counts = list(numbers) if isinstance(numbers, list | tuple) else []
    if not all(type(count) is int and 0 < count <= 100_000 for count in counts) or len(counts) <= max(
        (layer for layer, _ in files), default=0
    ):
        raise MalformedError(f"its num_experts {printable(numbers, 80)} do not fit its files of experts")
    experts = Experts()
    for layer, count in enumerate(counts):
        for number in range(count):
            if (layer, number) not in files:
                raise MalformedError(
                    f"it lacks layer_{layer}_expert_{number}_mp_rank_00_model_states.pt; layer {layer} has {count} experts"
                )
            for name, tensor in read(files[layer, number]).items():
                match = _NAME.fullmatch(name) if type(name) is str else None
                if match is None or int(match[2]) != number or name in experts.weights or experts.counts.get(match[1], count) != count:
                    raise MalformedError(f"{files[layer, number]} has {printable(name, 80)}, which is not of this expert")
                experts.weights[name] = tensor
                experts.counts[match[1]] = count
    return experts
