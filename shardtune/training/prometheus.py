"""The newest metrics of a run for Prometheus, by HTTP."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardtune.config.schema.runner import PrometheusConfig
from shardtune.errors import ParallelError

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily  # pyright: ignore[reportMissingImports]

Samples = Mapping[str, Mapping[tuple[str, str], float]]
"""Values by the name of the gauge, then by the name and the value of the label that distinguishes them."""


def check_port(chosen: PrometheusConfig) -> None:
    """Refuse an address that cannot be listened on.

    Raises:
        ParallelError: the port is in use or not permitted, or the address is not one of this host.
    """
    family = socket.AF_INET6 if ":" in chosen.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((chosen.address, chosen.port))
            probe.listen()
    except OSError as error:
        raise _unusable(chosen, error) from error


def _unusable(chosen: PrometheusConfig, error: OSError) -> ParallelError:
    return ParallelError(
        f"Prometheus cannot be served at {chosen.address}:{chosen.port}: {error.strerror}",
        where=f"runner.logger.prometheus on {socket.gethostname()}",
        remedy="choose another runner.logger.prometheus.port or address, or take prometheus out of "
        "runner.logger.logger_backends",
    )


class Prometheus:
    """A server whose gauges have the values of the last logged step.

    `train/loss` is `shardtune_train_loss{run="…",metric="train/loss"}`, the parts of a step's time are
    `shardtune_seconds{run="…",part="…"}`.

    Args:
        chosen: address and port.
        run: the name of the run, a label.
        restart: how often the run was started again.

    Raises:
        ParallelError: the port is in use.
    """

    def __init__(self, chosen: PrometheusConfig, *, run: str, restart: int) -> None:
        # An extra, and slow to import.
        from prometheus_client import CollectorRegistry, start_http_server  # pyright: ignore[reportMissingImports]

        self._run = run
        self._restart = float(restart)
        self._samples: Samples = {}
        self._known: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(chosen.port, chosen.address, registry)
        except OSError as error:
            raise _unusable(chosen, error) from error

    def log(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        self._known |= metrics  # the last evaluation's metrics stay until the next one
        samples: dict[str, dict[tuple[str, str], float]] = {
            "shardtune_step": {("metric", "step"): float(step)},
            "shardtune_restarts": {("metric", "restarts"): self._restart},
            "shardtune_logged_time_seconds": {("metric", "logged_time"): time.time()},
            "shardtune_seconds": {("part", part): value for part, value in seconds.items()},
        }
        for key, value in self._known.items():
            samples.setdefault(gauge_name(key), {})["metric", key] = value
        self._samples = samples  # replaced as a whole: the server's threads read it

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges, as `prometheus_client` reads them from a collector."""
        from prometheus_client.core import GaugeMetricFamily  # pyright: ignore[reportMissingImports]

        for name, values in self._samples.items():
            labels = [label for label, _ in values]
            family = GaugeMetricFamily(name, "of the last logged step", labels=["run", *labels[:1]])
            for (_, distinguished), value in values.items():
                family.add_metric([self._run, distinguished], value)
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def gauge_name(key: str) -> str:
    """The name of a metric's gauge: `train/loss` becomes `shardtune_train_loss`."""
    return "shardtune_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
