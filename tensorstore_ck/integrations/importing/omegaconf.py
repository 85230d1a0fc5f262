"""OmegaConf containers, in which Lightning and Hydra keep hyper-parameters, as plain ones.

The result equals ``OmegaConf.to_container(config, resolve=False)``: interpolations stay text, field types and flags are dropped.
"""

from collections import Counter
from functools import partial
from typing import Any, Final

from tensorstore_ck.integrations.importing.key_types import require_cheap_keys
from tensorstore_ck.integrations.importing.malformed import MalformedError
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, Deferred

_CONTAINERS: Final[dict[tuple[str, str], type[Any]]] = {
    ("omegaconf.dictconfig", "DictConfig"): dict,
    ("omegaconf.listconfig", "ListConfig"): list,
}
_NODES: Final = ("AnyNode", "BooleanNode", "BytesNode", "EnumNode", "FloatNode", "IntegerNode", "PathNode", "StringNode")


def config_makers(converted: "Counter[str]") -> dict[tuple[str, str], object]:
    """The functions that make them; each container is counted in `converted`."""
    makers: dict[tuple[str, str], object] = {("omegaconf.nodes", name): AllowedGlobal(name, _Node) for name in _NODES}
    makers["omegaconf.base", "UnionNode"] = AllowedGlobal("UnionNode", _Node)
    for (module, name), kind in _CONTAINERS.items():
        made = partial(_Container, kind, partial(converted.update, [f"{module}.{name}, read as a {kind.__name__}"]))
        makers[module, name] = AllowedGlobal(name, made)
    return makers


class _Node(Deferred):
    def build(self, state: Any) -> None:
        if type(state) is not dict:
            raise MalformedError("it has a malformed OmegaConf value")
        self.value = _plain(state["_val"] if "_val" in state else state.get("_content"))
        self.held = list(state.values())


class _Container(Deferred):
    """A dict or list in a config; or None, or an interpolation."""

    def __init__(self, kind: type[Any], count: Any) -> None:
        super().__init__()
        self._kind, self._count = kind, count

    def build(self, state: Any) -> None:
        content = state.get("_content") if type(state) is dict else self
        if type(content) is dict and self._kind is dict:
            keys = require_cheap_keys([_plain(key) for key in content])
            self.value = dict(zip(keys, map(_plain, content.values()), strict=True))
        elif type(content) is list and self._kind is list:
            self.value = [_plain(item) for item in content]
        elif content is None or type(content) is str:
            self.value = content
        else:
            raise MalformedError("it has a malformed OmegaConf container")
        self.held = list(state.values())
        self._count()


def _plain(item: Any) -> Any:
    return item.value if isinstance(item, Deferred) else item
