// The episode as a chat: messages in their order, with media to play, tool calls and their results.
import { AudioPlayer } from "../media/audio";
import { Picture } from "../media/image";
import { VideoPlayer } from "../media/video";
import { isExample, mediaOf, wasCut } from "../data/story";
import type { Message, Part, ToolCall, TrajectoryDetail, TurnInfo } from "../data/types";
import { plural, seconds, signed } from "./format";
import { Notice } from "./parts";

export function Chat({ trajectory }: { trajectory: TrajectoryDetail }) {
  const turns = new Map(trajectory.turns.flatMap((turn) => (turn.message === null ? [] : [[turn.message, turn] as [number, TurnInfo]])));
  if (trajectory.messages.length === 0) return <Notice>The episode ended before anything was said.</Notice>;
  return (
    <ol class="chat">
      {trajectory.messages.map((message, index) => (
        <li key={index}>
          <Said message={message} turn={turns.get(index)} trajectory={trajectory} />
        </li>
      ))}
    </ol>
  );
}

const NAMES: Record<string, string> = { assistant: "Model", user: "Environment", system: "System", tool: "Tool result" };

function Said(properties: { message: Message; turn?: TurnInfo; trajectory: TrajectoryDetail }) {
  const { message, turn, trajectory } = properties;
  const name = message.role === "assistant" && isExample(trajectory) ? "Example" : (NAMES[message.role] ?? message.role);
  return (
    <article class={`message ${message.role}`} aria-label={name}>
      <header>
        <h3>
          {name}
          {message.name && <code> {message.name}</code>}
        </h3>
        {turn && <TurnFacts turn={turn} scored={!isExample(trajectory)} />}
      </header>
      {message.reasoning_content && (
        <details>
          <summary>Reasoning</summary>
          <p class="words">{message.reasoning_content}</p>
        </details>
      )}
      <Content message={message} trajectory={trajectory} />
      {message.tool_calls?.map((call, index) => <Call key={call.id ?? index} call={call} />)}
    </article>
  );
}

function TurnFacts({ turn, scored }: { turn: TurnInfo; scored: boolean }) {
  const facts = [
    `turn ${turn.index}`,
    turn.response_tokens === null ? "" : plural(turn.response_tokens, "token"),
    seconds(turn.seconds),
    wasCut(turn) ? "cut at its limit" : turn.finish_reason === "abort" ? "aborted" : "",
    scored && turn.reward ? `reward ${signed(turn.reward)}` : "",
    turn.unreadable_calls ? `${plural(turn.unreadable_calls, "unreadable call")}` : "",
  ];
  return <span class="muted turn-facts">{facts.filter(Boolean).join(" · ")}</span>;
}

function Content(properties: { message: Message; trajectory: TrajectoryDetail }) {
  const { message, trajectory } = properties;
  const { content } = message;
  if (content === null || content === undefined || content === "") {
    return message.tool_calls?.length ? null : <p class="words muted">(nothing)</p>;
  }
  if (typeof content === "string") return <p class="words">{content}</p>;
  return (
    <>
      {content.map((part, index) => (
        <PartView key={index} part={part} trajectory={trajectory} />
      ))}
    </>
  );
}

function PartView({ part, trajectory }: { part: Part; trajectory: TrajectoryDetail }) {
  if (part.type === "text") return <p class="words">{part.text}</p>;
  const [found] = mediaOf({ role: "user", content: [part] });
  if (!found) return <p class="words muted">(a part of type {part.type})</p>;
  const entry = trajectory.media[found.sha256];
  if (!entry || entry.missing) {
    return (
      <Notice>
        The {found.kind} <code>{found.sha256.slice(0, 12)}…</code> is not in the run's media folder any more.
      </Notice>
    );
  }
  const properties = { run: trajectory.run, sha256: found.sha256, entry };
  if (found.kind === "audio") return <AudioPlayer {...properties} />;
  if (found.kind === "video") return <VideoPlayer {...properties} />;
  return <Picture {...properties} />;
}

function Call({ call }: { call: ToolCall }) {
  const { name, arguments: given } = call.function ?? {};
  return (
    <div class="call">
      <span class="muted">calls</span> <code class="call-name">{name ?? "?"}</code>
      <pre>{pretty(given)}</pre>
    </div>
  );
}

function pretty(given: string | Record<string, unknown> | undefined): string {
  if (given === undefined) return "";
  if (typeof given !== "string") return JSON.stringify(given, null, 2);
  try {
    return JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    return given;
  }
}
