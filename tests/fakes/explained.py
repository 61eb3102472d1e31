"""What the report of a wrong deployment has to say."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.doctor.finding import Finding


def assert_explained(findings: Sequence[Finding], lines: Sequence[str], *, line: str, reason: str, remedy: str) -> None:
    """A failure says why and what to do, and names the line of the file that holds `line`."""
    found = [one for one in findings if one.status == "fail" and reason in one.detail]
    assert found, findings
    assert remedy in found[0].remedy
    number = int(found[0].check.split("line ")[1].split(":")[0])
    assert line in lines[number - 1]
