// All runs: a table that can be sorted and filtered, and from which several are chosen to compare.
import { useEffect, useState } from "preact/hooks";
import { isBundle, read } from "../data/client";
import type { RunSummary } from "../data/types";
import { go, link, setQuery } from "../route";
import { ago, count, DASH, fixed, moment, plural } from "../ui/format";
import { useLoad, useTitle } from "../ui/hooks";
import { useKeys } from "../ui/keys";
import { Failure, Loading, Notice, Reward, State } from "../ui/parts";

type Sortable = "name" | "env" | "model" | "state" | "step" | "reward_last10" | "held_out" | "updated" | "problems" | "trajectories";

const COLUMNS: [Sortable, string, boolean][] = [
  ["name", "Run", false],
  ["state", "State", false],
  ["env", "Environment", false],
  ["model", "Model", false],
  ["step", "Step", true],
  ["reward_last10", "Reward", true],
  ["held_out", "Held out", true],
  ["trajectories", "Trajectories", true],
  ["problems", "Findings", true],
  ["updated", "Updated", true],
];
const REFRESH = 5000; // milliseconds between looks at the list of runs

export function RunsPage(properties: { query: URLSearchParams }) {
  const { query } = properties;
  useTitle("Runs");
  const [turn, setTurn] = useState(0);
  const { value, error } = useLoad((signal) => read<{ runs: RunSummary[] }>("runs.json", {}, signal), [turn], false);
  useEffect(() => {
    if (isBundle()) return;
    const timer = setInterval(() => !document.hidden && setTurn((n) => n + 1), REFRESH);
    return () => clearInterval(timer);
  }, []);
  const [at, setAt] = useState(-1);
  const chosen = new Set((query.get("chosen") ?? "").split(",").filter(Boolean));
  const shown = value ? sorted(value.runs.filter(passes(query.get("q") ?? "")), query) : [];
  useKeys({
    j: () => setAt(Math.min(at + 1, shown.length - 1)),
    k: () => setAt(Math.max(at - 1, 0)),
    ArrowDown: () => setAt(Math.min(at + 1, shown.length - 1)),
    ArrowUp: () => setAt(Math.max(at - 1, 0)),
    Enter: () => shown[at] && go(["runs", shown[at].name]),
    x: () => shown[at] && choose(chosen, shown[at].name),
  });
  return (
    <>
      <div class="page-head">
        <h1>Runs</h1>
        <input
          type="search"
          placeholder="Filter by name, environment, model"
          aria-label="Filter runs"
          value={query.get("q") ?? ""}
          onInput={(event) => setQuery({ q: event.currentTarget.value })}
        />
        {chosen.size > 0 && (
          <div class="chosen">
            <span role="status">{chosen.size} chosen</span>
            <a class="button primary" href={link(["compare"], { runs: [...chosen].join(",") })} aria-disabled={chosen.size < 2}>
              Compare
            </a>
            <button type="button" onClick={() => setQuery({ chosen: null })}>
              Choose none
            </button>
          </div>
        )}
      </div>
      {error && <Failure error={error} what="The list of runs" />}
      {!value && !error && <Loading what="runs" />}
      {value && value.runs.length === 0 && (
        <Notice>
          There is no run here yet. <code>relax train tone-v0</code> starts one that takes a minute; <code>relax view FOLDER</code> looks into another folder.
        </Notice>
      )}
      {value && value.runs.length > 0 && shown.length === 0 && <Notice>No run matches “{query.get("q")}”.</Notice>}
      {shown.length > 0 && <RunsTable runs={shown} query={query} chosen={chosen} at={at} />}
    </>
  );
}

function choose(chosen: Set<string>, name: string): void {
  const next = new Set(chosen);
  if (!next.delete(name)) next.add(name);
  setQuery({ chosen: [...next].join(",") });
}

