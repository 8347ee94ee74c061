// One trajectory: told in sentences, as a chat with media, token by token, with its rewards, timings and seed.
import { useEffect } from "preact/hooks";
import { read, runPath } from "../data/client";
import { listQuery } from "../data/select";
import { isExample, story, type Sentence } from "../data/story";
import type { Quantity } from "../data/tokens";
import type { Member, TrajectoryDetail } from "../data/types";
import { go, link, setQuery } from "../route";
import { Chat } from "../ui/chat";
import { count, fixed, plural, seconds, signed } from "../ui/format";
import { useLoad, useRun, useTitle } from "../ui/hooks";
import { useKeys } from "../ui/keys";
import { CopyLine, Facts, Failure, Loading, Notice, Panel, State } from "../ui/parts";
import { Rewards, Timings } from "../ui/rewards";
import { Tokens } from "../ui/tokens";
import { useSelection } from "./trajectories";

export function TrajectoryPage(properties: { run: string; seq: string; query: URLSearchParams }) {
  const { run, seq, query } = properties;
  useTitle(`Trajectory ${seq}`, run);
  const { value, error, loading } = useLoad((signal) => read<TrajectoryDetail>(`${runPath(run)}/trajectories/${encodeURIComponent(seq)}.json`, {}, signal), [run, seq], false);
  useEffect(() => window.scrollTo(0, 0), [seq]);
  const shown = value && String(value.seq) === seq ? value : loading ? value : null;
  return (
    <>
      <Heading run={run} seq={Number(seq)} query={query} trajectory={shown} />
      {error && <Failure error={error} what={`Trajectory ${seq}`} />}
      {!shown && !error && <Loading what={`trajectory ${seq}`} />}
      {shown && !error && <Shown key={shown.seq} trajectory={shown} query={query} />}
    </>
  );
}

function Heading(properties: { run: string; seq: number; query: URLSearchParams; trajectory: TrajectoryDetail | null }) {
  const { run, seq, query, trajectory } = properties;
  const store = useRun(run);
  useEffect(() => {
    if (!trajectory) return;
    if (!store.trajectoriesLoaded) store.loadTrajectories().catch(() => {});
    if (!store.detail) store.loadDetail().catch(() => {});
  }, [store, trajectory !== null]);
  const { rows } = useSelection(store, query);
  const place = rows.findIndex((row) => store.trajectories.value("seq", row) === seq);
  const at = (by: number) => (place < 0 ? undefined : rows[place + by]);
  const address = (row: number | undefined) => (row === undefined ? undefined : link(["runs", run, "trajectories", store.trajectories.text("seq", row)], listQuery(query)));
  const jump = (by: number) => {
    const next = address(at(by));
    if (next) location.hash = next;
  };
  const back = new URLSearchParams(listQuery(query));
  back.set("at", String(seq));
  useKeys({
    j: () => jump(1),
    k: () => jump(-1),
    ArrowRight: () => jump(1),
    ArrowLeft: () => jump(-1),
    u: () => go(["runs", run, "groups", seq]),
    p: playFirst,
    Escape: () => go(["runs", run, "trajectories"], back),
  });
  return (
    <div class="page-head">
      <h1>
        Trajectory <span class="seq">#{seq}</span>
      </h1>
      {trajectory && (
        <p class="subtitle">
          <State state={trajectory.status} /> {trajectory.env} · task {count(trajectory.task_index)} · {trajectory.split}
          {trajectory.step !== null && ` · step ${count(trajectory.step)}`}
        </p>
      )}
      <nav class="steps" aria-label="Neighbours in the list">
        <a href={link(["runs", run, "trajectories"], back)}>List</a>
        <a href={address(at(-1))} aria-disabled={at(-1) === undefined}>
          ← Previous
        </a>
        <span class="muted" role="status">
          {place >= 0 ? `${count(place + 1)} of ${count(rows.length)}` : ""}
        </span>
        <a href={address(at(1))} aria-disabled={at(1) === undefined}>
          Next →
        </a>
      </nav>
    </div>
  );
}

function playFirst(): void {
  const player = document.querySelector<HTMLMediaElement>("main audio, main video");
  if (!player) return;
  if (player.paused) void player.play();
  else player.pause();
}

