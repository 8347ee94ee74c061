// Which trajectories are shown, and in which order, as the address says: filters and sorting over the columns.
import type { GrowingTable } from "./table";

/** Filters by a range of numbers: the column, and the names of its bounds in the address. */
export const RANGES: { column: string; low: string; high: string; name: string }[] = [
  { column: "reward", low: "reward_min", high: "reward_max", name: "Reward" },
  { column: "tokens", low: "tokens_min", high: "tokens_max", name: "Tokens" },
  { column: "staleness", low: "stale_min", high: "stale_max", name: "Staleness" },
  { column: "step", low: "step_min", high: "step_max", name: "Step" },
];

/** Filters by equal text. */
export const EQUALS = ["status", "split", "env", "media"] as const;
export const FILTER_NAMES = [...RANGES.flatMap((range) => [range.low, range.high]), ...EQUALS, "q", "task"];

export interface Sorting {
  column: string;
  descending: boolean;
}

export function sorting(query: URLSearchParams): Sorting {
  const [column = "seq", direction] = (query.get("sort") ?? "seq:desc").split(":");
  return { column, descending: direction !== "asc" };
}

/** The part of an address that filters and sorts, to be carried from a list to its items and back. */
export function listQuery(query: URLSearchParams): URLSearchParams {
  const kept = new URLSearchParams();
  for (const name of [...FILTER_NAMES, "sort"]) {
    const value = query.get(name);
    if (value) kept.set(name, value);
  }
  return kept;
}

export function isFiltered(query: URLSearchParams): boolean {
  return FILTER_NAMES.some((name) => query.get(name));
}

/** Rows of the table that pass all filters of the address, sorted; `found` holds the seqs that a text search gave. */
export function select(table: GrowingTable, query: URLSearchParams, found: Set<number> | null): number[] {
  const tests = rowTests(table, query, found);
  const rows: number[] = [];
  for (let row = 0; row < table.length; row++) if (tests.every((test) => test(row))) rows.push(row);
  return sort(table, rows, sorting(query));
}

function rowTests(table: GrowingTable, query: URLSearchParams, found: Set<number> | null): ((row: number) => boolean)[] {
  const tests: ((row: number) => boolean)[] = [];
  for (const { column, low, high } of RANGES) {
    const values = table.column(column);
    const [from, to] = [bound(query.get(low)), bound(query.get(high))];
    if (from !== null) tests.push((row) => typeof values[row] === "number" && (values[row] as number) >= from);
    if (to !== null) tests.push((row) => typeof values[row] === "number" && (values[row] as number) <= to);
  }
  for (const name of EQUALS) {
    const wanted = query.get(name);
    if (!wanted) continue;
    const values = table.column(name);
    if (name === "media") tests.push((row) => (wanted === "none" ? !values[row] : String(values[row] ?? "").split("+").includes(wanted)));
    else if (name === "status" && wanted === "not_ok") tests.push((row) => !["completed", "truncated"].includes(String(values[row])));
    else tests.push((row) => values[row] === wanted);
  }
  const task = bound(query.get("task"));
  if (task !== null) tests.push((row) => table.value("task_index", row) === task);
  if (found) tests.push((row) => found.has(Number(table.value("seq", row))));
  return tests;
}

function bound(text: string | null): number | null {
  if (text === null || text.trim() === "") return null;
  const value = Number(text);
  return Number.isFinite(value) ? value : null;
}

/** Sorted by a column; unknown values come last either way, and equal ones in order of commits. */
function sort(table: GrowingTable, rows: number[], { column, descending }: Sorting): number[] {
  const values = table.column(column);
  const way = descending ? -1 : 1;
  return rows.sort((a, b) => {
    const [x, y] = [values[a] ?? null, values[b] ?? null];
    if (x === y) return b - a;
    if (x === null) return 1;
    if (y === null) return -1;
    return (x < y ? -1 : 1) * way;
  });
}

/** Different values of a column, for the choices of a filter. */
export function choices(table: GrowingTable, column: string): string[] {
  const seen = new Set<string>();
  for (const value of table.column(column)) if (value !== null && value !== "") seen.add(String(value));
  return [...seen].sort();
}

/** Kinds of media among the rows: "audio+video" counts for both. */
export function mediaKinds(table: GrowingTable): string[] {
  return [...new Set(choices(table, "media").flatMap((kinds) => kinds.split("+")))].sort();
}

export function extent(values: Iterable<number | string | null>): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (typeof value !== "number") continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}
