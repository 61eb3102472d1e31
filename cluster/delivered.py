"""What has reached the client of an answer: enough to go on after it somewhere else."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from protos import generation_pb2
from worker.errors import InvalidRequest
from worker.sampling import MAX_CHOICES


class Delivered:
    """The token ids of every choice, which choices have ended, and the number of the next message."""

    __slots__ = ("_ids", "finished", "is_complete", "next_sequence")

    def __init__(self) -> None:
        self._ids: dict[int, array[int]] = {}
        self.finished: set[int] = set()
        """Choices that nothing more is wanted of."""
        self.next_sequence = 0
        self.is_complete = False
        """Whether the last message is among them."""

    @classmethod
    def from_proto(cls, choices: Iterable[generation_pb2.DeliveredChoice], next_sequence: int) -> Delivered:
        """As another process tells it. Raises InvalidRequest."""
        delivered = cls()
        delivered.next_sequence = next_sequence
        for choice in choices:
            if choice.index >= MAX_CHOICES:
                raise InvalidRequest("delivered", f"choice {choice.index}; there are at most {MAX_CHOICES}")
            if choice.index in delivered._ids:
                raise InvalidRequest("delivered", f"choice {choice.index} comes twice")
            delivered._ids[choice.index] = array("I", choice.token_ids)
            if choice.is_finished:
                delivered.finished.add(choice.index)
        if (delivered.num_tokens or delivered.finished) and not next_sequence:
            raise InvalidRequest("next_sequence", "is 0 although something was delivered")
        return delivered

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(ids) for ids in self._ids.values())

    @property
    def longest(self) -> int:
        """Tokens of the choice that has most."""
        return max((len(ids) for ids in self._ids.values()), default=0)

    @property
    def by_choice(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of choices 0, 1, ... up to the last one that has any."""
        num_choices = 1 + max(self._ids, default=-1)
        return tuple(tuple(self._ids.get(index, ())) for index in range(num_choices))

    def note(self, piece: generation_pb2.GenerateResponse | generation_pb2.ChatResponse) -> None:
        """A message has arrived."""
        self.next_sequence = piece.sequence + 1
        for choice in piece.choices:
            ids = self._ids.get(choice.index)
            if ids is None:
                ids = self._ids[choice.index] = array("I")
            ids.extend(choice.token_ids)
            if choice.finish_reason:
                self.finished.add(choice.index)
        self.is_complete = self.is_complete or piece.HasField("timings")

    def to_proto(self) -> list[generation_pb2.DeliveredChoice]:
        """The wire form, in order of choices."""
        return [
            generation_pb2.DeliveredChoice(index=index, token_ids=self._ids[index], is_finished=index in self.finished)
            for index in sorted(self._ids)
        ]
