"""The parameter groups of a pipeline in a universal checkpoint of DeepSpeed, which each stage takes by their position."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.store import Store

TIED = ("tied_modules.first.weight", "tied_modules.second.weight")
NAMES = [*TIED, *(f"{layer}.weight" for layer in range(12)), *(f"{layer}.bias" for layer in (6, 10))]
Groups = dict[str, tuple[float, list[str]]]
"""First parameter -> weight decay and parameters, as an engine stores the groups of all stages."""


def state_of(names: list[str], groups: object) -> dict[str, Any]:
    """As an engine in bfloat16 has it after three steps."""
    master = {name: torch.full((4,), float(number)) for number, name in enumerate(names)}
    counters = {"global_steps": 3, "global_samples": 24, "skipped_steps": 0, "micro_steps": 0, "micro_offset": 6}
    return {
        "model": {name: each.bfloat16() for name, each in master.items()},
        "optimizer": {
            "state": {name: {"master": each, "exp_avg": each / 2, "step": torch.tensor(3.0)} for name, each in master.items()},
            "param_groups": groups,
        },
        "scaler": {},
        "extra": {"deepspeed": counters},
    }


def pipeline(groups: Groups) -> dict[str, Any]:
    named = {first: {"lr": 0.1, "weight_decay": decay, "params": dict.fromkeys(params)} for first, (decay, params) in groups.items()}
    return state_of(NAMES, named)


def decays(groups: Any) -> list[float]:
    return [group["weight_decay"] for group in groups]


DIFFERENT: dict[str, tuple[Groups, list[float]]] = {
    "the first stage has fewer groups": (
        {TIED[0]: (0.1, NAMES[:7]), NAMES[7]: (0.1, NAMES[7:14]), "6.bias": (0.0, NAMES[14:])},
        [0.1, 0.0, 0.0],
    ),
    "a tied layer's group is one": (
        {TIED[0]: (0.1, NAMES[:14]), "6.bias": (0.0, ["6.bias"]), "10.bias": (0.0, ["10.bias"])},
        [0.1, 0.0, 0.0],
    ),
    "a tied parameter is in two": ({TIED[0]: (0.1, NAMES[:7]), TIED[1]: (0.1, [TIED[1], *NAMES[7:]])}, [0.1, 0.1]),
    "an empty one": ({TIED[0]: (0.1, NAMES[:7]), "#1": (0.0, []), NAMES[7]: (0.1, NAMES[7:])}, [0.1, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_stages_take_the_options_of_their_groups(store: Store, tmp_path: Path, case: str) -> None:
    groups, expected = DIFFERENT[case]
    store.put_snapshot(pipeline(groups), ref="job", step=3)
    report = export_snapshot(store, "job", tmp_path / "out", format="deepspeed-universal")
    assert any("by their position" in note for note in report.notes)
    written = torch.load(tmp_path / "out" / "global_step3_universal" / "zero" / "optimizer_state.pt")
    assert decays(written["param_groups"]) == expected
    import_checkpoint(store, tmp_path / "out", ref="again")
    with store.open_snapshot("job") as before, store.open_snapshot("again") as after:
        assert set(after) == set(before)
        assert all(torch.equal(after[name][...], before[name][...]) for name in after)
        assert after.state_values["extra.deepspeed.micro_offset"] == 6
    found = store.checkout("again")["optimizer"]["param_groups"]
    assert {name: group["weight_decay"] for group in found.values() for name in group["params"]} == {
        name: decay for decay, params in groups.values() for name in params
    }


ODD = {
    "experts": (["moe.deepspeed_moe.experts.deepspeed_experts.0.weight"], "MoE experts"),
    "no groups": ("odd", "needs model, optimizer and counters"),
    "odd groups": ({"odd": "odd"}, "needs model, optimizer and counters"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_cannot_be_exported(store: Store, tmp_path: Path, case: str) -> None:
    groups, message = ODD[case]
    names = groups if isinstance(groups, list) else NAMES
    stored = {names[0]: {"lr": 0.1, "params": dict.fromkeys(names)}} if isinstance(groups, list) else groups
    store.put_snapshot(state_of(names, stored), ref="job", step=3)
    with pytest.raises(UnsupportedValueError, match=message):
        export_snapshot(store, "job", tmp_path / "out", format="deepspeed-universal")
    assert not (tmp_path / "out").exists()
