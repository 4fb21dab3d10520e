"""Builds the two native modules: torchext._C (the backends) and torchext._kernels (the operators).

Everything that is only data stands in pyproject.toml; how CUDA is chosen and what is recorded stands in
tools/build_config.py. Environment: TORCHEXT_CUDA=auto|1|0, TORCH_CUDA_ARCH_LIST, TORCHEXT_BATCH, MAX_JOBS,
CXX.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 builds do not put the project's folder on the path

from tools.build_config import BuildWithSummary, extensions, torch_requirement  # noqa: E402

setup(
    ext_modules=extensions(ROOT),
    cmdclass={"build_ext": BuildWithSummary},
    install_requires=[torch_requirement()],
)
