"""The Ray Serve application: Serve places, starts, checks, drains and replaces replicas; tokens never pass through it."""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.autoscale.config import ScalingConfig
from cluster.config import ReplicaConfig, from_mapping, is_listed, join_address, split_address
from cluster.deployment_version import code_version
from cluster.surge import SURGE_PERCENT, has_room
from worker.config import MAX_CPU_THREADS, WorkerConfig

if TYPE_CHECKING:
    from ray.serve import Application

APP_NAME = "graphpool"
DEPLOYMENT_NAME = "replica"
SERVE_LOGGING = {"log_level": "ERROR", "enable_access_log": False}
HEAD_ADDRESS = "head-address"
"""As the host of one of `routers`: the address of the cluster's head, which nobody knows before the cloud gives it one."""
LIVE = frozenset({"routers"})
"""What a replica's config says and its process takes while it runs."""
STOP_MARGIN_S = 5.0
"""What Serve waits beyond the drain before it kills a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A pool of equal replicas."""

    worker: WorkerConfig = field(default_factory=WorkerConfig)
    """What each replica runs."""
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    """How each replica serves; `routers` must name at least one router."""
    num_replicas: int = 1
    """Replicas Serve keeps alive, unless `scaling` is given."""
    scaling: ScalingConfig | None = None
    """Objectives by which Serve changes the number of replicas, from the loads that routers report; None = it never does."""
    model_name: str = ""
    """The model as routers know it, where several share a router: only its load counts for `scaling`."""
    num_gpus: float | None = None
    """GPUs of one replica; None = one, unless the device is "cpu". Every replica has its own CUDA context and graphs."""
    num_cpus: float = 1.0
    """CPUs Ray sets aside for one replica."""
    drain_timeout_s: float = 120.0
    """A replica that is taken away may finish its requests for this long."""
    surge: bool | None = None
    """Whether a changed replica is ready before the one that it replaces goes: that takes room for one more than
    there are. None = if the cluster has the room when the config is applied. Without, the old one goes first."""
    health_check_period_s: float = 1.0
    """Between two health checks of a replica."""
    health_check_timeout_s: float = 3.0
    """A check without an answer for this long counts as failed; three failures end the replica."""
    revision: str = ""
    """Any text; another one replaces the replicas, where nothing else has changed but, say, the files of the model."""
    max_start_attempts: int = 3
    """Failed starts in a row before Serve gives up."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "max_start_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("drain_timeout_s", "health_check_period_s", "health_check_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if not isinstance(self.revision, str):
            raise ValueError(f"revision is {self.revision!r:.60}, must be text: give it quotes")
        if self.surge not in (None, True, False):
            raise ValueError(f"surge is {self.surge!r:.60}, must be true, false or null")
        if not self.replica.routers:
            raise ValueError("replica.routers is empty, must name a router: nobody else would find the replicas")


def pool_config(values: dict[str, Any]) -> PoolConfig:
    """From plain values, such as a Serve config file's; unknown keys are refused."""
    nested = {"worker": WorkerConfig, "replica": ReplicaConfig, "scaling": ScalingConfig}
    return from_mapping(
        PoolConfig,
        {name: from_mapping(nested[name], value) if name in nested else value for name, value in values.items()},
    )


def app(values: dict[str, Any]) -> Application:
    """Application builder for Serve config files: `import_path: cluster.serve_app:app`, with PoolConfig as its args."""
    return build_app(pool_config(values))


def build_app(config: PoolConfig) -> Application:
    """The application of one pool. Needs Ray."""
    from cluster.served_replica import ServedReplica

    config = replace(config, replica=with_router_addresses(config.replica))
    return application_of(ServedReplica, config, asdict(config.worker), asdict(config.replica))


def application_of(kind: type, config: PoolConfig, *made_of: dict[str, Any]) -> Application:
    """Replicas of that kind, constructed with `made_of` and the drain's length.

    A change of `made_of` but its routers, of `revision`, resources or environment, or of this code's version replaces
    them in turn. Everything else (routers, their number, `scaling`, the drain, health checks) changes while they run.
    """
    from ray import serve

    from cluster.versioned_config import VersionedConfig

    options = actor_options(config)
    deployment = serve.deployment(
        kind,
        name=DEPLOYMENT_NAME,
        **replicas_of(config),
        ray_actor_options=options,
        user_config={"drain_timeout_s": config.drain_timeout_s, "routers": list(config.replica.routers)},
        # Requests do not come through Serve; its own limits must never bind.
        max_ongoing_requests=1,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_timeout_s + STOP_MARGIN_S,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        max_constructor_retry_count=config.max_start_attempts,
        max_surge_percent=SURGE_PERCENT if may_surge(config, options) else 0,
    )
    fixed = [{name: value for name, value in values.items() if name not in LIVE} for values in made_of]
    deployment._deployment_config = VersionedConfig.of(
        deployment._deployment_config, code_version(*fixed, config.revision)
    )
    return deployment.bind(*made_of, config.drain_timeout_s)


