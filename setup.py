"""Builds torchext._C (backends, pybind11)."""
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(p) for d in ("core", "c10d", "ddp", "python") for p in Path("csrc", d).glob("*.cpp"))
setup(
    name="torchext",
    version="0.1.0",
    packages=["torchext"],
    ext_modules=[CppExtension("torchext._C", SOURCES, include_dirs=[str(Path("csrc").resolve())],
                              extra_compile_args=["-O3", "-std=c++20", "-fvisibility=hidden", "-g0"])],
    cmdclass={"build_ext": BuildExtension},
)
