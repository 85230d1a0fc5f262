"""DeepSpeed's classes in pickles as plain values: loss scalers and addresses in flat tensors as dicts, its enum of stages as a number."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tensorstore_ck.integrations.importing.malformed import MalformedError
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal

PACKAGE: Final = "deepspeed."
_DICTS: Final = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
_STAGE: Final = ("deepspeed.runtime.zero.config", "ZeroStageEnum")


def deepspeed_makers(converted: "Counter[str]") -> dict[tuple[str, str], AllowedGlobal]:
    """The names, for a `PickleAllowlist`; counts conversions in `converted`."""

    def counting(key: tuple[str, str], to: str, make: Callable[..., Any], *args: Any) -> Any:
        converted[f"{'.'.join(key)}, read as {to}"] += 1
        return make(*args)

    makers = {key: AllowedGlobal(key[1], partial(counting, key, "a dict", _attributes)) for key in _DICTS}
    return {**makers, _STAGE: AllowedGlobal(_STAGE[1], partial(counting, _STAGE, "a number", _stage))}


def _attributes(*args: object) -> dict[str, Any]:
    """The attributes come later, as the object's state."""
    if args:
        raise MalformedError("it creates an object of DeepSpeed with arguments")
    return {}


def _stage(number: object = None) -> int:
    if type(number) is not int or not 0 <= number <= 3:
        raise MalformedError("it has an unknown ZeRO stage")
    return number
