"""What the viewer answers, asked over its real application, on real journals."""

import json
from pathlib import Path

import httpx
import orjson
import pytest
from relax_server.journal import open_journal
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.serve import make_app
from relax_server.viewer.summary import Summaries
from viewed_runs import SEED, add_steps, make_group, make_run

from relax_sdk.media import MediaRef
from relax_sdk.run_lock import Holder, RunLock

KEY = "a key of more than sixteen characters"


def client(*paths: Path, key: str | None = None, static: Path = Path("/nowhere")) -> httpx.AsyncClient:
    app = make_app(FolderSource(paths, Journals()), key=key, static=static)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8100")


async def read(http: httpx.AsyncClient, path: str, **params: object):
    answer = await http.get(f"/view/data/{path}", params={k: str(v) for k, v in params.items()})
    assert answer.status_code == 200, answer.text
    return orjson.loads(answer.content)


async def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    make_run(tmp_path, "done")
    make_run(tmp_path, "early", steps=1)
    going_on = make_run(tmp_path, "now", steps=1)
    (tmp_path / "no run").mkdir()
    async with client(tmp_path) as http:
        with RunLock(going_on, Holder.here()):
            rows = {row["name"]: row for row in (await read(http, "runs.json"))["runs"]}
        assert {name: row["state"] for name, row in rows.items()} == {"done": "done", "early": "stopped", "now": "running"}
        done = rows["done"]
        assert (done["step"], done["steps"], done["reward"], done["held_out"]) == (2, 2, 0.2, 0.5)
        assert done["reward_last10"] == pytest.approx(0.15)
        assert done["trajectories"] == 13


async def test_looking_takes_no_lock_and_writes_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and "db-" not in path.name}
    async with client(folder) as http:
        for page in ("runs.json", "runs/tone/run.json", "runs/tone/trajectories.json", "runs/tone/trajectories/1.json"):
            await read(http, page)
        with RunLock(folder, Holder.here()):  # raises if the viewer held it
            await read(http, "runs/tone/run.json")
    after = {path: path.stat().st_mtime_ns for path in before}
    assert {path.name for path in before if before[path] != after[path]} == {"run.lock"}  # by this test


async def test_a_run_that_is_written_to_is_followed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    journal = open_journal(folder / "journal.db")
    async with client(folder) as http:
        first = await read(http, "runs/tone/trajectories.json")
        metrics = await read(http, "runs/tone/metrics.json")
        journal.commit(make_group(9, "tone", folder / "hf", []), "tone")
        add_steps(folder, 3, 3)
        new = await read(http, "runs/tone/trajectories.json", after=first["next"])
        assert new["columns"]["id"] == [f"tone/train/9/{index}" for index in range(4)]
        assert new["total"] == 17
        more = await read(http, "runs/tone/metrics.json", after=metrics["next"])
        assert (more["columns"]["step"], more["reset"]) == ([3], False)
    journal.close()


async def test_metrics_that_were_written_anew_are_told_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    async with client(folder) as http:
        metrics = await read(http, "runs/tone/metrics.json")
        assert metrics["columns"]["staleness_histogram/0"] == [4, 4]
        assert metrics["columns"]["eval_reward"] == [None, 0.5]
        assert "sample/asked" not in metrics["columns"]
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text(lines[0])  # as a resume does, which then goes on
        add_steps(folder, 2, 5)
        again = await read(http, "runs/tone/metrics.json", after=metrics["next"])
        assert again["columns"]["step"] in ([1, 2, 3, 4, 5], [3, 4, 5])
        assert again["reset"] == (again["columns"]["step"][0] == 1)
        (folder / "metrics.jsonl").write_text("")
        add_steps(folder, 7, 9)
        anew = await read(http, "runs/tone/metrics.json", after=metrics["next"])
        assert (anew["columns"]["step"], anew["reset"]) == ([7, 8, 9], True)


async def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    async with client(folder) as http:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "re')
        half = await read(http, "runs/tone/metrics.json")
        assert half["columns"]["step"] == [1, 2]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('ward": 1.0}\n')
        assert (await read(http, "runs/tone/metrics.json", after=half["next"]))["columns"]["reward"] == [1.0]


