"""What the demo does, act by act, and what it must have seen at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil
from rich.console import Console

from cluster.cli.startup import StartupLines
from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig, RouterConfig
from cluster.demo.screen import ChatScreen, chat_table
from cluster.demo.watched import WatchedChat
from cluster.local_pool import LocalPool, LocalPoolConfig
from protos import control_pb2
from worker.config import WorkerConfig

NUM_REPLICAS = 2
CHAT_TOKENS = 64
LONG_TOKENS = 96
KILL_AFTER_TOKENS = 16
HEAL_TIMEOUT_S = 120.0
STREAM_TIMEOUT_S = 120.0
QUESTIONS = ("Why is the sky blue?", "How does a bicycle stay upright?", "What is a haiku?")
POLL_S = 0.05


class Story:
    """Tells the acts in order and keeps what went wrong."""

    def __init__(self, lines: StartupLines, console: Console) -> None:
        self.failures: list[str] = []
        self._lines = lines
        self._console = console
        self._seen: set[psutil.Process] = set()

    async def run(self) -> None:
        """All of it."""
        config = LocalPoolConfig(
            # An answer that changes its replica is then exactly the one that it would have been.
            worker=WorkerConfig(max_model_len=2048, deterministic=True),
            router=RouterConfig(listen="127.0.0.1:0"),
            num_replicas=NUM_REPLICAS,
        )
        self._title(f"1. A pool of {NUM_REPLICAS} replicas starts")
        async with LocalPool(config, self._lines) as pool:
            self._seen.update(pool.processes())
            async with AsyncGraphpoolClient(pool.address, ClientConfig(timeout_s=STREAM_TIMEOUT_S)) as client:
                await self._three_chats(client)
                victim = await self._kill_one(pool, client)
                await self._both_serve_again(client, victim)
            self._seen.update(pool.processes())
            self._title("5. The pool stops")
        self._nothing_is_left()

    async def _three_chats(self, client: AsyncGraphpoolClient) -> None:
        self._title("2. Three chats at once")
        chats = [WatchedChat(question) for question in QUESTIONS]
        with ChatScreen(self._console, chats) as screen:
            await asyncio.gather(
                *(chat.stream(client, screen.update, temperature=0.0, max_tokens=CHAT_TOKENS) for chat in chats)
            )
        self._console.print(chat_table(chats))
        self._expect(all(chat.error is None and chat.text for chat in chats), "three answers")
        self._expect(all(chat.num_pieces > 4 for chat in chats), "tokens arrived one after the other")
        used = {chat.execution.replica for chat in chats if chat.execution}
        self._expect(len(used) == NUM_REPLICAS, "both replicas worked")

    async def _kill_one(self, pool: LocalPool, client: AsyncGraphpoolClient) -> WatchedChat:
        self._title("3. One of two replicas is killed while both stream")
        victim, survivor = WatchedChat(QUESTIONS[0]), WatchedChat(QUESTIONS[1])
        with ChatScreen(self._console, [victim, survivor]) as screen:
            async with asyncio.TaskGroup() as streams:
                streams.create_task(self._long(victim, client, screen))
                replica = await self._replica_of(victim, pool)
                streams.create_task(self._long(survivor, client, screen))
                await self._until(lambda: len(survivor.token_ids) >= KILL_AFTER_TOKENS or survivor.is_over)
                killed_s, num_before = time.monotonic(), len(victim.token_ids)
                self._expect(not victim.is_over and not survivor.is_over, "both streams were under way")
                self._kill(pool, replica)
        for chat, name in ((victim, "its"), (survivor, "the other")):
            self._expect(
                chat.error is None and len(chat.token_ids) == LONG_TOKENS,
                f"{name} stream went on: {LONG_TOKENS} tokens, longest gap {1000 * chat.longest_gap_s:.0f} ms",
            )
        taken_over = victim.execution is not None and victim.execution.replica != replica.replica
        self._expect(taken_over and num_before < LONG_TOKENS, f"it was taken over after {num_before} tokens")
        await self._heals(pool, replica, killed_s)
        return victim

    async def _heals(self, pool: LocalPool, lost: control_pb2.ReplicaLoad, killed_s: float) -> None:
        self._lines.doing(f"Ray Serve replaces {lost.replica}")

        def is_back() -> bool:
            ready = pool.ready()
            return len(ready) == NUM_REPLICAS and lost.incarnation not in {replica.incarnation for replica in ready}

        healed = await self._until(is_back, HEAL_TIMEOUT_S)
        took_s = time.monotonic() - killed_s
        self._expect(healed, f"the pool is back to {NUM_REPLICAS} replicas, {took_s:.1f} s after the kill")

    async def _both_serve_again(self, client: AsyncGraphpoolClient, victim: WatchedChat) -> None:
        self._title("4. The healed pool answers as before")
        again = [WatchedChat(victim.question) for _ in range(NUM_REPLICAS)]
        with ChatScreen(self._console, again) as screen:
            await asyncio.gather(*(self._long(chat, client, screen) for chat in again))
        self._console.print(chat_table(again))
        used = {chat.execution.replica for chat in again if chat.execution}
        self._expect(len(used) == NUM_REPLICAS, "the new replica works beside the old one")
        same = all((chat.token_ids, chat.text) == (victim.token_ids, victim.text) for chat in again)
        self._expect(same, "both give, token by token, the answer that the kill interrupted")

    def _nothing_is_left(self) -> None:
        left = [process for process in self._seen if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        left += [child for child in psutil.Process().children(recursive=True) if child not in left]
        self._expect(not left, f"{len(left)} of {len(self._seen)} processes are left")

    async def _long(self, chat: WatchedChat, client: AsyncGraphpoolClient, screen: ChatScreen) -> None:
        await chat.stream(client, screen.update, temperature=0.0, max_tokens=LONG_TOKENS, ignore_eos=True)

    async def _replica_of(self, chat: WatchedChat, pool: LocalPool) -> control_pb2.ReplicaLoad:
        await self._until(lambda: chat.num_pieces > 0 or chat.is_over)
        return next(replica for replica in pool.ready() if replica.router_streams)

    def _kill(self, pool: LocalPool, replica: control_pb2.ReplicaLoad) -> None:
        process = pool.process_of(replica)
        assert process is not None, f"nobody listens at {replica.address}"
        self._seen.update(pool.processes())
        process.kill()
        self._lines.say(f"  [red]SIGKILL[/] to {replica.replica}, process {process.pid}")

    async def _until(self, condition: Callable[[], bool], timeout_s: float = STREAM_TIMEOUT_S) -> bool:
        give_up_s = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < give_up_s:  # noqa: ASYNC110  # conditions come from several places
            await asyncio.sleep(POLL_S)
        return condition()

    def _expect(self, seen: bool, what: str) -> None:
        self._lines.say(f"  [green]✓[/] {what}" if seen else f"  [red]✗ NOT SEEN:[/] {what}")
        if not seen:
            self.failures.append(what)

    def _title(self, text: str) -> None:
        self._lines.say(f"\n[bold]{text}[/]")


async def tell() -> list[str]:
    """Run the demo; returns what it promises and was not seen."""
    console = Console(highlight=False)
    with StartupLines(console) as lines:
        story = Story(lines, console)
        await story.run()
        verdict = "[green]All of it was seen[/]" if not story.failures else f"[red]{len(story.failures)} not seen[/]"
        lines.say(f"\n{verdict} in {lines.elapsed_s:.0f} s.")
    return story.failures
