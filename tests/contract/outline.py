"""The contract as text: one line per field and RPC, so that a reviewer sees every change of the API as a diff.

`python tests/contract/outline.py` prints it; `make golden` stores it.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor

import kvplane.v1


def files() -> list[FileDescriptor]:
    """Descriptors of all files of `kvplane.v1`, by name."""
    names = sorted(each.name for each in pkgutil.iter_modules(kvplane.v1.__path__) if each.name.endswith("_pb2"))
    return [importlib.import_module(f"kvplane.v1.{name}").DESCRIPTOR for name in names]


def services() -> list[ServiceDescriptor]:
    """Descriptors of all services, in file order."""
    return [service for file in files() for service in file.services_by_name.values()]


def messages() -> list[Descriptor]:
    """Descriptors of all top-level messages, in file order."""
    return [message for file in files() for message in file.message_types_by_name.values()]


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            return f"map<{_type(key)}, {_type(value)}>"
        return str(field.message_type.full_name)
    if field.enum_type is not None:
        return str(field.enum_type.full_name)
    names = {
        number: name.removeprefix("TYPE_").lower()
        for name, number in vars(FieldDescriptor).items()
        if name.startswith("TYPE_")
    }
    return names[field.type]


def _label(field: FieldDescriptor) -> str:
    if field.containing_oneof is not None and not field.containing_oneof.name.startswith("_"):
        return f"oneof {field.containing_oneof.name}"
    if field.is_repeated:
        return "repeated"
    return "optional" if field.has_presence and field.message_type is None else "singular"


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"  {enum.full_name}.{value.name} = {value.number}"


def lines() -> Iterator[str]:
    """The outline, line by line."""
    for file in files():
        yield file.name
        for service in file.services_by_name.values():
            for method in service.methods:
                request = ("stream " if method.client_streaming else "") + method.input_type.full_name
                response = ("stream " if method.server_streaming else "") + method.output_type.full_name
                yield f"  {service.full_name}/{method.name}({request}) -> {response}"
        for message in file.message_types_by_name.values():
            yield f"  {message.full_name}"
            for field in message.fields:
                yield f"    {field.full_name} = {field.number} {_label(field)} {_type(field)}"
        for enum in file.enum_types_by_name.values():
            yield from _enum(enum)


if __name__ == "__main__":
    print("\n".join(lines()))