async def test_a_trajectory_is_shown_token_by_token(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    async with client(folder) as http:
        shown = await read(http, "runs/tone/trajectories/2.json")
        (sample,) = shown["samples"]
        assert "".join(sample["texts"][9:18]) == "<|im_start|>where?le"
        assert sample["texts"][:9] == ["<|image_pad|>"] * 3 + ["<|audio_pad|>"] * 3 + ["<|video_pad|>"] * 3
        assert "\\xc3" in sample["texts"] and "\\xa9" in sample["texts"]  # the two bytes of é
        lengths = {name: len(values) for name, values in sample.items()}
        assert set(lengths.values()) == {len(sample["ids"])}, lengths
        for index, trained in enumerate(sample["mask"]):
            known = [sample[name][index] for name in ("logprobs", "trainer_logprobs", "advantages")]
            assert known == ([-0.25, -0.5, 0.75] if trained else [None] * 3)
        entropy = [value for value, trained in zip(sample["entropy"], sample["mask"], strict=True) if trained]
        assert (entropy[0], entropy[1]) == (None, 1.5)
        reasons = [shown["why"][number] for number in sample["why"]]
        assert list(dict.fromkeys(reasons)) == [
            "not trained: prompt",
            "answer of turn 0: trained in step 1 with advantage +0.75",
            "not trained: what came after the answer of turn 0, such as its observation",
            "answer of turn 1: trained in step 1 with advantage +0.75",
        ]
        assert [turn["message"] for turn in shown["turns"]] == [1, 3]
        assert shown["turns"][0]["placeholders"] == {"image": 3, "audio": 3, "video": 3}
        assert shown["seed"] == str(SEED) == shown["turns"][0]["sampling"]["sampling_seed"]
        assert [(m["seq"], m["index"], m["advantage"]) for m in shown["group"]] == [
            (1, 0, 0.75),
            (2, 1, 0.75),
            (3, 2, 0.75),
            (4, 3, None),
        ]
        assert shown["info"] == {"shown": None, "answer": "right"}
        assert shown["replay"] == f"relax replay {folder} --episode train/0/1"


async def test_why_a_group_was_not_trained(tmp_path: Path) -> None:
    folder = make_run(tmp_path, trained=False)
    journal = open_journal(folder / "journal.db")
    found = journal.lease(1, "tone", "policy", 99, 98, 60.0)  # group 0 is too old, and so dropped
    journal.set_aside(found.leases[0].group.id, "tone", "policy", "a loss that is not finite")
    async with client(folder) as http:
        whys = [(await read(http, f"runs/tone/trajectories/{seq}.json"))["why"][1] for seq in (1, 5, 9, 13)]
        assert whys == [
            "answer of turn 0: not trained: the group was too old (its oldest weights are of version 0)",
            "answer of turn 0: not trained: the group was set aside (a loss that is not finite)",
            "answer of turn 0: not trained yet: the group waits for the trainer",
            "answer of turn 0: not trained: a held-out evaluation",
        ]
        group = await read(http, "runs/tone/groups/6.json")
        assert (group["state"], group["failure"]) == ("failed", "a loss that is not finite")
        assert [t["seq"] for t in group["trajectories"]] == [5, 6, 7, 8]
        failed = await read(http, "runs/tone/trajectories/4.json")
        assert (failed["error"], failed["samples"], failed["turns"]) == ("ValueError: boom", [], [])
    journal.close()


async def test_rows_hold_what_is_known_and_can_be_searched(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    async with client(folder) as http:
        rows = await read(http, "runs/tone/trajectories.json")
        assert rows["columns"]["seq"] == list(range(1, 14))
        assert {len(values) for values in [*rows["columns"].values(), *rows["components"].values()]} == {13}
        assert rows["columns"]["media"][:4] == ["audio+image+video"] * 3 + [""]
        assert rows["components"]["form"][:4] == [1.0, 1.0, 1.0, None]
        assert (await read(http, "runs/tone/trajectories.json", step=1))["columns"]["seq"] == [1, 2, 3]
        part = await read(http, "runs/tone/trajectories.json", after=3, limit=2)
        assert (part["columns"]["seq"], part["next"], part["more"]) == ([4, 5], 5, True)
        assert (await read(http, "runs/tone/search.json", q="TASK 2"))["seqs"] == [12, 11, 10, 9]
        assert (await read(http, "runs/tone/search.json", q="100%"))["seqs"] == []


async def test_media_are_the_very_bytes_with_ranges(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    async with client(folder) as http:
        items = (await read(http, "runs/tone/media.json"))["media"]
        assert [item["kind"] for item in items] == ["image", "audio", "video"]
        for item in items:
            answer = await http.get(f"/view/{item['url']}")
            ref = MediaRef(item["sha256"], item["mime"], item["size"])
            assert answer.content == (folder / "media" / ref.sha256[:2] / (ref.sha256 + ref.extension)).read_bytes()
            assert (answer.headers["content-type"], "immutable" in answer.headers["cache-control"]) == (item["mime"], True)
            part = await http.get(f"/view/{item['url']}", headers={"Range": "bytes=2-5"})
            assert (part.status_code, part.content) == (206, answer.content[2:6])
        (folder / "media" / items[0]["sha256"][:2] / f"{items[0]['sha256']}.png").unlink()
        shown = await read(http, "runs/tone/trajectories/1.json")
        assert [shown["media"][item["sha256"]]["missing"] for item in items] == [True, False, False]
        assert (await http.get(f"/view/{items[0]['url']}")).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "runs/..%2Ftone/run.json",
        "runs/tone/media/..%2F..%2Fconfig.json",
        "runs/tone/media/" + "a" * 64 + ".json",
        "runs/tone/media/" + "%2e%2e%2f" * 20 + ".png",
        "runs/tone/logs/..%2F..%2Fconfig.json",
        "runs/tone/logs/..%2Fconfig.json.json",
        "runs/tone/trajectories/99999999999999999999.json",
        "runs/tone/trajectories/99.json",
        "runs/tone/trajectories/x.json",
        "runs/tone",
        "nothing.json",
        "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    ],
)
async def test_what_is_not_there_is_not_found(tmp_path: Path, path: str) -> None:
    make_run(tmp_path)
    async with client(tmp_path) as http:
        answer = await http.get(f"/view/data/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"]


async def test_values_out_of_range_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with client(tmp_path) as http:
        for query in ("limit=0", "limit=1000000", "after=-1", "after=x", "step=1.5"):
            answer = await http.get(f"/view/data/runs/tone/trajectories.json?{query}")
            assert answer.status_code == 400, query
        assert (await http.post("/view/data/runs.json")).status_code == 405


async def test_logs_are_shown_from_the_beginning_of_a_line(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with client(tmp_path) as http:
        (log,) = (await read(http, "runs/tone/logs.json"))["logs"]
        end = await read(http, f"runs/tone/logs/{log['name']}.json", bytes=25)
        assert (end["text"], end["size"]) == ("line 998\nline 999\n", log["size"])


async def test_a_run_page_hides_what_may_be_secret(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    config = orjson.loads((folder / "config.json").read_bytes())
    config["ray"]["runtime_env"] = {"env_vars": {"TOKEN": "hush"}}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    async with client(folder) as http:
        page = await read(http, "runs/tone/run.json")
        assert page["config"]["ray"]["runtime_env"]["env_vars"] == {"TOKEN": "hidden"}
        assert page["splits"] == {"eval": 1, "train": 12}
        assert page["checkpoints"] == [2]
        assert (page["counts"]["acked"], page["counts"]["ready"]) == (1, 2)
        assert page["env"]["rewards"] == ["env", "form"]


async def test_a_run_without_journal_or_metrics_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.json").write_text('{"env": "tone-v0", "steps": 5}')
    async with client(tmp_path) as http:
        assert [row["state"] for row in (await read(http, "runs.json"))["runs"]] == ["unknown"]
        for page in ("run", "metrics", "events", "trajectories", "media", "logs"):
            await read(http, f"runs/new/{page}.json")
        assert (await http.get("/view/data/runs/new/trajectories/1.json")).status_code == 404
        assert not (folder / "media").exists()


async def test_only_who_has_the_key_sees_data(tmp_path: Path) -> None:
    make_run(tmp_path)
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("<!doctype html>")
    (static / "assets" / "a-1.js").write_text("1")
    async with client(tmp_path, key=KEY, static=static) as http:
        for path in ("", "assets/a-1.js", "data/site.json"):
            assert (await http.get(f"/view/{path}")).status_code == 200
        assert (await http.get("/view/assets/..%2f..%2fconfig.json")).status_code == 404
        assert (await http.get("/view/data/runs.json")).status_code == 401
        assert (await http.get("/view/data/runs.json", headers={"Authorization": "Bearer no"})).status_code == 401
        assert (await http.get("/view/data/runs.json", headers={"Authorization": f"Bearer {KEY}"})).status_code == 200


async def test_files_of_the_page_come_compressed_and_are_kept_by_browsers(tmp_path: Path) -> None:
    make_run(tmp_path)
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "assets" / "a-1.js").write_text(text := "1 + 1;" * 1000)
    async with client(tmp_path, static=static) as http:
        zipped = await http.get("/view/assets/a-1.js", headers={"Accept-Encoding": "gzip"})
        plain = await http.get("/view/assets/a-1.js", headers={"Accept-Encoding": "identity"})
        assert (zipped.text, plain.text) == (text, text)
        assert zipped.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
        assert int(zipped.headers["content-length"]) < 100 < int(plain.headers["content-length"])
        assert zipped.headers["content-type"].startswith("text/javascript") and "immutable" in zipped.headers["cache-control"]
        missing = await http.get("/view/")
        assert missing.status_code == 404 and "make view" in missing.json()["error"]["message"]


async def test_pages_of_other_sites_see_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with client(tmp_path) as http:
        assert (await http.get("/view/data/runs.json", headers={"Host": "evil.example"})).status_code == 400
        assert (await http.get("/view/data/runs.json", headers={"Origin": "http://evil.example"})).status_code == 403
        assert (await http.get("/view/data/runs.json", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 403
        assert (await http.get("/")).headers["location"] == "/view/"


def test_the_folder_of_an_evaluation_is_told_from_a_run_and_has_the_tokenizer_of_its_model(tmp_path):
    for name in ("run", "evaluation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"env": "tone-v0"}))
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps({"weights": f"{tmp_path}/a model 0a1b2c"}))
    found = {run.name: run for run in FolderSource([tmp_path], Journals()).runs()}
    assert {name: Summaries().of(run)["evaluation"] for name, run in found.items()} == {"run": False, "evaluation": True}
    assert found["evaluation"].models[-1] == tmp_path / "a model"


async def test_a_run_without_a_model_of_its_own_has_the_texts_of_the_one_that_its_settings_name(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    (folder / "hf").rename(model := tmp_path / "a model")
    config = json.loads((folder / "config.json").read_text())

    async def shown(name: str) -> tuple[list[str], object]:
        (folder / "config.json").write_text(json.dumps(config | {"model": name}))
        async with client(tmp_path / "runs") as http:
            page = await read(http, "runs/tone/trajectories/2.json")
            return page["samples"][0]["texts"], page["turns"][0]["placeholders"]

    texts, placeholders = await shown(str(model))
    assert "".join(texts[9:18]) == "<|im_start|>where?le" and placeholders == {"image": 3, "audio": 3, "video": 3}
    texts, _ = await shown("relax/tiny-omni")
    assert not [text for text in texts if text.startswith("⟨")]
    for name in (str(tmp_path / "gone"), "relax/smollm2-135m"):
        texts, placeholders = await shown(name)
        assert texts[0] == "⟨2⟩" and placeholders is None


async def test_a_run_of_too_few_steps_is_told_from_one_in_which_nothing_is_found(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    async with client(folder) as http:
        page = await read(http, "runs/tone/run.json")
        assert (page["findings"], page["unjudged"]) == ([], 5)
        rows = [{"step": n, "time": 1000.0 + n, "seconds_step": 1.0, "staleness_max": 0, "reward": n / 10} for n in range(1, 6)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page = await read(http, "runs/tone/run.json")
        assert page["findings"] and page["unjudged"] is None


async def test_notes_that_were_noticed_leave_a_mark_beside_problems(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    events = [("finding", "note", "a step takes 2.5 s"), ("finding", "note", "a step takes 3.0 s"), ("finding", "ok", "fine")]
    events += [("finding", "problem", "nothing is learnt"), ("warning", "note", "a group was dropped")]
    told = [dict(zip(("kind", "level", "what"), event, strict=True)) for event in events]
    lines = [{"n": n, "time": 1000.0, "step": n, **event} for n, event in enumerate(told)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with client(tmp_path) as http:
        (row,) = (await read(http, "runs.json"))["runs"]
        assert (row["problems"], row["notes"]) == (1, 1)
