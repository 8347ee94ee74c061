// One trajectory told in plain sentences: what it was given, what it answered, why it was rewarded so, and what to do next.
import { count, fixed, plural, signed } from "../ui/format";
import type { Message, TrajectoryDetail, TurnInfo } from "./types";

export interface Sentence {
  label: "Given" | "Answered" | "Reward" | "Training" | "Next";
  text: string;
  /** Where the sentence leads: another trajectory of the group, or the group. */
  to?: { seq: number; view: "trajectories" | "groups"; name: string };
}

const SENSES = { audio: ["heard", "sound"], image: ["saw", "image"], video: ["watched", "film"] } as const;

export function story(t: TrajectoryDetail): Sentence[] {
  return [given(t), answered(t), rewarded(t), trained(t), ...next(t)];
}

export function textOf(message: Message | undefined): string {
  if (!message) return "";
  if (typeof message.content === "string") return message.content;
  return (message.content ?? []).flatMap((part) => (part.type === "text" && part.text ? [part.text] : [])).join(" ");
}

/** Hashes and kinds of the media of a message, in their order. */
export function mediaOf(message: Message): { kind: "image" | "audio" | "video"; sha256: string }[] {
  if (!Array.isArray(message.content)) return [];
  return message.content.flatMap((part) => {
    for (const kind of ["image", "audio", "video"] as const) {
      const url = part[`${kind}_url`]?.url;
      if (url) return [{ kind, sha256: url.replace(/^relax-media:/, "") }];
    }
    return [];
  });
}

function given(t: TrajectoryDetail): Sentence {
  const kinds = { audio: 0, image: 0, video: 0 };
  let asked = "";
  const later: string[] = [];
  for (const message of t.messages) {
    if (message.role === "assistant") continue;
    for (const { kind } of mediaOf(message)) kinds[kind]++;
    const words = message.role === "user" ? textOf(message).trim() : "";
    if (asked && words) later.push(words);
    asked ||= words;
  }
  const sensed = (Object.keys(kinds) as (keyof typeof kinds)[])
    .filter((kind) => kinds[kind])
    .map((kind) => `${isExample(t) ? "shown" : SENSES[kind][0]} ${plural(kinds[kind], SENSES[kind][1])}`);
  if (t.messages.length === 0) return { label: "Given", text: "Nothing: the episode ended before the environment had said anything." };
  const then = areShort(later) ? later.map((words) => `, then “${cut(words)}”`).join("") : "";
  const was = asked ? `was asked “${cut(asked)}”${then}` : "was asked nothing in words";
  if (isExample(t)) return { label: "Given", text: `An example for the warm-up, made by the environment: ${[...sensed, asked ? `asked “${cut(asked)}”` : ""].filter(Boolean).join(", ")}.` };
  return { label: "Given", text: `The model ${[...sensed, was].join(" and ")}.` };
}

function answered(t: TrajectoryDetail): Sentence {
  const answers = t.messages.filter((message) => message.role === "assistant");
  const last = answers.at(-1);
  if (!last) return { label: "Answered", text: "It never answered." };
  const calls = answers.reduce((sum, message) => sum + (message.tool_calls?.length ?? 0), 0);
  const it = isExample(t) ? "The environment's example" : "It";
  const words = textOf(last).trim();
  const said = words ? `“${cut(words)}”` : last.tool_calls?.length ? `with a call of ${last.tool_calls[0]!.function?.name ?? "a tool"}` : "nothing";
  const each = answers.map((message) => textOf(message).trim());
  const told = answers.length > 1 && !calls && each.every(Boolean) && areShort(each); // all of them can be told
  const many = answers.length > 1 ? `${answers.length} times${told ? ":" : ", at last"} ` : "";
  const tokens = t.turns.reduce((sum, turn) => sum + (turn.response_tokens ?? 0), 0);
  const tools = calls ? `, ${plural(calls, "tool call")}` : "";
  const end = wasCut(t.turns.at(-1)) ? " The last answer was cut at its token limit." : "";
  return { label: "Answered", text: `${it} answered ${many}${told ? each.map((answer) => `“${cut(answer)}”`).join(", then ") : said} (${plural(tokens, "token")}${tools}).${end}` };
}

/** Whether an answer ended at its limit of tokens; one that was to be a single token is whole. */
export function wasCut(turn: TurnInfo | undefined): boolean {
  return turn?.finish_reason === "length" && (turn.response_tokens ?? 0) > 1;
}

function rewarded(t: TrajectoryDetail): Sentence {
  if (isExample(t)) return { label: "Reward", text: "Examples are not scored." };
  if (isFailure(t)) return { label: "Reward", text: `No reward counts: the episode ${ended(t)}. ${t.error ?? ""}`.trim() };
  const parts = Object.entries(t.rewards ?? {});
  const list = parts.map(([name, value]) => `${rewardName(name)} ${fixed(value)}${weighted(t, name)}`).join(", ");
  const text = parts.length === 0 ? `It got ${fixed(t.reward)}.` : parts.length === 1 && parts[0]![1] === t.reward ? `It got ${fixed(t.reward)}${t.reward ? ", all" : ""} from ${rewardName(parts[0]![0])}.` : `It got ${fixed(t.reward)}, from ${list}.`;
  const turns = t.turns.map((turn) => turn.reward ?? 0);
  const each = turns.length > 1 && turns.some((reward) => reward !== 0) ? ` Turn by turn: ${turns.map((reward) => fixed(reward)).join(", ")}.` : "";
  return { label: "Reward", text: text + each + rightAnswer(t) };
}

