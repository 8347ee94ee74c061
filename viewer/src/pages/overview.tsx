// A run at a glance: findings first, then curves, stage times, staleness, queue, roles, events and the timeline.
import { useEffect, useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import type { Finding, RunDetail, RunEvent } from "../data/types";
import { link } from "../route";
import { rewardName } from "../data/story";
import { ago, count, DASH, fixed, groupState, moment, plural } from "../ui/format";
import { useRun, useTitle } from "../ui/hooks";
import { Facts, Failure, Loading, Notice, Panel, State } from "../ui/parts";
import { TimelineView } from "../charts/timeline";
import { Curves } from "./overview_curves";
import { Events, Roles } from "./overview_roles";

export function OverviewPage({ run, query }: { run: string; query: URLSearchParams }) {
  useTitle(run);
  const store = useRun(run);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => {
    store.loadDetail().catch(setError);
    store.loadMetrics().catch(setError);
    store.loadEvents().catch(() => {});
  }, [store]);
  const { detail } = store;
  if (error && !detail) return <Failure error={error} what={`The run ${run}`} />;
  if (!detail) return <Loading what={run} />;
  return (
    <>
      <div class="page-head">
        <h1>{run}</h1>
        <p class="subtitle">
          <State state={detail.summary.state} /> {detail.summary.env ?? "unknown environment"} · {detail.summary.model ?? "unknown model"}
          {detail.summary.updated !== null && (
            <span class="muted" title={moment(detail.summary.updated)}>
              {" "}
              · updated {ago(detail.summary.updated)}
            </span>
          )}
        </p>
      </div>
      <Figures detail={detail} store={store} />
      <Findings findings={withNoticed(detail.findings, store.events)} run={run} />
      {!detail.summary.evaluation && <Curves store={store} query={query} />}
      <div class="columns">
        <Panel title="Roles">
          <Roles run={run} status={detail.status} />
        </Panel>
        <Panel title="Events">
          <Events events={store.events} />
        </Panel>
      </div>
      {!detail.summary.evaluation && (
        <Panel title="Timeline">
          <TimelineView run={run} />
        </Panel>
      )}
      <About detail={detail} />
    </>
  );
}

function Figures({ detail, store }: { detail: RunDetail; store: RunStore }) {
  const { summary } = detail;
  const last = store.metrics.length - 1;
  const step = Math.max(summary.step ?? 0, ...(last >= 0 ? [store.metrics.number("step", last) ?? 0] : []));
  const done = summary.steps ? Math.min(1, step / summary.steps) : 0;
  const stage = typeof detail.status?.stage === "string" && summary.state === "running" ? detail.status.stage : "";
  return (
    <ul class="figures" aria-label="The run in numbers">
      {!summary.evaluation && <li>
        <span class="name">Step</span>
        <span class="value">
          {count(step)}
          {summary.steps !== null && <small> of {count(summary.steps)}</small>}
        </span>
        <span class="progress" aria-hidden="true">
          <span style={{ width: `${done * 100}%` }} />
        </span>
        {stage && <small class="muted">{stage}</small>}
      </li>}
      {!summary.evaluation && <li>
        <span class="name">Reward, last 10 steps</span>
        <span class="value">{fixed(summary.reward_last10 ?? summary.reward)}</span>
      </li>}
      <li>
        <span class="name">{summary.evaluation ? "Mean reward of the evaluation" : "Held out"}</span>
        <span class="value">
          {fixed(summary.held_out)}
          {summary.held_out !== null && summary.held_out_ci95 !== null && <small title="95% confidence interval"> ± {fixed(summary.held_out_ci95)}</small>}
        </span>
        {summary.held_out === null && <small class="muted">not measured yet</small>}
      </li>
      <li>
        <span class="name">Trajectories</span>
        <a class="value" href={link(["runs", summary.name, "trajectories"])}>
          {count(summary.trajectories)}
        </a>
        <span class="figure-links">
          <a href={link(["runs", summary.name, "trajectories"], { sort: "reward:asc" })}>worst</a>
          <a href={link(["runs", summary.name, "trajectories"], { sort: "reward:desc" })}>best</a>
          <a href={link(["runs", summary.name, "trajectories"], { status: "not_ok" })}>failed</a>
        </span>
      </li>
    </ul>
  );
}

/** What the doctor finds now, and the problems that were noticed while the run went on, the latest of each kind. */
function withNoticed(findings: Finding[] | null, events: RunEvent[]): Finding[] | null {
  const found = findings ?? [];
  const kind = (what: string) => what.replace(/[\d.,%]+/g, "#").slice(0, 24);
  const known = new Set(found.map((finding) => kind(finding.what)));
  const noticed = new Map(events.filter((event) => event.level === "problem" && event.kind === "finding").map((event) => [kind(event.what), event]));
  const late = [...noticed].filter(([name]) => !known.has(name)).map(([, event]) => event);
  return findings && [...found, ...late.map(({ level, what, advice, step }) => ({ level, what: step === null ? what : `${what} (noticed at step ${step})`, advice }))];
}

function Findings({ findings, run }: { findings: Finding[] | null; run: string }) {
  if (!findings) return null;
  if (findings.length === 0) return <p class="all-well">No finding: nothing that `relax doctor` looks for has been seen.</p>;
  const problems = findings.filter((finding) => finding.level === "problem").length;
  const rank = (finding: Finding) => ["problem", "warning", "note", "ok"].indexOf(finding.level);
  const ordered = [...findings].sort((a, b) => rank(a) - rank(b));
  return (
    <Panel title="Findings" side={<span class="muted">{problems ? plural(problems, "problem") : "no problem"}</span>} class="findings">
      <ul>
        {ordered.map((finding) => (
          <li key={finding.what} class={finding.level}>
            <span class="mark-name">{finding.level}</span>
            <div>
              <strong>{finding.what}</strong>
              {finding.advice && <p>{finding.advice}</p>}
            </div>
          </li>
        ))}
      </ul>
      {problems > 0 && (
        <p class="muted">
          Look at the <a href={link(["runs", run, "trajectories"], { sort: "reward:asc" })}>worst episodes</a> to see what they mean.
        </p>
      )}
    </Panel>
  );
}

function About({ detail }: { detail: RunDetail }) {
  const { summary, env, splits, counts, checkpoints } = detail;
  const rows: [string, string][] = [
    ["started", moment(summary.started)],
    ["mode", summary.mode ?? DASH],
    ["seed", count(summary.seed)],
    ["folder", summary.folder ?? DASH],
    ["senses", env?.modalities.join(", ") || DASH],
    ["rewards", env?.rewards.map(rewardName).join(", ") || DASH],
    ["tools", env?.tools.join(", ") || "none"],
    ["splits", Object.entries(splits ?? {}).map(([name, n]) => `${name} ${count(n)}`).join(", ") || DASH],
    ["groups", Object.entries(counts ?? {}).filter(([, n]) => n).map(([name, n]) => `${count(n)} ${groupState(name)}`).join(", ") || DASH],
    ["checkpoints", checkpoints?.map((step) => `step ${step}`).join(", ") || "none"],
  ]; // prettier-ignore
  return (
    <Panel title="About the run" class="about">
      {env?.description && <p>{env.description}</p>}
      <Facts rows={rows} />
      {detail.config ? (
        <details>
          <summary>Configuration</summary>
          <pre class="info">{JSON.stringify(detail.config, null, 2)}</pre>
        </details>
      ) : (
        <Notice>The run's configuration is not in its folder.</Notice>
      )}
    </Panel>
  );
}
