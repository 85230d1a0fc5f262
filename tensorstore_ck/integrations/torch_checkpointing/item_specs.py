"""Which items a payload may, and must, have: from a `Config` of torch_checkpointing, which this module does not import."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import InvalidOptionError

KEY: Final = re.compile(r"[a-zA-Z0-9_-]+")
UNSUPPORTED: Final = ("pre_finalize_callback", "finalize_callback", "subprocess_init_fn")
"""Options that belong to its files and its process."""


class UnfitItemsError(InvalidOptionError, KeyError, ValueError):
    """The items of a payload do not fit the `Config`; torch_checkpointing raises the built-in errors."""

    __str__ = Exception.__str__


class ItemSpecs(NamedTuple):
    """The specs of a `Config`."""

    items: Mapping[str, Any]
    """Key -> an `ItemSpec`."""
    is_open: bool
    """Whether there may be items without a spec."""
    shares_others: bool
    """Whether the default spec has a resharder."""
    asynchronous: bool

    @classmethod
    def of(cls, config: Any) -> "ItemSpecs":
        """The specs in a `Config`; None: its defaults.

        Raises:
            InvalidOptionError: it is no `Config`, or has an option that a store cannot honour.
        """
        if config is None:
            return cls({}, is_open=True, shares_others=False, asynchronous=True)
        for name in ("items", "default", "save"):
            if not hasattr(config, name):
                raise InvalidOptionError(
                    f"config must be a CheckpointManager.Config of torch_checkpointing, or None; {type(config).__name__} has no {name!r}",
                    object_id="config",
                )
        for name in UNSUPPORTED:
            if getattr(config, name, None) is not None:
                raise InvalidOptionError(
                    f"Config.{name} has no meaning for a store, which writes no files in a process of its own: leave it out, and wait for "
                    "the Future of save(), or use store.on_event()",
                    object_id=name,
                )
        shares_others = getattr(config.default, "resharder", None) is not None
        return cls(dict(config.items), config.default is not None, shares_others, hasattr(config.save, "staging_config"))

    def is_shared(self, key: str) -> bool:
        """Whether the ranks have an item in common, because it has a resharder."""
        spec = self.items.get(key)
        return self.shares_others if spec is None else getattr(spec, "resharder", None) is not None

    def require_fitting(self, payload: object) -> None:
        """Checks the items of a payload. Raises `UnfitItemsError` if an item is missing, is not allowed, or has no valid key."""
        if not isinstance(payload, Mapping):
            raise InvalidOptionError(f"a checkpoint must be a dict of items by key, not a {type(payload).__name__}", object_id="checkpoint")
        invalid = [key for key in payload if not (isinstance(key, str) and KEY.fullmatch(key))]
        if invalid:
            raise UnfitItemsError(
                f"invalid checkpoint keys {invalid}: a key has only letters, digits, hyphens and underscores", object_id=str(invalid[0])
            )
        missing = sorted(key for key, spec in self.items.items() if getattr(spec, "required", True) and key not in payload)
        if missing:
            raise UnfitItemsError(f"missing required checkpoint item(s): {missing}", object_id=missing[0])
        extra = [] if self.is_open else sorted(set(payload) - set(self.items))
        if extra:
            raise UnfitItemsError(
                f"no ItemSpec for checkpoint key(s) {extra}, and the schema is strict (default=None): declare them in Config.items",
                object_id=extra[0],
            )


def require_id(checkpoint_id: object) -> str:
    """The text of a checkpoint id. Raises `InvalidOptionError` if it is no text, or empty."""
    text = os.fspath(checkpoint_id).rstrip("/") if isinstance(checkpoint_id, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise InvalidOptionError(f"a checkpoint id is a text such as 'step_1000', not {checkpoint_id!r}", object_id="checkpoint_id")
    return text
