"""The viewer of a service: behind its keys, each of which sees what was made for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from relax_server.api.keys import KeyRing, Right
from relax_server.journal.schema import trainings
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.named import SERVED, note_served
from service_inside import HELLO, InsideService, service_inside
from sqlalchemy import insert
from viewed_runs import make_run


def made(it: InsideService, name: str, *rights: Right) -> dict[str, str]:
    """The headers of a new key."""
    secret, _ = KeyRing(it.core.journal).create(name, rights)
    return {"Authorization": f"Bearer {secret}"}


async def played(it: InsideService, headers: dict[str, str]) -> None:
    """A session of a key, finished."""
    session = (await it.http.post("/v1/sessions", json={}, headers=headers)).json()
    own, base = {"Authorization": f"Bearer {session['key']}"}, f"/v1/sessions/{session['id']}"
    answer = await it.http.post(f"{base}/openai/v1/chat/completions", json={"messages": HELLO}, headers=own)
    assert answer.status_code == 200, answer.text
    assert (await it.http.post(f"{base}/finish", headers=own)).status_code == 200


async def names(it: InsideService, headers: dict[str, str]) -> list[str]:
    answer = await it.http.get("/view/data/runs.json", headers=headers)
    assert answer.status_code == 200, answer.text
    return [row["name"] for row in answer.json()["runs"]]


async def test_sessions_are_shown_with_their_tokens(processor, tmp_path: Path) -> None:
    async with service_inside(processor, tmp_path) as it:
        await it.finish(await it.played())
        assert (await it.http.get("/view/data/site.json")).json()["keys"] is False
        (name,) = await names(it, {})
        rows = (await it.http.get(f"/view/data/runs/{name}/trajectories.json")).json()
        assert rows["total"] == 1
        shown = (await it.http.get(f"/view/data/runs/{name}/trajectories/{rows['columns']['seq'][0]}.json")).json()
        (sample,) = shown["samples"]
        assert "hello" in "".join(sample["texts"])
        assert (await it.http.get("/view/")).headers["content-type"].startswith("text/html")


async def test_its_folder_alone_tells_which_model_the_tokens_are_of(processor, tmp_path: Path) -> None:
    async with service_inside(processor, tmp_path) as it:
        await it.finish(await it.played())
        folder = it.core.config.folder
    journals = Journals()
    (run,) = FolderSource([folder], journals).runs()
    assert list(run.model_folders()) == [processor.path]
    journals.close()
    note_served(folder, tmp_path / "not there")
    assert not list(run.model_folders())
    (folder / SERVED).write_text("{")
    assert not list(run.model_folders())


async def test_a_key_sees_only_its_own(processor, tmp_path: Path) -> None:
    async with service_inside(processor, tmp_path) as it:
        one, two, root = made(it, "one", "run"), made(it, "two", "run"), made(it, "root", "admin")
        await played(it, one)
        await played(it, two)
        assert (await it.http.get("/view/data/site.json")).json()["keys"] is True
        assert (await it.http.get("/view/data/runs.json")).status_code == 401
        assert (await it.http.get("/view")).headers["location"].endswith("/view/")
        mine, theirs, everything = await names(it, one), await names(it, two), await names(it, root)
        assert len(mine) == len(theirs) == 1 and mine != theirs
        assert set(everything) == {*mine, *theirs}
        for page in (
            "trajectories.json",
            "trajectories/1.json",
            "trajectories/2.json",
            "run.json",
            "live",
            "search.json?q=hello",
        ):
            answer = await it.http.get(f"/view/data/runs/{theirs[0]}/{page}", headers=one)
            assert answer.status_code == 404, page
        own = await it.http.get(f"/view/data/runs/{mine[0]}/trajectories.json", headers=one)
        seqs = own.json()["columns"]["seq"]
        others = [seq for seq in (1, 2) if seq not in seqs]
        assert (await it.http.get(f"/view/data/runs/{mine[0]}/trajectories/{others[0]}.json", headers=one)).status_code == 404


async def test_a_training_run_is_shown_to_its_owner_without_places_on_the_server(processor, tmp_path: Path) -> None:
    make_run(tmp_path / "made", "t_1")
    async with service_inside(processor, tmp_path / "service") as it:
        one, two, root = made(it, "one", "run"), made(it, "two", "run"), made(it, "root", "admin")
        owner = next(row["id"] for row in KeyRing(it.core.journal).list() if row["name"] == "one")
        row = dict(id="t_1", key=owner, request={}, state="completed", step=2, server="x", created_at=0.0, ended_at=1.0)
        with it.core.journal.writing("add a run") as connection:
            connection.execute(insert(trainings).values(row))
        shutil.copytree(tmp_path / "made" / "t_1", it.core.config.folder / "runs" / "t_1")
        assert (await names(it, one), await names(it, two), await names(it, root)) == (["t_1"], [], ["t_1"])
        shown = await it.http.get("/view/data/runs/t_1/trajectories/1.json", headers=one)
        assert shown.status_code == 200 and shown.json()["replay"] is None
        for page in ("run.json", "trajectories/1.json", "logs.json"):
            answer = await it.http.get(f"/view/data/runs/t_1/{page}", headers=one)
            assert answer.status_code == 200 and str(tmp_path) not in answer.text, page
        assert (await it.http.get("/view/data/runs/t_1/logs.json", headers=one)).json() == {"logs": []}
        assert len((await it.http.get("/view/data/runs/t_1/logs.json", headers=root)).json()["logs"]) == 1
        assert (await it.http.get("/view/data/runs/t_1/run.json", headers=two)).status_code == 404
        (it.core.config.folder / "runs" / "t_1" / "journal.db").write_text("no journal")
        broken = await it.http.get("/view/data/runs/t_1/trajectories.json", headers=two)
        assert broken.status_code == 404
        broken = await it.http.get("/view/data/runs/t_1/trajectories/1.json", headers=one)
        assert str(tmp_path) not in broken.text
