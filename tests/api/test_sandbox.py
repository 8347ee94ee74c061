"""The attacker's table: what uploaded code tries inside a real worker, and what comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from relax_server.api.environments.printed import LOG_LIMIT
from relax_server.api.environments.sandbox import Sandbox, SandboxUnavailable
from relax_server.api.environments.visible import mounts, python_paths

from relax_sdk import printable

PROGRAM = Path(__file__).parents[1] / "sandbox_attacks.py"
NORMAL_USER = 54_321
SECRET = "sk-relax-of-the-admin"

CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
table = ctypes.CDLL("libseccomp.so.2")
def call(name, *arguments):
    number = table.seccomp_syscall_resolve_name(name.encode())
    result = libc.syscall(number, *arguments)
    return os.strerror(ctypes.get_errno()) if result < 0 else "done"
"""
FILL = """
import os, socket, time
def fill(one, other):
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(1 << 16))
    except BlockingIOError:
        return one, other
"""
REFUSED = "Operation not permitted"
UNKNOWN = "Function not implemented"


@dataclass(frozen=True)
class Attack:
    """Something that uploaded code tries."""

    code: str
    """Statements; the value of `out` is what it found out."""
    comes_to: str
    """Some of these words, divided by `|`, are in what it is answered with."""


def reading(path: str) -> Attack:
    return Attack(f"out = open({path!r}, 'rb').read()[:200]", "FileNotFoundError|PermissionError")


def writing(path: str) -> Attack:
    return Attack(f"out = open({path!r}, 'a').write('was here')", "OSError|PermissionError|FileNotFoundError")


def calling(name: str, *arguments: Any, comes_to: str = REFUSED) -> Attack:
    return Attack(f"{CALLS}\nout = call({', '.join(map(repr, (name, *arguments)))})", comes_to)


