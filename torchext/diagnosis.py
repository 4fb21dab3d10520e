"""``python -m torchext``: what is built, whether it fits this machine, and a self-test. Exits 0 if all of it works."""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
from collections.abc import Iterator

import torch

from torchext._build import build_info, check_torch, load_native
from torchext._version import __version__


def _print_summary() -> None:
    """Prints what is known; of a build that is not there, nothing."""
    try:
        info = build_info()
    except ImportError:
        _print_rows({"torchext": __version__, "python": platform.python_version(), "torch": torch.__version__})
        return
    cuda = "yes" if info["cuda"] else "no"
    architectures = f", for {info['arch_list']}" if info["arch_list"] else ""
    rows = {
        "torchext": __version__,
        "python": f"{platform.python_version()} (built with {info['python']})",
        "torch": f"{torch.__version__} (built for {info['torch']})",
        "CUDA kernels": f"{cuda} ({info['cuda_reason']}){architectures}",
        "visible GPUs": str(torch.cuda.device_count()),
        "compiler": str(info["compiler"]),
    }
    _print_rows(rows)


def _print_rows(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        print(f"{name:<13} {value}")


def main() -> int:
    """Prints the summary, checks it, and runs the self-test; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchext", description=__doc__)
    parser.add_argument("--no-self-test", action="store_true", help="print and check what is built; start no process")
    arguments = parser.parse_args()
    try:
        _print_summary()
        check_torch()
        for name in ("_C", "_kernels"):
            load_native(name)
            print(f"{name:<13} loads")
        if not arguments.no_self_test:
            print("self-test: two processes, backend prague", flush=True)
            from torchext import selftest

            selftest.run()
    except Exception as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    print("torchext works.")
    return 0


@contextlib.contextmanager
def report_import_error() -> Iterator[None]:
    """Under ``python -m torchext``, which imports the package first, an ImportError inside ends in what that says.

    Elsewhere it is raised.
    """
    try:
        yield
    except ImportError:
        if not _is_main():
            raise
        status = main()
        if status == 0:  # what it looks at is well
            raise
        sys.exit(status)


def _is_main() -> bool:
    """Whether ``python -m torchext`` is importing the package: the module's name is what precedes its arguments."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("torchext", "-mtorchext")
