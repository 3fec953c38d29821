"""The .proto files: everything is documented, and zero never means something by accident."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from google.protobuf import descriptor_pb2
from millrace_testing.paths import ROOT

PROTO = ROOT / "proto"
# The path of a descriptor in a FileDescriptorProto is a list of field numbers and indices, see descriptor.proto.
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD, NESTED_MESSAGE, NESTED_ENUM, ENUM_VALUE, METHOD = 2, 3, 4, 2, 2
Elements = Iterator[tuple[tuple[int, ...], str]]  # path and name


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("proto") / "set.bin"
    sources = sorted(PROTO.glob("millrace/v1/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--descriptor_set_out={out}"]
    subprocess.run([*command, "--include_source_info", *map(str, sources)], check=True)
    found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    assert len(found) == len(sources)
    return list(found)


def enum_paths(enum: descriptor_pb2.EnumDescriptorProto, path: tuple[int, ...]) -> Elements:
    yield path, enum.name
    for i, value in enumerate(enum.value):
        yield (*path, ENUM_VALUE, i), f"{enum.name}.{value.name}"


def message_paths(message: descriptor_pb2.DescriptorProto, path: tuple[int, ...]) -> Elements:
    yield path, message.name
    for i, field in enumerate(message.field):
        yield (*path, FIELD, i), f"{message.name}.{field.name}"
    for i, enum in enumerate(message.enum_type):
        yield from enum_paths(enum, (*path, NESTED_ENUM, i))
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from message_paths(nested, (*path, NESTED_MESSAGE, i))


def element_paths(file: descriptor_pb2.FileDescriptorProto) -> Elements:
    for i, message in enumerate(file.message_type):
        yield from message_paths(message, (MESSAGE, i))
    for i, enum in enumerate(file.enum_type):
        yield from enum_paths(enum, (ENUM, i))
    for i, service in enumerate(file.service):
        yield (SERVICE, i), service.name
        for j, method in enumerate(service.method):
            yield (SERVICE, i, METHOD, j), f"{service.name}.{method.name}"


def test_every_element_has_a_comment(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    missing = []
    for file in files:
        commented = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments.strip()}
        missing += [f"{file.name}: {name}" for path, name in element_paths(file) if path not in commented]
    assert not missing, "\n".join(missing)


def test_zero_of_every_enum_is_unspecified(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    zeros = {
        enum.name: enum.value[0].name
        for file in files
        for part in (file, *file.message_type)
        for enum in part.enum_type
    }
    assert zeros, "no enum was found"
    assert {name: zero for name, zero in zeros.items() if not zero.endswith("_UNSPECIFIED")} == {}


def test_package_is_the_folder(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    assert {file.package for file in files} == {"millrace.v1"}


def test_every_rpc_has_its_own_request(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """So that one rpc can grow a field without touching another."""
    requests = {}
    for file in files:
        for service in file.service:
            for method in service.method:
                requests.setdefault(method.input_type, set()).add(method.name)
    assert {request: names for request, names in requests.items() if len(names) > 1} == {}
