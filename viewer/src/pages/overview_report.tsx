// What was measured: the report of an evaluation in tables, and what the model uses of what it is shown.
import type { ComponentChildren } from "preact";
import { rewardName } from "../data/story";
import type { Estimate, EvalReport, Finding, SensePass, SensesReport } from "../data/types";
import { link } from "../route";
import { count, DASH, fixed, plural, signed } from "../ui/format";
import { Panel, Reward } from "../ui/parts";

const CLEAR = 0.1; // how much oftener one of several answers succeeds than a single one, to be worth a word

export function Report({ report, run }: { report: EvalReport; run: string }) {
  const failed = report.failures.reduce((sum, failure) => sum + failure.episodes, 0);
  const list = (query: Record<string, string>) => link(["runs", run, "trajectories"], query);
  return (
    <Panel
      title="Report"
      class="report"
      side={
        <span class="figure-links">
          <a href={list({ sort: "reward:asc" })}>worst</a>
          <a href={list({ sort: "reward:desc" })}>best</a>
          {failed > 0 && <a href={list({ status: "not_ok" })}>failed</a>}
        </span>
      }
    >
      <p>
        {plural(report.episodes, "episode")} of {count(report.tasks)} {report.tasks === report.of ? "" : `of ${count(report.of)} `}
        {report.of === 1 ? "task" : "tasks"} ({report.split}). {failed > 0 && <strong>{count(failed)} failed and count nowhere below. </strong>}
        An episode succeeds with a reward of {report.success} or more.
      </p>
      <div class="tables">
        <Figures head={["Figure", "Mean", "± 95%", "n"]} rows={[estimate("reward", report.reward), ...Object.entries(report.pass_at).map(([k, value]) => estimate(<abbr title={`at least one of ${k} answers to a task succeeds`}>pass@{k}</abbr>, value))]} />
        {Object.keys(report.components).length > 0 && (
          <Figures
            head={["By component", "Mean", "± 95%", "n", ""]}
            rows={Object.entries(report.components).map(([name, value]) => [...estimate(rewardName(name), value), name.includes(":") ? "" : <a href={list({ sort: `reward/${name}:asc` })}>worst<span class="unseen"> of {rewardName(name)}</span></a>])}
          />
        )}
        {report.by_tag.length > 0 && (
          <Figures
            head={[`By ${report.by}`, "Reward", "± 95%", "pass@1", "Tasks", "Failed"]}
            rows={report.by_tag.map((one) => [one.tag, <Reward value={one.reward.mean} />, half(one.reward), fixed(one.once?.mean), count(one.tasks), one.failed ? count(one.failed) : ""])}
          />
        )}
        {failed > 0 && <Figures head={["Failed by", "Episodes", "For example"]} text={2} rows={report.failures.map((one) => [one.cause, count(one.episodes), one.example ?? DASH])} />}
      </div>
      <p class="next">
        <strong>Next:</strong> {advice(report, failed)}
      </p>
    </Panel>
  );
}

function estimate(name: ComponentChildren, value: Estimate): ComponentChildren[] {
  return [name, fixed(value.mean, 3), half(value), count(value.n)];
}

function half(value: Estimate): string {
  return fixed(value.ci95, 3);
}

/** What to do after an evaluation, from its figures. */
function advice(report: EvalReport, failed: number): ComponentChildren {
  if (!report.complete) return "the same command goes on where this evaluation ended.";
  if (failed > 0) return "open the failed episodes first and mend their errors; the same command then plays them again.";
  const most = Math.max(1, ...Object.keys(report.pass_at).map(Number));
  const [once, best] = [report.pass_at[1]?.mean ?? 0, report.pass_at[most]?.mean ?? 0];
  if (most > 1 && best === 0) return `none of ${most} answers to any task succeeds. Look at the worst episodes; make tasks easier, or teach the form of an answer first.`;
  if (best - once > CLEAR) return `one of ${most} answers succeeds far oftener than a single one. The model can do these tasks, and training can make it do them each time.`;
  return (
    <>
      look at the worst episodes to see what is missing; <code>relax eval compare A B</code> says whether another model does better.
    </>
  );
}

