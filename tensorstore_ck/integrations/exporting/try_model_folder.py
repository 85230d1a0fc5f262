"""Tries whether transformers or peft loads a folder, with every weight in its place; without memory for the weights of a whole model."""

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.integrations.model_file_names import ADAPTER_CONFIG

_NO_FOREIGN_CODE: Final = {"trust_remote_code": False, "attn_implementation": "eager"}
"""A configuration can name code, such as the kernel of another repository as its attention, that transformers would load and run."""


def try_folder(folder: str, shown: str, config: Mapping[str, Any]) -> str:
    """Says what loads the folder, or why that was not tried; `config`: the content of config.json, or of adapter_config.json.

    Raises:
        MismatchError: it does not load, or a weight is missing or too many.
    """
    is_adapter = os.path.exists(os.path.join(folder, ADAPTER_CONFIG))
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            return _try_adapter(folder, shown, config) if is_adapter else _try_model(folder, shown, config)
    except MismatchError:
        raise
    except ImportError as exc:
        return f"not tried: {_first_line(exc)}"
    except Exception as exc:  # BLE: transformers raises any exception for files that it cannot use
        raise MismatchError(_refused(shown, f"{type(exc).__name__}: {_first_line(exc)}"), object_id=shown) from exc


def _try_model(folder: str, shown: str, config: Mapping[str, Any]) -> str:
    import transformers  # noqa: PLC0415 - an extra

    reason = _why_not(transformers, config)
    if reason:
        return f"not tried: {reason}"
    kind = getattr(transformers, config["architectures"][0])
    options = {"output_loading_info": True, "device_map": "meta", "local_files_only": True, "ignore_mismatched_sizes": True}
    _, report = kind.from_pretrained(folder, **options, **_NO_FOREIGN_CODE)
    _require_whole(shown, report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
    return f"tried: {kind.__name__}.from_pretrained loads it, with every weight (transformers {transformers.__version__})"


def _try_adapter(folder: str, shown: str, config: Mapping[str, Any]) -> str:
    import peft  # noqa: PLC0415 - an extra
    import transformers  # noqa: PLC0415
    from safetensors import safe_open  # noqa: PLC0415

    base = config.get("base_model_name_or_path")
    if not base:
        return f"not tried: {ADAPTER_CONFIG} does not name the base model"
    try:
        base_config = transformers.AutoConfig.from_pretrained(base, local_files_only=True, **_NO_FOREIGN_CODE)
    except (OSError, ValueError):
        return f"not tried: the base model {base} is not on this machine"
    reason = _why_not(transformers, base_config.to_dict())
    if reason:
        return f"not tried: {reason}"
    with torch.device("meta"):
        model = getattr(transformers, base_config.architectures[0])(base_config)
    loaded = peft.PeftModel.from_pretrained(model, folder, low_cpu_mem_usage=True)
    expected = set(peft.get_peft_model_state_dict(loaded))
    with safe_open(os.path.join(folder, "adapter_model.safetensors"), framework="pt") as file:
        present = set(file.keys())
    _require_whole(shown, expected - present, present - expected, ())
    return f"tried: PeftModel.from_pretrained loads it, with every weight (peft {peft.__version__})"


def _why_not(transformers: Any, config: Mapping[str, Any]) -> str:
    """Why a model cannot be tried; '' if it can."""
    kinds = config.get("architectures")
    if not kinds:
        return "the configuration does not name the class of the model (architectures)"
    if config.get("auto_map"):
        return f"{kinds[0]} needs code of its own, which is not run here"
    if config.get("quantization_config"):
        return "the configuration says that the model is quantised, which needs other packages or a GPU"
    return "" if hasattr(transformers, kinds[0]) else f"transformers {transformers.__version__} has no {kinds[0]}"


def _require_whole(shown: str, missing: Collection[str], unexpected: Collection[str], mismatched: Collection[Any]) -> None:
    problems = [
        f"{what} {listed(sorted(map(str, names)), 3)}"
        for what, names in (("it lacks", missing), ("it has unknown", unexpected), ("shapes differ of", [name for name, *_ in mismatched]))
        if names
    ]
    if problems:
        raise MismatchError(_refused(shown, "; ".join(problems)), object_id=shown)


def _refused(shown: str, what: str) -> str:
    return (
        f"{shown} was not written, because it would not load as a model: {what}. Check --include, --strip-prefix and --config-from; "
        "--to safetensors writes weights without trying them"
    )


def _first_line(exc: Exception) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers from printing its own report, warnings and a progress bar. Raises `ImportError` if it is not installed."""
    try:
        from transformers.utils import logging  # noqa: PLC0415
    except ImportError as exc:
        raise ImportError("transformers is not installed") from exc
    level, shows_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if shows_bar:
            logging.enable_progress_bar()
