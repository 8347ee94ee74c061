"""The pages of the docs name everything public, and the programs in them can be carried out."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer

import relax_sdk as relax
from relax_sdk import registry
from relax_sdk.cli import add_commands, app
from relax_sdk.rewards import score_group
from relax_sdk.trajectory import Trajectory

DOCS = Path(__file__).parent.parent / "docs"
ROWS = [{"sound": relax.Audio.from_array(np.zeros(160), 16_000), "answer": "A"}]
GIVEN: dict[str, dict[str, Any]] = {
    "environments.md": dict(
        train_rows=ROWS,
        eval_rows=ROWS,
        action=relax.AssistantMessage(content=(relax.Text("A"),)),
        self=SimpleNamespace(answer="A"),
    ),
    "reference.md": {},
    "tracking.md": {},
}
"""What the programs of a page take for granted, besides `relax`."""


def test_the_reference_has_every_public_name_and_no_other():
    page = (DOCS / "reference.md").read_text()
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    named |= set(re.findall(r"`(?:relax\.)?(\w*(?:Error|Over|Timeout|Unavailable|Faulty|Denied|Aborted)|__version__)`", page))
    named -= {"ValueError", "LookupError"}
    assert set(relax.__all__) - named == set(), "public, and in no row of docs/reference.md"
    assert named - set(relax.__all__) == set(), "in docs/reference.md, and not public"


def test_links_between_pages_lead_somewhere():
    lost = []
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]*)(?:#[\w-]*)?\)", page.read_text()):
            if target and "://" not in target and not (page.parent / target).exists():
                lost.append(f"{page.name}: {target}")
    assert not lost


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Carries out a page's programs in their order, without training, and returns their names.

    A program that registers an environment finds its name free, though an installed one may have it: in a new program that is
    looked for only when its name is asked for.
    """
    installed = {spec.id: spec for spec in registry.list_envs()}

    def carry_out(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {"relax": relax} | GIVEN[page]
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        assert blocks
        own = re.findall(r"register\(\s*\"([^\"]+)\"", "\n".join(blocks))
        monkeypatch.setattr(registry, "_specs", {id: spec for id, spec in installed.items() if id not in own})
        for code in blocks:
            exec(compile(code.replace(").fit()", ")"), page, "exec"), names)
        return names

    return carry_out


@pytest.mark.parametrize("page", GIVEN)
def test_programs_of_a_page_can_be_carried_out(programs, page: str):
    programs(page)


async def test_the_rubric_and_the_gymnasium_environment_of_the_page_work(programs):
    names = programs("environments.md")
    episodes = [
        Trajectory("t", "e", "0", 0, "g", i, 2, 0, relax.Status.COMPLETED, [], [], reward)
        for i, reward in enumerate((0.5, 1.0))
    ]
    env = type("Story", (relax.Env,), {"rubric": relax.Rubric(group_functions=[names["best_of"]])})
    await score_group(env, episodes)
    assert [episode.rewards["best_of"] for episode in episodes] == [0.0, 1.0]
    assert names["FrozenLake"].shown_as == "image"
    lake = type("Lake", (names["FrozenLake"],), {"shown_as": "ansi"})()
    observation, _ = lake.reset(seed=3, options={"task": {"seed": 3}})
    assert "left, down, right, up" in str(observation[0]) and "FHFH" in str(observation[1])
    answer, *_ = lake.step(relax.AssistantMessage.from_openai({"role": "assistant", "content": "fly"}))
    assert "Answer one of: left" in answer
    lake.close()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_map_of_how_to_look_at_a_run_names_commands_that_there_are(page: str):
    add_commands()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    table = (DOCS.parent / page).read_text().partition("## How to look at a run")[2].partition("\n## ")[0]
    named = set(re.findall(r"`relax ([\w-]+)", table))
    assert len(named) >= 7 and named <= set(commands)
    options = {option for parameter in commands["train"].params for option in parameter.opts}
    assert set(re.findall(r"`(--[\w-]+)", table)) <= options
