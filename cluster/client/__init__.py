"""Calling a pool, or one replica: `GraphpoolClient` blocks, `AsyncGraphpoolClient` is for asyncio.

A call that a server ended raises a CallError; a value that no message can hold, InvalidRequest before anything is sent.
"""

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
from cluster.config import ClientConfig
from cluster.security.config import ClientSecurity
from worker.errors import InvalidRequest

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
    "ClientConfig",
    "ClientSecurity",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "GraphpoolClient",
    "InternalError",
    "InvalidArgument",
    "InvalidRequest",
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
