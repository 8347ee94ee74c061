"""The page of `relax view`, in a real Chromium, over a real server and real run folders."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from chromium import AXE, CHROMIUM, chromium, hashes, painted, plays, serious, viewer
from judged_run import make_judged
from many_runs import MANY, make_many, text_group
from page_runs import WORK, make_runs, make_seed
from playwright.sync_api import Browser, Page, expect
from relax_server.journal import open_journal
from relax_server.viewer.bundle import write_bundle
from viewed_runs import add_steps, make_run, record

from relax_sdk.run_lock import Holder, RunLock

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
OMNI = 9
"""Number of an episode of the run `omni` with a sound and a film that play."""
FRAMES = 16
"""Frames of its film, all of which the model sees."""


class Quiet(SimpleHTTPRequestHandler):
    """A plain file server that does not write a line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page over all runs, over a copy of `omni`, shown as `omni (2)`, whose media are lost, and over a service's `r_1`."""
    lost = tmp_path_factory.mktemp("lost")
    shutil.copytree(runs / "omni", lost / "omni", ignore=shutil.ignore_patterns("media"))
    service = open_journal((folder := tmp_path_factory.mktemp("service")) / "journal.db")
    service.commit(text_group(0, "r_1"), "r_1")
    service.close()
    with viewer(runs, lost, folder) as (url, _):
        yield url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab; an exception of the page's own code fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(60_000)
    opened, broken = context.new_page(), []
    opened.on("pageerror", lambda error: broken.append(str(error)))
    yield opened
    context.close()
    assert not broken


PAGES = {
    "runs": ("#/", "Runs"),
    "compare": ("#/compare?runs=seed-0,seed-1,omni", "Compare 3 runs"),
    "overview": ("#/runs/omni", "omni"),
    "report": ("#/runs/judged", "judged"),
    "trajectories": ("#/runs/many/trajectories?plot=1", "Trajectories"),
    "trajectory": (f"#/runs/omni/trajectories/{OMNI + 1}", "Trajectory"),
    "failed": ("#/runs/omni/trajectories/4", "Trajectory"),
    "group": (f"#/runs/omni/groups/{OMNI + 1}", "Group"),
    "media": ("#/runs/omni/media", "Media"),
    "troubled": ("#/runs/troubled", "troubled"),
    "empty": ("#/runs/empty", "empty"),
    "played": ("#/runs/r_1", "r_1"),
    "no such run": ("#/runs/none", "Not found: The run none"),
}


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: run `make view`")
@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible_in_light_dark_and_narrow(page: Page, site: str, name: str) -> None:
    address, title = PAGES[name]
    page.goto(site + address)
    expect(page.locator("main h1, main [role=alert]").first).to_contain_text(title)
    expect(page.locator("main .loading")).to_have_count(0)
    if name == "troubled":
        expect(page.get_by_text("The run failed: the engine could not be started again")).to_be_visible()
        page.get_by_role("button", name="engine-e1.log").click()
        expect(page.get_by_role("region", name="End of engine-e1.log")).to_contain_text("engine-e1 says 199")
        for shown in ("Restarts", "nothing was learnt in the last 10 steps", "look at the worst episodes", "lost"):
            expect(page.locator("main").get_by_text(shown).first).to_be_visible()
    assert serious(page) == []
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert serious(page) == []
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 400")  # charts follow the width a moment later


