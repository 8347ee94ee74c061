"""A run as a static site: a plain file server shows all that `relax view` shows of what was written."""

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
from relax_server.journal import open_journal
from relax_server.viewer.bundle import Bundle, write_bundle
from relax_server.viewer.cli import app
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.pages import Pages
from typer.testing import CliRunner
from viewed_runs import make_group, make_run

from relax_sdk.errors import ConfigError
from relax_sdk.media import Image, MediaStore


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def files(folder: Path) -> Iterator[httpx.Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client:
        yield client
    server.shutdown()
    server.server_close()


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "assets" / "a.js").write_text("1")
    return folder


def test_a_site_holds_what_the_server_answers(tmp_path: Path, static: Path) -> None:
    make_run(tmp_path / "runs", "a run, 100%")
    source = FolderSource([tmp_path / "runs"], Journals())
    write_bundle([tmp_path / "runs"], tmp_path / "site", None, static)
    with files(tmp_path / "site") as http:
        assert (http.get("/").text, http.get("/assets/a.js").text) == ("<!doctype html>", "1")
        assert http.get("/data/site.json").json()["mode"] == "bundle"
        (run,) = http.get("/data/runs.json").json()["runs"]
        place = "/data/runs/a%20run%2C%20100%25"
        rows = http.get(f"{place}/trajectories.json").json()
        assert rows["columns"]["seq"] == list(range(1, 14)) and run["trajectories"] == 13
        for seq in rows["columns"]["seq"]:
            for what in ("trajectories", "groups"):
                told = Pages().answer(source, ["runs", "a run, 100%", what, f"{seq}.json"], {})
                written = http.get(f"{place}/{what}/{seq}.json").json()
                assert isinstance(told, dict) and written.keys() == told.keys()
                if what == "trajectories":
                    assert [len(sample["ids"]) for sample in written["samples"]] == [len(s["ids"]) for s in told["samples"]]
        texts = http.get(f"{place}/texts.json").json()
        assert [seq for seq, text in zip(texts["seq"], texts["text"], strict=True) if "task 2" in text] == [9, 10, 11, 12]
        media = http.get(f"{place}/media.json").json()["media"]
        assert [item["kind"] for item in media] == ["image", "audio", "video"]
        for item in media:
            assert len(http.get("/" + item["url"]).content) == item["size"]
        for page in ("run", "metrics", "events", "timeline", "logs"):
            assert http.get(f"{place}/{page}.json").status_code == 200
    assert not [file for file in (tmp_path / "site").rglob("*.json") if str(tmp_path) in file.read_text()]


def test_a_limit_keeps_the_newest_the_worst_and_the_best(tmp_path: Path, static: Path) -> None:
    make_run(tmp_path / "runs", groups=3)
    told: list[tuple[str, int, int]] = []
    Bundle(FolderSource([tmp_path / "runs"], Journals()), tmp_path / "site", static).write(1, lambda *line: told.append(line))
    written = sorted(int(file.stem) for file in (tmp_path / "site/data/runs/tone/trajectories").iterdir())
    assert len(written) == 2 and 13 in written  # the newest is also one of the worst
    assert 11 in written  # of the best ones the newest
    assert told[-1] == ("tone", 2, 2)


def test_members_that_a_limit_leaves_out_are_marked_and_their_media_are_there(tmp_path: Path, static: Path) -> None:
    folder = make_run(tmp_path / "runs", groups=0, trained=False)
    own = MediaStore(folder / "media").put(Image.from_array(np.full((8, 8, 3), 77, np.uint8)))
    group = make_group(1, "tone", folder / "hf", [])
    part = {"type": "image_url", "image_url": {"url": f"relax-media:{own.sha256}"}}
    group.trajectories[1].messages[0]["content"].append(part)
    journal = open_journal(folder / "journal.db")
    journal.commit(group, "tone")
    journal.close()
    write_bundle([tmp_path / "runs"], tmp_path / "site", 1, static)
    place = tmp_path / "site/data/runs/tone"
    written = {int(file.stem) for file in (place / "trajectories").iterdir()}
    seen = set()
    for file in (place / "groups").iterdir():
        for member in json.loads(file.read_text())["trajectories"]:
            assert member.get("left_out", False) == (member["seq"] not in written)
            seen |= {member["seq"] for member in member["group"] if "left_out" in member}
            for item in member["media"].values():
                assert (tmp_path / "site" / item["url"]).is_file()
    for file in (place / "trajectories").iterdir():
        page = json.loads(file.read_text())
        assert "left_out" not in page and all(m.get("left_out", False) == (m["seq"] not in written) for m in page["group"])
    assert seen and not seen & written
    assert (place / "media" / f"{own.sha256}.png").is_file()


def test_only_an_earlier_site_is_replaced(tmp_path: Path, static: Path) -> None:
    make_run(tmp_path / "runs")
    site = tmp_path / "site"
    write_bundle([tmp_path / "runs"], site, None, static)
    write_bundle([tmp_path / "runs"], site, 1, static)
    assert len(list((site / "data/runs/tone/trajectories").iterdir())) < 13
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds something else"):
        write_bundle([tmp_path / "runs"], tmp_path / "mine", None, static)
    with pytest.raises(ConfigError, match="no run to write"):
        write_bundle([tmp_path / "nowhere"], tmp_path / "new", None, static)


def test_the_command_refuses_what_would_be_open_to_others(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "give a key with --key" in str(run(app, [str(tmp_path), "--host", "0.0.0.0", "--port", "0"]).exception)
    assert "can be guessed" in str(run(app, [str(tmp_path), "--key", "short", "--port", "0"]).exception)
    assert "--limit needs --bundle" in str(run(app, [str(tmp_path), "--limit", "3"]).exception)


def test_the_command_refuses_a_folder_that_there_is_not_and_a_port_that_cannot_be(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert f"there is no {tmp_path / 'tpyo'}; name a run folder" in str(run(app, [str(tmp_path / "tpyo")]).exception)
    refused = run(app, [str(tmp_path), "--port", "99999"])
    assert refused.exit_code == 2 and "65535" in refused.output
