"""A deployment's configuration with a version of our own. Imports Ray."""

from __future__ import annotations

from typing import Any, Self

from pydantic import PrivateAttr
from ray.serve._private.config import DeploymentConfig


class VersionedConfig(DeploymentConfig):  # type: ignore[misc]
    """Keeps its version, whatever Serve sets: replicas are replaced when the version changes, and only then.

    Serve's own version is a new one for each `serve.run`, and for each `serve deploy` a hash over all arguments of the
    application: either way another number of replicas would replace every one of them.
    """

    _version: str = PrivateAttr("")

    @classmethod
    def of(cls, config: DeploymentConfig, version: str) -> Self:
        """The same configuration with this version."""
        made = cls(**dict(config))
        made._version = version
        return made

    def to_proto(self) -> Any:
        """What the controller gets."""
        proto = super().to_proto()
        proto.version = self._version
        return proto