def test_a_sound_plays_beside_its_wave(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/trajectories/{OMNI + 1}")
    sound = page.locator("audio").first
    expect(page.locator("canvas[aria-label=Waveform]")).to_be_visible()
    expect(page.locator(".waves canvas")).to_have_count(2)
    painted(page, "canvas[aria-label=Waveform]", 2)
    painted(page, "canvas[aria-label^=Spectrogram]", 51)
    plays(sound, 0.2)
    assert sound.evaluate("player => player.duration") == pytest.approx(2.0, abs=0.01)


def test_a_film_plays_above_its_frames(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/trajectories/{OMNI + 1}")
    plays(page.locator("video").first, 0.2)
    frames = page.get_by_role("group", name="Frames of the film").get_by_role("img")
    expect(frames).to_have_count(8)
    shown = frames.evaluate_all("images => new Set(images.map(image => image.src)).size")
    assert shown > 4


def test_what_the_model_got_of_media_is_shown_on_request(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/trajectories/{OMNI + 1}")
    page.get_by_text("What the model heard").click()
    expect(page.get_by_text("32,000 samples at 16 kHz, one channel")).to_be_visible(timeout=60_000)
    expect(page.locator(".medium.audio .seen p").first).to_contain_text(re.compile(r"; \d+ placeholder tokens in the prompt"))
    expect(page.locator(".seen canvas")).to_have_count(2)
    plays(page.get_by_label("The wave that the model heard"), 0.1)
    saw = page.get_by_text("What the model saw")
    saw.nth(1).click()
    frames = page.locator(".medium.video .seen img")
    expect(frames).to_have_count(FRAMES)
    for frame in frames.all():
        expect(frame).not_to_have_js_property("naturalWidth", 0)


def test_a_stranger_reads_what_was_heard_answered_and_why(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/trajectories/2")
    short = page.get_by_role("region", name="In short")
    expect(short).to_contain_text("heard 1 sound")
    expect(short).to_contain_text("“where? task 0”")
    expect(short).to_contain_text("It answered 2 times: “left é”, then “up”")
    expect(short).to_contain_text("from the environment's steps 0.25, form 1.00. The right answer is “right”.")
    expect(short).to_contain_text("In step 1, 1 step old, its advantage was +0.75: what it answered was made more likely.")
    expect(short.get_by_role("link", name="Open #3")).to_have_attribute("href", "#/runs/omni/trajectories/3")
    expect(page.get_by_text("relax replay")).to_contain_text("--episode train/0/1")


def test_a_trajectory_by_its_link_asks_for_nothing_twice_and_for_no_code_of_curves(page: Page, site: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(site)))
    page.goto(f"{site}#/runs/omni/trajectories/2")
    expect(page.get_by_role("region", name="In short")).to_be_visible()
    assert asked.count("data/site.json") == asked.count("data/runs/omni/trajectories/2.json") == 1
    code = [one for one in asked if one.endswith(".js")]
    assert code and not [one for one in code if "overview" in one or "compare" in one]
    page.goto(f"{site}#/runs/omni")
    expect(page.get_by_role("heading", level=1)).to_have_text("omni")
    assert [one for one in asked if re.fullmatch(r"assets/overview-.*\.js", one)]


def test_a_failed_episode_says_that_it_is_no_zero(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/trajectories/4")
    short = page.get_by_role("region", name="In short")
    expect(short).to_contain_text("No reward counts: the episode failed. ValueError: boom")
    expect(short).to_contain_text("mend the error, then replay")
    expect(page.get_by_text("No token was produced")).to_be_visible()


def test_tokens_are_coloured_folded_and_read_by_keys(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/trajectories/2")
    strip = page.get_by_role("group", name="Tokens, arrow keys")
    expect(strip.locator(".folded")).to_have_count(3)
    expect(strip.locator(".folded").first).to_contain_text("<|image_pad|> × 3")
    page.get_by_role("button", name="Entropy").click()
    expect(page).to_have_url(re.compile("colour=entropy"))
    trained = strip.locator(".trained.heat")
    expect(trained.first).to_be_visible()
    strip.focus()
    page.keyboard.press("End")
    expect(page.locator(".inspector")).to_contain_text("entropy 1.5000 · advantage 0.7500")
    expect(page.locator(".inspector")).to_contain_text("trained in step 1")
    page.get_by_text("The same as a table").click()
    table = page.get_by_role("region", name="Table of tokens")
    expect(table.get_by_role("columnheader", name="Gap")).to_be_visible()


def test_ten_thousand_trajectories_are_a_table_of_few_rows(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/many/trajectories")
    table = page.get_by_role("table", name="Trajectories")
    expect(table).to_have_attribute("aria-rowcount", str(MANY + 1))
    expect(table.get_by_role("row").nth(1)).to_contain_text(str(MANY))
    assert table.get_by_role("row").count() < 80
    page.locator(".virtual").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    expect(table.get_by_role("link", name="1", exact=True).first).to_be_visible()
    assert table.get_by_role("row").count() < 80


def test_filters_sorting_and_place_are_in_the_address(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/many/trajectories")
    page.get_by_label("Status").select_option("failed")
    count = page.locator(".list-count")
    expect(count).to_have_text("100 of 10,000 trajectories")
    page.get_by_label("Status").select_option("")
    page.get_by_role("searchbox").fill("ANSWER 3 of 77")
    expect(count).to_have_text("11 of 10,000 trajectories")
    page.get_by_role("button", name="Worst").click()
    expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute("aria-sort", "ascending")
    _, query = hashes(page)
    assert query == "q=ANSWER+3+of+77&sort=reward%3Aasc"
    first = page.locator(".virtual tbody tr").first.inner_text()
    page.goto("about:blank")
    page.goto(f"{site}#/runs/many/trajectories?{query}")
    expect(count).to_have_text("11 of 10,000 trajectories")
    assert page.locator(".virtual tbody tr").first.inner_text() == first


def test_an_episode_is_found_by_its_id(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/many/episodes/many%2Ftrain%2F3%2F2")
    expect(page.get_by_role("heading", level=1)).to_have_text("Trajectory #27")
    page.goto(f"{site}#/runs/many/episodes/none")
    expect(page.get_by_role("alert")).to_contain_text("This run has no episode none")


def test_keys_lead_through_a_run(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/many/trajectories")
    expect(page.locator(".virtual tbody tr").first).to_be_visible()
    for key in ("w", "j", "j", "Enter"):
        page.keyboard.press(key)
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text("Trajectory")
    expect(page.get_by_text(f"2 of {MANY:,}")).to_be_visible()
    second = heading.inner_text()
    page.keyboard.press("j")
    expect(page.get_by_text(f"3 of {MANY:,}")).to_be_visible()
    page.keyboard.press("k")
    expect(heading).to_have_text(second)
    page.keyboard.press("u")
    expect(heading).to_have_text("Group")
    page.go_back()
    expect(heading).to_have_text(second)
    page.keyboard.press("Escape")
    expect(page.locator("tr.at")).to_contain_text(second.removeprefix("Trajectory #"))
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Escape")
    for key in ("g", "m"):
        page.keyboard.press(key)
    expect(heading).to_have_text("Media")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def when_first_seen(page: Page, selector: str, act: str) -> None:
    """Have JavaScript carried out in the very task in which an element comes into the next document, before it is painted."""
    page.add_init_script(
        f"""const watching = new MutationObserver(() => {{
            if (!document.querySelector({json.dumps(selector)})) return;
            watching.disconnect();
            {act};
        }});
        watching.observe(document, {{childList: true, subtree: true}});"""
    )


def test_a_key_that_is_pressed_as_soon_as_rows_are_there_counts(page: Page, site: str) -> None:
    pressed = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'w', bubbles: true}))"
    when_first_seen(page, ".virtual tbody tr th", pressed)
    page.goto(f"{site}#/runs/many/trajectories")
    expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute("aria-sort", "ascending")


def test_an_address_that_changes_as_soon_as_the_page_is_there_is_followed(page: Page, site: str) -> None:
    when_first_seen(page, "header.top", "location.hash = '#/runs/omni/media'")
    page.goto(f"{site}#/runs/many/trajectories")
    expect(page.get_by_role("heading", level=1)).to_have_text("Media")


def test_a_group_stands_side_by_side(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/groups/2")
    expect(page.get_by_role("heading", name="What all were given")).to_be_visible()
    members = page.get_by_role("article", name="Member")
    expect(members).to_have_count(4)
    expect(members.nth(2)).to_contain_text("0.50")
    expect(members.nth(2)).to_contain_text("advantage +0.75")
    expect(members.nth(3)).to_contain_text("ValueError: boom")


def test_episodes_that_a_service_played_are_no_run_that_ended_before_its_first_step(page: Page, site: str) -> None:
    page.goto(f"{site}#/?q=r_1")
    row = page.get_by_role("row").filter(has_text="r_1")
    expect(row).to_contain_text("played at the service")
    expect(row).to_contain_text("parity-v0")
    row.get_by_role("link", name="r_1").click()
    main = page.locator("main")
    expect(main).to_contain_text("A caller of the service had these episodes played.")
    expect(main).to_contain_text("Reward, newest 20 episodes")
    for wrong in ("first step", "unknown", "Roles", "Timeline", "waiting for the trainer"):
        expect(main).not_to_contain_text(wrong)
    page.get_by_role("link", name="episodes").click()
    expect(page.locator(".list-count")).to_have_text("8 trajectories")


def test_runs_of_several_seeds_are_one_curve_and_settings_that_differ_are_told(page: Page, site: str) -> None:
    page.goto(f"{site}#/")
    for name in ("seed-0", "seed-1", "omni"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("link", name="Compare").click()
    legend = page.get_by_role("list", name="Runs and their colours")
    expect(legend).to_contain_text("mean and standard deviation of 2 seeds")
    settings = page.get_by_role("region", name="Table of settings").get_by_role("row")
    expect(settings.filter(has_text="env")).to_contain_text("omni-v0")
    expect(settings.filter(has_text=re.compile("^seed"))).to_be_visible()
    expect(settings.filter(has_text="lr")).to_have_count(0)


def test_the_report_of_an_evaluation_leads_to_its_worst_and_failed_episodes(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/judged")
    report = page.get_by_role("region", name="Report", exact=True)
    expect(report).to_contain_text("16 episodes of 7 of 8 tasks (eval). 2 failed and count nowhere below.")
    expect(report.get_by_role("row", name="pass@2 1.000")).to_be_visible()
    expect(report.get_by_role("row", name="low 0.50")).to_be_visible()
    expect(report.get_by_role("row", name="ValueError 2 ValueError: boom")).to_be_visible()
    expect(report).to_contain_text("Next: open the failed episodes first")
    report.get_by_role("link", name="worst of form").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Trajectories")
    assert hashes(page)[1] == "sort=reward%2Fform%3Aasc"
    page.go_back()
    report.get_by_role("link", name="failed").click()
    expect(page.locator(".list-count")).to_have_text("1 of 5 trajectories")


def test_the_report_appears_when_the_evaluation_ends(page: Page, tmp_path: Path) -> None:
    folder = make_judged(tmp_path)
    report = (folder / "report.json").read_text()
    for name in ("report.json", "senses.json"):
        (folder / name).unlink()
    with viewer(tmp_path) as (url, _):
        with RunLock(folder, Holder.here()):
            page.goto(f"{url}#/runs/judged")
            expect(page.get_by_text("The report comes when the evaluation ends.")).to_be_visible()
            (folder / "report.json").write_text(report)
        expect(page.get_by_role("region", name="Report", exact=True)).to_be_visible(timeout=20_000)


def test_what_the_model_uses_of_what_it_is_shown_is_a_table_with_a_verdict_on_each_sense(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/judged")
    senses = page.get_by_role("region", name="What the model uses")
    expect(senses.get_by_role("row", name="images used 1.00 0.25 −0.75 0.25 −0.75 0.25 −0.75", exact=True)).to_be_visible()
    expect(senses.get_by_role("row", name=re.compile("^sounds not used 1.00 1.00 "))).to_be_visible()
    expect(senses.get_by_role("listitem").filter(has_text="sounds: not used")).to_contain_text("the images suffice")


def test_the_timeline_has_a_colour_for_each_kind_of_work_and_is_zoomed_by_keys(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/seed-0")
    panel = page.get_by_role("region", name="Timeline")
    lanes = panel.get_by_role("img", name=re.compile("^Timeline of policy"))
    painted(page, "canvas[aria-label^=Timeline]", 8)
    kinds = panel.locator(".key")
    expect(kinds).to_have_count(len(WORK) - 1)
    expect(kinds.nth(1)).to_have_text("evaluation")
    colours = kinds.locator(".swatch").evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == len(WORK) - 1
    shown = panel.get_by_role("status")
    expect(shown).to_contain_text("(7.50 s)")
    lanes.press("+")
    expect(shown).not_to_contain_text("(7.50 s)")
    lanes.press("0")
    expect(shown).to_contain_text("(7.50 s)")


def test_metrics_are_found_by_name(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/seed-0")
    page.get_by_label("Search metrics").fill("los")
    expect(page.get_by_role("region", name="loss", exact=True)).to_contain_text("0.05")
    page.get_by_label("Search metrics").fill("nothing like it")
    expect(page.get_by_text("No metric has “nothing like it”")).to_be_visible()


def test_media_of_a_run_are_a_grid_that_leads_to_episodes(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni/media")
    expect(page.locator(".tile")).to_have_count(6)
    page.get_by_role("button", name="Sounds").click()
    expect(page.locator(".tile")).to_have_count(2)
    page.get_by_role("link", name="first in").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Trajectory")


def test_a_run_that_trains_is_followed(page: Page, runs: Path, site: str) -> None:
    folder = make_many(runs, "live", 80)
    with RunLock(folder, Holder.here()):
        page.goto(f"{site}#/runs/live/trajectories?sort=seq:asc")
        count = page.locator(".list-count")
        expect(count).to_have_text("80 trajectories")
        first = page.locator(".virtual tbody tr").first
        first.evaluate("row => row.dataset.same = 'yes'")
        journal = open_journal(folder / "journal.db")
        for number in range(10, 16):
            journal.commit(text_group(number, "live"), "live")
        journal.close()
        expect(count).to_have_text("128 trajectories")
        expect(page.locator("tr[data-same=yes]")).to_have_count(1)
        page.goto(f"{site}#/runs/live")
        expect(page.get_by_text("No training step is done yet")).to_be_visible()
        add_steps(folder, 1, 3)
        expect(page.get_by_role("heading", name="Where a step's time goes")).to_be_visible(timeout=20_000)


def test_rows_long_ago_that_a_step_has_taken_in_are_asked_for_again(page: Page, runs: Path, site: str) -> None:
    folder = make_many(runs, "long", 4800)
    with RunLock(folder, Holder.here()):
        page.goto(f"{site}#/runs/long/trajectories?sort=seq:asc")
        expect(page.locator(".list-count")).to_have_text("4,800 trajectories")
        journal = open_journal(folder / "journal.db")
        (lease,) = journal.lease(1, "long", "policy", 0, 10, 60.0).leases
        journal.record_trained("long", [record(lease.group, 7)])
        journal.close()
        for step in (7, 8, 9):  # the first part is asked for again at every second step, the newest rows (after 2,800) at each
            with page.expect_response(re.compile(r"long/trajectories\.json\?(after=(?!2800&)\d+&)?limit=2000$")):
                add_steps(folder, step, step)
        expect(page.get_by_role("columnheader", name="Advantage")).to_be_visible()
        page.goto(f"{site}#/runs/long/trajectories?step_min=7&step_max=7")
        expect(page.locator(".list-count")).to_have_text("8 of 4,800 trajectories")
        journal = open_journal(folder / "journal.db")
        leases = journal.lease(290, "long", "policy", 0, 10, 60.0).leases
        journal.record_trained("long", [record(lease.group, 7) for lease in leases])
        journal.close()
    expect(page.locator(".list-count")).not_to_have_text("8 of 4,800 trajectories")  # when it has ended, all are asked for
    expect(page.locator(".list-count")).to_have_text("2,305 of 4,800 trajectories")


def test_a_run_of_few_steps_tells_what_was_noticed_and_what_failed_and_is_not_called_well(page: Page, tmp_path: Path) -> None:
    folder = make_seed(tmp_path, 3)
    ages = {str(age): 10 for age in range(10)}
    row = {"step": 2, "time": 1002.0, "reward": 0.5, "staleness_histogram": ages}
    rows = [row | {"step": 1, "failures": {"TimeoutError": 1}}, row | {"failures": {"TimeoutError": 2, "ValueError": 5}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with viewer(tmp_path) as (url, _):
        page.goto(f"{url}#/runs/seed-3")
        main = page.locator("main")
        expect(main).to_contain_text("Too few steps to be judged yet: relax doctor needs 5.")
        expect(main).not_to_contain_text("No finding")
        staleness = page.get_by_role("region", name="Staleness")
        expect(staleness.locator(".key").first).to_have_text("0 steps old 0.1")
        expect(staleness.locator(".key").last).to_have_text("6 or more steps old 0.4")
        failures = page.get_by_role("region", name="Failures", exact=True)
        expect(failures.get_by_role("row").nth(1)).to_have_text("ValueError5")
        expect(failures.get_by_role("row").nth(2)).to_have_text("TimeoutError2")
        expect(failures.get_by_role("link")).to_have_attribute("href", "#/runs/seed-3/trajectories?status=not_ok")
        finding = {"n": 1, "time": 1001.0, "step": 1, "kind": "finding", "level": "note", "what": "A step is slower"}
        (folder / "events.jsonl").write_text(json.dumps(finding | {"advice": "look at the timeline"}) + "\n")
        page.goto(f"{url}#/?q=seed-3")
        expect(page.get_by_role("row").filter(has_text="seed-3")).to_contain_text("1 note")
        page.get_by_role("link", name="seed-3").click()
        findings = page.get_by_role("region", name="Findings", exact=True)
        expect(findings.get_by_role("listitem")).to_contain_text("A step is slower (noticed at step 1)")
        expect(findings).to_contain_text("Too few steps to be judged yet")


def test_it_is_told_how_much_of_an_episode_is_searched(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/many/trajectories")
    expect(page.get_by_role("searchbox")).to_have_attribute("title", re.compile("first 16,384 characters"))
    page.get_by_role("searchbox").fill("answer 3")
    expect(page.get_by_text("The first 16,384 characters of each episode are searched.")).to_be_visible()


def test_a_key_is_asked_for_and_media_come_with_it(page: Page, runs: Path) -> None:
    with viewer(runs, "--key", "a-secret-that-is-long-enough") as (url, _):
        page.goto(f"{url}#/runs/omni/trajectories/{OMNI + 1}")
        dialog = page.get_by_role("dialog", name="This service needs a key")
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button").click()
        expect(dialog).to_contain_text("The key was refused")
        dialog.get_by_label("Key").fill("a-secret-that-is-long-enough")
        dialog.get_by_role("button").click()
        sound = page.locator("audio").first
        expect(sound).to_have_attribute("src", re.compile("^blob:"))
        plays(sound, 0.1)


def test_lost_media_are_told(page: Page, site: str) -> None:
    page.goto(f"{site}#/runs/omni%20(2)/trajectories/2")
    expect(page.get_by_text("is not in the run's media folder any more")).to_have_count(3)
    expect(page.get_by_role("region", name="In short")).to_contain_text("3 media files are gone")


@contextlib.contextmanager
def bundled(run: Path, site: Path, limit: int | None = None) -> Iterator[str]:
    """The address of a site of files of a run, written to `site`."""
    write_bundle([run], site, limit)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_bundle_opens_from_a_file_server_and_asks_for_nothing_else(page: Page, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "omni", tmp_path / "omni", ignore=shutil.ignore_patterns("hf"))
    with bundled(tmp_path / "omni", tmp_path / "site") as url:
        lost: list[str] = []
        page.on("response", lambda answer: None if answer.ok else lost.append(answer.url))
        page.goto(f"{url}#/runs/omni/trajectories?sort=seq%3Aasc")
        page.get_by_role("searchbox").fill("TASK 7")
        expect(page.locator(".list-count")).to_have_text("4 of 13 trajectories")
        page.locator(".virtual tbody tr").first.click()
        plays(page.locator("audio").first, 0.1)
        page.goto(f"{url}#/runs/omni")
        expect(page.get_by_role("heading", name="Where a step's time goes")).to_be_visible()
        assert not lost


def test_a_bundle_of_few_episodes_has_no_link_that_leads_nowhere(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path, "few", groups=1)
    with bundled(tmp_path / "few", tmp_path / "site", 1) as url:
        page.goto(f"{url}#/runs/few/trajectories/3")  # the best; the newest, which is the worst too, is 5
        story = page.get_by_role("region", name="In short")
        expect(story.get_by_role("link")).to_have_attribute("href", "#/runs/few/groups/3")
        members = page.get_by_role("region", name="Group", exact=True).get_by_role("listitem")
        expect(members).to_have_count(4)
        expect(members.get_by_role("link")).to_have_text(re.compile("#3"))
        page.goto(f"{url}#/runs/few/groups/3")
        expect(page.get_by_role("heading", name="#")).to_have_count(4)
        expect(page.get_by_role("article", name="Member").get_by_role("link", name="#")).to_have_text("#3")
        page.goto(f"{url}#/runs/few/media")
        expect(page.locator(".tile")).to_have_count(3)
        expect(page.get_by_role("link", name="first in")).to_have_count(0)


def test_a_server_that_is_gone_is_told(page: Page, tmp_path: Path) -> None:
    make_many(tmp_path, "gone", 80)
    with viewer(tmp_path) as (url, process):
        page.goto(f"{url}#/runs/gone/trajectories")
        expect(page.locator(".virtual tbody tr").first).to_be_visible()
        process.kill()
        process.wait(30)
        page.locator(".virtual tbody tr").first.click()
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
