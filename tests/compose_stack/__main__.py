"""`make compose-test`: the compose stack for real, on the CPU, from building its images to taking it down.

    python -m compose_stack [--skip-without-docker] [--keep]

Needs an environment with the SDK and torch, and a Docker engine; as root it installs and starts one where none runs,
and stops it at the end. What is kept for the next run (layers, base image, wheels) is in
`${KVPLANE_COMPOSE_CACHE:-${XDG_CACHE_HOME:-~/.cache}/kvplane/compose}`. Exit status: 0, or 1 for what failed, or 3
where Docker cannot run; with --skip-without-docker that is 0, and said loudly.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compose_stack import images, monitoring, traffic
from compose_stack.engine import docker_engine
from compose_stack.shell import CannotRunError, FailedError, Shell
from compose_stack.stack import SERVICES, Stack, check_hardening, check_ports_free

ROOT = Path(__file__).resolve().parents[2]
BASE = "python:3.11.13-slim-bookworm"
PROMETHEUS = "prom/prometheus:v3.5.0"
CACHE_IMAGE, COMPUTE_IMAGE = "kvplane-cache:test", "kvplane-compute:test-cpu"
PORTS = (50051, 50052, 9090)
PRESSURE = ("--prompts", "12", "--own-tokens", "100", "--new-tokens", "24", "--rounds", "2")
"""More than the pool holds side by side: some wait, some yield."""


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run the compose stack for real.")
    parser.add_argument("--skip-without-docker", action="store_true", help="exit 0 where Docker cannot run")
    parser.add_argument("--keep", action="store_true", help="leave the stack up when something fails, until Enter")
    options = parser.parse_args()
    cache = Path(os.environ.get("KVPLANE_COMPOSE_CACHE") or _user_cache() / "kvplane/compose")
    cache.mkdir(parents=True, exist_ok=True)
    # The classic builder: every engine has it, and it builds with the host's network without being asked twice.
    quiet = {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0", "DOCKER_CLI_HINTS": "false"}
    shell = Shell(cache / "last.log", quiet)
    shell.log.write_text("")
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken down
    try:
        with docker_engine(shell, cache) as engine:
            print(f"Docker: {engine}, {shell.run('docker', 'version', '--format', '{{.Server.Version}}').strip()}")
            _run(shell, cache, options.keep)
    except CannotRunError as error:
        line = "!" * 100
        print(f"{line}\n!! SKIPPED, NOT TESTED: the compose stack. Docker cannot run here: {error}\n{line}", flush=True)
        return 0 if options.skip_without_docker else 3
    except FailedError as error:
        print(f"FAILED: {error}\nall commands and their output: {shell.log}")
        return 1
    print(f"compose-test: all right, {time.monotonic() - begin:.0f} s")
    return 0


def _run(shell: Shell, cache: Path, keep: bool) -> None:
    check_ports_free(*PORTS)
    with tempfile.TemporaryDirectory(prefix="kvplane-compose-") as work:
        settings, tool = _images(shell, cache, Path(work))
        with shell.step("files: promtool, docker-compose config"):
            _files(shell, settings, tool)
        stack = Stack(shell, ROOT, settings)
        try:
            _gpu(shell, settings)
            _stack(shell, stack)
            _tls(shell, settings, Path(work))
        except BaseException:
            if keep:
                traceback.print_exc()
                input("the stack stays up until Enter: ")
            raise
        finally:
            with shell.step("down"):
                stack.remove()
    found = images.sizes(shell, CACHE_IMAGE, COMPUTE_IMAGE, settings["KVPLANE_BASE_IMAGE"])
    for name, size in found.items():
        print(f"image {name}: {size / 1e6:.0f} MB")


def _images(shell: Shell, cache: Path, work: Path) -> tuple[dict[str, str], Path | None]:
    """All images; returns settings that name them, and promtool."""
    with ThreadPoolExecutor() as pool, shell.step("base image, wheels"):
        base_made = pool.submit(images.base_image, shell, cache, BASE)
        wheels = pool.submit(images.wheels, shell, ROOT, cache).result()
        base = base_made.result()
    settings = {
        "KVPLANE_BASE_IMAGE": base,
        "KVPLANE_BUILD_NETWORK": "host",
        "KVPLANE_TORCH_INDEX": "",
        "KVPLANE_VERSION": "test",
    }
    # The cache image takes packages from the index, with this machine's certificates; the compute image takes wheels.
    without, with_wheels = (
        images.context(shell, ROOT, work / "from-index", None),
        images.context(shell, ROOT, work / "from-wheels", wheels),
    )
    from_index = {**settings, "KVPLANE_BUILD_CONTEXT": str(without), "KVPLANE_PIP_ARGS": images.index_arguments()}
    from_wheels = {**settings, "KVPLANE_BUILD_CONTEXT": str(with_wheels), "KVPLANE_PIP_ARGS": "--no-index"}
    with ThreadPoolExecutor() as pool, shell.step("images: cache, compute on the CPU, Prometheus"):
        building = [
            pool.submit(Stack(shell, ROOT, from_index).compose, "build", "cache"),
            pool.submit(Stack(shell, ROOT, from_wheels).compose, "build", "compute-cpu"),
        ]
        prometheus, tool = images.prometheus_image(shell, cache, base, PROMETHEUS)
        for each in building:
            each.result()
    return {**settings, "KVPLANE_PROMETHEUS_IMAGE": prometheus}, tool


def _files(shell: Shell, settings: dict[str, str], tool: Path | None) -> None:
    folder = ROOT / "deploy/prometheus"
    if tool is not None:
        shell.run(tool, "check", "config", folder / "prometheus.yml")
        shell.run(tool, "test", "rules", folder / "alerts.test.yml", cwd=folder)
    else:
        print("   no promtool here: rules are checked by Prometheus alone")
    for overlays in ((), ("docker-compose.tls.yml",)):
        Stack(shell, ROOT, settings, overlays).compose("config")


def _gpu(shell: Shell, settings: dict[str, str]) -> None:
    """What a bare `docker-compose up` makes of the committed .env: the GPU stack, created and not started, since there
    may be no GPU. The images of CUDA and Grafana are stood in for: nothing of them runs."""
    with shell.step("a bare up: the GPU stack, created"):
        shell.run("docker", "tag", COMPUTE_IMAGE, "kvplane-compute:test-cuda")
        bare = Stack(shell, ROOT, {**settings, "KVPLANE_GRAFANA_IMAGE": settings["KVPLANE_PROMETHEUS_IMAGE"]})
        del bare.settings["COMPOSE_PROFILES"]
        bare.compose("up", "--no-start", "--no-build")
        services = bare.services()
        expected = {"cache", "pod", "compute", "prometheus", "grafana"}
        if services != expected:
            raise FailedError(f"a bare up creates {sorted(services)}, not {sorted(expected)}")
        devices = bare.container("compute")["HostConfig"]["DeviceRequests"]
        if not devices or devices[0]["Capabilities"] != [["gpu"]]:
            raise FailedError(f"the compute service asks for no GPU: {devices}")
        bare.remove()


def _stack(shell: Shell, stack: Stack) -> None:
    with shell.step("up, until healthy"):
        stack.compose("up", "--detach", "--no-build", *SERVICES)
        stack.wait_healthy("cache", "compute-cpu")
        check_hardening(stack)
        torch = stack.compose(
            "exec", "-T", "cache", "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"
        )
        if torch.strip() != "None":
            raise FailedError("the cache image has torch")
    with shell.step("the SDK's example from outside, over published ports"):
        print(f"   {traffic.example(ROOT)}")
    with shell.step("an attached engine in a container of its own"):
        print(f"   {stack.compose('run', '--rm', '-T', '--no-deps', 'engine-cpu').strip().splitlines()[-1]}")
    with shell.step("the cache service is killed"):
        before: list[tuple[int, int]] = []
        seconds, hit = traffic.live_through(lambda: before.append(stack.crash("cache")))
        stack.wait_restarted("cache", before[0])
        stack.wait_healthy("cache")
        print(
            f"   the running sequence went on after {seconds:.1f} s; {hit} of {len(traffic.PROMPT)} prompt tokens hit"
        )
    with shell.step("the compute service is killed"):
        crashed = stack.crash("compute-cpu")
        stack.wait_restarted("compute-cpu", crashed)
        stack.wait_healthy("compute-cpu")
        # The pod kept its /dev/shm.
        if "memory taken up" not in stack.compose("logs", "compute-cpu"):
            raise FailedError("the compute service has not found its memory again")
    # After the restarts: counters begin at 0 again.
    with shell.step("a pool that is too small: waiting, eviction, preemption"):
        print(f"   {traffic.example(ROOT, *PRESSURE)}")
    with shell.step("Prometheus: targets, queries of the dashboard, rules"):
        monitoring.wait_targets()
        traffic.refused_step()
        queries = {**monitoring.dashboard_queries(ROOT), **monitoring.rule_queries(ROOT)}
        series = monitoring.check_queries(queries)
        rules, alerts = monitoring.check_rules()
        for query in ("kvplane_hit_tokens_total", "kvplane_preemptions_total", "kvplane_evicted_blocks_total"):
            if not monitoring.value(query) > 0:
                raise FailedError(f"{query} has not counted what was done")
        print(
            f"   {len(queries)} queries have {series} series, {rules} rules are evaluated, alerts: {alerts or 'none'}"
        )


def _tls(shell: Shell, settings: dict[str, str], work: Path) -> None:
    """The same containers with mutual TLS: the example goes in with a certificate, and not without."""
    certificates = work / "certs"
    with shell.step("mutual TLS: certificates, up, the example from outside"):
        shell.run(ROOT / "deploy/make-test-ca", certificates)
        secured = Stack(shell, ROOT, {**settings, "KVPLANE_CERTS": str(certificates)}, ("docker-compose.tls.yml",))
        secured.compose("up", "--detach", "--no-build", "cache", "pod", "compute-cpu")
        secured.wait_healthy("cache", "compute-cpu")
        given = [
            word
            for name, file in (("ca", "ca.pem"), ("certificate", "client.pem"), ("key", "client.key"))
            for word in (f"--tls-{name}", str(certificates / file))
        ]
        print(f"   {traffic.example(ROOT, *given)}")
        traffic.shut_out(None)
        traffic.shut_out(certificates / "ca.pem")
        inside = secured.compose("run", "--rm", "-T", "--no-deps", "engine-cpu").strip().splitlines()[-1]
        print(f"   {inside}")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


if __name__ == "__main__":
    sys.exit(main())
