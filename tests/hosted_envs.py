"""Environments that tests register, upload and host."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import relax_sdk as relax


class Echo(relax.Env):
    """Two turns with a picture each, a tool, rewards of its own and of the group."""

    modalities: ClassVar[set[str]] = {"image"}
    system_prompt = "be brief"
    version = "7"
    tasks: ClassVar[Any] = {"train": [{"shade": 10 * i} for i in range(6)], "eval": [{"shade": 5}, {"shade": 15}]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> relax.env.ResetResult:
        super().reset(seed=seed)
        self.shade, self.turn = (options or {})["task"]["shade"], 0
        return [self.picture(), f"shade {self.shade}?"], {"seed": seed, "odd": object()}

    def step(self, action: relax.AssistantMessage) -> relax.env.StepResult:
        self.turn += 1
        return [self.picture(), f"you said {action.text}"], np.float32(0.25), self.turn == 2, False, {"turn": self.turn}

    def picture(self) -> relax.Image:
        return relax.Image.from_array(np.full((28, 28, 3), self.shade, np.uint8))

    @relax.tool
    def look(self, where: str) -> relax.ToolResult:
        """Look somewhere."""
        return relax.ToolResult([self.picture(), f"nothing {where}"], reward=0.5)

    @relax.reward(weight=2.0)
    def length(self, trajectory: relax.Trajectory) -> float:
        return float(len(trajectory.turns))

    def format_example(self, rng: np.random.Generator) -> str:
        return chr(ord("A") + int(rng.integers(26)))


def best(trajectories: list[relax.Trajectory]) -> list[float]:
    return [float(t.group_index) for t in trajectories]


class Grouped(Echo):
    rubric = relax.Rubric(group_functions=[best])


class Hostile(relax.Env):
    """Does what the action says, all of it bad."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> relax.env.ResetResult:
        super().reset(seed=seed)
        return "ready", {}

    def step(self, action: relax.AssistantMessage) -> relax.env.StepResult:
        word, _, rest = action.text.partition(" ")
        return str(getattr(self, f"do_{word}")(rest)), 0.0, False, False, {}

    def do_hello(self, _: str) -> str:
        return "hello"

    def do_exit(self, _: str) -> None:
        os._exit(3)

    def do_crash(self, _: str) -> None:
        ctypes.string_at(0)

    def do_memory(self, _: str) -> None:
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20) * 32))

    def do_fork(self, _: str) -> None:
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)

    def do_orphan(self, seconds: str) -> str:
        """A grandchild in a session of its own, which would go on after its worker."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", seconds])
            os._exit(0)
        return "left"

    def do_hang(self, _: str) -> None:
        time.sleep(600)

    def do_spin(self, seconds: str) -> float:
        """Processor seconds that it gets in so many seconds."""
        end, before = time.monotonic() + float(seconds), time.process_time()
        if os.fork() == 0:
            while time.monotonic() < end:
                pass
            os._exit(0)
        while time.monotonic() < end:
            pass
        own = time.process_time() - before
        os.wait()
        return own + os.times().children_user + os.times().children_system

    def do_write(self, path: str) -> str:
        try:
            Path(path).write_text("was here")
        except OSError as error:
            return type(error).__name__
        return "written"

    def do_connect(self, port: str) -> str:
        try:
            socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
        except OSError as error:
            return type(error).__name__
        return "connected"

    def do_secrets(self, _: str) -> str:
        return ",".join(sorted(os.environ))
