"""Everything that can go wrong between a client and a worker, beside what the worker itself refuses.

    ClusterError
    ├── NoReplicaAvailable      no replica could take the request in time
    ├── ReplicaLost             the replica that was answering is gone
    │   ├── ReplicaUnresponsive its connection stands, but nothing came over it for too long
    │   └── ReplicaUnsound      it found its own memory changed
    ├── RemoteError             a replica ended the request with this status
    ├── AnswerInterrupted       too many replicas were lost under one answer, or none was left
    ├── PoisonedRequest         a request that ends the replica that computes it
    ├── BrokenStream            pieces of an answer were missing
    ├── CanaryFailed            a replica did not pass the generation that admits it
    ├── DuplicateRequest        the request id is live already
    ├── UnknownModel            another model is served here
    ├── UnknownReplica          no replica of that name is known
    ├── StaleIncarnation        a process announced itself after its successor did
    ├── TooManyStreams          the server answers as many requests as it may
    ├── Overloaded              too much is waiting, or what waits would take too long
    ├── SlowReader              an answer was not read as fast as it was made
    ├── AnswerTooLarge          the whole answer does not fit one message
    ├── MessageTooLarge         the request is over the limit of a message
    ├── MalformedMessage        the bytes are not a message of this method
    ├── NotReady                the replica has not loaded its model, or failed to
    ├── Unauthenticated         the caller did not say who it is, or nobody knows it
    ├── NotPermitted            the caller may not do this
    └── QuotaExceeded           the tenant has used what it may

Arguments go to `super().__init__` unchanged so that every error survives pickling across process borders. No message
holds text of a prompt or of an answer.
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of all errors that the cluster raises on purpose."""


class NoReplicaAvailable(ClusterError):
    """No replica was ready, for as long as the router was willing to wait."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(waited_s)
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"no replica is ready to take the request (waited {self.waited_s:.1f} s)"


class ReplicaLost(ClusterError):
    """The connection to a replica ended while it was answering; `delivered` tokens had reached the router."""

    def __init__(self, replica: str, delivered: int = 0) -> None:
        super().__init__(replica, delivered)
        self.replica = replica
        self.delivered = delivered

    def __str__(self) -> str:
        return f"replica {self.replica} was lost after {self.delivered} tokens of this answer"


class ReplicaUnresponsive(ReplicaLost):
    """Nothing, not even a load report, came from a connected replica for too long."""

    def __str__(self) -> str:
        return f"replica {self.replica} stopped responding after {self.delivered} tokens of this answer"


class ReplicaUnsound(ReplicaLost):
    """Weights that nobody writes have changed in the replica's memory."""

    def __str__(self) -> str:
        return f"replica {self.replica} found its memory changed after {self.delivered} tokens of this answer"


class RemoteError(ClusterError):
    """A status a replica gave: `code` is a google.rpc.Code, `field` names the field of an invalid request."""

    def __init__(self, code: int, message: str, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(code, message, field, retry_after_ms)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return self.message


class AnswerInterrupted(ClusterError):
    """An answer broke off after `num_tokens`: it was taken up again after losses, but not after the last one."""

    def __init__(self, num_losses: int, num_tokens: int) -> None:
        super().__init__(num_losses, num_tokens)
        self.num_losses = num_losses
        self.num_tokens = num_tokens

    def __str__(self) -> str:
        replicas = "replica was" if self.num_losses == 1 else "replicas were"
        return f"the answer broke off after {self.num_tokens} tokens: {self.num_losses} {replicas} lost, none took over"


class PoisonedRequest(ClusterError):
    """The request, alone in its step, ended the replica that computed it, or it is like one that did."""

    def __str__(self) -> str:
        return "this request ends the replica that computes it: it is not tried again"


class BrokenStream(ClusterError):
    """Messages of one answer did not arrive in an unbroken sequence."""

    def __init__(self, replica: str, expected: int, got: int) -> None:
        super().__init__(replica, expected, got)
        self.replica = replica
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"replica {self.replica} sent message {self.got} of an answer where {self.expected} was due"


class CanaryFailed(ClusterError):
    """The short generation that admits a replica to the pool went wrong."""

    def __init__(self, replica: str, problem: str) -> None:
        super().__init__(replica, problem)
        self.replica = replica
        self.problem = problem

    def __str__(self) -> str:
        return f"replica {self.replica} failed its canary: {self.problem}"


class DuplicateRequest(ClusterError):
    """A request with this id is being answered already."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request_id: {self.request_id!r} is live already"


class UnknownModel(ClusterError):
    """The model asked for is not the one that is served."""

    def __init__(self, served: str) -> None:
        super().__init__(served)
        self.served = served

    def __str__(self) -> str:
        return f"model: not served here; {self.served} is"


class UnknownReplica(ClusterError):
    """No replica of that name is known."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica

    def __str__(self) -> str:
        return f"replica: no replica is called {self.replica!r}"


class StaleIncarnation(ClusterError):
    """A newer process of the same name is known already."""

    def __init__(self, replica: str, incarnation: str) -> None:
        super().__init__(replica, incarnation)
        self.replica = replica
        self.incarnation = incarnation

    def __str__(self) -> str:
        return f"incarnation: {self.incarnation} of replica {self.replica} has been succeeded"


class TooManyStreams(ClusterError):
    """The server already answers as many requests as it may."""

    def __init__(self, limit: int, retry_after_s: float = 0.5) -> None:
        super().__init__(limit, retry_after_s)
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.limit} requests are being answered, which is the limit"


class Overloaded(ClusterError):
    """Refused at once, since there is no room in any queue or no time to wait in it; `reason` says which."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        if self.reason == "queue_full":
            return "overloaded: the queues of all replicas are full"
        return "overloaded: the answer would not come in time"


class SlowReader(ClusterError):
    """More than `limit` of an answer, in `unit`, had gathered unread."""

    def __init__(self, limit: int, unit: str) -> None:
        super().__init__(limit, unit)
        self.limit = limit
        self.unit = unit

    def __str__(self) -> str:
        return f"the reader fell more than {self.limit} {self.unit} behind"


class AnswerTooLarge(ClusterError):
    """The whole answer does not fit one message."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"the answer takes {self.size} bytes and a message holds {self.limit}: stream it instead"


class MessageTooLarge(ClusterError):
    """The request takes more bytes than a message may."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"request: takes {self.size} bytes and a message holds {self.limit}"


class MalformedMessage(ClusterError):
    """The bytes received are not a message of the type this method takes."""

    def __init__(self, message_type: str) -> None:
        super().__init__(message_type)
        self.message_type = message_type

    def __str__(self) -> str:
        return f"request: the bytes are not a {self.message_type}"


class NotReady(ClusterError):
    """The replica serves nothing in its present state."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state

    def __str__(self) -> str:
        return f"the replica is {self.state}"


class Unauthenticated(ClusterError):
    """Nobody knows who calls; `problem` says what is missing, never what was shown."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class NotPermitted(ClusterError):
    """The caller is known, and this is not for it."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class QuotaExceeded(ClusterError):
    """The tenant has used what it may; `limit` says what that is."""

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(limit, retry_after_s)
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"the tenant's quota of {self.limit} is used up"
