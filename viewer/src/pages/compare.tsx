// Several runs over one another: curves, a band where runs differ by nothing but their seed, and the settings that differ.
import { useMemo } from "preact/hooks";
import { Plot, type Series } from "../charts/plot";
import { band, smooth } from "../charts/smooth";
import { read, runPath } from "../data/client";
import { GrowingTable, orderBy } from "../data/table";
import type { Columnar, Num, RunDetail } from "../data/types";
import { link, setQuery } from "../route";
import { DASH, fixed, plural, text } from "../ui/format";
import { useLoad, useTitle } from "../ui/hooks";
import { Failure, Loading, Notice, Panel } from "../ui/parts";

interface Loaded {
  detail: RunDetail;
  metrics: GrowingTable;
  settings: Map<string, string>;
}

interface Family {
  name: string;
  runs: Loaded[];
}

const USUAL = ["reward", "eval_reward", "loss", "entropy", "kl", "seconds_step"];

export function ComparePage({ query }: { query: URLSearchParams }) {
  const names = (query.get("runs") ?? "").split(",").filter(Boolean);
  useTitle("Compare", ...names);
  const { value, error } = useLoad((signal) => Promise.all(names.map((name) => load(name, signal))), [names.join()]);
  return (
    <>
      <div class="page-head">
        <h1>Compare {plural(names.length, "run")}</h1>
        <a href={link([], { chosen: names.join(",") })}>Choose others</a>
      </div>
      {names.length === 0 && <Notice>No run is chosen. Choose some in the table of runs.</Notice>}
      {error && <Failure error={error} what="The comparison" />}
      {!value && !error && names.length > 0 && <Loading what="the runs" />}
      {value && value.length > 0 && <Compared runs={value} query={query} />}
    </>
  );
}

async function load(name: string, signal: AbortSignal): Promise<Loaded> {
  const [detail, part] = await Promise.all([
    read<RunDetail>(`${runPath(name)}/run.json`, {}, signal),
    read<Columnar>(`${runPath(name)}/metrics.json`, {}, signal),
  ]);
  const metrics = new GrowingTable("step");
  metrics.merge(part);
  return { detail, metrics, settings: flat(detail.config ?? {}) };
}

function flat(value: Record<string, unknown>, before = ""): Map<string, string> {
  const out = new Map<string, string>();
  for (const [name, inner] of Object.entries(value)) {
    if (inner !== null && typeof inner === "object" && !Array.isArray(inner)) {
      for (const [key, one] of flat(inner as Record<string, unknown>, `${before}${name}.`)) out.set(key, one);
    } else out.set(before + name, text(inner));
  }
  return out;
}

/** Runs whose settings are equal but for the seed belong together. */
function families(runs: Loaded[]): Family[] {
  const out = new Map<string, Loaded[]>();
  for (const run of runs) {
    const key = [...run.settings].filter(([name]) => name !== "seed").map(([name, value]) => `${name}=${value}`).sort().join("\n") || run.detail.summary.name;
    out.set(key, [...(out.get(key) ?? []), run]);
  }
  return [...out.values()].map((members) => ({
    runs: members,
    name: members.length > 1 ? `${members[0]!.detail.summary.name} and ${plural(members.length - 1, "other seed")}` : members[0]!.detail.summary.name,
  }));
}

function Compared({ runs, query }: { runs: Loaded[]; query: URLSearchParams }) {
  const together = useMemo(() => families(runs), [runs]);
  const asked = query.get("metrics") ?? "";
  const all = [...new Set(runs.flatMap((run) => [...run.metrics.columns.keys()]))].filter((name) => name !== "step" && name !== "time").sort();
  const words = asked.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = (words.length ? all.filter((name) => words.some((word) => name.toLowerCase().includes(word))) : USUAL.filter((name) => all.includes(name))).slice(0, 24);
  return (
    <>
      <Panel
        title="Curves"
        side={<input type="search" placeholder={`Search ${all.length} metrics`} aria-label="Search metrics" value={asked} onInput={(event) => setQuery({ metrics: event.currentTarget.value })} />}
      >
        <ul class="legend" aria-label="Runs and their colours">
          {together.map((family, index) => (
            <li key={family.name}>
              <span class="swatch" style={{ background: `var(--series-${(index % 8) + 1})` }} aria-hidden="true" />
              {family.runs.map((run) => (
                <a key={run.detail.summary.name} href={link(["runs", run.detail.summary.name])}>
                  {run.detail.summary.name}
                </a>
              ))}
              {family.runs.length > 1 && <span class="muted">mean and standard deviation of {family.runs.length} seeds</span>}
            </li>
          ))}
        </ul>
        {shown.length === 0 && <Notice>{all.length ? `No metric has “${asked}” in its name.` : "None of these runs has made a step."}</Notice>}
        <div class="small-plots wide">
          {shown.map((name) => (
            <section key={name} aria-label={name}>
              <h3>{name}</h3>
              <Overlaid name={name} families={together} />
            </section>
          ))}
        </div>
      </Panel>
      <Results runs={runs} />
      <Differences runs={runs} />
    </>
  );
}

