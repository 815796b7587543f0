# mypy: ignore-errors
"""What pyproject.toml cannot say: an extension of the stable ABI, and a .pth file beside the package."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

PTH = "whyspan_inproc.pth"


class BuildWithPth(build_py):
    """Put the .pth file where the packages go, so that site-packages has it."""

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            self.copy_file(PTH, str(Path(self.build_lib) / PTH))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / PTH)]


setup(
    ext_modules=[
        Extension(
            "whyspan_inproc._marker",
            ["whyspan_inproc/_marker.c"],
            py_limited_api=True,
            define_macros=[("Py_LIMITED_API", "0x03090000")],
            extra_compile_args=["-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
        )
    ],
    cmdclass={"build_py": BuildWithPth},
    options={"bdist_wheel": {"py_limited_api": "cp39"}},
)
