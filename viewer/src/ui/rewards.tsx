// A trajectory's reward by component, with their sum, and its time by stage.
import { ended, isExample, rewardName, weighted } from "../data/story";
import type { TrajectoryDetail } from "../data/types";
import { DASH, fixed, seconds } from "./format";
import { Notice } from "./parts";

export function Rewards({ trajectory }: { trajectory: TrajectoryDetail }) {
  const parts = Object.entries(trajectory.rewards ?? {});
  const most = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value)), Math.abs(trajectory.reward ?? 0));
  const sum = parts.reduce((total, [name, value]) => total + value * (trajectory.weights?.[name] ?? 1), 0);
  const { reward } = trajectory;
  if (reward === null) return <Notice>{isExample(trajectory) ? "An example of the warm-up is not scored." : `The episode ${ended(trajectory)}, so it has no reward: it counts neither as good nor as bad.`}</Notice>;
  const adds = Math.abs(sum - (trajectory.reward ?? 0)) < 1e-6;
  return (
    <>
      <table class="rewards">
        <thead>
          <tr>
            <th scope="col">Component</th>
            <th scope="col">
              <span class="unseen">Share</span>
            </th>
            <th scope="col" class="right">
              Value
            </th>
          </tr>
        </thead>
        <tbody>
          {parts.map(([name, value]) => (
            <tr key={name}>
              <th scope="row" title={name}>
                {rewardName(name)}
                <span class="muted">{weighted(trajectory, name)}</span>
              </th>
              <td>
                <span class={`bar wide ${value < 0 ? "negative" : ""}`} aria-hidden="true">
                  <span style={{ width: `${(Math.abs(value) / most) * 100}%` }} />
                </span>
              </td>
              <td class="right">{fixed(value, 3)}</td>
            </tr>
          ))}
        </tbody>
        <tfoot>
          <tr>
            <th scope="row">Reward</th>
            <td />
            <td class="right">{fixed(trajectory.reward, 3)}</td>
          </tr>
        </tfoot>
      </table>
      {parts.length === 0 && <Notice>No component was recorded.</Notice>}
      {parts.length > 0 && !adds && <p class="muted">Components are shown before their weights; the reward is their weighted sum.</p>}
    </>
  );
}

const STAGES: Record<string, string> = {
  queued: "waited for a free place",
  reset: "the environment made the task",
  generate: "the engine answered",
  step: "the environment took the answers",
  score: "rewards were reckoned",
};

export function Timings({ timings }: { timings: Record<string, number> | null }) {
  const waited = (timings?.queued ?? 0) > 0;
  const stages = Object.entries(timings ?? {}).filter(([name, value]) => name !== "total" && value > 0);
  const total = timings?.total ?? stages.reduce((sum, [, value]) => sum + value, 0);
  if (stages.length === 0) return <Notice>No timings were recorded.</Notice>;
  const sum = stages.reduce((all, [, value]) => all + value, 0);
  return (
    <>
      <div class="stack" aria-hidden="true">
        {stages.map(([name, value], index) => (
          <span key={name} class={`s${(index % 8) + 1}`} style={{ width: `${(value / sum) * 100}%` }} />
        ))}
      </div>
      <dl class="facts stages">
        {stages.map(([name, value], index) => (
          <div key={name} title={STAGES[name]}>
            <dt>
              <span class={`swatch s${(index % 8) + 1}`} aria-hidden="true" /> {name}
            </dt>
            <dd>{seconds(value)}</dd>
          </div>
        ))}
        <div>
          <dt title="from the first message to the reward">{waited ? "total, without queued" : "total"}</dt>
          <dd>{total ? seconds(total) : DASH}</dd>
        </div>
      </dl>
    </>
  );
}
