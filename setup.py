"""What pyproject.toml has no settled words for: a small kernel, for what numpy is too slow for. Without a compiler numpy does it."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tensorstore_ck.format.codec._kernel",
            ["tensorstore_ck/format/codec/_kernel.c"],
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