function curve(run: Loaded, name: string): { x: number[]; y: Num[] } {
  const order = orderBy(run.metrics, "step");
  const y = order.map((row) => run.metrics.number(name, row));
  return { x: order.map((row) => run.metrics.number("step", row) ?? 0), y: name === "reward" ? smooth(y, 0.8) : y };
}

function Overlaid({ name, families: together }: { name: string; families: Family[] }) {
  const bands = together.map((family) => band(family.runs.map((run) => curve(run, name))));
  const x = [...new Set(bands.flatMap((one) => one.x))].sort((a, b) => a - b);
  const series = bands.flatMap((one, index): Series[] => {
    const hue = `series-${(index % 8) + 1}`;
    const at = new Map(one.x.map((place, position) => [place, position]));
    const over = (values: Num[]) => x.map((place) => (at.has(place) ? (values[at.get(place)!] ?? null) : null));
    const mean: Series = { name: together[index]!.name, values: over(one.mean), colour: hue };
    return [mean];
  });
  together.forEach((family, index) => {
    if (family.runs.length < 2) return;
    const one = bands[index]!;
    const hue = `series-${(index % 8) + 1}`;
    const at = new Map(one.x.map((place, position) => [place, position]));
    const over = (values: Num[]) => x.map((place) => (at.has(place) ? (values[at.get(place)!] ?? null) : null));
    series.push({ name: `${family.name} low`, values: over(one.low), colour: hue, kind: "faint", quiet: true });
    series.push({ name: `${family.name} high`, values: over(one.high), colour: hue, kind: "faint", quiet: true, fillTo: series.length - 1 });
  });
  return <Plot label={name} x={x} series={series} height={200} />;
}

function Results({ runs }: { runs: Loaded[] }) {
  return (
    <Panel title="Results">
      <div class="scroll" role="region" aria-label="Table of results" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th scope="col">Run</th>
              <th scope="col" class="right">
                Seed
              </th>
              <th scope="col" class="right">
                Steps
              </th>
              <th scope="col" class="right">
                Reward
              </th>
              <th scope="col" class="right">
                Held out
              </th>
            </tr>
          </thead>
          <tbody>
            {runs.map(({ detail: { summary } }) => (
              <tr key={summary.name}>
                <th scope="row">
                  <a href={link(["runs", summary.name])}>{summary.name}</a>
                </th>
                <td class="right">{summary.seed ?? DASH}</td>
                <td class="right">{summary.step ?? DASH}</td>
                <td class="right">{fixed(summary.reward_last10 ?? summary.reward)}</td>
                <td class="right">
                  {fixed(summary.held_out)}
                  {summary.held_out_ci95 !== null && summary.held_out !== null && <span class="muted"> ± {fixed(summary.held_out_ci95)}</span>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Differences({ runs }: { runs: Loaded[] }) {
  const names = [...new Set(runs.flatMap((run) => [...run.settings.keys()]))];
  const differing = names.filter((name) => new Set(runs.map((run) => run.settings.get(name) ?? DASH)).size > 1);
  return (
    <Panel title="Settings that differ">
      {differing.length === 0 ? (
        <Notice>All settings of these runs are equal.</Notice>
      ) : (
        <div class="scroll" role="region" aria-label="Table of settings" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col">Setting</th>
                {runs.map((run) => (
                  <th key={run.detail.summary.name} scope="col">
                    {run.detail.summary.name}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {differing.map((name) => (
                <tr key={name}>
                  <th scope="row">
                    <code>{name}</code>
                  </th>
                  {runs.map((run) => (
                    <td key={run.detail.summary.name}>{run.settings.get(name) ?? DASH}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
