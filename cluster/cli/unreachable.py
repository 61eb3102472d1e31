"""Why a server cannot be reached, in words of this command line, from what gRPC says about the connection."""

from __future__ import annotations

_REASONS = (
    (("address lookup failed", "dns resolution failed"), "the name in --address cannot be looked up"),
    (("wrong_version_number",), "the server at that address speaks no TLS: leave out --tls-ca"),
    (("certificate_verify_failed", "unable to get local issuer"), "the CAs of --tls-ca did not sign the server's certificate, or it has expired"),
    (("peer name", "hostname verification"), "the server's certificate is for another name than that in --address"),
    (("socket closed", "connection reset"), "the server hangs up: does it want TLS (--tls-ca), or a certificate of yours (--tls-cert, --tls-key)?"),
    (("failed parsing http/2", "settings frame"), "what listens at that address does not speak gRPC: is it the metrics port?"),
    (("refused",), "nothing answers at that address: is `graphpool serve` running, and on that port?"),
)  # fmt: skip
_ABOUT_CONNECTIONS = ("failed to connect", "errors resolving", "dns resolution", "handshake")


def why_unreachable(details: str) -> str:
    """One sentence; "" when the failure is not about the connection."""
    said = details.lower()
    if not any(words in said for words in _ABOUT_CONNECTIONS):
        return ""
    for words, reason in _REASONS:
        if any(one in said for one in words):
            return reason
    return f"no connection to that address comes about: {details.rpartition('last error: ')[2].strip()}"
