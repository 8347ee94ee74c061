// The frame of all views: header with the way back, views by address, dialogs.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";
import { hasKey, isBundle, loadSite, onKeyWanted, siteInfo } from "./data/client";
import { forgetRuns } from "./data/store";
import { EpisodePage } from "./pages/episode";
import { GroupPage } from "./pages/group";
import { MediaPage } from "./pages/media";
import { RunsPage } from "./pages/runs";
import { TrajectoriesPage } from "./pages/trajectories";
import { TrajectoryPage } from "./pages/trajectory";
import { go, link, type Route } from "./route";
import { HelpDialog, KeyDialog } from "./ui/dialogs";
import { useRoute, useRun } from "./ui/hooks";
import { later } from "./ui/later";
import { focusSearch, useKeys } from "./ui/keys";
import { Failure, Loading, Notice } from "./ui/parts";
import { nextTheme, theme } from "./ui/theme";

// Views with curves bring the library that draws them; whoever opens a trajectory by its link does not wait for it.
const ComparePage = later("This comparison", async () => (await import("./pages/compare")).ComparePage);
const OverviewPage = later("This overview", async () => (await import("./pages/overview")).OverviewPage);

const VIEWS: [string, string][] = [
  ["", "Overview"],
  ["trajectories", "Trajectories"],
  ["media", "Media"],
];

export function App() {
  const route = useRoute();
  const [ready, setReady] = useState<"loading" | "ready" | Error>("loading");
  const [help, setHelp] = useState(false);
  const [keyAsked, setKeyAsked] = useState(false);
  const [generation, setGeneration] = useState(0);
  useLayoutEffect(() => {
    onKeyWanted(() => setKeyAsked(true));
    loadSite().then(
      () => setReady("ready"),
      (error: Error) => setReady(error),
    );
  }, [generation]);
  const run = route.path[0] === "runs" ? route.path[1] : undefined;
  useKeys({
    "?": () => setHelp(true),
    "/": focusSearch,
    d: nextTheme,
    "g r": () => go([]),
    ...(run && {
      "g o": () => go(["runs", run]),
      "g t": () => go(["runs", run, "trajectories"]),
      "g m": () => go(["runs", run, "media"]),
    }),
  });
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <Header route={route} run={run} ready={ready === "ready"} onHelp={() => setHelp(true)} />
      <main id="main" tabIndex={-1} key={generation}>
        {ready === "loading" && <Loading what="the page" />}
        {ready instanceof Error && <Failure error={ready} what="The viewer's data" />}
        {ready === "ready" && (isNeedingKey() ? <Notice>Give the key to go on.</Notice> : <View route={route} />)}
      </main>
      <HelpDialog open={help} onClose={() => setHelp(false)} />
      <KeyDialog
        open={keyAsked}
        refused={hasKey()}
        onKey={() => {
          setKeyAsked(false);
          forgetRuns();
          setGeneration(generation + 1);
        }}
      />
    </>
  );
}

function isNeedingKey(): boolean {
  return siteInfo().keys && !hasKey();
}

function Header(properties: { route: Route; run: string | undefined; ready: boolean; onHelp: () => void }) {
  const { route, run } = properties;
  const [, redraw] = useState(0);
  const names = { system: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
  return (
    <header class="top">
      <nav aria-label="Way back" class="crumbs">
        <a href="#/" class="brand">
          <span aria-hidden="true" class="logo" />
          Relax Gym
        </a>
        {run && (
          <a href={link(["runs", run])} class="crumb">
            {run}
          </a>
        )}
      </nav>
      {run && <Views run={run} shown={route.path[2] ?? ""} />}
      <div class="tools">
        {run && properties.ready && !isBundle() && <Live key={run} run={run} />}
        <button type="button" onClick={() => (nextTheme(), redraw((n) => n + 1))} aria-label={`Colours: ${names[theme()]}`} title="Colours (d)">
          {names[theme()]}
        </button>
        <button type="button" onClick={properties.onHelp} aria-label="Help on keys" title="Keys (?)">
          ?
        </button>
      </div>
    </header>
  );
}

function Views(properties: { run: string; shown: string }) {
  const shown = ["groups", "episodes"].includes(properties.shown) ? "trajectories" : properties.shown;
  return (
    <nav aria-label="Views of the run" class="views">
      {VIEWS.map(([path, name]) => (
        <a key={path} href={link(["runs", properties.run, ...(path ? [path] : [])])} aria-current={path === shown ? "page" : undefined}>
          {name}
        </a>
      ))}
    </nav>
  );
}

function Live(properties: { run: string }) {
  const store = useRun(properties.run);
  const running = store.detail?.summary.state === "running";
  const says = store.live === "following" ? (running ? "live" : "") : store.live === "waiting" ? "server gone, trying again" : "";
  return (
    <span class={`live ${store.live} ${running ? "running" : ""}`} role="status">
      {says}
    </span>
  );
}

function View(properties: { route: Route }): ComponentChildren {
  const { path, query } = properties.route;
  if (path.length === 0) return <RunsPage query={query} />;
  if (path[0] === "compare") return <ComparePage query={query} />;
  const [first, run, view, item] = path;
  if (first === "runs" && run) {
    if (!view) return <OverviewPage key={run} run={run} query={query} />;
    if (view === "trajectories" && !item) return <TrajectoriesPage key={run} run={run} query={query} />;
    if (view === "trajectories" && item) return <TrajectoryPage run={run} seq={item} query={query} />;
    if (view === "groups" && item) return <GroupPage run={run} seq={item} />;
    if (view === "episodes" && item) return <EpisodePage run={run} id={item} />;
    if (view === "media") return <MediaPage key={run} run={run} query={query} />;
  }
  return (
    <Notice kind="problem">
      <strong>There is no such page.</strong> <a href="#/">See all runs</a>
    </Notice>
  );
}

