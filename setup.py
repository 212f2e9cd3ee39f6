"""The metadata is in setup.cfg. This file builds the kernels of tfdpfl/native.

The extension is optional: without a C compiler the package installs without it, and the wheel fits any machine.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "tfdpfl/native"
KERNELS = Extension(
    "tfdpfl.native._kernels",
    [f"{NATIVE}/kernels.c", f"{NATIVE}/tensorflow.c"],
    depends=[f"{NATIVE}/filters.h", f"{NATIVE}/tile.h", f"{NATIVE}/normals.h", f"{NATIVE}/rows.h", f"{NATIVE}/aes.h"],
    extra_compile_args=["-std=gnu11", "-O3", "-fno-math-errno", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-lpthread", "-ldl", "-lm"],
    optional=True,
)


class BuildKernels(build_ext):
    """Builds a plain shared library, which no version of Python is part of."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class Wheel(bdist_wheel):
    """Tags the wheel by the system that its kernels are for, if it holds any, and by no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(name).is_file() for name in self.distribution.get_command_obj("build_ext").get_outputs())
        return ("py3", "none", super().get_tag()[2]) if built else ("py3", "none", "any")


setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel})
