// A group side by side: the same task, several samples; what each answered, its reward and its advantage.
import { read, runPath } from "../data/client";
import { textOf } from "../data/story";
import type { GroupDetail, TrajectoryDetail } from "../data/types";
import { link } from "../route";
import { Chat } from "../ui/chat";
import { count, fixed, groupState, plural, signed } from "../ui/format";
import { useLoad, useTitle } from "../ui/hooks";
import { Failure, Loading, Notice, Panel, State } from "../ui/parts";
import { Rewards } from "../ui/rewards";

export function GroupPage({ run, seq }: { run: string; seq: string }) {
  useTitle(`Group of ${seq}`, run);
  const { value, error } = useLoad((signal) => read<GroupDetail>(`${runPath(run)}/groups/${encodeURIComponent(seq)}.json`, {}, signal), [run, seq]);
  if (error) return <Failure error={error} what={`The group of trajectory ${seq}`} />;
  if (!value) return <Loading what="the group" />;
  const rewards = value.trajectories.flatMap((member) => (member.reward === null ? [] : [member.reward]));
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / Math.max(1, rewards.length);
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / Math.max(1, rewards.length));
  const first = value.trajectories[0];
  return (
    <>
      <div class="page-head">
        <h1>Group</h1>
        <p class="subtitle">
          task {count(value.task_index)} · {value.split} · {plural(value.trajectories.length, "member")} · {rewards.length ? `reward ${fixed(mean)} ± ${fixed(spread)}` : "no reward"}
          {value.state ? ` · ${groupState(value.state)}` : ""}
        </p>
      </div>
      {value.failure && <Notice kind="problem">It was set aside: {value.failure}</Notice>}
      {value.split === "train" && spread === 0 && rewards.length > 1 && <Notice>All members got the same reward, so the group taught nothing: there is no better or worse answer in it.</Notice>}
      {first && (
        <Panel title="What all were given">
          <Chat trajectory={{ ...first, messages: opening(first), turns: [] }} />
        </Panel>
      )}
      <h2 class="section">What each made of it</h2>
      <ol class="group">
        {value.trajectories.map((member) => (
          <li key={member.seq}>
            <Member run={run} member={member} mean={mean} here={String(member.seq) === seq} />
          </li>
        ))}
      </ol>
    </>
  );
}

/** Messages before the first answer: the same for all members. */
function opening(trajectory: TrajectoryDetail) {
  const first = trajectory.messages.findIndex((message) => message.role === "assistant");
  return first < 0 ? trajectory.messages : trajectory.messages.slice(0, first);
}

function Member(properties: { run: string; member: TrajectoryDetail; mean: number; here: boolean }) {
  const { run, member, mean, here } = properties;
  const rest = member.messages.slice(opening(member).length);
  const against = member.reward === null ? 0 : member.reward - mean;
  return (
    <article class={`member ${against > 0 ? "above" : against < 0 ? "below" : ""} ${here ? "here" : ""}`} aria-label={`Member ${member.group_index ?? ""}`}>
      <header>
        <h3>
          {member.left_out ? <span title="It is not part of this site.">#{member.seq}</span> : <a href={link(["runs", run, "trajectories", member.seq])}>#{member.seq}</a>}
        </h3>
        <span class="member-reward">{member.reward === null ? "" : fixed(member.reward)}</span>
        <span class="muted">{member.advantage === null ? "" : `advantage ${signed(member.advantage)}`}</span>
        {member.status !== "completed" && <State state={member.status} />}
      </header>
      {member.error && <Notice kind="problem">{member.error}</Notice>}
      {rest.length === 1 ? <p class="words answer">{textOf(rest[0]) || "(nothing)"}</p> : <Chat trajectory={{ ...member, messages: rest, turns: shifted(member) }} />}
      {Object.keys(member.rewards ?? {}).length > 1 && (
        <details>
          <summary>Reward components</summary>
          <Rewards trajectory={member} />
        </details>
      )}
    </article>
  );
}

function shifted(member: TrajectoryDetail) {
  const by = opening(member).length;
  return member.turns.map((turn) => ({ ...turn, message: turn.message === null ? null : turn.message - by }));
}
