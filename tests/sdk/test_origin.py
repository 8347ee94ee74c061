"""A run folder remembers where its environment came from: scripts, modules, notebooks, and what cannot be loaded again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk import origin, registry
from relax_sdk.cli import app
from relax_sdk.errors import ConfigError, RegistryError
from relax_sdk.origin import COPY, NOTE, load_origin
from relax_sdk.runtime import Job

ENV = """
import relax_sdk as relax
import rows

class Adder(relax.Env):
    version = "first"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"{options['task']['a']} + 1?", {}

    def step(self, action):
        return None, 1.0, True, False, {}
"""
REGISTER = """
relax.register("adder-v0", Adder, tasks={"train": lambda: rows.rows(), "eval": [{"a": 7}]})
"""
TRAIN = """
class Nothing:
    def fit(self, job, observer):
        pass

relax.Trainer("adder-v0", folder="run", runtime=Nothing()).fit(steps=3, progress=False)
"""


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a loaded environment changes in this process is undone; the programs of these tests have a helper module."""
    registry.discover()
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rows.py").write_text("def rows():\n    return [{'a': 1}, {'a': 2}]\n")
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """`script(text)` runs a program in a process of its own; the run folder it leaves."""

    def run(text: str, *command: str) -> Path:
        (tmp_path / "adder.py").write_text(text)
        arguments = command or (str(tmp_path / "adder.py"),)
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return tmp_path / "run"

    return run


def guarded(text: str = TRAIN) -> str:
    return 'if __name__ == "__main__":\n' + textwrap.indent(text, "    ")


def asked(spec: relax.EnvSpec) -> Any:
    """What the environment asks for the first task of each split."""
    return [spec.make().reset(options={"task": split.row(0)})[0] for split in spec.splits().values()]  # type: ignore[index]


def test_a_script_is_imported_without_its_main_part(script, capsys, tmp_path):
    folder = script(ENV + REGISTER + guarded())
    spec, agent = load_origin(folder, "adder-v0")
    assert (spec.id, agent, asked(spec)) == ("adder-v0", None, ["1 + 1?", "7 + 1?"])
    assert f"loaded from {tmp_path / 'adder.py'}" in capsys.readouterr().err


def test_a_guarded_script_is_loaded_as_it_is_now(script, tmp_path):
    folder = script(ENV + REGISTER + guarded())
    changed = (tmp_path / "adder.py").read_text().replace('"first"', '"second"')
    (tmp_path / "adder.py").write_text(changed)
    assert load_origin(folder, "adder-v0")[0].load().version == "second"


def test_a_script_without_a_main_part_is_not_run_again(script, capsys):
    folder = script(ENV + REGISTER + TRAIN + "open('ran', 'a').write('once')")
    spec, _ = load_origin(folder, "adder-v0")
    assert asked(spec) == ["1 + 1?", "7 + 1?"]
    assert (folder.parent / "ran").read_text() == "once"
    said = capsys.readouterr().err
    assert f"loaded from {folder / COPY}, as it was when the run began" in said and "__main__" in said


def test_what_was_defined_in_no_file_is_loaded_from_the_copy(script):
    folder = script("", "-c", ENV + REGISTER + TRAIN)
    assert json.loads((folder / NOTE).read_text())["file"] is None
    assert asked(load_origin(folder, "adder-v0")[0]) == ["1 + 1?", "7 + 1?"]


def test_a_module_that_registers_when_it_is_imported(script, tmp_path):
    (tmp_path / "mine.py").write_text(ENV + REGISTER)
    folder = script("import relax_sdk as relax\nimport mine\n" + TRAIN)
    note = json.loads((folder / NOTE).read_text())
    assert (note["module"], note["folder"]) == ("mine", str(tmp_path))
    assert asked(load_origin(folder, "adder-v0")[0]) == ["1 + 1?", "7 + 1?"]


def test_a_file_that_is_gone_leaves_the_copy(script, tmp_path):
    (tmp_path / "mine.py").write_text(ENV + REGISTER)
    folder = script("import relax_sdk as relax\nimport mine\n" + TRAIN)
    (tmp_path / "mine.py").unlink()
    assert asked(load_origin(folder, "adder-v0")[0]) == ["1 + 1?", "7 + 1?"]


def test_without_a_copy_the_error_says_how_to_give_the_environment(script, tmp_path):
    folder = script(ENV + REGISTER + TRAIN)
    note = json.loads((folder / NOTE).read_text())
    (folder / NOTE).write_text(json.dumps(note | {"no_copy": "with its tasks it is larger than 64 MiB"}))
    (folder / COPY).unlink()
    with pytest.raises(RegistryError, match=r"larger than 64 MiB.*--env package\.module:Class.*Run\.load\(folder, env="):
        load_origin(folder, "adder-v0")
    (tmp_path / "later.py").write_text(ENV)
    spec, _ = load_origin(folder, "adder-v0", f"{tmp_path / 'later.py'}:Adder")
    assert spec.id == "adder-v0" and spec.load().version == "first"


def test_tasks_that_are_too_large_are_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "COPY_LIMIT", 1000)

    class Large(relax.Env):
        tasks = ({"a": "x" * 2000},)

    origin.keep_origin(registry.get_spec(Large), None, tmp_path)
    assert "larger than" in json.loads((tmp_path / NOTE).read_text())["no_copy"] and not (tmp_path / COPY).exists()


def test_code_that_another_user_s_folder_names_is_not_run(script, monkeypatch):
    folder = script(ENV + REGISTER + guarded())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RegistryError, match="belongs to another user"):
        load_origin(folder, "adder-v0")