function passes(text: string): (run: RunSummary) => boolean {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (run) => {
    const all = `${run.name} ${run.env ?? ""} ${run.model ?? ""} ${run.state} ${run.mode ?? ""}`.toLowerCase();
    return words.every((word) => all.includes(word));
  };
}

function sorted(runs: RunSummary[], query: URLSearchParams): RunSummary[] {
  const [column, direction] = (query.get("sort") ?? "updated:desc").split(":") as [Sortable, string];
  const way = direction === "asc" ? 1 : -1;
  return [...runs].sort((a, b) => {
    const [x, y] = [a[column], b[column]];
    if (x === y) return a.name.localeCompare(b.name);
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * way;
  });
}

function RunsTable(properties: { runs: RunSummary[]; query: URLSearchParams; chosen: Set<string>; at: number }) {
  const [column, direction] = (properties.query.get("sort") ?? "updated:desc").split(":");
  return (
    <div class="scroll" role="region" aria-label="Table of runs" tabIndex={0}>
      <table class="runs">
        <thead>
          <tr>
            <th scope="col" class="pick">
              <span class="unseen">Choose</span>
            </th>
            {COLUMNS.map(([name, title, right]) => (
              <th key={name} scope="col" class={right ? "right" : ""} aria-sort={name === column ? (direction === "asc" ? "ascending" : "descending") : undefined}>
                <button type="button" onClick={() => setQuery({ sort: `${name}:${name === column && direction !== "asc" ? "asc" : "desc"}` })}>
                  {title}
                  <span aria-hidden="true" class="arrow">
                    {name === column ? (direction === "asc" ? "↑" : "↓") : ""}
                  </span>
                </button>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {properties.runs.map((run, index) => (
            <RunRow key={run.name} run={run} chosen={properties.chosen} at={index === properties.at} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function RunRow(properties: { run: RunSummary; chosen: Set<string>; at: boolean }) {
  const { run, chosen } = properties;
  return (
    <tr class={properties.at ? "at" : ""} onClick={(event) => !(event.target as HTMLElement).closest("a, button, input, label") && go(["runs", run.name])}>
      <td class="pick">
        <label>
          <input type="checkbox" checked={chosen.has(run.name)} onChange={() => choose(chosen, run.name)} />
          <span class="unseen">Compare {run.name}</span>
        </label>
      </td>
      <th scope="row">
        <a href={link(["runs", run.name])}>{run.name}</a>
      </th>
      <td>
        {run.played ? <span class="muted">{DASH}</span> : <State state={run.state} />}
      </td>
      <td>{run.env ?? DASH}</td>
      <td class="model">{run.model ?? DASH}</td>
      <td class="right">
        {run.evaluation || run.played ? <span class="muted">{run.evaluation ? "evaluation" : "played at the service"}</span> : count(run.step)}
        {!run.evaluation && !run.played && run.steps !== null && <span class="muted"> / {count(run.steps)}</span>}
      </td>
      <td class="right">
        <Reward value={run.reward_last10 ?? run.reward} />
      </td>
      <td class="right">
        {fixed(run.held_out)}
        {run.held_out !== null && run.held_out_ci95 !== null && <span class="muted"> ± {fixed(run.held_out_ci95)}</span>}
      </td>
      <td class="right">{count(run.trajectories)}</td>
      <td class="right">
        <Marks run={run} />
      </td>
      <td class="right" title={moment(run.updated)}>
        {ago(run.updated)}
      </td>
    </tr>
  );
}

/** How many problems and how many notes a run has told of while it went on. */
function Marks({ run }: { run: RunSummary }) {
  const { problems, notes = 0 } = run;
  if (!problems && !notes) return <span class="muted">{problems === 0 ? "none" : DASH}</span>;
  return (
    <>
      {problems ? <span class="mark problem">{plural(problems, "problem")}</span> : null}
      {problems && notes ? ", " : null}
      {notes ? <span class="mark note">{plural(notes, "note")}</span> : null}
    </>
  );
}
