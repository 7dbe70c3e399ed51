"""What the code implements of the contract, found by looking at the code and not at the registry."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from google.protobuf.descriptor import MethodDescriptor

from contract import outline

PORTIONS = ("kvplane.cache", "kvplane.compute", "kvplane.client")


def rpcs() -> dict[str, MethodDescriptor]:
    """All RPCs of the contract by `package.Service/Method`."""
    return {
        f"{service.full_name}/{method.name}": method for service in outline.services() for method in service.methods
    }


def modules() -> Iterator[ModuleType]:
    """All modules of the services and the client."""
    for portion in PORTIONS:
        package = importlib.import_module(portion)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{portion}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def snake_case(name: str) -> str:
    """`OpenSession` → `open_session`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def servicers_of(service: str) -> list[type]:
    """Classes of ours that derive from the generated servicer of `kvplane.v1.Service`."""
    name = f"{service.rpartition('.')[2]}Servicer"
    found = {
        member
        for module in modules()
        for member in vars(module).values()
        if inspect.isclass(member)
        and member.__module__.startswith(PORTIONS)
        and any(base.__name__ == name for base in member.__mro__[1:])
    }
    return sorted(found, key=lambda member: member.__qualname__)


def served_by(rpc: str) -> list[str]:
    """`module:Class.method` of every servicer method of ours for an RPC."""
    service, _, method = rpc.partition("/")
    return [
        f"{servicer.__module__}:{servicer.__qualname__}.{method}"
        for servicer in servicers_of(service)
        if any(method in vars(base) for base in servicer.__mro__ if base.__module__.startswith(PORTIONS))
    ]


def called_by(rpc: str) -> list[str]:
    """`module:qualname` of every function that calls an RPC on a stub: of the client, or, for the registry that compute
    services dial into, of the compute service."""
    service, _, method = rpc.partition("/")
    caller = "kvplane.compute" if service.endswith("PoolRegistryService") else "kvplane.client"
    return [where for module in modules() if module.__name__.startswith(caller)
            for where in _calls(module, method)]  # fmt: skip


def _calls(module: ModuleType, method: str) -> Iterator[str]:
    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, (*path, child.name))
                continue
            # A stub's method is an attribute of something called a stub; message classes of the same name are not.
            stub = isinstance(child, ast.Attribute) and child.attr == method and "stub" in ast.unparse(child.value)
            if stub and path:
                yield f"{module.__name__}:{'.'.join(path)}"
            yield from walk(child, path)

    source = Path(str(module.__file__)).read_text()
    yield from dict.fromkeys(walk(ast.parse(source), ()))


def twins_of(rpc: str) -> list[str]:
    """`module:Class.method` of every class whose docstring calls itself an in-process twin and that has the call."""
    method = snake_case(rpc.partition("/")[2])
    return [
        f"{member.__module__}:{member.__qualname__}.{method}"
        for module in modules()
        for member in vars(module).values()
        if inspect.isclass(member)
        and member.__module__ == module.__name__
        and "in-process twin" in (member.__doc__ or "").lower()
        and method in vars(member)
    ]


def resolve(where: str) -> Callable[..., object]:
    """The function that `module:Class.method` names."""
    module, _, path = where.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert callable(found)
    return found


def streams_answers(function: Callable[..., object]) -> bool:
    """Whether a servicer method answers with a stream: it yields, or it writes to its context."""
    yields = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
    return yields or "context.write" in inspect.getsource(function)
