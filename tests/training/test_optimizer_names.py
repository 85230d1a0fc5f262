"""Names of parameters that torch keeps in an optimizer's groups."""

import torch
from torch import nn

import tensorstore_ck as tsck


def _model(order: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in order})


def test_names_follow_the_parameters_of_this_optimizer(store: tsck.Store) -> None:
    """Saved by a model that defines its layers in another order."""
    saved, model = _model("ab"), _model("ba")
    tsck.TrainingState(model=saved, optimizer=torch.optim.AdamW(saved.named_parameters())).put(store, ref="r", step=1)
    optimizer = torch.optim.AdamW(model.named_parameters())
    tsck.TrainingState(model=model, optimizer=optimizer).restore(store, "r")
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
