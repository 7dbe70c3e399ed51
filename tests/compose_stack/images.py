"""What the stack runs on: base image, wheels, the two images, Prometheus."""

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

from compose_stack.engine import install
from compose_stack.shell import FailedError, Shell

SUITE = "bookworm"
PYTHON = "3.11"
"""Python of the suite, and so of the wheels."""
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_GLIBC = ("2_36", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
"""Platform tags of wheels that run in the suite."""
_NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


def base_image(shell: Shell, cache: Path, official: str) -> str:
    """The official base image where it can be pulled, else a stand-in made by debootstrap, kept for the next run."""
    try:
        shell.run("docker", "pull", official, timeout=300)
    except FailedError:
        pass
    else:
        return official
    key = hashlib.sha256(repr((SUITE, BASE_PACKAGES, _NOT_NEEDED)).encode()).hexdigest()[:12]
    image = f"kvplane-standin-base:{key}"
    if not shell.works("docker", "image", "inspect", image):
        install(shell, "debootstrap")
        root = cache / f"base-{os.getpid()}"
        try:
            shell.run(
                *("debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", SUITE, root), timeout=500
            )
            for each in _NOT_NEEDED:
                shutil.rmtree(root / each, ignore_errors=True)
                (root / each).mkdir(parents=True)
            _import(shell, root, image)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return image


def prometheus_image(shell: Shell, cache: Path, base: str, official: str) -> tuple[str, Path | None]:
    """The official image where it can be pulled, else Debian's package over the base; and promtool, if it is here."""
    tool = shutil.which("promtool")
    try:
        shell.run("docker", "pull", official, timeout=300)
    except FailedError:
        pass
    else:
        return official, Path(tool) if tool else None
    context = cache / "prometheus"
    package = context / "package"
    if not (package / "usr/bin/promtool").exists():
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir(parents=True)
        shell.run("apt-get", "download", "prometheus", cwd=context, timeout=120)
        (archive,) = context.glob("prometheus_*.deb")
        shell.run("dpkg-deb", "--extract", archive, package)
        archive.unlink()
    (context / "Dockerfile").write_text(
        f"FROM {base}\n"
        "COPY package/usr/bin/prometheus /usr/bin/prometheus\n"
        "RUN install -d -o 65534 -g 65534 /prometheus\n"
        "USER 65534:65534\n"
        'ENTRYPOINT ["prometheus"]\n'
    )
    image = "kvplane-standin-prometheus:latest"
    shell.run("docker", "build", "--tag", image, context)
    return image, package / "usr/bin/promtool"


def wheels(shell: Shell, root: Path, cache: Path) -> Path:
    """Everything that the CPU image installs, as wheels for the base image's Python. Kept until a pin changes."""
    files = [root / "constraints/run.txt", root / "constraints/images.txt", root / "pyproject.toml"]
    key = hashlib.sha256(b"\0".join(each.read_bytes() for each in files)).hexdigest()[:12]
    folder = cache / f"wheels-{key}"
    if not folder.exists():
        for older in cache.glob("wheels-*"):
            shutil.rmtree(older)
        draft = cache / f"draft-wheels-{os.getpid()}"
        requirements = shell.run(
            sys.executable, root / "deploy/image/requirements.py", root / "pyproject.toml", "compute"
        ).split()
        build = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
        platforms = [*(f"manylinux_{each}_x86_64" for each in _GLIBC), "manylinux2014_x86_64", "linux_x86_64"]
        shell.run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", draft, "--only-binary=:all:"),
            *("--python-version", PYTHON, "--implementation", "cp"),
            *(word for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)),
            *(word for platform in platforms for word in ("--platform", platform)),
            *("-c", files[0], "-c", files[1], *requirements, *build),
            timeout=400,
        )
        draft.rename(folder)
    return folder


def context(shell: Shell, root: Path, folder: Path, wheel_folder: Path | None) -> Path:
    """A build context: the repository's files, this machine's certificates, and wheels. They stay out of the images'
    last stages, and out of the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = shell.run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=root)
    for name in filter(None, listed.split("\0")):
        source, target = root / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    bundle = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    if Path(bundle).exists():
        shutil.copy(bundle, folder / "deploy/image/ca-certificates.crt")
    if wheel_folder is not None:
        for wheel in wheel_folder.glob("*.whl"):
            target = folder / "deploy/image/wheels" / wheel.name
            try:
                os.link(wheel, target)
            except OSError:
                shutil.copy2(wheel, target)
    return folder


def index_arguments() -> str:
    """The index that this machine's pip is set up with, as arguments; empty for pip's own default."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    url = os.environ.get("PIP_INDEX_URL") or (found.stdout.strip() if found.returncode == 0 else "")
    return f"--index-url {url}" if url else ""


def sizes(shell: Shell, *images: str) -> dict[str, int]:
    """Bytes of images."""
    return {each: int(shell.run("docker", "image", "inspect", "--format", "{{.Size}}", each)) for each in images}


def _import(shell: Shell, root: Path, image: str) -> None:
    pack = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    with pack:
        done = subprocess.run(
            ["docker", "import", "-", image], stdin=pack.stdout, env=shell.environment, capture_output=True, text=True
        )
    if done.returncode or pack.returncode:
        raise FailedError(f"docker import: {done.stderr.strip()}")
