"""Traceable wrapper subclasses of tensors as states: inner tensors and plain values, by torch's own protocol.

`__tensor_flatten__` returns the inner tensors' names and a context, and `__tensor_unflatten__` rebuilds the tensor from them. The state
is a dict of the inner tensors by attribute name, and `OUTER_KEY`: everything else about the outer tensor. An inner tensor with one
element per block of the flattened whole (`FLAT`) may be stored in the whole's shape with its last dims merged (see `sharded_wrappers`).
"""

from typing import Any, Final

import torch

from tensorstore_ck.errors import CorruptObjectError, MismatchError, UnsupportedValueError

OUTER_KEY: Final = "__tensor__"
FLAT: Final = {"OptimState8bit": ("scale",), "OptimState4bit": ("codes", "scale"), "OptimStateFp8": ("scale",)}
"""Class -> inner tensors of one dim, with one element per block of the flattened whole."""


def is_traceable(cls: type[Any]) -> bool:
    """Whether it is a subclass of tensors that torch can take apart."""
    return issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def flattened(tensor: Any) -> dict[str, Any]:
    """The state of a wrapper subclass. Its inner tensors are the tensor's own."""
    inner, context = tensor_parts(tensor)
    return inner | {OUTER_KEY: describe_outer(tensor, context)}


def tensor_parts(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Inner tensors and context of a wrapper subclass.

    Raises:
        UnsupportedValueError: an inner tensor has the name that `OUTER_KEY` needs.
    """
    names, context = tensor.__tensor_flatten__()
    if OUTER_KEY in names:
        raise UnsupportedValueError(f"{type(tensor).__qualname__} has an inner tensor named {OUTER_KEY}: rename it", object_id=OUTER_KEY)
    return {name: getattr(tensor, name) for name in names}, context


def describe_outer(tensor: torch.Tensor, context: Any) -> dict[str, Any]:
    """The `OUTER_KEY` entry: everything but the inner tensors."""
    return {
        "size": torch.Size(tensor.shape),
        "stride": tuple(tensor.stride()),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "context": context,
    }


def unflattened(cls: Any, state: Any) -> torch.Tensor:
    """Rebuilds the tensor whose state `flattened` returned.

    Raises:
        CorruptObjectError: the state is not one of this class.
        MismatchError: its blocks belong to one layout of ranks, so the whole tensor cannot be rebuilt.
    """
    try:
        form = state[OUTER_KEY]
        if form.get("bound") is not None:
            raise MismatchError(
                f"a {cls.__qualname__} was quantised in blocks that do not follow from the whole tensor, on ranks {form['bound']}: restore "
                "it into= the same layout",
                object_id=cls.__qualname__,
            )
        flat = FLAT.get(cls.__name__, ())
        inner = {name: tensor.reshape(-1) if name in flat else tensor for name, tensor in state.items() if name != OUTER_KEY}
        made: torch.Tensor = cls.__tensor_unflatten__(inner, form["context"], form["size"], form["stride"])
        if form["parameter"]:
            return torch.nn.Parameter(made, requires_grad=form["requires_grad"])
        return made.requires_grad_() if form["requires_grad"] and not made.requires_grad else made
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, ZeroDivisionError, RuntimeError) as exc:
        raise CorruptObjectError(
            f"a stored {cls.__qualname__} cannot be rebuilt here ({exc!r}): restore it with the version of its library that saved it, or "
            "run `tsck fsck`",
            object_id=cls.__qualname__,
        ) from exc


def is_same_form(cls: type[Any], own: Any, stored: Any) -> bool:
    """Whether two tensors of a class have the same form, ignoring flags and the nominal dtype of an optimizer's state."""

    def compared(form: Any) -> Any:
        context = form["context"]
        return tuple(form["size"]), context[:-1] if cls.__name__ in FLAT else context, form.get("bound")

    try:
        return bool(compared(own) == compared(stored))
    except (KeyError, TypeError):
        return False
