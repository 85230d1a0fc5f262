"""The packages that optional features need, and the error if one is not installed.

The message names the dependencies, since tensorstore_ck may not be in the user's index: then ``pip install 'tensorstore_ck[s3]'`` fails
or installs something else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tensorstore_ck.errors import MissingExtraError

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("s3fs>=2025.7",),
    "gcs": ("gcsfs>=2025.7",),
    "azure": ("adlfs>=2024.7",),
    "safetensors": ("safetensors>=0.5",),
    "dask": ("distributed>=2025.7",),
    "otel": ("opentelemetry-api>=1.31",),
    "accelerate": ("accelerate>=1.12,<2",),
    "deepspeed": ("deepspeed>=0.19,<0.20",),
    "hf": ("transformers>=5.3,<6", "accelerate>=1.12"),
    "lightning": ("lightning>=2.6,<3",),
    "megatron": ("megatron-core>=0.16,<0.20",),
    "mlflow": ("mlflow-skinny>=3.6,<4",),
    "nvrx": ("nvidia-resiliency-ext>=0.4,<0.8",),
    "titan": ("torchtitan>=0.3,<0.4",),
    "wandb": ("wandb>=0.23,<1",),
    "ray": ("ray[train]>=2.56,<3",),
    "sign": ("cryptography>=42",),
    "pandas": ("pandas>=2.2",),
    "plot": ("matplotlib>=3.9",),
    "catalog": ("sqlalchemy>=2.0",),
    "postgres": ("sqlalchemy>=2.0", "psycopg[binary]>=3.2"),
    "exporter": ("prometheus-client>=0.22", "sqlalchemy>=2.0"),
    "ui": ("sqlalchemy>=2.0", "starlette>=0.49.1", "uvicorn>=0.34", "jinja2>=3.1.6"),
}
"""Extra -> its dependencies, as in pyproject.toml."""


def missing_extra(extra: str, what: str) -> MissingExtraError:
    """The error if packages of an extra are not installed; `what` needs them."""
    packages = " ".join(f"'{package}'" for package in EXTRAS[extra])
    return MissingExtraError(
        f"{what} needs a package that is not installed: run `pip install {packages}`. As an extra that is `pip install '.[{extra}]'` "
        f"in a checkout of tensorstore_ck, `pip install 'tensorstore_ck[{extra}]'` where your package index has it",
        object_id=extra,
    )


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """For the imports of an extra's packages, which `what` needs. Raises `MissingExtraError` if one is not installed."""
    try:
        yield
    except ImportError as exc:
        raise missing_extra(name, what) from exc
