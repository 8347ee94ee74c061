// Tokens of a training sequence as cells: runs of placeholders folded into one, and the quantity that colours them.
import type { Num, TokenSample } from "./types";

export type Quantity = "mask" | "logprob" | "gap" | "entropy" | "advantage" | "version";

export const QUANTITIES: [Quantity, string][] = [
  ["mask", "Mask"],
  ["logprob", "Logprob"],
  ["gap", "Gap"],
  ["entropy", "Entropy"],
  ["advantage", "Advantage"],
  ["version", "Version"],
];

export const MEANINGS: Record<Quantity, string> = {
  mask: "the loss mask: what the policy produced, against what it was given",
  logprob: "the engine's natural log of the token's probability: pale is sure, dark is surprising",
  gap: "absolute difference of logprobs between engine and trainer, in nats",
  entropy: "entropy of the policy at the token, in nats",
  advantage: "what training pushed: up in blue, down in orange",
  version: "weight version that produced the token",
};

export interface Cell {
  /** First token of the cell. */
  start: number;
  /** Tokens in it: more than 1 where placeholders are folded. */
  length: number;
  text: string;
}

const PLACEHOLDER = /^<\|?(audio|image|video)[^>]*\|?>$/i;
const FOLDED_FROM = 3;

/** Cells of a sequence: equal placeholders in a row become one, with their number. */
export function cells(sample: TokenSample): Cell[] {
  const out: Cell[] = [];
  for (let start = 0; start < sample.ids.length; ) {
    const text = sample.texts[start] ?? "";
    let end = start + 1;
    if (PLACEHOLDER.test(text)) while (end < sample.ids.length && sample.ids[end] === sample.ids[start]) end++;
    if (end - start < FOLDED_FROM) end = start + 1;
    out.push({ start, length: end - start, text });
    start = end;
  }
  return out;
}

/** A token's text with its white space made visible. */
export function shown(text: string): string {
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

export function valueOf(sample: TokenSample, quantity: Quantity, at: number): Num {
  const logprob = sample.logprobs[at] ?? null;
  switch (quantity) {
    case "mask":
      return sample.mask[at] ?? 0;
    case "logprob":
      return logprob;
    case "gap": {
      const trainer = sample.trainer_logprobs?.[at] ?? null;
      return logprob === null || trainer === null ? null : Math.abs(logprob - trainer);
    }
    case "entropy":
      return sample.entropy?.[at] ?? null;
    case "advantage":
      return sample.advantages?.[at] ?? null;
    case "version":
      return sample.mask[at] ? (sample.versions[at] ?? null) : null;
  }
}

/** Whether any token has the quantity, so that its button means something. */
export function has(sample: TokenSample, quantity: Quantity): boolean {
  return sample.ids.some((_, at) => valueOf(sample, quantity, at) !== null);
}

/** Range of a quantity over a sequence, for its scale. */
export function scale(sample: TokenSample, quantity: Quantity): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (let at = 0; at < sample.ids.length; at++) {
    const value = valueOf(sample, quantity, at);
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : [0, 0];
}

/** How strongly a token is coloured, from 0 to 1, and the hue's name; null where it has no value. */
export function shade(quantity: Quantity, value: Num, [low, high]: [number, number]): { hue: string; strength: number } | null {
  if (value === null || !Number.isFinite(value)) return null;
  switch (quantity) {
    case "mask":
      return value ? { hue: "up", strength: 0.45 } : null;
    case "logprob":
      return { hue: "heat", strength: Math.min(1, -value / 5) };
    case "gap":
      return { hue: "heat", strength: Math.min(1, value / Math.max(high, 0.05)) };
    case "entropy":
      return { hue: "heat", strength: high > 0 ? value / Math.max(high, 1) : 0 };
    case "advantage": {
      const most = Math.max(Math.abs(low), Math.abs(high), 1e-9);
      return { hue: value >= 0 ? "up" : "down", strength: Math.abs(value) / most };
    }
    case "version":
      return { hue: "up", strength: high > low ? 0.15 + (0.7 * (value - low)) / (high - low) : 0.4 };
  }
}