def test_what_is_registered_here_is_used(script):
    folder = script(ENV + REGISTER + TRAIN)

    class Adder(relax.Env):
        version = "mine"

    relax.register("adder-v0", Adder)
    assert load_origin(folder, "adder-v0")[0].load() is Adder


def test_tasks_that_were_given_beside_the_class_are_not_lost(script, tmp_path):
    (tmp_path / "mine.py").write_text(ENV)
    given = 'relax.EnvSpec("adder-v0", mine.Adder, tasks=[{"a": 41}])'
    folder = script("import relax_sdk as relax\nimport mine\n" + TRAIN.replace('"adder-v0"', given))
    assert asked(load_origin(folder, "adder-v0")[0]) == ["41 + 1?"]


def test_a_run_that_went_on_is_loaded_from_its_code_still(script, tmp_path):
    (tmp_path / "mine.py").write_text(ENV + REGISTER)
    folder = script("import relax_sdk as relax\nimport mine\n" + TRAIN)
    spec, agent = load_origin(folder, "adder-v0")
    origin.keep_origin(spec, agent, folder)
    assert json.loads((folder / NOTE).read_text())["from_code"]


def test_an_agent_is_remembered(script):
    command = TRAIN.replace('folder="run"', 'folder="run", agent=["python", "play.py"]')
    assert load_origin(script(ENV + REGISTER + command), "adder-v0")[1] == ["python", "play.py"]


def test_an_agent_that_is_a_function_is_remembered(script):
    function = "async def play(session):\n    return 'played'\n"
    folder = script(ENV + REGISTER + function + guarded(TRAIN.replace('folder="run"', 'folder="run", agent=play')))
    agent = load_origin(folder, "adder-v0")[1]
    assert callable(agent) and agent.__name__ == "play"


def test_going_on_takes_environment_and_agent_from_the_folder(script):
    command = TRAIN.replace('folder="run"', 'folder="run", agent="python play.py", max_staleness=3')
    trainer = relax.Trainer.from_run(script(ENV + REGISTER + command))
    assert (trainer.spec.id, trainer.agent, trainer.config.max_staleness) == ("adder-v0", "python play.py", 3)


def test_a_script_that_trains_when_it_is_imported_is_told_so(script, tmp_path):
    script(ENV + REGISTER + TRAIN)
    with pytest.raises(ConfigError, match=r"adder\.py calls fit\(\) while it is only imported.*__main__"):
        registry.get_spec(f"{tmp_path / 'adder.py'}:Adder")


def test_figures_need_no_environment(script):
    folder = script(ENV + REGISTER + TRAIN)
    (folder / NOTE).unlink()
    rows = [{"step": i, "reward": 0.5, "seconds_step": 1.0, "staleness_max": 0, "time": 100.0 + i} for i in range(1, 8)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = relax.Run.load(folder)
    assert list(run.history.index) == list(range(1, 8)) and run.plot() is not None
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "reward 0.500" in done.output
    with pytest.raises(RegistryError, match=r"does not say where its environment came from.*unknown environment 'adder-v0'"):
        run.evaluate(progress=False)


def test_a_relative_folder_is_as_good_as_an_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = relax.Trainer("tone-v0").config
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.json").write_text(json.dumps(config.to_dict()))
    run = relax.Run.load("runs/a")
    store, job = relax.MediaStore("runs/a/media"), Job(registry.get_spec("tone-v0"), config, Path("runs/a"))
    monkeypatch.chdir("/")
    assert run.folder == job.folder == tmp_path / "runs/a" and store.root == tmp_path / "runs/a/media"


def test_import_strings_look_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text(ENV)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert registry.get_spec("plain:Adder").load().version == "first"
    assert sys.path[-1] == str(tmp_path)  # so that child processes, which are given the path, find it too


def test_a_class_named_by_its_module_has_the_tasks_it_was_registered_with(tmp_path, monkeypatch):
    (tmp_path / "full.py").write_text(ENV + REGISTER)
    monkeypatch.chdir(tmp_path)
    assert asked(registry.get_spec("full:Adder")) == ["1 + 1?", "7 + 1?"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("broken:Adder", "import relax_sdk\n1 / 0\n", r"raised ZeroDivisionError.*broken\.py:2"),
        ("nowhere:Adder", "", "current folder"),
    ],
)
def test_what_cannot_be_imported_is_said_with_its_line(tmp_path, monkeypatch, name, text, why):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RegistryError, match=why):
        registry.get_spec(name)


def test_an_evaluation_without_such_a_split_starts_no_engine(script):
    folder = script(ENV + REGISTER.replace(', "eval": [{"a": 7}]', "") + TRAIN)

    class Engines:
        def open_model(self, job: Job, tell: Any) -> Any:
            raise AssertionError("an engine was started")

    run = relax.Run.load(folder)
    run._runtime = Engines()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"adder-v0 has no 'eval' split; there are train; register it with tasks="):
        run.evaluate(progress=False)


def test_a_class_given_in_place_of_the_run_s_environment_gets_the_run_s_tasks(script):
    folder = script(ENV + REGISTER + TRAIN)

    class Changed(relax.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"{(options or {})['task']['a']} and 1?", {}

    spec, _ = load_origin(folder, "adder-v0", Changed)
    assert (spec.id, asked(spec)) == ("adder-v0", ["1 and 1?", "7 and 1?"])

    class Own(Changed):
        tasks = [{"a": 3}]

    assert asked(load_origin(folder, "adder-v0", Own)[0])[0] == "3 and 1?"
    (folder / COPY).unlink()
    assert load_origin(folder, "adder-v0", Changed)[0].tasks is None
