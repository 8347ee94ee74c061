// Follows a run: server-sent events, read with fetch so that the key goes with the request.
import { get, ReadError, runPath } from "./client";
import type { LiveChange } from "./types";

export type LiveState = "following" | "waiting" | "off";

/** Calls `changed` for each event until `stop()`; connects again after breaks, with growing pauses. */
export function follow(run: string, changed: (change: LiveChange) => void, state: (state: LiveState) => void): () => void {
  const ended = new AbortController();
  void loop(run, changed, state, ended.signal);
  return () => ended.abort();
}

async function loop(
  run: string,
  changed: (change: LiveChange) => void,
  state: (state: LiveState) => void,
  signal: AbortSignal,
): Promise<void> {
  let pause = 1000;
  while (!signal.aborted) {
    try {
      const response = await get(`data/${runPath(run)}/live`, signal);
      if (!response.headers.get("content-type")?.includes("text/event-stream")) return state("off");
      state("following");
      pause = 1000;
      await events(response, changed);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ReadError && [403, 404].includes(error.status)) return state("off");
    }
    state("waiting");
    await sleep(pause, signal);
    pause = Math.min(pause * 2, 30_000);
  }
}

async function events(response: Response, changed: (change: LiveChange) => void): Promise<void> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r\n", "\n");
    const blocks = text.split("\n\n");
    text = blocks.pop() ?? "";
    for (const block of blocks) {
      const change = parse(block);
      if (change) changed(change);
    }
  }
}

function parse(block: string): LiveChange | null {
  let name = "message";
  const data: string[] = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (name !== "changed" || data.length === 0) return null;
  try {
    return JSON.parse(data.join("\n")) as LiveChange;
  } catch {
    return null;
  }
}

function sleep(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