function Figures(properties: { head: string[]; rows: ComponentChildren[][]; text?: number }) {
  const side = (column: number) => (column === 0 || column === properties.text ? "" : "right");
  return (
    <div class="scroll" role="region" aria-label={properties.head[0]} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {properties.head.map((title, column) => (title ? <th key={title} scope="col" class={side(column)}>{title}</th> : <td key="more" />))}
          </tr>
        </thead>
        <tbody>
          {properties.rows.map((cells, row) => (
            <tr key={row}>
              {cells.map((cell, column) => (column === 0 ? <th key={column} scope="row">{cell}</th> : <td key={column} class={side(column)}>{cell}</td>))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const KINDS: Record<string, string> = { image: "images", audio: "sounds", video: "films", text: "text alone", all: "all together" };

export function Senses({ senses, run }: { senses: SensesReport; run: string }) {
  const verdicts = Object.entries(senses.verdicts);
  const kinds = new Set([...senses.passes.map((one) => one.kind).filter((kind) => kind !== "all"), ...Object.keys(senses.verdicts)]);
  const pass = (condition: string, kind: string) => senses.passes.find((one) => one.condition === condition && one.kind === kind);
  const base = pass("as it is", "all");
  const nothing = pass("another task's", "all");
  const blind = pass("blanked", "all") ?? (kinds.size - Number(kinds.has("text")) === 1 ? pass("blanked", [...kinds].find((kind) => kind !== "text")!) : undefined);
  if (blind) kinds.add("text");
  const swapped = (kind: string) => best(["pairs", "next", "previous"].flatMap((condition) => pass(condition, kind) ?? []));
  const rows = [...kinds].map((kind) =>
    kind === "text"
      ? [KINDS.text, <Verdict finding={senses.verdicts.text} none="no leak seen" />, fixed(base?.reward), <Changed one={blind} />, "", ""]
      : [KINDS[kind] ?? kind, <Verdict finding={senses.verdicts[kind]} none={DASH} />, fixed(base?.reward), <Changed one={pass("blanked", kind)} />, <Changed one={pass("shuffled", kind)} />, <Changed one={swapped(kind)} />],
  );
  return (
    <Panel title="What the model uses" id="senses" class="report findings" side={<span class="muted">{plural(senses.tasks, "task")} ({senses.split})</span>}>
      <p>
        The blindness check plays the same tasks with media taken away or exchanged. Where the model uses a sense, its reward falls.
        {nothing && ` Knowing nothing of the task, it earns ${fixed(nothing.reward)}.`}
        {senses.failed > 0 && ` ${plural(senses.failed, "episode")} failed and count nowhere.`}
      </p>
      {rows.length > 0 ? <Figures head={["Sense", "Verdict", "As it is", "Blanked", "Shuffled", "Swapped"]} text={1} rows={rows} /> : <p class="muted">Nothing but text is shown: there is nothing to check.</p>}
      <ul>
        {verdicts.map(([kind, verdict]) => (
          <li key={kind} class={verdict.level}>
            <span class="mark-name">{verdict.level}</span>
            <div>
              <strong>
                {kind === "text" ? kind : (KINDS[kind] ?? kind)}: {verdict.what}
              </strong>
              {verdict.advice && <p>{verdict.advice}</p>}
            </div>
          </li>
        ))}
      </ul>
      {!senses.ok && (
        <p class="muted">
          <a href={link(["runs", run, "media"])}>See the media</a> that the episodes showed.
        </p>
      )}
    </Panel>
  );
}

function best(passes: SensePass[]): SensePass | undefined {
  return passes.reduce<SensePass | undefined>((a, b) => (a === undefined || (b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a), undefined);
}

const SWAPS: Record<string, string> = { pairs: "with the task that it is paired with", next: "with the task after it", previous: "with the task before it" };

/** The reward of a pass, and its change with the interval for those who point at it. */
function Changed({ one }: { one: SensePass | undefined }) {
  if (!one) return <span class="muted">{DASH}</span>;
  const interval = one.change ? `change ${signed(one.change.mean, 3)}, 95% interval ${signed(one.change.low, 3)} to ${signed(one.change.high, 3)}` : "";
  return (
    <span title={[SWAPS[one.condition], interval].filter(Boolean).join("; ")}>
      {fixed(one.reward)} {one.change && <small class="muted">{signed(one.change.mean)}</small>}
    </span>
  );
}

function Verdict({ finding, none }: { finding: Finding | undefined; none: string }): ComponentChildren {
  if (!finding) return <span class="muted">{none}</span>;
  const [word = "", rest] = finding.what.split(": ");
  return <span class={`mark-name ${finding.level}`}>{rest !== undefined && word.length < 24 ? word : finding.level}</span>;
}
