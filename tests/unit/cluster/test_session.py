"""A router's stream that breaks while its last frame is on its way."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.config import ReplicaConfig
from cluster.replica.session import AttachSession
from protos import generation_pb2, replica_pb2
from tests.fakes.script_pool import start_replica


class StuckContext:
    """Reads what it was given; a frame that ends an answer is never written."""

    def __init__(self, *frames: replica_pb2.RouterFrame) -> None:
        self._frames = list(frames)
        self.is_stuck = asyncio.Event()

    async def read(self) -> replica_pb2.RouterFrame:
        if not self._frames:
            await asyncio.Event().wait()
        return self._frames.pop(0)

    async def write(self, frame: replica_pb2.ReplicaFrame) -> None:
        if any(event.end for event in frame.events):
            self.is_stuck.set()
            await asyncio.Event().wait()


async def test_an_answer_whose_end_could_not_be_sent_is_forgotten_with_its_router() -> None:
    request = generation_pb2.GenerateRequest(
        request_id="r",
        token_ids=generation_pb2.TokenIds(ids=[5, 6]),
        sampling=generation_pb2.SamplingParams(max_tokens=4, seed=1),
    )
    submit = replica_pb2.RouterFrame(submit=replica_pb2.Submit(stream_id=1, attempt=1, generate=request))
    one = await start_replica()
    context: Any = StuckContext(submit)
    session = AttachSession(one.server._backend, ReplicaConfig(), replica_pb2.ReplicaHello())
    run = asyncio.create_task(session.run(context))
    await asyncio.wait_for(context.is_stuck.wait(), 20)
    assert one.server.num_live == 1
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert one.server.num_live == 0
    # Nobody waits for it: with the answer still on the books a drain would take all of its grace.
    await asyncio.wait_for(one.server.drain(60), 20)
    await one.stop()
