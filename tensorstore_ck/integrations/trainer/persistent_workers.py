"""Data loaders with `persistent_workers`: torch draws random numbers when it makes their iterator, which happens in their first pass only.

A process that resumes behind the first pass would draw these numbers in a later pass, so it makes the iterator first.
"""

from collections.abc import Iterator
from typing import Any

import torch

from tensorstore_ck.training import random_generators


def has_begun(loader: Any) -> bool:
    """Whether the loader has persistent workers, and has started them."""
    return _is_persistent(loader) and _dataset_loader(loader)._iterator is not None


def begin(loader: Any) -> None:
    """Starts persistent workers that are not running, as a first pass does. No generator of this process keeps a trace of it."""
    native = _dataset_loader(loader)
    if not _is_persistent(loader) or native._iterator is not None:
        return
    held = generators_of(native)
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


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers hold, each once."""
    generators = [getattr(sampler, "generator", None) for sampler in samplers_of(loader)]
    return list({id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}.values())


def samplers_of(loader: Any) -> Iterator[Any]:
    """The loader, and what its order comes from."""
    inner, seen = [loader], set[int]()
    while inner:
        sampler = inner.pop()
        if id(sampler) in seen:  # a dataset may keep its sampler, and the sampler its dataset
            continue
        seen.add(id(sampler))
        yield sampler
        inner += [below for name in ("sampler", "batch_sampler", "_sampler") if (below := getattr(sampler, name, None)) is not None]
        if sampler is not loader and is_wrapper(sampler):  # the dataset of the loader itself is the user's
            inner.append(sampler.dataset)


def is_wrapper(sampler: Any) -> bool:
    """Whether it is Lightning's `DistributedSamplerWrapper`, which shows nothing of the state of the sampler below."""
    return hasattr(getattr(sampler, "dataset", None), "_sampler")
