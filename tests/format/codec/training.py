"""A state as training makes it, which all codecs have something to do with."""

from typing import Any

import torch

import tensorstore_ck as tsck

SIZE = 100_000
State = dict[str, Any]


class Training:
    """fp32 masters that each step moves a little, their weights in bf16, and a table of which each step changes few elements."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.masters = {f"m{number}": self._noise() * 0.02 for number in range(3)}
        self.table = (self._noise() * 0.02).bfloat16()
        self.step = 0

    def _noise(self) -> torch.Tensor:
        return torch.randn(SIZE, generator=self.generator)

    def train(self) -> State:
        self.step += 1
        for master in self.masters.values():
            master.add_(self._noise(), alpha=1e-5)
        chosen = torch.randint(SIZE, (SIZE // 200,), generator=self.generator)
        self.table[chosen] += 1
        weights = {name: master.bfloat16() for name, master in self.masters.items()}
        state = {"masters": self.masters, "weights": weights, "table": self.table, "step": self.step}
        return {
            key: {name: each.clone() for name, each in value.items()} if isinstance(value, dict) else value for key, value in state.items()
        } | {"table": self.table.clone()}


def same(found: State, wanted: State) -> bool:
    def bits(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(-1).view(torch.uint8)

    return (
        found["step"] == wanted["step"]
        and all(torch.equal(bits(found[key][name]), bits(wanted[key][name])) for key in ("masters", "weights") for name in wanted[key])
        and torch.equal(bits(found["table"]), bits(wanted["table"]))
    )


def put_steps(store: tsck.Store, steps: int, **options: Any) -> list[tuple[tsck.Snapshot, State]]:
    training = Training()
    return [(store.put_snapshot(state := training.train(), ref="run", step=training.step, **options), state) for _ in range(steps)]