NEW_USER, NEW_MOUNTS = 0x1000_0000, 0x0002_0000
ATTACKS = {
    # ------------------------------------------------------------------------------------------- files
    "passwords": reading("/etc/shadow"),
    "users": reading("/etc/passwd"),
    "the admin's key": reading("<folder>/admin.key"),
    "the journal": reading("<folder>/journal.db"),
    "an admin key of its own": Attack(
        "import sqlite3\nc = sqlite3.connect('<folder>/journal.db')\nc.execute(\"insert into keys values ('mine')\")\n"
        "c.commit()\nout = 'inserted'",
        "OperationalError",
    ),
    "the folder's names": Attack("import os; out = os.listdir('<folder>')", "FileNotFoundError|PermissionError"),
    "its own log": reading("<folder>/logs/env-attacker.log"),
    "another run": reading("<folder>/runs/t_1/config.json"),
    "homes": Attack("import glob; out = glob.glob('/root/.bash*') + glob.glob('/home/*/.bash*')", "[]"),
    "open files": Attack(
        "import os\nout = [p for f in os.listdir('/proc/self/fd') if (p := os.path.realpath(f'/proc/self/fd/{f}'))"
        ".startswith('<folder>')]",
        "[]",
    ),
    # --------------------------------------------------------------------------- what would outlive it
    "a library": writing("/usr/lib/python3/dist-packages/evil.pth"),
    "this package": writing("<source>"),
    "the root": writing("/evil"),
    "a device": writing("/dev/evil"),
    "the system's settings": writing("/proc/sys/kernel/core_pattern"),
    "the service's folder": writing("<folder>/evil"),
    "temporary files": Attack(
        "for place in ('/tmp', '/var/tmp', '/dev/shm'): open(place + '/relax-evil', 'w').write('x')\nout = 'private'", "private"
    ),
    # ---------------------------------------------------------------------------------- other processes
    "processes": Attack("import os; out = len([p for p in os.listdir('/proc') if p.isdigit()])", "2|3"),
    "command lines": Attack(
        "import glob; out = [c for f in glob.glob('/proc/[0-9]*/cmdline') if b'pytest' in (c := open(f, 'rb').read())]", "[]"
    ),
    "environment variables": Attack(
        "import glob\nfound = []\nfor f in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: found += [f] if b'" + SECRET + "' in open(f, 'rb').read() else []\n    except OSError: pass\nout = found",
        "[]",
    ),
    "a signal": Attack("import os; os.kill(<pid>, 15); out = 'sent'", "ProcessLookupError"),
    "another's priority": Attack("import os; os.setpriority(os.PRIO_PROCESS, <pid>, 19); out = 'set'", "ProcessLookupError"),
    "another worker's files": reading("/tmp/mine"),
    "a debugger": calling("ptrace", 16, 1, 0, 0),
    "another's memory": calling("process_vm_readv", 1, 0, 0, 0, 0, 0),
    # ------------------------------------------------------------------------------------------ network
    "a service of this machine": Attack(
        "import socket; socket.create_connection(('127.0.0.1', <port>), 5); out = 'connected'", "ConnectionRefusedError"
    ),
    "a service elsewhere": Attack("import socket; socket.create_connection(('192.0.2.1', 80), 5)", "unreachable"),
    "a socket without a file": Attack(
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0<abstract>'); out = 'connected'", "ConnectionRefusedError"
    ),
    "a socket's file": Attack("import socket; socket.socket(socket.AF_UNIX).connect('<path>'); out = 1", "FileNotFoundError"),
    "the machine around this one": Attack("import socket; socket.socket(40, socket.SOCK_STREAM); out = 'made'", REFUSED),
    "raw packets": Attack("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); out = 'made'", REFUSED),
    "the kernel's ciphers": Attack("import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET, 0)", REFUSED),
    # ------------------------------------------------------------------------------------------- rights
    "root": Attack("import os; os.setuid(0); out = os.getuid()", f"{REFUSED}|Invalid argument"),
    "its user": Attack("import os; out = os.getuid() > 1000 and os.getgid() > 1000 and 0 not in os.getgroups()", "True"),
    "capabilities": Attack(
        "out = [l.split()[1].strip('0') for l in open('/proc/self/status') if l[:6] in ('CapEff', 'CapPrm', 'CapAmb')]",
        "['', '', '']",
    ),
    "a user namespace": calling("unshare", NEW_USER),
    "a process in a user namespace": calling("clone", NEW_USER | 17, 0, 0, 0, 0),
    "a process in a new world": calling("clone3", 0, 88, comes_to=UNKNOWN),
    "a mount namespace": calling("unshare", NEW_MOUNTS),
    "another's namespace": calling("setns", 0, 0),
    "a mount": calling("mount", 0, 0, 0, 0, 0),
    "a new root": calling("chroot", 0),
    "a program in the kernel": calling("bpf", 0, 0, 0),
    "a module": calling("init_module", 0, 0, 0),
    "another kernel": calling("kexec_load", 0, 0, 0, 0),
    "keys of the kernel": calling("keyctl", 0, 0),
    "io_uring": calling("io_uring_setup", 1, 0),
    "events of the processor": calling("perf_event_open", 0, 0, 0, 0, 0),
    "page faults of its own": calling("userfaultfd", 0),
    "typing into a terminal": Attack("import fcntl; fcntl.ioctl(2, 0x5412, b'x')", REFUSED),
    # ------------------------------------------------------------------------------------------- memory
    "a file of memory": calling("memfd_create", b"x", 0, comes_to=UNKNOWN),
    "shared memory of System V": calling("shmget", 0, 1 << 20, 0o1600),
    "memory": Attack("held = []\nwhile True: held.append(bytearray(b'x') * (16 << 20))", "MiB of memory"),
    "memory asked for at once": Attack("out = len(bytearray(1 << 40))", "MemoryError"),
    "memory of many": Attack(
        "import os, time\nfor _ in range(3): os.fork()\nheld = bytearray(b'x') * (80 << 20)\ntime.sleep(60)", "MiB of memory"
    ),
    "memory as files": Attack("with open('/tmp/big', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", "OSError"),
    "memory as many files": Attack(
        "i = 0\nwhile True:\n  open(f'/tmp/{i}', 'w').close()\n  i += 1", "MiB of memory|No space left"
    ),
    "memory as full sockets": Attack(
        f"{FILL}\nos.fork(), os.fork()\nheld = [s for _ in range(400) for s in fill(*socket.socketpair())]\ntime.sleep(60)",
        "MiB of memory",
    ),
    "memory as connections": Attack(
        f"{FILL}\nserver = socket.create_server(('127.0.0.1', 0), backlog=500)\nheld = []\nfor _ in range(250):\n"
        "  one = socket.create_connection(server.getsockname())\n  held += [*fill(one, server.accept()[0])]\ntime.sleep(60)",
        "MiB of memory",
    ),
    "larger buffers": Attack(
        "import socket\na, b = socket.socketpair()\nbefore = a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)\n"
        "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)\n"
        "out = before == a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)",
        "True",
    ),
    "larger pipes": Attack("import fcntl, os; out = fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)", REFUSED),
    # --------------------------------------------------------------------------------- processes, and what it prints
    "processes without end": Attack(
        "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)", "processes; allowed"
    ),
    "files without end": Attack("held = [open('/dev/null') for _ in range(100_000)]", "Too many open files"),
    "escapes": Attack(
        "import sys; sys.stderr.write('\\x1b]0;owned\\x07\\x1b[2J\\u202e'); sys.stderr.flush(); out = 'said'", "said"
    ),
    "a log without end": Attack("import os\nfor _ in range(40): os.write(2, b'x' * (1 << 20))\nout = 'said'", "said"),
    # -------------------------------------------------------------------------------- its connection to the service
    "an answer without end": Attack("out = 'x' * (80 << 20)", "allowed: 67108864|MiB of memory"),
    "nonsense to the service": Attack(
        "import os, sys, time; os.write(int(sys.argv[1]), b'\\xff' * 8); time.sleep(9)", "ended: "
    ),
}
LIMITS = {"memory": 400 << 20, "files": 64 << 20, "processes": 12, "cpus": 2.0}


