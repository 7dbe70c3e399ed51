"""The stack under test: docker-compose.yml as it is, with settings by environment, and what becomes of it."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compose_stack.shell import FailedError, Shell, wait_until

PROJECT = "kvplane-test"
SERVICES = ("cache", "pod", "compute-cpu", "prometheus")
"""What is started; Grafana's image is not to be had everywhere, and its queries are asked of Prometheus itself."""

POOL = {
    "KVPLANE_NUM_LAYERS": "2",
    "KVPLANE_NUM_KV_HEADS": "2",
    "KVPLANE_HEAD_DIM": "32",
    "KVPLANE_KV_DTYPE": "float32",
    "KVPLANE_POOL_BYTES": str(96 * 16 * 2 * 2 * 2 * 32 * 4),
    "KVPLANE_ARENA_BYTES": str(64 << 20),
    "KVPLANE_SHM_SIZE": "256m",
    "KVPLANE_COMPUTE_MEMORY": "3g",
}
"""A pool of 96 blocks of 16 tokens: small enough to run short."""


class Stack:
    """Compose commands on one project."""

    def __init__(self, shell: Shell, root: Path, settings: Mapping[str, str], overlays: tuple[str, ...] = ()) -> None:
        self.shell = shell
        self._root = root
        self.settings = {"COMPOSE_PROFILES": "cpu", **POOL, **settings}
        self._files = ["-f", "docker-compose.yml", *(word for each in overlays for word in ("-f", each))]
        self._command = compose_command(shell)

    def compose(self, *arguments: str, timeout: float = 600) -> str:
        """Run compose. Raises `FailedError`."""
        return self.shell.run(
            *(*self._command, "-p", PROJECT, *self._files, *arguments),
            cwd=self._root,
            environment=self.settings,
            timeout=timeout,
        )

    def services(self) -> set[str]:
        """Services that have a container."""
        label = '{{.Label "com.docker.compose.service"}}'
        project = f"label=com.docker.compose.project={PROJECT}"
        return set(self.shell.run("docker", "ps", "--all", "--format", label, "--filter", project).split())

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container. Raises `FailedError` when there is none."""
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={PROJECT}"
        found = self.shell.run("docker", "ps", "--all", "--quiet", "--filter", label, "--filter", project).split()
        if not found:
            raise FailedError(f"{service} has no container")
        inspected: list[dict[str, Any]] = json.loads(self.shell.run("docker", "inspect", found[0]))
        return inspected[0]

    def state(self, service: str) -> str:
        """Health of a container, or its status where it has no health check."""
        state = self.container(service)["State"]
        return str(state.get("Health", state).get("Status"))

    def wait_healthy(self, *services: str, seconds: float = 120) -> None:
        """Wait until containers are healthy. Raises `FailedError` with the last lines of their logs."""
        for service in services:
            try:
                wait_until(lambda service=service: self.state(service) == "healthy", f"{service} is healthy", seconds)
            except FailedError as error:
                raise FailedError(f"{error}\n{self.compose('logs', '--tail', '20', service)}") from error

    def crash(self, service: str) -> tuple[int, int]:
        """SIGKILL to a container's process, as the kernel would send it; the engine's restart policy has to bring it
        back. Returns the old process and how often the container had been restarted."""
        found = self.container(service)
        pid, restarts = int(found["State"]["Pid"]), int(found["RestartCount"])
        if os.getuid() == 0:
            os.kill(pid, signal.SIGKILL)
        else:
            # `docker kill` would tell the restart policy to stay away: from inside, then, where only root's own is 1.
            self.shell.run(
                *("docker", "run", "--rm", "--privileged", "--pid", "host", "--user", "0"),
                *("--entrypoint", "python3", found["Config"]["Image"]),
                *("-c", f"import os; os.kill({pid}, 9)"),
            )
        return pid, restarts

    def wait_restarted(self, service: str, before: tuple[int, int], seconds: float = 60) -> None:
        """Wait until the engine has started a container again. Raises `FailedError`."""

        def again() -> bool:
            found = self.container(service)
            return int(found["RestartCount"]) > before[1] and bool(found["State"]["Running"])

        wait_until(again, f"{service} is started again", seconds)

    def remove(self) -> None:
        """Containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans", timeout=120)


def compose_command(shell: Shell) -> list[str]:
    """The standalone compose, else the plugin."""
    if shutil.which("docker-compose") and shell.works("docker-compose", "version"):
        return ["docker-compose"]
    return ["docker", "compose"]


def check_hardening(stack: Stack) -> None:
    """What docker-compose.yml promises of every container, as the engine sees it. Raises `FailedError`."""
    for service in SERVICES:
        found = stack.container(service)
        host = found["HostConfig"]
        wrong = [
            text
            for bad, text in (
                (found["Config"]["User"] in ("", "0", "root", "0:0"), "runs as root"),
                (not host["ReadonlyRootfs"], "may write its file system"),
                (host["Privileged"] or host["CapAdd"], "has capabilities"),
                (host["CapDrop"] != ["ALL"], "keeps capabilities"),
                ("no-new-privileges:true" not in (host["SecurityOpt"] or []), "may gain privileges"),
                ("host" in (host["NetworkMode"], host["PidMode"], host["IpcMode"]), "shares a namespace of the host"),
                (not host["Memory"], "has no memory limit"),
                (not host["PidsLimit"] or host["PidsLimit"] < 1, "has no limit on processes"),
                (host["RestartPolicy"]["Name"] != "unless-stopped", "is not started again"),
            )
            if bad
        ]
        for port, bindings in (host["PortBindings"] or {}).items():
            wrong += [f"publishes {port} on {each['HostIp']}" for each in bindings if each["HostIp"] != "127.0.0.1"]
        if wrong:
            raise FailedError(f"{service}: {', '.join(wrong)}")


def check_ports_free(*ports: int) -> None:
    """Raises `FailedError` when something listens on a port already."""
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise FailedError(f"port {port} is taken already on this machine")
