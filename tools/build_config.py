"""build_config says what setup.py builds: the extension modules, the CUDA decision, and the record of both.

The record (torchext/_build_info.json) is what `python -m torchext` prints and what torchext._build compares with the
running torch before it loads native code.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from setuptools import Extension
from torch.utils import cpp_extension

from tools.batches import batch_source, batches

# Ampere and Hopper machine code, PTX for what comes later: few enough to compile in seconds. An explicit list is a
# must on machines without a GPU, where torch would otherwise have nothing to look at.
DEFAULT_ARCH_LIST = "8.0;9.0+PTX"

CUDA_CHOICES = ("auto", "1", "0")

# C++ sources to an object file, unless TORCHEXT_BATCH says otherwise: a quarter of the time that each on its own takes.
DEFAULT_BATCH = 8

# The address sanitizer brings that for undefined behaviour, as in CMake; torch is built without the type information
# that its vptr check wants.
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
}


class BuildError(SystemExit):
    """Stops the build with one paragraph instead of a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\ntorchext: {message}\n")


@dataclass(frozen=True)
class CudaDecision:
    """Whether CUDA sources are compiled, and the sentence that says why."""

    enabled: bool
    reason: str


def _toolkit_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise BuildError(f"'{nvcc} --version' names no release:\n{text}")
    return match.group(1)


def _find_buildable_cuda() -> CudaDecision:
    """CUDA if it can be built here. Looks at torch and at the toolkit, never for a visible GPU."""
    wanted = torch.version.cuda
    if wanted is None:
        return CudaDecision(False, f"torch {torch.__version__} is a CPU build")
    major = wanted.split(".")[0]
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home, "bin", "nvcc") if home else None
    if nvcc is None or not nvcc.is_file():
        where = f"no nvcc in CUDA_HOME={home}" if home else "no CUDA toolkit found (no CUDA_HOME, no nvcc on PATH)"
        return CudaDecision(False, f"{where}; torch needs toolkit {major}.x")
    toolkit = _toolkit_version(str(nvcc))
    if toolkit.split(".")[0] != major:
        return CudaDecision(False, f"the toolkit is {toolkit}, torch was built with CUDA {wanted}: the majors differ")
    return CudaDecision(True, f"toolkit {toolkit}, torch built with CUDA {wanted}")


def decide_cuda(choice: str | None = None) -> CudaDecision:
    """Applies TORCHEXT_CUDA: auto (build it where possible), 1 (build it or stop), 0 (leave it out)."""
    choice = os.environ.get("TORCHEXT_CUDA", "auto") if choice is None else choice
    if choice not in CUDA_CHOICES:
        raise BuildError(f"TORCHEXT_CUDA={choice!r} is not one of {', '.join(CUDA_CHOICES)}.")
    if choice == "0":
        return CudaDecision(False, "TORCHEXT_CUDA=0")
    found = _find_buildable_cuda()
    if choice == "1" and not found.enabled:
        major = (torch.version.cuda or "13").split(".")[0]
        raise BuildError(
            f"TORCHEXT_CUDA=1, but CUDA cannot be built here: {found.reason}.\n"
            f"Install a CUDA build of torch and the CUDA toolkit {major}.x (with nvcc), point CUDA_HOME at it, "
            f"and build again; or set TORCHEXT_CUDA=0 to build for CPU only."
        )
    return found


def torch_requirement() -> str:
    """The torch a built package needs: the one it was compiled against (the C++ interface is not stable)."""
    return f"torch=={torch.__version__.split('+')[0]}"


def _relative(root: Path, *patterns: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern))


def extensions(root: Path) -> list[Extension]:
    """torchext._C from csrc/, torchext._kernels from kernels/."""
    backends = _relative(root, *(f"csrc/{layer}/**/*.cpp" for layer in ("core", "c10d", "ddp", "kfac", "python")))
    if not any(source.startswith("csrc/python/") for source in backends):
        raise BuildError("csrc/python holds no .cpp file, so torchext._C has no bindings to build from.")
    drop_launchers()
    batch_size()  # a bad value stops here, as a bad TORCHEXT_CUDA does
    include_dirs = [str(root), str(root / "csrc")]
    # The last two keep the folders of this machine out of error messages, and so out of the binary.
    cxx = [
        *("-O3", "-std=c++20", "-fvisibility=hidden", "-g0", "-Wall", "-Wno-subobject-linkage"),
        f"-ffile-prefix-map={root}/=",
        f"-ffile-prefix-map={Path(torch.__file__).parent}/=torch/",
    ]
    sanitizer, link = os.environ.get("TORCHEXT_SANITIZE", ""), []
    if sanitizer:
        if sanitizer not in SANITIZERS:
            raise BuildError(f"TORCHEXT_SANITIZE={sanitizer!r}: allowed are {', '.join(map(repr, SANITIZERS))}.")
        cxx = [flag for flag in cxx if flag not in ("-O3", "-g0")]
        link = SANITIZERS[sanitizer]
        cxx += ["-O1", "-g", "-fno-omit-frame-pointer", *link]
    native = cpp_extension.CppExtension(
        "torchext._C",
        backends,
        include_dirs=list(include_dirs),
        extra_compile_args={"cxx": [*cxx, f"-idirafter{root / 'csrc/c10d/stubs'}"]},
        extra_link_args=link,
    )
    return [native, _kernels_extension(root, include_dirs, cxx, link)]


