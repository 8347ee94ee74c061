// A run at a glance: findings first, then curves, stage times, staleness, queue, roles, events and the timeline.
import { useEffect, useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import type { Finding, Num, RunDetail, RunEvent, SensesReport } from "../data/types";
import { link } from "../route";
import { rewardName } from "../data/story";
import { ago, count, DASH, fixed, groupState, moment, plural } from "../ui/format";
import { useLoad, useRun, useTitle } from "../ui/hooks";
import { Facts, Failure, Loading, Notice, Panel, State } from "../ui/parts";
import { TimelineView } from "../charts/timeline";
import { Curves } from "./overview_curves";
import { Failures } from "./overview_failures";
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
  const wanted = Boolean(detail?.report || detail?.senses); // most runs have neither, and do not wait for the code
  const { value: measured } = useLoad(async () => (wanted ? await import("./overview_report") : null), [wanted]);
  if (error && !detail) return <Failure error={error} what={`The run ${run}`} />;
  if (!detail) return <Loading what={run} />;
  return (
    <>
      <div class="page-head">
        <h1>{run}</h1>
        <p class="subtitle">
          {detail.summary.played ? "played at the service" : <State state={detail.summary.state} />} {detail.summary.played && "· "}
          {detail.summary.env ?? "unknown environment"}
          {!detail.summary.played && ` · ${played(detail) ?? detail.summary.model ?? "unknown model"}`}
          {detail.summary.updated !== null && (
            <span class="muted" title={moment(detail.summary.updated)}>
              {" "}
              · updated {ago(detail.summary.updated)}
            </span>
          )}
        </p>
      </div>
      <Figures detail={detail} store={store} />
      <WhyEnded detail={detail} />
      {measured && detail.report && <measured.Report report={detail.report} run={run} />}
      {detail.summary.evaluation && !detail.report && !detail.senses && <Notice>{detail.summary.state === "running" ? "The report comes when the evaluation ends." : "This evaluation has no report: the same command goes on where it ended."}</Notice>}
      {detail.summary.played && <Notice>A caller of the service had these episodes played. There are no training steps, so there are no curves: look at the <a href={link(["runs", run, "trajectories"])}>episodes</a>.</Notice>}
      <Findings findings={withoutVerdicts(withNoticed(detail.findings, store.events), detail.senses)} run={run} quiet={!trains(detail)} unjudged={detail.unjudged ?? null} steps={detail.summary.step ?? 0} />
      {trains(detail) && <Curves store={store} query={query} />}
      {trains(detail) && <Failures run={run} metrics={store.metrics} />}
      {measured && detail.senses && <measured.Senses senses={detail.senses} run={run} />}
      {!detail.summary.played && <div class="columns">
        <Panel title={detail.summary.evaluation ? "Logs" : "Roles"}>
          <Roles run={run} status={detail.status} expected={!detail.summary.evaluation} />
        </Panel>
        <Panel title="Events">
          <Events events={store.events} />
        </Panel>
      </div>}
      {trains(detail) && (
        <Panel title="Timeline">
          <TimelineView run={run} />
        </Panel>
      )}
      <About detail={detail} />
    </>
  );
}

/** Whether there are training steps to tell of: an evaluation only measures, and a service plays episodes for its callers. */
function trains(detail: RunDetail): boolean {
  return !detail.summary.evaluation && !detail.summary.played;
}

/** The model that an evaluation or a check played, which is another one than that of its settings where a run was played. */
function played(detail: RunDetail): string | undefined {
  return detail.summary.evaluation ? (detail.report?.model ?? detail.senses?.model) : undefined;
}

