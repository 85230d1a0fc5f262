"""The part of the build that pyproject.toml cannot describe: the compiled kernel of the codecs. Without a compiler, numpy replaces it."""

import os
from glob import glob

from setuptools import Extension, setup

FOLDER = "tensorstore_ck/format/codec"

setup(
    ext_modules=[
        Extension(
            "tensorstore_ck.format.codec._kernel",
            sorted(glob(f"{FOLDER}/*.c")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            extra_compile_args=[] if os.name == "nt" else ["-O3"],  # the environment's CFLAGS replace Python's own
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
