"""The sandbox of workers: bubblewrap's namespaces, a filter of system calls, and a user without any rights.

`python -m relax_server.api.environments.sandbox FOLDER` tries it out on this machine, and says why it does not work.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

from relax_sdk.errors import EnvError
from relax_server.api.environments.limits import WorkerLimits
from relax_server.api.environments.syscalls import NEW_ENOUGH, filter_pipe
from relax_server.api.environments.visible import mounts

FIRST_UID, UIDS = 2_000_000, 1_000_000
"""Users that workers run as where the service is root's: each has its own, which nobody else has."""
NOBODY = 65534
"""Its user inside a user namespace, which is the service's own user outside."""
TRIAL_SECONDS = 60.0
INSTALL = f"bubblewrap 0.7 or newer (Debian, Ubuntu: apt install bubblewrap) and {NEW_ENOUGH}"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV")
"""Environment variables that a worker gets; none of them holds a secret."""
_WORKS = "the sandbox works"
_NAME = "relax_server.api.environments.sandbox"


class SandboxUnavailable(EnvError):
    """Code from outside is not run here."""


class Sandbox:
    """Whether code of strangers may be run by a service: in bubblewrap, or without where it is trusted.

    Args:
        folder: of the service, which no worker sees.
        trusted: run it without bubblewrap, with no more protection than a user of its own where the service is root's.
    """

    def __init__(self, folder: Path, trusted: bool = False) -> None:
        self.folder, self.trusted = folder, trusted
        self._works = trusted
        self._trying = asyncio.Lock()

    async def require(self) -> None:
        """Try the sandbox, until it has worked once.

        Raises:
            SandboxUnavailable: it does not work on this machine.
        """
        async with self._trying:
            if self._works:
                return
            said = await self._try()
            if said != _WORKS:
                raise SandboxUnavailable(
                    f"this service does not run code from outside, as the sandbox for it does not work here ({said}): install "
                    f"{INSTALL}, or start the service with --trust-uploads if whoever may upload may do all that it may"
                )
            self._works = True

    async def _try(self) -> str:
        trial = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _NAME, str(self.folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                said, _ = await trial.communicate()
        except TimeoutError:
            trial.kill()
            await trial.wait()
            return f"it did not start within {TRIAL_SECONDS:.0f} s"
        return (said.decode(errors="replace").strip().splitlines() or ["it ended without a word"])[-1]


def enclosed(program: list[str], limits: WorkerLimits, hidden: Path, filter_fd: int) -> list[str]:
    """The command line that runs a program in the sandbox; what starts it passes `filter_fd` on.

    Args:
        program: command line of the program.
        limits: of the worker.
        hidden: folder of the service.
        filter_fd: of `filter_pipe`.

    Raises:
        FileNotFoundError: bubblewrap is not installed.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise FileNotFoundError("bubblewrap is not installed")
    options = ["--die-with-parent", "--new-session", "--hostname", "worker", "--chdir", "/tmp", "--seccomp", str(filter_fd)]
    options += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"]
    if not limits.network:
        options.append("--unshare-net")
    if os.geteuid() == 0:
        # Root lays the mounts, also of a Python that only root can reach; then a user whom nobody else is takes over.
        user = str(FIRST_UID + os.getpid() % UIDS)
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        program = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all", "--", *program]
    else:
        options += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [bubblewrap, *options, *mounts(limits.files, hidden, limits.network), "--", *program]


def environment(home: str) -> dict[str, str]:
    """Environment variables of a worker.

    Args:
        home: the folder that it may write to.
    """
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if paths := os.environ.get("PYTHONPATH"):
        passed["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep))
    passed |= {"HOME": home, "TMPDIR": home, "USER": "worker", "LOGNAME": "worker"}
    passed |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return passed | {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def inside() -> None:
    """Look around as a worker, and tell what is not as it must be.

    Raises:
        RuntimeError: something is not.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    rights = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(status[name], 16)]
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    for wrong, what in (
        (os.getuid() == 0, "it runs as root"),
        (rights, f"it has capabilities ({', '.join(rights)})"),
        (status["Seccomp"] != "2" or status["NoNewPrivs"] != "1", "its system calls are not filtered"),
        (len(processes) > 3, "it sees other processes"),
    ):
        if wrong:
            raise RuntimeError(what)
    import relax_server.api.environments.child  # noqa: F401  (can it be read?)

    Path("/tmp/trial").write_text("can be written")
    print(_WORKS)


def main() -> None:
    """Try the sandbox out, and say in one line what came of it."""
    program = [sys.executable, "-P", "-c", f"from {_NAME} import inside; inside()"]
    try:
        filter_fd = filter_pipe()
        command = enclosed(program, WorkerLimits(), Path(sys.argv[1]), filter_fd)
        trial = subprocess.run(
            command, env=environment("/tmp"), pass_fds=[filter_fd], capture_output=True, text=True, timeout=TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error)
        return
    said = (trial.stdout + trial.stderr).strip().splitlines()
    print(said[-1] if said else f"bubblewrap ended with exit code {trial.returncode}")


if __name__ == "__main__":
    main()
