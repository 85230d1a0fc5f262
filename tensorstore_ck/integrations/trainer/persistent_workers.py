"""Data loaders with `persistent_workers`: torch draws random numbers when it makes their iterator, which happens in their first pass only.

A process that resumes behind the first pass would draw these numbers in a later pass, so it makes the iterator first.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch

from tensorstore_ck.training import random_generators

INNER: Final = ("sampler", "batch_sampler")


def has_begun(loader: Any) -> bool:
    """Whether the loader has persistent workers, and has started them."""
    return _is_persistent(loader) and _dataset_loader(loader)._iterator is not None


def begin(loader: Any) -> None:
    """Starts persistent workers that are not running, as a first pass does. No generator of this process keeps a trace of it."""
    native = _dataset_loader(loader)
    if not _is_persistent(loader) or native._iterator is not None:
        return
    held = list({id(generator): generator for generator in _generators(native)}.values())
    states = [random_generators.get_state(generator) for generator in held]
    with random_generators.preserved():
        native._iterator = native._get_iterator()
    for generator, state in zip(held, states, strict=True):
        random_generators.set_state(generator, state)


def _is_persistent(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False)) and loader.num_workers > 0


def _dataset_loader(loader: Any) -> Any:
    """The loader of torch or torchdata, which accelerate wraps."""
    return getattr(loader, "base_dataloader", loader)


def _generators(loader: Any) -> Iterator[torch.Generator]:
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        yield generator
    for name in INNER:
        below = getattr(loader, name, None)
        if below is not None:
            yield from _generators(below)
