"""torchext/_C.pyi says what torchext._C has: the same names, and arguments that both agree on."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchext
from torchext import _C

STUB = Path(torchext.__file__).with_name("_C.pyi")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def stub_names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Name -> its definitions (several for overloads and for a property with a setter)."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            names.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.setdefault(node.target.id, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).append(node)
    return names


def module_names(owner: Any) -> set[str]:
    """Public names, constructors and operators that the owner defines itself."""
    kept = {"__init__", "__eq__", "__hash__", "__len__", "__call__", "__enter__", "__exit__", "__getitem__", "__iter__"}
    ignored = {"__hash__"} if owner is not None and inspect.isclass(owner) else set()
    own = vars(owner)
    return {name for name in own if (not name.startswith("_") or name in kept) and name not in ignored}


def signatures(function: Any) -> list[list[str]]:
    """Argument names of a pybind11 function, one list an overload, from the signature lines of its docstring."""
    found = []
    for line in (function.__doc__ or "").splitlines():
        match = re.match(r"^(?:\d+\. )?\w+\((.*)\) -> ", line.strip())
        if match:
            # Commas inside brackets belong to types.
            flat = match.group(1)
            while re.search(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", flat):
                flat = re.sub(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", "", flat)
            parts = [part.strip() for part in flat.split(",") if part.strip()]
            found.append([re.split(r"[:=]", part)[0].strip() for part in parts])
    return found


def stub_arguments(node: Function) -> list[str]:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        names.append("*")
    names += [a.arg for a in arguments.kwonlyargs]
    return names + (["**" + arguments.kwarg.arg] if arguments.kwarg else [])


def unnamed(names: list[str]) -> list[str]:
    """pybind11 calls arguments without py::arg arg0, arg1, ...: the stub may name those as it likes."""
    return [re.sub(r"^arg\d+$", "?", name) for name in names if name != "/"]


def same(stub: list[str], real: list[str]) -> bool:
    real = unnamed(real)
    stub = [name for name in stub if name != "/"]
    return len(stub) == len(real) and all(r in ("?", s) for s, r in zip(stub, real, strict=True))


def owners() -> Iterator[tuple[str, Any, list[ast.stmt]]]:
    body = ast.parse(STUB.read_text()).body
    yield "torchext._C", _C, body
    for name, nodes in stub_names(body).items():
        if isinstance(nodes[0], ast.ClassDef):
            yield name, getattr(_C, name, None), nodes[0].body


@pytest.fixture(scope="module", autouse=True)
def _stub_is_there() -> None:
    assert STUB.is_file(), "torchext/_C.pyi is missing: torchext._C has no types"


def test_the_same_names() -> None:
    for name, owner, body in owners():
        assert owner is not None, f"{name} is in the stub but not in the module"
        written = {n for n in stub_names(body) if not n.startswith("_") or n == "__init__"}
        real = {n for n in module_names(owner) if not n.startswith("_") or n == "__init__"}
        if inspect.isclass(owner) and issubclass(owner, BaseException):
            real.discard("__init__")
        # Inherited, and said again in our stub because torch's own stub of the base leaves it out.
        real |= {n for n in written if inspect.isclass(owner) and any(n in vars(base) for base in owner.__mro__[1:])}
        assert written - {"__init__"} == real - {"__init__"}, f"{name}: {sorted(written ^ real)} differ"


def test_the_same_arguments() -> None:
    checked = 0
    for name, owner, body in owners():
        for member, nodes in stub_names(body).items():
            functions = [n for n in nodes if isinstance(n, Function)]
            real = getattr(owner, member, None)
            if not functions or isinstance(inspect.getattr_static(owner, member, None), property):
                continue
            overloads = signatures(real)
            if not overloads:
                continue
            assert len(overloads) == len(functions), f"{name}.{member}: overloads differ"
            for node, arguments in zip(functions, overloads, strict=True):
                assert same(stub_arguments(node), arguments), f"{name}.{member}: {stub_arguments(node)} != {arguments}"
                checked += 1
    assert checked > 0


def test_properties_are_properties() -> None:
    for name, owner, body in owners():
        if isinstance(owner, ModuleType):
            continue
        for member, nodes in stub_names(body).items():
            decorators = [ast.unparse(d) for n in nodes if isinstance(n, Function) for d in n.decorator_list]
            attribute = isinstance(nodes[0], ast.AnnAssign | ast.Assign) or "property" in decorators
            static = inspect.getattr_static(owner, member, None)
            assert isinstance(static, property) == attribute or not callable(static), f"{name}.{member}"
