"""What answers requests: one engine, or a pool of replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from cluster.codec import AnyRequest
from cluster.delivered import Delivered
from protos import control_pb2, generation_pb2


class Backend(Protocol):
    """The one face the gRPC services know. Errors are those of worker/errors.py and cluster/errors.py."""

    def generate(
        self, request: AnyRequest, *, timeout_s: float | None, delivered: Delivered | None = None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The pieces of one answer, numbered 0, 1, 2, ..., or on from `delivered`; closing the iterator ends the request.

        The request has an id and a seed. Chat is answered in the same pieces, its text being the message's content.
        """

    async def tokenize(
        self, request: generation_pb2.TokenizeRequest, *, timeout_s: float | None
    ) -> generation_pb2.TokenizeResponse:
        """Token ids of a text or of a rendered conversation."""

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest, *, timeout_s: float | None
    ) -> generation_pb2.DetokenizeResponse:
        """Text of token ids."""

    async def model_info(self, model: str) -> control_pb2.ModelInfo:
        """The model of that name, or with "" the one that is served. Raises UnknownModel or NoReplicaAvailable."""

    def server_info(self) -> control_pb2.ServerInfo:
        """Who answers."""

    def loads(self) -> Sequence[control_pb2.ReplicaLoad]:
        """Every known replica with its state and load."""

    def held(self) -> Sequence[control_pb2.HeldRequests]:
        """Requests that wait for a replica of their model, by model."""

    async def drain(self, replica: str, *, grace_s: float) -> None:
        """Take no new requests and wait for the live ones, at most `grace_s`; "" = this server itself."""

    def abort(self, request_id: str) -> bool:
        """End a live request with RequestAborted; False if there is none of that id."""
