// The curves of a run: reward with held-out intervals, where the time goes, staleness, queue, and any metric by search.
import { useMemo } from "preact/hooks";
import { Plot, type Series } from "../charts/plot";
import { smooth, stacked } from "../charts/smooth";
import type { RunStore } from "../data/store";
import { orderBy, type GrowingTable } from "../data/table";
import type { Num } from "../data/types";
import { setQuery } from "../route";
import { Loading, Notice, Panel } from "../ui/parts";

const STAGES = ["seconds_wait", "seconds_load", "seconds_fields", "seconds_train", "seconds_publish"];
const USUAL = ["loss", "entropy", "kl", "logprob_gap_mean", "grad_norm", "tokens_per_second"];
const MOST = 24; // charts of found metrics
const AGES = 7; // classes of staleness, the last of which holds all that is older

type Column = (name: string) => Num[];

export function Curves({ store, query }: { store: RunStore; query: URLSearchParams }) {
  const { metrics } = store;
  const order = useMemo(() => orderBy(metrics, "step"), [metrics, metrics.length]);
  if (!store.metricsLoaded) return <Loading what="metrics" />;
  if (metrics.length === 0) {
    return <Notice>No training step is done yet. {store.detail?.summary.state === "running" ? "Curves appear with the first." : "The run ended before its first step."}</Notice>;
  }
  const column: Column = (name) => {
    const values = metrics.column(name);
    return order.map((row) => (typeof values[row] === "number" ? (values[row] as number) : null));
  };
  const x = column("step").map(Number);
  const has = (name: string) => metrics.columns.has(name);
  return (
    <>
      <Panel title="Reward" side={<span class="muted">mean of a step; held out with its 95% interval</span>}>
        <Plot label="Reward by step" x={x} series={rewardSeries(column, has)} height={240} floor={0} />
      </Panel>
      <div class="columns three">
        <Panel title="Where a step's time goes" side={<span class="muted">seconds</span>}>
          <Plot label="Seconds of a step by stage" x={x} series={stageSeries(column, has)} floor={0} />
        </Panel>
        <Panel title="Staleness" side={<span class="muted">share by age in steps</span>}>
          <Plot label="Share of trajectories by staleness" x={x} series={stalenessSeries(metrics, column)} floor={0} ceiling={1} />
        </Panel>
        <Panel title="Queue" side={<span class="muted">groups</span>}>
          <Plot label="Groups that wait" x={x} series={queueSeries(column, has)} floor={0} />
        </Panel>
      </div>
      <Metrics metrics={metrics} x={x} column={column} query={query} />
    </>
  );
}

function rewardSeries(column: Column, has: (name: string) => boolean): Series[] {
  const reward = column("reward");
  const series: Series[] = [
    { name: "each step", values: reward, colour: "series-1", kind: "faint", quiet: true },
    { name: "reward, smoothed", values: smooth(reward, 0.8), colour: "series-1" },
  ];
  if (has("eval_reward")) series.push({ name: "held out", values: column("eval_reward"), colour: "series-2", kind: "points", around: column("eval_ci95") });
  return series;
}

function stageSeries(column: Column, has: (name: string) => boolean): Series[] {
  const names = STAGES.filter(has);
  const sums = stacked(names.map(column));
  const layers = names.map((name, index): Series => ({ name: name.replace("seconds_", ""), values: sums[index]!, told: column(name), colour: `series-${index + 1}` }));
  const zero: Series = { name: "none", values: (sums[0] ?? []).map(() => 0), colour: "grid", quiet: true };
  const all = [zero, ...layers];
  return all.map((one, index) => (index === 0 ? one : { ...one, fillTo: index - 1 }));
}

/** Shares of each staleness in a step's batch, on top of one another; the last class holds all that is older. */
function stalenessSeries(metrics: GrowingTable, column: Column): Series[] {
  const names = [...metrics.columns.keys()].filter((name) => name.startsWith("staleness_histogram/"));
  const ages = names.map((name) => Number(name.split("/")[1])).sort((a, b) => a - b);
  if (ages.length === 0) return [{ name: "mean staleness", values: column("staleness_mean"), colour: "series-1" }];
  const each = ages.map((age) => column(`staleness_histogram/${age}`));
  const older = each.slice(AGES - 1);
  const counts = ages.length > AGES ? [...each.slice(0, AGES - 1), older[0]!.map((_, index) => older.reduce((sum, values) => sum + (values[index] ?? 0), 0))] : each;
  const totals = counts[0]!.map((_, index) => counts.reduce((sum, values) => sum + (values[index] ?? 0), 0));
  const shares = counts.map((values) => values.map((value, index) => (totals[index] ? (value ?? 0) / totals[index]! : null)));
  const sums = stacked(shares);
  const zero: Series = { name: "none", values: totals.map(() => 0), colour: "grid", quiet: true };
  const named = (age: number, index: number) => (counts.length < ages.length && index === AGES - 1 ? `${age} or more steps old` : age === 1 ? "1 step old" : `${age} steps old`);
  return [zero, ...ages.slice(0, counts.length).map((age, index): Series => ({ name: named(age, index), values: sums[index]!, told: shares[index]!, colour: `series-${index + 1}`, fillTo: index }))];
}

function queueSeries(column: Column, has: (name: string) => boolean): Series[] {
  const names: [string, string][] = [
    ["queue", "ready"],
    ["rollout_in_flight", "in flight"],
    ["dropped", "dropped as too old"],
  ];
  return names.filter(([name]) => has(name)).map(([name, title], index) => ({ name: title, values: column(name), colour: `series-${index + 1}` }));
}

function Metrics(properties: { metrics: GrowingTable; x: number[]; column: Column; query: URLSearchParams }) {
  const { metrics, x, column, query } = properties;
  const asked = query.get("metrics") ?? "";
  const words = asked.toLowerCase().split(/\s+/).filter(Boolean);
  const names = [...metrics.columns.keys()].filter((name) => name !== "step" && name !== "time").sort();
  const found = words.length ? names.filter((name) => words.some((word) => name.toLowerCase().includes(word))) : USUAL.filter((name) => metrics.columns.has(name));
  const shown = found.slice(0, MOST);
  return (
    <Panel
      title="Metrics"
      side={
        <input
          type="search"
          placeholder={`Search ${names.length} metrics`}
          aria-label="Search metrics"
          value={asked}
          list="metric-names"
          onInput={(event) => setQuery({ metrics: event.currentTarget.value })}
        />
      }
    >
      <datalist id="metric-names">
        {names.map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
      {found.length === 0 && <Notice>No metric has “{asked}” in its name.</Notice>}
      {found.length > shown.length && <p class="muted">{found.length} metrics match; the first {shown.length} are drawn.</p>}
      <div class="small-plots">
        {shown.map((name) => (
          <section key={name} aria-label={name}>
            <h3>{name}</h3>
            <Plot label={name} x={x} series={[{ name: "last", values: column(name), colour: "series-1" }]} height={130} />
          </section>
        ))}
      </div>
    </Panel>
  );
}