def _kernels_extension(root: Path, include_dirs: list[str], cxx: list[str], link: list[str]) -> Extension:
    cuda = decide_cuda()
    # -fopenmp makes at::parallel_for parallel. It is not passed to the linker: the calls bind to the OpenMP runtime
    # that torch itself has loaded, so that there is one thread pool, under torch.set_num_threads.
    settings = {
        "include_dirs": list(include_dirs),
        "extra_compile_args": {"cxx": [*cxx, "-fopenmp"], "nvcc": ["-O3", "-std=c++20"]},
        "extra_link_args": link,
    }
    # The storage of embeddings is an algorithm of the core that only kernels use.
    sources = _relative(root, "kernels/*.cpp", "kernels/cpu/*.cpp", "csrc/core/embedding/*.cpp")
    if not cuda.enabled:
        sources += _relative(root, "kernels/cuda/stubs/*.cpp")
        return cpp_extension.CppExtension("torchext._kernels", sources, **settings)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)
    sources += _relative(root, "kernels/cuda/*.cpp", "kernels/cuda/*.cu")
    return cpp_extension.CUDAExtension("torchext._kernels", sources, **settings)


def _compiler() -> str:
    """The C++ compiler without a launcher in front of it (CXX="ccache g++" is g++)."""
    return shlex.split(os.environ.get("CXX", "c++"))[-1]


def drop_launchers() -> None:
    """Takes launchers (ccache) out of CC and CXX where the build tools cannot read them.

    setuptools takes every word of CC after the first for a flag, and torch hands CC to nvcc as a file name; newer
    versions of torch put ccache in front of CXX themselves and then quote all of it as one name.
    """
    for variable in ("CC", "CXX") if hasattr(cpp_extension, "_wrap_compiler") else ("CC",):
        words = shlex.split(os.environ.get(variable, ""))
        if len(words) > 1:
            os.environ[variable] = words[-1]


def _compiler_version() -> str:
    path = shutil.which(_compiler())
    if path is None:
        raise BuildError(f"the C++ compiler {_compiler()!r} is not on PATH. On Debian: apt-get install g++")
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def batch_size() -> int:
    """TORCHEXT_BATCH: how many C++ sources make an object file, 1 for each on its own."""
    text = os.environ.get("TORCHEXT_BATCH", str(DEFAULT_BATCH))
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"TORCHEXT_BATCH={text!r}: allowed are whole numbers from 1.")
    return int(text)


def batch_sources(sources: list[str], size: int, folder: Path) -> list[str]:
    """Writes the sources that include those of a batch into ``folder``; what is not C++ stays as it is."""
    result = [source for source in sources if not source.endswith(".cpp")]
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[Path, int] = {}  # of the batches of a folder
    for batch in batches((Path(s) for s in sources if s.endswith(".cpp")), size):
        if len(batch) == 1:
            result.append(str(batch[0]))
            continue
        home = batch[0].parent
        numbers[home] = numbers.get(home, -1) + 1
        path, text = folder / f"{'_'.join(home.parts)}_{numbers[home]}.cpp", batch_source(batch)
        if not path.is_file() or path.read_text() != text:  # ninja goes by the time of the last change
            path.write_text(text)
        result.append(str(path))
    return result


def build_info() -> dict[str, str | bool | None]:
    """What this build is. No dates and no paths: the same inputs give the same file."""
    cuda = decide_cuda()
    return {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cuda": cuda.enabled,
        "cuda_reason": cuda.reason,
        "arch_list": os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST) if cuda.enabled else "",
        "compiler": _compiler_version(),
    }


class BuildWithSummary(cpp_extension.BuildExtension):
    """BuildExtension that prints what was built and keeps it in the package."""

    def _check_abi(self) -> tuple[str, object]:
        # torch looks at the first word of the compiler's command line; a launcher there is no compiler to judge.
        compiler = _compiler()
        return compiler, cpp_extension.get_compiler_abi_compatibility_and_version(compiler)[1]

    def build_extensions(self) -> None:
        """Builds, then records and prints what was built."""
        info = build_info()
        super().build_extensions()
        self._record(info, Path(self.build_lib, "torchext"))
        width = max(map(len, info))
        lines = [f"  {key:<{width}}  {value}" for key, value in info.items()]
        print("torchext was built:", *lines, sep="\n", file=sys.stderr)

    def build_extension(self, ext: Extension) -> None:
        """Builds one module from batches of its sources."""
        own, size = ext.sources, batch_size()
        if size > 1:
            # A batch is no older than the module when a source that it includes has changed.
            ext.depends = [*ext.depends, *own]
            ext.sources = batch_sources(own, size, Path(self.build_temp, "batches", ext.name))
        try:
            super().build_extension(ext)
        finally:
            ext.sources = own

    def copy_extensions_to_source(self) -> None:
        """For editable installs, which run from the source folder: the record goes where the modules go."""
        super().copy_extensions_to_source()
        self._record(build_info(), Path(self.get_finalized_command("build_py").get_package_dir("torchext")))

    @staticmethod
    def _record(info: dict[str, str | bool | None], package: Path) -> None:
        package.joinpath("_build_info.json").write_text(json.dumps(info, indent=2) + "\n")