def may_surge(config: PoolConfig, options: dict[str, Any]) -> bool:
    """Whether successors start beside those that they replace; with no room for them they would wait for it for good."""
    if config.surge is not None:
        return config.surge
    return has_room(config.scaling.min_replicas if config.scaling else config.num_replicas, options, DEPLOYMENT_NAME)


def with_router_addresses(replica: ReplicaConfig) -> ReplicaConfig:
    """The same with the head's address in place of its name. Needs a connection to Ray only where the name is used."""
    if not any(_host_of(router) == HEAD_ADDRESS for router in replica.routers):
        return replica
    import ray

    gcs_address = ray.get_runtime_context().gcs_address
    return replace(replica, routers=tuple(router_address(router, gcs_address) for router in replica.routers))


def router_address(router: str, gcs_address: str) -> str:
    """Where the router is, once the address of the head's GCS is known."""
    if _host_of(router) != HEAD_ADDRESS:
        return router
    return join_address(split_address("gcs_address", gcs_address)[0], split_address("routers", router)[1])


def _host_of(router: str) -> str:
    """ "" for a list of routers, which holds addresses."""
    return "" if is_listed(router) else split_address("routers", router)[0]


def replicas_of(config: PoolConfig) -> dict[str, Any]:
    """How many replicas Serve keeps: a number, or what load asks for."""
    if config.scaling is None:
        return {"num_replicas": config.num_replicas}
    from cluster.autoscale.policy import autoscaling_options

    return {"autoscaling_config": autoscaling_options(config.scaling, config.replica, config.model_name)}


def actor_options(config: PoolConfig) -> dict[str, Any]:
    """Resources and environment of one replica's process."""
    num_gpus = num_gpus_of(config.worker) if config.num_gpus is None else config.num_gpus
    environment = {"GRPC_ENABLE_FORK_SUPPORT": "0", "TOKENIZERS_PARALLELISM": "false"}
    if num_gpus == 0:
        # Ray leaves the variable alone for an actor without GPUs, which could then take any of them.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if config.worker.cpu_threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.worker.cpu_threads)
    return {"num_cpus": config.num_cpus, "num_gpus": num_gpus, "runtime_env": {"env_vars": environment}}


def num_gpus_of(worker: WorkerConfig) -> float:
    """One for a replica on CUDA, none on the CPU; "auto" takes one where the driver is installed."""
    if worker.device == "auto":
        return 1.0 if Path("/dev/nvidiactl").exists() else 0.0
    return 1.0 if worker.device == "cuda" else 0.0


def share_cores(worker: WorkerConfig, num_replicas: int, num_cores: int) -> WorkerConfig:
    """On the CPU, share the cores of one machine fairly among its replicas, unless a number was chosen."""
    if worker.cpu_threads is not None or num_gpus_of(worker):
        return worker
    return replace(worker, cpu_threads=min(max(1, num_cores // num_replicas), MAX_CPU_THREADS))


def deploy(config: PoolConfig) -> None:
    """Start Serve and its application, without waiting for replicas. Needs a connection to Ray."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config=SERVE_LOGGING)
    target = serve.RunTarget(build_app(config), name=APP_NAME, route_prefix=None, logging_config=SERVE_LOGGING)
    serve.run_many([target], wait_for_applications_running=False)


def start_problem() -> str | None:
    """Why Serve gave up on the replicas, in one sentence; None while it has not."""
    from ray import serve

    application = serve.status().applications[APP_NAME]
    if application.status != "DEPLOY_FAILED":
        return None
    return last_cause(application.deployments[DEPLOYMENT_NAME].message)


def last_cause(message: str) -> str:
    """The line of a traceback that names the error, without its type."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "Ray Serve gave no reason"
    return re.sub(r"^[A-Za-z_][\w.]*(Error|Exception|Model|Checkpoint): ", "", lines[-1])