/** The environment's own answer, where its `info` has one. */
function rightAnswer(t: TrajectoryDetail): string {
  const answer = t.info?.answer;
  return typeof answer === "string" || typeof answer === "number" ? ` The right answer is “${cut(String(answer))}”.` : "";
}

/** A component's weight in the sum, where it is not 1. */
export function weighted(t: TrajectoryDetail, name: string): string {
  const weight = t.weights?.[name] ?? 1;
  return weight === 1 ? "" : ` × ${fixed(weight)}`;
}

export function rewardName(name: string): string {
  return name === "env" ? "the environment's steps" : name;
}

function trained(t: TrajectoryDetail): Sentence {
  const others = (t.group ?? []).filter((member) => member.reward !== null && !["failed", "timed_out", "cancelled"].includes(member.status));
  const rewards = others.map((member) => member.reward!);
  const mean = rewards.reduce((sum, value) => sum + value, 0) / Math.max(1, rewards.length);
  const group = rewards.length > 1 ? `Its group of ${rewards.length} has a mean reward of ${fixed(mean)}. ` : "";
  if (isExample(t)) return { label: "Training", text: "The warm-up, before the first step, taught the model to answer in this form." };
  if (isFailure(t)) return { label: "Training", text: `${group}It was not trained on: failed episodes teach nothing.` };
  if (t.split !== "train") return { label: "Training", text: `It belongs to the ${t.split} split: it is only measured, never trained on.` };
  if (t.step === null) return { label: "Training", text: `${group}No training step has recorded it.` };
  const age = t.staleness ? `, ${plural(t.staleness, "step")} old` : "";
  const at = `In step ${count(t.step)}${age}, `;
  if (t.advantage === null) return { label: "Training", text: `${group}${at}it was trained on; its advantage was not recorded.` };
  if (Math.abs(t.advantage) < 1e-6) return { label: "Training", text: `${group}${at}its advantage was 0: it changed nothing.` };
  return { label: "Training", text: `${group}${at}its advantage was ${signed(t.advantage)}: what it answered was made ${t.advantage > 0 ? "more" : "less"} likely.` };
}

/** Whether its answers were drawn by the environment to show their form, not given by the model. */
export function isExample(t: TrajectoryDetail): boolean {
  return t.split === "warmup";
}

/** How an episode that has no reward ended, as a verb. */
export function ended(t: TrajectoryDetail): string {
  return t.status === "cancelled" ? "was cancelled" : t.status.replace("_", " ");
}

function isFailure(t: TrajectoryDetail): boolean {
  return ["failed", "timed_out", "cancelled"].includes(t.status);
}

function next(t: TrajectoryDetail): Sentence[] {
  const out: Sentence[] = [];
  const say = (text: string, to?: Sentence["to"]) => out.push({ label: "Next", text, to });
  if (t.status === "timed_out") say("A stage passed its time limit: see the timings, and raise the limit of that stage if the work is honest.");
  if (t.status === "failed") say("The environment, a reward or the engine failed, not the model: mend the error, then replay the episode with its seed.");
  const cut = t.turns.filter(wasCut).length;
  if (cut) say(`${plural(cut, "answer was", "answers were")} cut at the limit: raise sampling.max_new_tokens if answers should be longer.`);
  const unreadable = t.turns.reduce((sum, turn) => sum + (turn.unreadable_calls ?? 0), 0);
  if (unreadable) say(`${plural(unreadable, "tool call")} could not be read: look at the answer's own words, and show the model an example of a call.`);
  const missing = Object.values(t.media).filter((one) => one.missing).length;
  if (missing) say(`${plural(missing, "media file is", "media files are")} gone from the run's folder, and cannot be shown.`);
  out.push(...compared(t));
  if (isExample(t)) say("Look at episodes of the train or eval split for what the model does.");
  if (out.length === 0) say(t.replay ? "Play it again with the line under Replay, or look at the next one." : "Look at the next one.");
  return out;
}

/** The member of the group that is most worth looking at beside this one. */
function compared(t: TrajectoryDetail): Sentence[] {
  const others = (t.group ?? []).filter((member) => member.seq !== t.seq && member.reward !== null);
  if (others.length === 0 || t.reward === null) return [];
  const best = others.reduce((a, b) => (b.reward! > a.reward! ? b : a));
  const worst = others.reduce((a, b) => (b.reward! < a.reward! ? b : a));
  if (best.reward === t.reward && worst.reward === t.reward) {
    if (t.split !== "train") return [];
    return [{ label: "Next", text: "All of its group got the same reward, so nothing could be learnt from it. If most groups are so, tasks are too easy or too hard.", to: { seq: t.seq, view: "groups", name: "See the group" } }];
  }
  const other = best.reward! > t.reward ? best : worst;
  const shown = other.left_out ? ({ seq: t.seq, view: "groups", name: "See the group" } as const) : ({ seq: other.seq, view: "trajectories", name: `Open #${other.seq}` } as const);
  const text = other === best ? `The best of its group got ${fixed(best.reward)}: compare what it did.` : `It is the best of its group; the worst got ${fixed(worst.reward)}.`;
  return [{ label: "Next", text, to: shown }];
}

/** Whether a few texts can stand in one sentence. */
function areShort(texts: string[]): boolean {
  return texts.join("").length <= 120 && texts.length <= 6;
}

function cut(text: string, length = 160): string {
  const flat = text.replace(/\s+/g, " ");
  return flat.length > length ? `${flat.slice(0, length)}…` : flat;
}
