"""The filter of system calls for the processes of workers: made by libseccomp, in the form that bubblewrap loads."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import termios

NEW_ENOUGH = "libseccomp 2.5.2 or newer (Debian, Ubuntu: apt install libseccomp2)"

_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_EQ, _GE, _MASKED_EQ = 4, 5, 7
_UNKNOWN = -1
_LOW = 0xFFFF_FFFF

_REFUSED = (
    *(
        "unshare",
        "setns",
        "mount",
        "umount",
        "umount2",
        "pivot_root",
        "chroot",
        "open_tree",
        "move_mount",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "mount_setattr",
    ),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    *(
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "fanotify_init",
        "lookup_dcookie",
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
    ),
    *("add_key", "request_key", "keyctl"),
    *(
        "kexec_load",
        "kexec_file_load",
        "init_module",
        "finit_module",
        "create_module",
        "delete_module",
        "query_module",
        "get_kernel_syms",
    ),
    *(
        "reboot",
        "swapon",
        "swapoff",
        "acct",
        "quotactl",
        "quotactl_fd",
        "syslog",
        "nfsservctl",
        "vhangup",
        "uselib",
        "personality",
        "modify_ldt",
        "iopl",
        "ioperm",
    ),
    *(
        "settimeofday",
        "stime",
        "clock_settime",
        "clock_settime64",
        "clock_adjtime",
        "clock_adjtime64",
        "adjtimex",
        "sethostname",
        "setdomainname",
    ),
    *("name_to_handle_at", "open_by_handle_at", "vm86", "vm86old"),
    *("shmget", "shmat", "shmctl", "msgget", "semget", "mq_open"),
)
"""What a worker is never allowed: namespaces and mounts, other processes, the kernel's own affairs, keys, and queues and memory
of System V, which belong to no process."""
_AS_IF_UNKNOWN = ("clone3", "memfd_create", "memfd_secret")
"""Answered as by a kernel that does not have them, so that libraries take another way: flags of `clone3` cannot be looked at by
a filter, and a file of `memfd_create` is memory that no limit of a process counts."""
_NAMESPACES = (0x0000_0080, 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
"""Flags of `clone` that make one: time, mount, cgroup, uts, ipc, user, pid, net."""
_FAMILIES = (*range(3, 10), *range(11, 16))
"""Families of sockets below netlink's that nobody needs; above netlink's none is allowed, such as AF_VSOCK to the host."""
_FIRST_FAMILY_ABOVE_NETLINK = 17


class _Argument(ctypes.Structure):
    """`struct scmp_arg_cmp`: a condition on one argument of a call."""

    _fields_ = (("number", ctypes.c_uint), ("how", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class _Filter:
    """A filter that allows what no rule names."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_release.argtypes = (ctypes.c_void_p,)
        library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
        library.seccomp_rule_add_array.argtypes = (
            *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
            ctypes.POINTER(_Argument),
        )
        self._context = library.seccomp_init(ctypes.c_uint32(_ALLOW))

    def refuse(self, name: str, *conditions: _Argument, code: int = errno.EPERM) -> None:
        """Answer a call with an error where all conditions hold."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number == _UNKNOWN:
            raise OSError(errno.ENOSYS, f"this libseccomp does not know {name}; needed: {NEW_ENOUGH}")
        array = (_Argument * len(conditions))(*conditions)
        failed = self._library.seccomp_rule_add_array(self._context, _ERRNO | code, number, len(conditions), array)
        if failed:
            raise OSError(-failed, f"libseccomp refuses a rule for {name}")

    def write(self, fd: int) -> None:
        """Write the filter's program and let it go."""
        failed = self._library.seccomp_export_bpf(self._context, fd)
        self._library.seccomp_release(self._context)
        if failed:
            raise OSError(-failed, "libseccomp cannot write its filter")


def filter_pipe() -> int:
    """A file descriptor from which the filter is read; whoever starts bubblewrap passes it on and closes it.

    Raises:
        OSError: libseccomp is not there, or too old.
    """
    rules = _Filter(_library())
    for name in _REFUSED:
        rules.refuse(name)
    for name in _AS_IF_UNKNOWN:
        rules.refuse(name, code=errno.ENOSYS)
    for flag in _NAMESPACES:
        rules.refuse("clone", _Argument(0, _MASKED_EQ, flag, flag))
    for family in _FAMILIES:
        rules.refuse("socket", _Argument(0, _MASKED_EQ, _LOW, family))
    rules.refuse("socket", _Argument(0, _GE, _FIRST_FAMILY_ABOVE_NETLINK))
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # answered with success: libraries ask for more and do with less
        rules.refuse(
            "setsockopt", _Argument(1, _MASKED_EQ, _LOW, socket.SOL_SOCKET), _Argument(2, _MASKED_EQ, _LOW, option), code=0
        )
    rules.refuse("fcntl", _Argument(1, _MASKED_EQ, _LOW, fcntl.F_SETPIPE_SZ))
    rules.refuse("ioctl", _Argument(1, _MASKED_EQ, _LOW, termios.TIOCSTI))  # types into the terminal
    reading, writing = os.pipe()  # which takes 64 KiB; the program has a few
    try:
        rules.write(writing)
    finally:
        os.close(writing)
    return reading


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise OSError(errno.ENOENT, f"libseccomp is not installed; needed: {NEW_ENOUGH}") from error
