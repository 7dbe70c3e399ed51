"""A Docker engine: the one that runs, or one of our own that is installed and started, and stopped at the end."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compose_stack.shell import CannotRunError, FailedError, Shell, wait_until

PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "iptables": "iptables",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
}
"""Debian packages of commands."""
START_SECONDS = 60.0
STOP_SECONDS = 60.0
KEEP_HOURS = 24 * 14
"""Age at which layers of earlier runs are deleted."""
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@contextmanager
def docker_engine(shell: Shell, cache: Path) -> Iterator[str]:
    """An engine to work with; yields in words which. Raises `CannotRunError`. One that was started here has its own
    data under `cache`, which stays for the next run, and ends with the context."""
    if shell.works("docker", "info"):
        _need_compose(shell)
        yield "the engine that runs here"
        return
    if os.getuid() != 0:
        raise CannotRunError("no Docker engine runs, and only root can start one")
    install(shell, "dockerd", "docker", "iptables", "docker-compose", "openssl")
    if shell.works("docker", "info"):
        yield "the engine that its package has started"
        return
    run = cache / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    shell.environment["DOCKER_HOST"] = f"unix://{run / 'docker.sock'}"
    network = _Network()
    with (run / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                *("--data-root", str(cache / "docker"), "--exec-root", str(run / "exec")),
                *("--pidfile", str(run / "docker.pid"), "--host", shell.environment["DOCKER_HOST"]),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        try:
            wait_until(
                lambda: daemon.poll() is not None or shell.works("docker", "info"), "dockerd answers", START_SECONDS
            )
        except FailedError as error:
            raise CannotRunError(f"{error}: {_last_words(run)}") from error
        if daemon.poll() is not None:
            raise CannotRunError(f"dockerd ended with status {daemon.returncode}: {_last_words(run)}")
        yield "an engine of our own"
        # Old layers; newer ones are what the next run builds on.
        shell.run("docker", "image", "prune", "--force", "--filter", f"until={KEEP_HOURS}h")
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        for mount in (run / "exec/netns").glob("*"):
            subprocess.run(["umount", str(mount)], capture_output=True)
        network.restore()


def install(shell: Shell, *commands: str) -> None:
    """Have commands of Debian packages. Raises `CannotRunError`."""
    missing = [each for each in commands if shutil.which(each) is None]
    if not missing:
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise CannotRunError(f"{', '.join(missing)} not installed, and this is not root with apt-get")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    packages = [PACKAGES[each] for each in missing]
    try:
        shell.run("apt-get", "update", timeout=120)
        shell.run(
            *("apt-get", "install", "--yes", "--no-install-recommends", *packages), environment=quiet, timeout=300
        )
    except FailedError as error:
        raise CannotRunError(f"{', '.join(missing)} cannot be installed: {error}") from error


def _need_compose(shell: Shell) -> None:
    if not shell.works("docker-compose", "version") and not shell.works("docker", "compose", "version"):
        install(shell, "docker-compose")


def _last_words(run: Path) -> str:
    lines = (run / "dockerd.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


class _Network:
    """What dockerd changes of the host's network and does not put back: packet filter, forwarding, its bridge."""

    def __init__(self) -> None:
        self._rules = subprocess.run(["iptables-save"], capture_output=True)
        self._forward = _FORWARD.read_text()
        self._had_bridge = Path("/sys/class/net/docker0").exists()

    def restore(self) -> None:
        """Put it back as far as that goes: the test is over."""
        if self._rules.returncode == 0:
            subprocess.run(["iptables-restore"], input=self._rules.stdout, capture_output=True)
        with suppress(OSError):
            _FORWARD.write_text(self._forward)
        if not self._had_bridge and shutil.which("ip"):
            subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True)
