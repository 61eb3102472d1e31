"""The wire contract as strangers see it: clients that have nothing of ours but the schema."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.config import ReplicaConfig
from protos import control_pb2, generation_pb2, replica_pb2
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import script_pool, start_replica

PROMPT = (10, 20, 30)
PACKAGE = "graphpool.v1"


def pool_of_committed_descriptors() -> DescriptorPool:
    """A fresh pool: nothing of the generated classes is in it."""
    pool = descriptor_pool.DescriptorPool()
    for module in (control_pb2, generation_pb2, replica_pb2):
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    return pool


def messages(pool: DescriptorPool, service: str, method: str) -> tuple[str, Any, Any]:
    """Path, request class and response class of a method."""
    found = pool.FindServiceByName(f"{PACKAGE}.{service}").FindMethodByName(method)
    assert found is not None
    classes = [message_factory.GetMessageClass(kind) for kind in (found.input_type, found.output_type)]
    return f"/{PACKAGE}.{service}/{method}", classes[0], classes[1]


def raw_call(channel: Any, path: str) -> Any:
    """A method of bytes to bytes."""
    return channel.unary_unary(path)


def raw_stream(channel: Any, path: str) -> Any:
    """A stream of bytes both ways."""
    return channel.stream_stream(path)()


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


def call_unary(address: str, pool: DescriptorPool, service: str, method: str, **fields: Any) -> Any:
    path, request, response = messages(pool, service, method)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            path, request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )
        return call(request(**fields), timeout=10)


def call_stream(address: str, pool: DescriptorPool, method: str, **fields: Any) -> list[Any]:
    path, request, response = messages(pool, "GenerationService", method)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream(
            path, request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )
        return list(call(request(**fields), timeout=10))


def reflected(address: str) -> tuple[DescriptorPool, set[str]]:
    """The schema as the server tells it, and the services it names."""
    channel = grpc.insecure_channel(address)
    database = ProtoReflectionDescriptorDatabase(channel)
    return DescriptorPool(database), set(database.get_services())


async def test_a_client_made_from_the_schema_alone_generates() -> None:
    schema = pool_of_committed_descriptors()
    sampling = {"max_tokens": 30, "seed": 5}
    async with script_pool() as pool:
        address = pool.router.address
        stream = await asyncio.to_thread(
            call_stream, address, schema, "GenerateStream", token_ids={"ids": PROMPT}, sampling=sampling
        )
        whole = await asyncio.to_thread(
            call_unary, address, schema, "GenerationService", "Generate", token_ids={"ids": PROMPT}, sampling=sampling
        )
    assert [message.sequence for message in stream] == list(range(len(stream)))
    ids = [token for message in stream for token in message.choices[0].token_ids]
    assert tuple(ids) == tuple(whole.choices[0].token_ids) == script(PROMPT, 5, 0, 30)


@pytest.mark.parametrize("is_direct", [False, True])
async def test_a_call_can_be_built_from_what_the_server_reflects(is_direct: bool) -> None:
    def call(address: str) -> tuple[set[str], Any]:
        schema, services = reflected(address)
        messages_ = [{"role": "user", "content": "hi"}]
        sampling = {"max_tokens": 4}
        return services, call_unary(address, schema, "GenerationService", "Chat", messages=messages_, sampling=sampling)

    async with script_pool() as pool:
        address = pool.replicas[0].server.address if is_direct else pool.router.address
        services, answer = await asyncio.to_thread(call, address)
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].token_ids) == 4
    inner = "ReplicaService" if is_direct else "MembershipService"
    expected = {f"{PACKAGE}.{name}" for name in ("GenerationService", "ControlService", inner)}
    assert expected | {"grpc.health.v1.Health"} <= services


async def test_reflection_can_be_turned_off() -> None:
    def ask(address: str) -> None:
        reflected(address)

    one = await start_replica(ReplicaConfig(reflection=False))
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(ask, one.server.address)
    await one.stop()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_fields_from_a_newer_schema_are_ignored() -> None:
    request = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(max_tokens=2))
    unknown = b"\xfa\x3f\x03abc"  # field 1023, three bytes
    async with script_pool() as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        call = raw_call(channel, f"/{PACKAGE}.GenerationService/Generate")
        raw = await call(request.SerializeToString() + unknown)
    assert len(generation_pb2.GenerateResponse.FromString(raw).choices[0].token_ids) == 2


async def test_bytes_that_are_no_frame_end_the_attach_stream_as_the_routers_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = await start_replica()
    async with grpc.aio.insecure_channel(replica.server.address) as channel:
        call = raw_stream(channel, f"/{PACKAGE}.ReplicaService/Attach")
        await call.write(b"\xff\xff\x07junk")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
    await replica.server.stop()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "unplanned" not in caplog.text


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async with script_pool() as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(channel, f"/{PACKAGE}.GenerationService/Resurrect")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("extra", [0, 1])
async def test_a_message_over_four_mebibytes_is_refused_and_one_of_just_that_breaks_no_other_answer(extra: int) -> None:
    limit = 4 * 1024 * 1024
    request = generation_pb2.GenerateRequest()
    request.text = "a" * (limit - 5 + extra)
    assert request.ByteSize() == limit + extra
    async with (
        script_pool(knobs=ScriptKnobs(step_s=0.04)) as pool,
        grpc.aio.insecure_channel(pool.router.address, options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        other = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=100, seed=2))  # four seconds
        call = raw_call(channel, f"/{PACKAGE}.GenerationService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(request.SerializeToString())
        assert not other.done()
        assert (await other).token_ids == script(PROMPT, 2, 0, 100)
    code = caught.value.code()
    assert code is (grpc.StatusCode.RESOURCE_EXHAUSTED if extra else grpc.StatusCode.INVALID_ARGUMENT)
