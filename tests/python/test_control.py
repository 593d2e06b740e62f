"""Owner and worker over gRPC with Google's own Python client, knowing nothing but the sockets: what grpcurl would do."""

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


# Python's gRPC names the escaped socket path as the HTTP/2 authority, which is no valid one ("%2F"), and the servers' HTTP/2
# library refuses it. grpcurl and Go send "localhost", as this does.
OPTIONS = [("grpc.default_authority", "localhost")]


@pytest.fixture()
def owner(served):
    with grpc.insecure_channel(f"unix:{served.dir}/owner.sock", OPTIONS) as channel:
        yield channel


@pytest.fixture()
def worker(served):
    with grpc.insecure_channel(f"unix:{served.dir}/worker.sock", OPTIONS) as channel:
        yield channel


def services(channel):
    return set(ProtoReflectionDescriptorDatabase(channel).get_services())


def call(channel, service, method, stream=False):
    """Calls a method with an empty request, with types learnt by reflection."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    descriptor = pool.FindServiceByName(service).FindMethodByName(method)
    request, reply = GetMessageClass(descriptor.input_type), GetMessageClass(descriptor.output_type)
    kind = channel.unary_stream if stream else channel.unary_unary
    stub = kind(f"/{service}/{method}", request_serializer=request.SerializeToString, response_deserializer=reply.FromString)
    return stub(request(), timeout=10)


def test_the_owner_lists_its_services(owner):
    found = services(owner)
    assert {"ds4.v1.Owner", "grpc.health.v1.Health"} <= found
    assert any(name.startswith("grpc.reflection.v1") for name in found)


def test_reflection_answers_in_its_older_and_its_newer_version(owner):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for version in ("v1alpha", "v1"):
        stub = owner.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        replies = list(stub(iter([request]), timeout=10))
        names = {s.name for s in replies[0].list_services_response.service}
        assert "ds4.v1.Owner" in names, version
    assert reflection_pb2_grpc.ServerReflectionStub(owner)


def test_owner_status_and_list(owner, served):
    status = call(owner, "ds4.v1.Owner", "Status")
    assert status.backend == "memfd"
    assert status.weight_bytes > 90_000_000
    assert status.rss_bytes < 20 * 2**20
    models = call(owner, "ds4.v1.Owner", "List").models
    assert [(m.name, m.state) for m in models] == [(served.model, 2)]
    assert models[0].family == "llama" and len(models[0].blake3) == 64


def test_leases_name_the_worker(owner, worker):
    lease = call(owner, "ds4.v1.Owner", "Leases").leases[0]
    assert lease.pid == call(worker, "ds4.v1.Worker", "Status").pid


def test_watch_begins_with_the_present(owner, served):
    events = call(owner, "ds4.v1.Owner", "Watch", stream=True)
    assert next(events).model.name == served.model
    events.cancel()


def test_health(owner, worker):
    for channel, service in ((owner, "ds4.v1.Owner"), (worker, "ds4.v1.Worker")):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, (service, name)


def test_an_unknown_model_is_a_typed_error(owner):
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(owner))
    method = pool.FindServiceByName("ds4.v1.Owner").FindMethodByName("Unload")
    request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    stub = owner.unary_unary(
        "/ds4.v1.Owner/Unload", request_serializer=request.SerializeToString, response_deserializer=reply.FromString
    )
    with pytest.raises(grpc.RpcError) as error:
        stub(request(model="no-such-model"), timeout=10)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert "no-such-model" in error.value.details()


def test_the_worker_describes_itself(worker, served):
    assert {"ds4.v1.Worker", "grpc.health.v1.Health"} <= services(worker)
    status = call(worker, "ds4.v1.Worker", "Status")
    assert (status.state, status.model, "http://" + status.http) == ("ready", served.model, served.url)