function Shown({ trajectory, query }: { trajectory: TrajectoryDetail; query: URLSearchParams }) {
  const quantity = (query.get("colour") ?? "mask") as Quantity;
  return (
    <div class="trajectory">
      <div class="main-column">
        <Story trajectory={trajectory} />
        <Panel title="Chat">
          <Chat trajectory={trajectory} />
        </Panel>
        <Panel title="Tokens">
          {trajectory.samples?.length ? (
            <Tokens samples={trajectory.samples} quantity={quantity} onQuantity={(chosen) => setQuery({ colour: chosen === "mask" ? null : chosen })} why={trajectory.why ?? []} />
          ) : (
            <Notice>No token was produced, so there is nothing to train on.</Notice>
          )}
        </Panel>
      </div>
      <aside class="side-column" aria-label="Numbers of the trajectory">
        <Panel title="Reward">
          <Rewards trajectory={trajectory} />
        </Panel>
        <GroupPanel trajectory={trajectory} />
        <Panel title="Timings">
          <Timings timings={trajectory.timings} />
        </Panel>
        <Panel title="Replay">
          <Facts
            rows={[
              ["seed", <code key="seed">{String(trajectory.seed ?? "–")}</code>],
              ["attempts", count(trajectory.attempts)],
              ["weights", versions(trajectory)],
              ["staleness", trajectory.staleness === null ? "–" : plural(trajectory.staleness, "step")],
              ["engine–trainer gap", trajectory.gap === null ? "–" : `${fixed(trajectory.gap, 5)} nats`],
            ]}
          />
          {trajectory.replay && <CopyLine text={trajectory.replay} label="the line that replays it" />}
        </Panel>
        <TurnsPanel trajectory={trajectory} />
        {trajectory.info && Object.keys(trajectory.info).length > 0 && (
          <Panel title="Info of the environment">
            <pre class="info">{JSON.stringify(trajectory.info, null, 2)}</pre>
          </Panel>
        )}
      </aside>
    </div>
  );
}

function versions({ version_min: low, version_max: high }: TrajectoryDetail): string {
  if (low === null) return "–";
  return low === high ? `version ${low}` : `versions ${low} to ${high}`;
}

function Story({ trajectory }: { trajectory: TrajectoryDetail }) {
  const sentences = story(trajectory);
  return (
    <Panel title="In short" class="story">
      <dl>
        {sentences.map((sentence, index) => (
          <div key={index} class={sentence.label.toLowerCase()}>
            <dt>{sentence.label === sentences[index - 1]?.label ? "" : sentence.label}</dt>
            <dd>
              {sentence.text} {sentence.to && <Leading to={sentence.to} run={trajectory.run} />}
            </dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}

function Leading({ to, run }: { to: NonNullable<Sentence["to"]>; run: string }) {
  return <a href={link(["runs", run, to.view, to.seq])}>{to.name}</a>;
}

function GroupPanel({ trajectory }: { trajectory: TrajectoryDetail }) {
  const members = trajectory.group ?? [];
  if (members.length < 2 || isExample(trajectory)) return null; // examples of a batch are of different tasks
  const rewards = members.flatMap((member) => (member.reward === null ? [] : [member.reward]));
  const [low, high] = [Math.min(0, ...rewards), Math.max(...rewards, 1e-9)];
  return (
    <Panel title="Group" side={<a href={link(["runs", trajectory.run, "groups", trajectory.seq])}>Side by side</a>}>
      <ol class="members">
        {members.map((member) => (
          <li key={member.seq}>
            {member.left_out ? (
              <span class="left-out" title="It is not part of this site; see it side by side.">
                <InGroup member={member} low={low} high={high} />
              </span>
            ) : (
              <a href={link(["runs", trajectory.run, "trajectories", member.seq])} aria-current={member.seq === trajectory.seq ? "true" : undefined}>
                <InGroup member={member} low={low} high={high} />
              </a>
            )}
          </li>
        ))}
      </ol>
    </Panel>
  );
}

/** A line about a member: its number, its reward as a bar between the lowest and the highest, and its advantage. */
function InGroup({ member, low, high }: { member: Member; low: number; high: number }) {
  return (
    <>
      <span class="member-name">#{member.seq}</span>
      <span class="bar" aria-hidden="true">
        <span style={{ width: `${high > low ? (((member.reward ?? low) - low) / (high - low)) * 100 : 0}%` }} />
      </span>
      <span>{member.reward === null ? member.status : fixed(member.reward)}</span>
      <span class="muted">{member.advantage === null ? "" : signed(member.advantage)}</span>
    </>
  );
}

function TurnsPanel({ trajectory }: { trajectory: TrajectoryDetail }) {
  if (trajectory.turns.length === 0) return null;
  return (
    <Panel title="Turns">
      {trajectory.turns.map((turn) => (
        <details key={turn.index}>
          <summary>
            Turn {turn.index}: {plural(turn.response_tokens ?? 0, "token")}, {seconds(turn.seconds)}
          </summary>
          <Facts
            rows={[
              ["prompt tokens", count(turn.prompt_tokens)],
              ["of these cached", count(turn.cached_tokens)],
              ...Object.entries(turn.placeholders ?? {}).map(([name, n]) => [`placeholders ${name}`, count(n)] as [string, string]),
              ["finished by", turn.finish_reason ?? "–"],
              ["weights", turn.weight_versions.map((span) => `version ${span.version}`).join(", ") || "–"],
              ["engine", turn.engine || "–"],
              ...Object.entries(turn.sampling ?? {}).filter(([, value]) => value !== null && !(Array.isArray(value) && value.length === 0)).map(([name, value]) => [name, String(value)] as [string, string]),
            ]}
          />
        </details>
      ))}
    </Panel>
  );
}
