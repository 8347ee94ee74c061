"""The registry: names, import strings, conflicts, and what Gymnasium sees."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import relax_sdk as relax
from relax_sdk import registry
from relax_sdk.errors import RegistryError
from relax_sdk.registry import EnvSpec, get_spec, list_envs, register
from relax_sdk.tasks import task_splits


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_specs", {})
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    monkeypatch.setattr(registry, "_discovered", True)


def env_class(reply: str = "hello") -> type[relax.Env]:
    class Greeter(relax.Env):
        def __init__(self, name: str = "you") -> None:
            self.name = name

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed)
            return f"{reply} {self.name}", {}

    return Greeter


class Other(relax.Env):
    tasks = ({"x": 1},)


def rows() -> list[dict[str, int]]:
    return [{"x": 2}, {"x": 3}]


def test_a_registered_class_is_found_by_name_and_by_class() -> None:
    cls = env_class()
    spec = register("greeter-v0", cls, tasks=rows, kwargs={"name": "Ada"}, defaults={"steps": 3})
    assert get_spec("greeter-v0") is get_spec(cls) is get_spec(spec) is spec
    assert spec.make().reset()[0] == "hello Ada" and spec.defaults == {"steps": 3}
    assert [s.id for s in list_envs()] == ["greeter-v0"]


def test_gymnasium_makes_it_too() -> None:
    register("greeter-v0", env_class(), kwargs={"name": "Ada"})
    assert gymnasium.make("relax/greeter-v0").reset(seed=1) == ("hello Ada", {})
    assert gymnasium.make("relax/greeter-v0", name="Bob").reset() == ("hello Bob", {})


def test_a_name_may_have_a_namespace() -> None:
    spec = register("acme/chirp-v0", env_class("chirp"))
    assert get_spec("acme/chirp-v0") is spec and spec.id == "acme/chirp-v0"
    assert gymnasium.make("acme/chirp-v0").reset()[0] == "chirp you"
    assert gymnasium.spec("acme/chirp-v0").namespace == "acme"
    register("acme/chirp-v0", env_class("again"))
    assert gymnasium.make("acme/chirp-v0").reset()[0] == "again you"


def test_the_name_that_gymnasium_knows_is_a_name_here_too() -> None:
    spec = register("greeter-v0", env_class())
    assert get_spec("relax/greeter-v0") is spec
    assert register("relax/other-v0", Other).id == "other-v0"
    assert gymnasium.spec("relax/other-v0").name == "other"


def test_an_environment_of_gymnasium_s_is_not_replaced() -> None:
    gymnasium.register("acme/lander-v0", entry_point=env_class())
    with pytest.raises(RegistryError, match="'acme/lander-v0' is an environment of Gymnasium's already"):
        register("acme/lander-v0", Other)
    assert [s.id for s in list_envs()] == []


@pytest.mark.parametrize(
    ("env", "folder"), [("acme/chirp-v0", "acme-chirp-v0-"), ("relax_envs.tone:ToneEnv", "relax_envs-tone-ToneEnv-")]
)
def test_a_run_s_folder_is_one_word(env: str, folder: str) -> None:
    register("acme/chirp-v0", env_class())
    trainer = relax.Trainer(env)
    assert trainer._run_folder(trainer.config, resume=False).name.startswith(folder)


def test_running_a_notebook_cell_again_replaces_the_class() -> None:
    register("greeter-v0", env_class("hello"))
    register("greeter-v0", env_class("good morning"))
    assert get_spec("greeter-v0").make().reset()[0] == "good morning you"
    assert gymnasium.make("relax/greeter-v0").reset()[0] == "good morning you"


def test_a_name_taken_by_another_class() -> None:
    register("greeter-v0", env_class())
    with pytest.raises(RegistryError, match=r"'greeter-v0' is already registered as .*Greeter; choose another name"):
        register("greeter-v0", Other)
    assert get_spec("greeter-v0").load().__name__ == "Greeter"


@pytest.mark.parametrize("name", ["", "two words", "a/b/c", "/a", "a/", "tab\t", "../x", "a:b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(RegistryError, match="must be one word"):
        register(name, Other)
    assert list_envs() == []


def test_a_name_that_gymnasium_refuses_is_not_half_registered() -> None:
    register("greeter-v1", env_class())
    with pytest.raises(RegistryError, match="'greeter' cannot be an environment's name"):
        register("greeter", env_class())
    assert [s.id for s in list_envs()] == ["greeter-v1"]


def test_an_unknown_name_lists_what_there_is() -> None:
    register("b-v0", env_class())
    register("a-v0", Other)
    with pytest.raises(RegistryError, match=r"unknown environment 'c-v0'; registered: a-v0, b-v0; or name it 'package\."):
        get_spec("c-v0")


def test_import_strings() -> None:
    spec = get_spec("relax_envs.tone:ToneEnv")
    assert spec.load().__name__ == "ToneEnv"
    named = register("tone-again-v0", "relax_envs.tone:ToneEnv", tasks="relax_envs.tone:tasks")
    assert len(task_splits(named.load_tasks())["eval"]) == 256


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("no_such_package.envs:Env", "No module named 'no_such_package'"),
        ("relax_envs.tone:NoSuchEnv", "NoSuchEnv"),
        ("relax_envs.tone:TONES", "not a subclass of relax_sdk.Env"),
        ("relax_envs.tone:make_row", "not a subclass of relax_sdk.Env"),
        ("relax_envs.tone:", "cannot be imported"),
    ],
)
def test_import_strings_that_lead_nowhere(entry: str, why: str) -> None:
    register("lost-v0", entry)  # strings are not followed before they are needed
    for make in (get_spec("lost-v0").make, lambda: get_spec(entry), lambda: gymnasium.make("relax/lost-v0")):
        with pytest.raises(RegistryError, match=why):
            make()


def test_a_class_that_is_not_registered_brings_its_own_tasks() -> None:
    spec = get_spec(Other)
    assert spec == EnvSpec("Other", Other, ({"x": 1},))
    with pytest.raises(RegistryError, match="not a subclass"):
        get_spec(int).load()  # type: ignore[arg-type]


def install(folder: Path, name: str, code: str) -> None:
    """What pip leaves behind of a package with the entry point `relax.envs`."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[relax.envs]\n{name} = {name}\n")


def test_installed_packages_are_discovered_and_broken_ones_left_out(tmp_path: Path) -> None:
    install(tmp_path, "good_envs", "import relax_sdk as relax\nrelax.register('good-v0', relax.Env)")
    install(tmp_path, "bad_envs", "import no_such_module")
    code = """
        import warnings, relax_sdk as relax
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            names = [spec.id for spec in relax.list_envs()]
        assert "good-v0" in names and "tone-v0" in names, names
        assert any("bad_envs 1.2 cannot be imported" in str(w.message) for w in caught), caught
        assert relax.get_spec("good-v0").make() is not None
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path
    )