@dataclass
class Battlefield:
    """What came of all attacks."""

    answers: dict[str, str]
    log: str
    kept: list[str]
    """Files that outlived the worker where it had tried to leave some."""


def lay_out(folder: Path) -> None:
    """Make what a service's folder holds."""
    for name, text in (("admin.key", SECRET), ("runs/t_1/config.json", "{}"), ("logs/serve.log", "")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with contextlib.closing(sqlite3.connect(folder / "journal.db")) as journal:
        journal.execute("create table keys (secret text)")


def readable_by_all(python: Path) -> list[str]:
    """Options of bubblewrap that show a Python below root's home, where it is there, to all users."""
    home = Path("/root")
    if not python.is_relative_to(home):
        return []
    options = ["--perms", "0755", "--tmpfs", str(home)]
    for parent in reversed(python.parents):
        options += ["--perms", "0755", "--dir", str(parent)] if parent.is_relative_to(home) else []
    return [*options, "--ro-bind", str(python), str(python)]


def attack(folder: Path, attacks: dict[str, str], user: int, **plan: Any) -> dict[str, str]:
    """Answers to attacks in a worker of a service that runs as a user; one that is not ours has less than our share of time."""
    plan |= {"attacks": attacks, "limits": LIMITS}
    command = [sys.executable, "-P", str(PROGRAM), str(folder), json.dumps(plan)]
    if user != os.geteuid():
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
        command = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--", "nice", "-n", "10", *command]
        command = ["bwrap", "--dev-bind", "/", "/", *readable_by_all(Path(sys.base_prefix)), "--", *command]
    variables = os.environ | {"SECRET": SECRET, "HOME": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def place_for_a_service() -> tempfile.TemporaryDirectory[str]:
    """A folder that other users can reach, too, which those of tests are not."""
    return tempfile.TemporaryDirectory(prefix="relax-service-", ignore_cleanup_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A service's folder."""
    with place_for_a_service() as name:
        lay_out(Path(name))
        yield Path(name)


USERS = ["as who runs the tests", "as a normal user"]


def user_of(who: str) -> int:
    if who == USERS[0]:
        return os.geteuid()
    if os.geteuid() != 0:
        pytest.skip("only root can run a service as another user; the tests run as a normal user already")
    return NORMAL_USER


@pytest.fixture(scope="module", params=USERS)
def battlefield(request: pytest.FixtureRequest, sandbox: None) -> Iterator[Battlefield]:
    """All attacks carried out, one after the other."""
    user = user_of(request.param)
    with (
        tempfile.TemporaryDirectory(prefix="relax-service-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as open_,
    ):
        folder, sleeper = Path(name), subprocess.Popen(["sleep", "600"])
        open_.callback(sleeper.wait)
        open_.callback(sleeper.kill)
        lay_out(folder)
        port, abstract, path = (open_.enter_context(it) for it in listeners(folder))
        filled = {"folder": folder, "port": port.getsockname()[1], "abstract": abstract.getsockname()[1:].decode()}
        filled |= {"path": path.getsockname(), "pid": sleeper.pid, "source": printable.__file__}
        attacks = {}
        for title, one in ATTACKS.items():
            attacks[title] = one.code
            for word, value in filled.items():
                attacks[title] = attacks[title].replace(f"<{word}>", str(value))
        answers = attack(folder, attacks, user, others=1)
        kept = [str(place) for parent in ("/tmp", "/var/tmp", "/dev/shm") for place in Path(parent).glob("relax-evil*")]
        assert sleeper.poll() is None
        yield Battlefield(answers, (folder / "logs" / "env-attacker.log").read_bytes().decode(), kept)


def listeners(folder: Path) -> tuple[socket.socket, socket.socket, socket.socket]:
    """Services of this machine: on TCP, on a socket without a file, and on one with a file."""
    found = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    found[1].bind(f"\0relax-{os.getpid()}-{folder.name}")
    found[2].bind(f"{folder}/socket")
    for one in found[1:]:
        one.listen()
    return found


@pytest.mark.parametrize("title", ATTACKS)
def test_each_attack_is_refused_or_contained(battlefield: Battlefield, title: str) -> None:
    answer, words = battlefield.answers[title], ATTACKS[title].comes_to.split("|")
    assert any(word in answer for word in words), f"came to: {answer[:500]}"


def test_nothing_of_the_attacker_is_left(battlefield: Battlefield) -> None:
    assert not battlefield.kept


def test_its_log_is_harmless_and_bounded(battlefield: Battlefield) -> None:
    assert "\x1b" not in battlefield.log and len(battlefield.log) < LOG_LIMIT + (4 << 20)


@pytest.mark.parametrize("who", USERS)
def test_without_the_sandbox_the_same_attacks_succeed(folder: Path, who: str) -> None:
    """The table can tell: what the sandbox refuses is done by code that is trusted."""
    titles = ["users", "a file of memory", "shared memory of System V", "command lines"]
    titles += ["an admin key of its own"] if who != USERS[0] else []
    attacks = {title: ATTACKS[title].code.replace("<folder>", str(folder)) for title in titles}
    attacks["command lines"] = attacks["command lines"].replace("b'pytest'", "b'sandbox_attacks'")
    answers = attack(folder, attacks, user_of(who), trusted=True)
    for title, answer in answers.items():
        assert not any(word in answer for word in ATTACKS[title].comes_to.split("|")), f"{title}: {answer[:200]}"


# ------------------------------------------------------------------------------------------------------- no sandbox


async def test_without_bubblewrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap is not installed.*apt install bubblewrap.*--trust-uploads"):
        await Sandbox(tmp_path).require()
    await Sandbox(tmp_path, trusted=True).require()


async def test_a_bubblewrap_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as one that the system forbids to make namespaces; installed later, it is found without a restart."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    program.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    tried = Sandbox(tmp_path)
    with pytest.raises(SandboxUnavailable, match="setting up uid map: Permission denied"):
        await tried.require()
    program.write_text("#!/bin/sh\n")
    with pytest.raises(SandboxUnavailable, match="exit code 0"):  # it did not run what it was told to
        await tried.require()


def test_only_what_can_be_imported_of_a_folder_of_sources_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    for name in ("package/__init__.py", "module.py", "secret.env", "runs"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    options = mounts(1 << 20, Path("/nowhere"), network=False)
    shown = {Path(place).name for place in options if place.startswith(f"{tmp_path}/")}
    assert shown == {"package", "module.py"}


def test_a_folder_that_may_not_be_looked_into_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the packages of an editable installation; root may look everywhere, so the system's answer is given here."""
    for name in ("mine", "closed", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    is_file, iterdir = Path.is_file, Path.iterdir

    def asked(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    def listed(path: Path) -> Iterator[Path]:
        if path.name == "whole":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "is_file", asked)
    monkeypatch.setattr(Path, "iterdir", listed)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "whole"), str(tmp_path)])
    shown = set(python_paths())
    assert tmp_path / "mine" in shown and tmp_path / "closed" not in shown and tmp_path / "whole" in shown, "as a package"


def test_a_services_folder_inside_a_package_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package" / "service").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    options = mounts(1 << 20, tmp_path / "package" / "service", network=False)
    assert options[options.index(str(tmp_path / "package" / "service")) - 1] == "--tmpfs"
