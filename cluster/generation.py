"""The public service, over any backend."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from cluster import codec, status
from cluster.answers import AnswerFold, chat_response
from cluster.backend import Backend
from cluster.codec import AnyRequest
from cluster.config import MESSAGE_BYTES
from cluster.criticality import criticality_of, use_criticality
from cluster.delivered import Delivered
from cluster.errors import AnswerTooLarge, DuplicateRequest, PoisonedRequest, SlowReader, TooManyStreams
from cluster.handlers import Context
from cluster.security.tenancy import Tenancy
from cluster.tracing import trace_parent_of, use_trace_parent
from protos import generation_pb2, generation_pb2_grpc
from worker.errors import DeadlineExceeded, InvalidRequest

SERVICE = "graphpool.v1.GenerationService"
READER_TIMEOUT_S = 30.0
ANSWER_BYTES = MESSAGE_BYTES - 64 * 1024
"""Room is left for what a chat message adds to an answer."""

Pieces = AsyncGenerator[generation_pb2.GenerateResponse, None]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Admits and names requests; the backend answers them.

    Nothing, not even initial metadata, is sent before the first piece, so that until then an RPC may be tried again.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_streams: int,
        draw_seed: Callable[[], int] | None = None,
        tenancy: Tenancy | None = None,
        reader_timeout_s: float = READER_TIMEOUT_S,
    ) -> None:
        self._backend = backend
        self._max_streams = max_streams
        self._tenancy = tenancy
        self._reader_timeout_s = reader_timeout_s
        self._draw_seed = draw_seed or (lambda: secrets.randbits(63))
        self._live: set[str] = set()

    @property
    def num_live(self) -> int:
        """Requests being answered now."""
        return len(self._live)

    async def Generate(  # noqa: D102, N802  # the contract is in the .proto
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        return await self._whole(request, context)

    async def GenerateStream(  # type: ignore[override]  # noqa: D102, N802
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        await self._stream(request, context)

    async def Chat(  # noqa: D102, N802
        self, request: generation_pb2.ChatRequest, context: Context
    ) -> generation_pb2.ChatResponse:
        return chat_response(await self._whole(request, context))

    async def ChatStream(  # type: ignore[override]  # noqa: D102, N802
        self, request: generation_pb2.ChatRequest, context: Context
    ) -> None:
        await self._stream(request, context)

    async def Resume(  # type: ignore[override]  # noqa: D102, N802
        self, request: generation_pb2.ResumeRequest, context: Context
    ) -> None:
        await self._resume(request, context)

    async def ResumeChat(  # type: ignore[override]  # noqa: D102, N802
        self, request: generation_pb2.ResumeChatRequest, context: Context
    ) -> None:
        await self._resume(request, context)

    async def Tokenize(  # noqa: D102, N802
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        async with status.on_error(context):
            with self._slot():
                return await self._backend.tokenize(request, timeout_s=_time_left(context))

    async def Detokenize(  # noqa: D102, N802
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        async with status.on_error(context):
            with self._slot():
                return await self._backend.detokenize(request, timeout_s=_time_left(context))

    async def _resume(
        self, resume: generation_pb2.ResumeRequest | generation_pb2.ResumeChatRequest, context: Context
    ) -> None:
        """The client brings all there is to know of the answer; whose it is, its call says like that of any request."""
        async with status.on_error(context):
            delivered = Delivered.from_proto(resume.delivered, resume.next_sequence)
            if resume.next_sequence and not resume.request.sampling.HasField("seed"):
                raise InvalidRequest("seed", "is needed to go on as the answer began: its first message has it")
        await self._stream(resume.request, context, delivered)

    async def _stream(self, request: AnyRequest, context: Context, delivered: Delivered | None = None) -> None:
        """Write the pieces that follow what was delivered."""
        sent = _Sent(0 if delivered is None else delivered.next_sequence)
        is_chat = isinstance(request, generation_pb2.ChatRequest)
        async with self._answer(request, context, delivered, sent) as pieces:
            async for piece in pieces:
                if piece.sequence == 0:
                    piece.seed = request.sampling.seed
                await self._write(context, chat_response(piece) if is_chat else piece)
                sent.next_sequence = piece.sequence + 1

    async def _write(
        self, context: Context, message: generation_pb2.GenerateResponse | generation_pb2.ChatResponse
    ) -> None:
        """Wait until the reader has room for it, but not for ever: what is made for it meanwhile takes a row."""
        try:
            async with asyncio.timeout(self._reader_timeout_s):
                await context.write(message)
        except TimeoutError as error:
            raise SlowReader(round(1000 * self._reader_timeout_s), "milliseconds") from error

    async def _whole(self, request: AnyRequest, context: Context) -> generation_pb2.GenerateResponse:
        fold = AnswerFold()
        async with self._answer(request, context) as pieces:
            async for piece in pieces:
                fold.add(piece)
            answer = fold.result()
            answer.seed = request.sampling.seed
            if answer.ByteSize() > ANSWER_BYTES:
                raise AnswerTooLarge(answer.ByteSize(), ANSWER_BYTES)
        return answer

    @contextlib.asynccontextmanager
    async def _answer(
        self, request: AnyRequest, context: Context, delivered: Delivered | None = None, sent: _Sent | None = None
    ) -> AsyncIterator[Pieces]:
        async with status.on_error(context):
            self._admit(request, context)
            try:
                async with self._turn(request, context) as counted:
                    pieces = self._backend.generate(request, timeout_s=_time_left(context), delivered=delivered)
                    async with contextlib.aclosing(counted(pieces)) as counted_pieces:
                        yield counted_pieces
            except Exception as error:
                context.set_trailing_metadata(_trailers(request, error, sent))
                raise
            finally:
                self._live.discard(request.request_id)

    def _slot(self) -> contextlib.AbstractContextManager[None]:
        """One of the tenant's requests at the same time."""
        return contextlib.nullcontext() if self._tenancy is None else self._tenancy.slot()

    @contextlib.asynccontextmanager
    async def _turn(self, request: AnyRequest, context: Context) -> AsyncIterator[Callable[[Pieces], Pieces]]:
        """Wait for the turn of the request's tenant; what passes through the callable given is counted for it."""
        if self._tenancy is None or not self._tenancy.has_tenant:
            yield lambda pieces: pieces
            return
        async with self._tenancy.turn(request, timeout_s=_time_left(context)) as spending:
            yield spending.counted

    def _admit(self, request: AnyRequest, context: Context) -> None:
        """Check the request and make it repeatable: it gets its id and its seed here, once for all attempts."""
        codec.check_request_id(request.request_id)
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        context.set_trailing_metadata(((status.REQUEST_ID_KEY, request.request_id),))
        codec.check_request(request)
        criticality = criticality_of(context.invocation_metadata())
        if self._tenancy is not None:
            self._tenancy.check_criticality(criticality)
        use_criticality(criticality)
        use_trace_parent(trace_parent_of(context.invocation_metadata()))
        if not request.sampling.HasField("seed"):
            request.sampling.seed = self._draw_seed()
        if self._tenancy is not None:
            self._tenancy.prepare(request)
        if len(self._live) >= self._max_streams:
            raise TooManyStreams(self._max_streams)
        if request.request_id in self._live:
            raise DuplicateRequest(request.request_id)
        self._live.add(request.request_id)


@dataclass(slots=True)
class _Sent:
    """How far a stream is."""

    next_sequence: int


def _trailers(request: AnyRequest, error: Exception, sent: _Sent | None) -> tuple[tuple[str, str], ...]:
    """What a client can do about an answer that failed: go on with it elsewhere, or never ask for it again."""
    trailers = ((status.REQUEST_ID_KEY, request.request_id),)
    if isinstance(error, PoisonedRequest):
        return (*trailers, (status.POISON_KEY, "true"))
    if sent is not None and sent.next_sequence and status.code_of(error) is grpc.StatusCode.UNAVAILABLE:
        return (*trailers, (status.RESUME_INDEX_KEY, str(sent.next_sequence)))
    return trailers


def _time_left(context: Context) -> float | None:
    remaining: float | None = context.time_remaining()
    if remaining is not None and remaining <= 0:
        raise DeadlineExceeded
    return remaining
