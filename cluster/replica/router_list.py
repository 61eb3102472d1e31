"""Which routers a replica announces itself to: addresses, all addresses of a name, and files of both."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from cluster.config import DNS, FILE, check_router, is_listed, join_address, split_address
from cluster.security.watched_file import WatchedFiles

FILE_PERIOD_S = 1.0
DNS_PERIOD_S = 5.0
HOLD_S = 10.0
"""A router whose address is missing from a name's for less than this, as when it starts anew, is not left."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

log = logging.getLogger(__name__)


class RouterList:
    """`host:port` is itself; `dns:name:port` is each address that the name has, looked up again every DNS_PERIOD_S;
    `file:path` names routers of the other two kinds, one a line, and is read again within a second of a change.

    What cannot be looked up or read any more stays as it was. Raises OSError or ValueError for a file that cannot be
    used to begin with.
    """

    def __init__(
        self, routers: Sequence[str], *, resolve: Resolve | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._routers = tuple(routers)
        self._files = {router: _watched(router.removeprefix(FILE)) for router in routers if router.startswith(FILE)}
        self._resolve = resolve or _addresses
        self._clock = clock
        self._seen_s: dict[str, dict[str, float]] = {}
        """When each address of a name was last among those that it has."""
        self._looked_s: dict[str, float] = {}
        self._unresolved: set[str] = set()

    @property
    def is_fixed(self) -> bool:
        """Whether it never changes."""
        return not any(is_listed(router) for router in self._routers)

    async def look(self) -> tuple[str, ...]:
        """The addresses at present, each once."""
        found: dict[str, None] = {}
        for router in self._entries():
            found.update(dict.fromkeys(await self._of_name(router) if router.startswith(DNS) else (router,)))
        return tuple(found)

    async def changes(self) -> AsyncIterator[tuple[str, ...]]:
        """The addresses at first, and whenever they are others. Ends only if it is fixed."""
        before: tuple[str, ...] | None = None
        while True:
            addresses = await self.look()
            if before is None or set(addresses) != set(before):
                before = addresses
                yield addresses
            if self.is_fixed:
                return
            await asyncio.sleep(FILE_PERIOD_S)

    def _entries(self) -> list[str]:
        return [entry for router in self._routers for entry in self._of_file(router)]

    def _of_file(self, router: str) -> Sequence[str]:
        return self._files[router].get() if router in self._files else (router,)

    async def _of_name(self, router: str) -> list[str]:
        now_s = self._clock()
        if now_s - self._looked_s.get(router, -DNS_PERIOD_S) >= DNS_PERIOD_S:
            await self._look_up(router)
            self._looked_s[router] = self._clock()
        return list(self._seen_s.get(router, ()))

    async def _look_up(self, router: str) -> None:
        host, port = split_address("routers", router.removeprefix(DNS))
        seen_s = self._seen_s.setdefault(router, {})
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            if router not in self._unresolved:
                log.warning("%s cannot be looked up, what was known stays: %s", router, error)
            self._unresolved.add(router)
            addresses = list(seen_s)
        else:
            self._unresolved.discard(router)
        now_s = self._clock()
        seen_s.update(dict.fromkeys(addresses, now_s))
        for address in [address for address, last_s in seen_s.items() if now_s - last_s > HOLD_S]:
            del seen_s[address]


def _watched(path: str) -> WatchedFiles[tuple[str, ...]]:
    return WatchedFiles([path], lambda: _read(path), period_s=FILE_PERIOD_S)


def _read(path: str) -> tuple[str, ...]:
    """Raises ValueError for a file that names no router, or something else."""
    lines = (line.partition("#")[0].strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    routers = tuple(line for line in lines if line)
    if not routers:
        raise ValueError(f"{path} names no router")
    for router in routers:
        if router.startswith(FILE):
            raise ValueError(f"{path}: a file names no other files")
        check_router(path, router)
    return routers


async def _addresses(host: str, port: int) -> list[str]:
    """Raises OSError when the name is not known, or nobody answers."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [join_address(str(address[0]), port) for *_, address in found]