/** Why a run is over before its last step, in its own words; they may be several lines, with the command that goes on. */
function WhyEnded({ detail }: { detail: RunDetail }) {
  const { state } = detail.summary;
  const reason = typeof detail.status?.reason === "string" ? detail.status.reason : "";
  if (!reason || (state !== "failed" && state !== "stopped")) return null;
  return (
    <Notice kind={state === "failed" ? "problem" : undefined}>
      <span class="reason">{state === "failed" ? `The run failed: ${reason}` : reason.startsWith("stopped") ? `The run was ${reason}` : `The run was stopped: ${reason}`}</span>
    </Notice>
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
      {trains(detail) && <li>
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
        <span class="name">{summary.played ? "Reward, newest 20 episodes" : "Reward, last 10 steps"}</span>
        <span class="value">{fixed(summary.reward_last10 ?? summary.reward)}</span>
      </li>}
      {!summary.played && !(summary.evaluation && detail.senses && !detail.report) && <li>
        <span class="name">{summary.evaluation ? "Mean reward of the evaluation" : "Held out"}</span>
        <span class="value">
          {fixed(summary.held_out)}
          {summary.held_out !== null && summary.held_out_ci95 !== null && <small title="95% confidence interval"> ± {fixed(summary.held_out_ci95)}</small>}
        </span>
        {summary.held_out === null && <small class="muted">not measured yet</small>}
      </li>}
      <li>
        <span class="name">Trajectories</span>
        <a class="value" href={link(["runs", summary.name, "trajectories"])}>
          {count(summary.trajectories)}
        </a>
        {!detail.report && <span class="figure-links">
          <a href={link(["runs", summary.name, "trajectories"], { sort: "reward:asc" })}>worst</a>
          <a href={link(["runs", summary.name, "trajectories"], { sort: "reward:desc" })}>best</a>
          <a href={link(["runs", summary.name, "trajectories"], { status: "not_ok" })}>failed</a>
        </span>}
      </li>
    </ul>
  );
}

/** What the doctor finds now, and what was noticed while the run went on and is not found any more, the latest of each kind. */
function withNoticed(findings: Finding[] | null, events: RunEvent[]): Finding[] | null {
  const found = findings ?? [];
  const kind = (what: string) => what.replace(/[\d.,%]+/g, "#").slice(0, 24);
  const known = new Set(found.map((finding) => kind(finding.what)));
  const noticed = new Map(events.filter((event) => event.level !== "ok" && event.kind === "finding").map((event) => [kind(event.what), event]));
  const late = [...noticed].filter(([name]) => !known.has(name)).map(([, event]) => event);
  return findings && [...found, ...late.map(({ level, what, advice, step }) => ({ level, what: step === null ? what : `${what} (noticed ${step ? `at step ${step}` : "before the first step"})`, advice }))];
}

/** Findings without what the table of the senses says too, but for problems. */
function withoutVerdicts(findings: Finding[] | null, senses: SensesReport | null | undefined): Finding[] | null {
  const told = new Set(Object.entries(senses?.verdicts ?? {}).map(([kind, verdict]) => `${kind}: ${verdict.what}`));
  return findings && findings.filter((finding) => finding.level === "problem" || !told.has(finding.what));
}

function Findings({ findings, run, quiet, unjudged, steps }: { findings: Finding[] | null; run: string; quiet?: boolean; unjudged: Num; steps: number }) {
  if (!findings || (quiet && findings.length === 0)) return null; // nothing was trained that could go wrong
  const early = unjudged !== null && !quiet && (
    <Notice>
      {steps < unjudged ? "Too few steps to be judged yet: " : "Not judged: "}
      <code>relax doctor</code> {steps < unjudged ? `needs ${count(unjudged)}.` : "cannot read this run."}
    </Notice>
  );
  if (findings.length === 0 && early) return early;
  if (findings.length === 0)
    return (
      <p class="all-well">
        No finding: nothing that <code>relax doctor</code> looks for has been seen.
      </p>
    );
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
      {early}
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
    ...(summary.played ? [] : ([["started", moment(summary.started)]] as [string, string][])),
    ...(trains(detail) ? [["mode", summary.mode ?? DASH] as [string, string]] : []),
    ...(summary.played ? [] : ([["seed", count(summary.seed)], ["folder", summary.folder ?? DASH]] as [string, string][])),
    ["senses", env?.modalities.join(", ") || DASH],
    ["rewards", env?.rewards.map(rewardName).join(", ") || DASH],
    ["tools", env?.tools.join(", ") || "none"],
    ["splits", Object.entries(splits ?? {}).map(([name, n]) => `${name} ${count(n)}`).join(", ") || DASH],
    ...(!trains(detail) ? [] : ([["groups", Object.entries(counts ?? {}).filter(([, n]) => n).map(([name, n]) => `${count(n)} ${groupState(name)}`).join(", ") || DASH],
    ["checkpoints", checkpoints?.map((step) => `step ${step}`).join(", ") || "none"]] as [string, string][])),
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
        !summary.played && <Notice>The run's configuration is not in its folder.</Notice>
      )}
    </Panel>
  );
}
