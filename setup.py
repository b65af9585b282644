"""Build of the compiled libraries; pyproject.toml defines the rest of the distribution.

The CPU kernel and the draft store are plain C libraries, not extension modules, so one wheel
supports every Python. Each instruction set is compiled separately with its own flags and selected
at run time, so a wheel does not depend on the build machine's processor. Without a compiler the
build continues without the libraries: vLLM's own attention is used, and drafting from siblings is
disabled.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = [
    *["-std=c++17", "-O3", "-g0", "-fPIC"],
    *["-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno"],
    # GCC warns about intentionally undefined vectors in its own headers.
    *["-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"],
]
INSTRUCTIONS = {
    "avx2.cpp": ["-mavx2", "-mfma"],
    "avx512.cpp": [
        *["-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"],
        "-mavx512vbmi",
    ],
}


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        objects = []
        for source in ext.sources:
            flags = FLAGS + ext.extra_compile_args + INSTRUCTIONS.get(Path(source).name, [])
            objects += self.compiler.compile([source], self.build_temp, extra_postargs=flags)
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=ext.extra_link_args,
            target_lang="c++",
        )


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def library(kernel: str, compile_flags: list[str], link_flags: list[str]) -> Extension:
    sources = Path("kernels", kernel, "csrc")
    return Extension(
        f"kernels.{kernel}.lib{kernel}",
        sources=sorted(map(str, sources.glob("*.cpp"))),
        depends=sorted(map(str, sources.glob("*.h"))),
        extra_compile_args=compile_flags,
        extra_link_args=link_flags,
        optional=True,
    )


def libraries() -> list[Extension]:
    # No fused multiply-add, so that probabilities are rounded as in Python.
    drafts = library("draft_index", ["-ffp-contract=off"], [])
    if platform.machine() != "x86_64":
        return [drafts]
    return [library("shared_prefix_attention", ["-fopenmp"], ["-fopenmp"]), drafts]


setup(
    ext_modules=libraries(),
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
