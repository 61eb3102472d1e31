"""Lists of routers that change while a replica runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config import ReplicaConfig
from cluster.replica import router_list
from cluster.replica.router_list import DNS_PERIOD_S, HOLD_S, RouterList


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Names:
    """A name service."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses: dict[str, Sequence[str]] = dict(addresses)
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        if host not in self.addresses:
            raise OSError("unknown name")
        return [f"{address}:{port}" for address in self.addresses[host]]


async def test_a_fixed_list_is_itself_and_asks_nobody() -> None:
    names = Names()
    routers = RouterList(("b:2", "a:1", "b:2"), resolve=names)
    assert routers.is_fixed
    assert [addresses async for addresses in routers.changes()] == [("b:2", "a:1")]
    assert names.num_asked == 0


async def test_each_address_of_a_name_is_a_router_and_they_are_looked_up_again_in_time() -> None:
    names, clock = Names(routers=["10.0.0.1", "10.0.0.2"]), ManualClock()
    routers = RouterList(("dns:routers:5", "a:1"), resolve=names, clock=clock)
    for _ in range(3):
        assert await routers.look() == ("10.0.0.1:5", "10.0.0.2:5", "a:1")
    assert names.num_asked == 1
    names.addresses["routers"] = ["10.0.0.2", "10.0.0.3"]
    clock.now_s += DNS_PERIOD_S
    assert set(await routers.look()) == {"10.0.0.1:5", "10.0.0.2:5", "10.0.0.3:5", "a:1"}


async def test_an_address_that_is_missing_is_left_after_a_while_and_not_for_a_name_service_that_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names, clock = Names(routers=["10.0.0.1", "10.0.0.2"]), ManualClock()
    routers = RouterList(("dns:routers:5",), resolve=names, clock=clock)
    both = await routers.look()
    gone = names.addresses.pop("routers")
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            clock.now_s += DNS_PERIOD_S
            assert await routers.look() == both
    assert len(caplog.records) == 1, "it is said once"
    names.addresses["routers"] = gone[1:]
    clock.now_s += DNS_PERIOD_S
    assert set(await routers.look()) == set(both), "it may only start anew"
    clock.now_s += HOLD_S
    assert await routers.look() == ("10.0.0.2:5",)


def write(path: Path, text: str) -> None:
    """As a tool would: another file takes its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_a_file_is_read_again_and_what_cannot_be_used_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_list, "FILE_PERIOD_S", 0.0)
    file = tmp_path / "routers"
    write(file, "# of this room\na:1\n\ndns:routers:5  # all of them\n")
    routers = RouterList((f"file:{file}",), resolve=Names(routers=["10.0.0.1"]))
    assert not routers.is_fixed
    changes = routers.changes()
    assert await anext(changes) == ("a:1", "10.0.0.1:5")
    for nonsense in ("", "# nobody\n", "no port\n", f"file:{file}\n"):
        write(file, nonsense)
        assert await routers.look() == ("a:1", "10.0.0.1:5")
    file.unlink()
    assert await routers.look() == ("a:1", "10.0.0.1:5")
    write(file, "b:2\n")
    assert await anext(changes) == ("b:2",)
    await changes.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "nobody", "a:1 b:2"])
def test_a_file_that_cannot_be_used_at_the_start_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "routers"
    with pytest.raises(FileNotFoundError):
        RouterList((f"file:{file}",))
    write(file, text)
    with pytest.raises(ValueError, match="routers"):
        RouterList((f"file:{file}",))


@pytest.mark.parametrize("router", ["dns:name", "dns:", "file:", "dns:name:0", "dns:dns:name:5", "tcp:name:5"])
def test_a_config_takes_lists_and_refuses_what_is_none(router: str) -> None:
    assert ReplicaConfig(routers=("dns:name:5", "file:/a/b", "a:1")).routers[0] == "dns:name:5"
    with pytest.raises(ValueError, match="routers"):
        ReplicaConfig(routers=(router,))


async def test_a_name_that_no_name_service_takes_is_only_not_known() -> None:
    assert await RouterList((f"dns:{'x' * 70}.example:5",)).look() == ()
    assert await RouterList(("dns:localhost:5",)).look() in (
        ("127.0.0.1:5",),
        ("[::1]:5", "127.0.0.1:5"),
        ("127.0.0.1:5", "[::1]:5"),
    )
