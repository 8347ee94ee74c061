// Numbers, times and sizes as people read them. Unknown values are a dash.
import type { Num } from "../data/types";

export const DASH = "–";

export function number(value: Num | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e7)) return value.toExponential(2);
  return grouped(Number(value.toFixed(Number.isInteger(value) || size >= 1000 ? 0 : size >= 100 ? 1 : digits)));
}

/** A number with commas between thousands. The browser's own formatter takes 25 ms to begin with, before anything is drawn. */
function grouped(value: number): string {
  return String(value).replace(/^-?\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
}

export function fixed(value: Num | undefined, digits = 2): string {
  return value === null || value === undefined || !Number.isFinite(value) ? DASH : value.toFixed(digits).replace("-", "−");
}

export function signed(value: Num | undefined, digits = 2): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return (value > 0 ? "+" : "") + fixed(value, digits);
}

export function count(value: Num | undefined): string {
  return value === null || value === undefined ? DASH : grouped(Math.round(value));
}

export function plural(n: number, one: string, many = `${one}s`): string {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function seconds(value: Num | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function size(bytes: Num | undefined): string {
  if (bytes === null || bytes === undefined) return DASH;
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1024 ** 2) return `${(bytes / 1024).toFixed(1)} KiB`;
  return `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}

export function moment(time: Num | undefined): string {
  if (time === null || time === undefined) return DASH;
  const date = new Date(time * 1000);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function clock(time: number): string {
  const date = new Date(time * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function ago(time: Num | undefined): string {
  if (time === null || time === undefined) return DASH;
  const passed = Date.now() / 1000 - time;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86_400) return `${Math.floor(passed / 3600)} h ago`;
  return moment(time).slice(0, 10);
}

const GROUP_STATES: Record<string, string> = {
  ready: "waiting for the trainer",
  leased: "at the trainer",
  acked: "trained on",
  stale: "too old to train on",
  failed: "set aside",
  empty: "without a token to train on",
  recorded: "not for training",
};

/** What became of a group, in words. */
export function groupState(state: string): string {
  return GROUP_STATES[state] ?? state;
}

function two(value: number): string {
  return String(value).padStart(2, "0");
}

export function text(value: unknown): string {
  if (value === null || value === undefined) return DASH;
  if (typeof value === "number") return number(value, 6);
  return typeof value === "string" ? value : JSON.stringify(value);
}
