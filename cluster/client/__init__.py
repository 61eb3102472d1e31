"""Calling a pool, or one replica: `GraphpoolClient` blocks, `AsyncGraphpoolClient` is for asyncio."""

from cluster.client.aio import AsyncAnswerStream, AsyncGraphpoolClient
from cluster.client.answers import Answer, Choice, PoolStatus, TokenLogprob
from cluster.client.errors import (
    AlreadyExists,
    CallError,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from cluster.client.requests import AnswerOptions, Message, Prompt, SamplingOptions
from cluster.client.sync import AnswerStream, GraphpoolClient

__all__ = [
    "AlreadyExists",
    "Answer",
    "AnswerOptions",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncGraphpoolClient",
    "CallError",
    "Cancelled",
    "Choice",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "GraphpoolClient",
    "InternalError",
    "InvalidArgument",
    "Message",
    "NotFound",
    "PermissionDenied",
    "PoolStatus",
    "Prompt",
    "ResourceExhausted",
    "SamplingOptions",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
]
