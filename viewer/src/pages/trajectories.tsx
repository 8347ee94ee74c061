// A run's trajectories: filters, table, scatter. All of its state is in the address.
import { useEffect, useMemo, useState } from "preact/hooks";
import { Scatter } from "../charts/scatter";
import { choices, extent, FILTER_NAMES, isFiltered, listQuery, mediaKinds, RANGES, select, sorting } from "../data/select";
import { siteInfo } from "../data/client";
import { searchTexts } from "../data/search";
import type { RunStore } from "../data/store";
import type { GrowingTable } from "../data/table";
import { go, link, setQuery } from "../route";
import { clock, count, DASH, fixed, number, plural, signed } from "../ui/format";
import { useLoad, useRun, useTitle } from "../ui/hooks";
import { useKeys } from "../ui/keys";
import { Choice, Failure, Loading, Notice, Reward, State } from "../ui/parts";
import { VirtualTable, type ColumnOf } from "../ui/virtual";

export function TrajectoriesPage(properties: { run: string; query: URLSearchParams }) {
  const { run, query } = properties;
  useTitle("Trajectories", run);
  const store = useRun(run);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => {
    store.loadTrajectories().catch(setError);
    if (!store.detail) store.loadDetail().catch(setError);
  }, [store]);
  const rows = useSelection(store, query);
  const table = store.trajectories;
  return (
    <div class="fill">
      <div class="page-head">
        <h1>Trajectories</h1>
        <Filters table={table} query={query} />
      </div>
      {error && <Failure error={error} what="The list of trajectories" />}
      {rows.error && <Failure error={rows.error} what="The text search" />}
      {!error && !store.trajectoriesLoaded && table.length === 0 && <Loading what="trajectories" />}
      {store.trajectoriesLoaded && table.length === 0 && (
        <Notice>
          {store.detail?.summary.state === "running"
            ? "No episode is finished yet. They appear here as they come."
            : "This run has no episodes in its journal: it ended before the first group was finished."}
        </Notice>
      )}
      {table.length > 0 && <List run={run} table={table} rows={rows.rows} query={query} />}
    </div>
  );
}

/** Rows that the address asks for; the search runs on the server, the rest here. */
export function useSelection(store: RunStore, query: URLSearchParams): { rows: number[]; error: Error | null } {
  const text = (query.get("q") ?? "").trim();
  const table = store.trajectories;
  const newest = table.length;
  const found = useLoad(async (signal) => (text ? await searchTexts(store.run, text, signal) : null), [store, text, text ? newest : 0], false);
  const { merged } = table; // rows change when they have been trained on
  const asked = listQuery(query).toString();
  const rows = useMemo(() => select(table, query, text ? (found.value ?? new Set()) : null), [table, merged, asked, found.value]);
  return { rows, error: found.error };
}

function List(properties: { run: string; table: GrowingTable; rows: number[]; query: URLSearchParams }) {
  const { run, table, rows, query } = properties;
  const at = query.get("at") ? Number(query.get("at")) : null;
  const seq = (row: number) => Number(table.value("seq", row));
  const open = (row: number) => go(["runs", run, "trajectories", seq(row)], listQuery(query));
  const move = (by: number) => {
    const place = rows.findIndex((row) => seq(row) === at);
    const next = rows[Math.min(rows.length - 1, Math.max(0, place + by))];
    if (next !== undefined) setQuery({ at: seq(next) });
  };
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => at !== null && table.row(at) >= 0 && open(table.row(at)),
    w: () => setQuery({ sort: "reward:asc" }),
    b: () => setQuery({ sort: "reward:desc" }),
    Escape: () => setQuery(Object.fromEntries(FILTER_NAMES.map((name) => [name, null]))),
  });
  const sort = sorting(query);
  const plot = query.get("plot") === "1";
  const columns = useColumns(run, table, query);
  const toSort = (column: string) => setQuery({ sort: `${column}:${sort.column === column && sort.descending ? "asc" : "desc"}` });
  return (
    <>
      <div class="list-bar">
        <span role="status" class="list-count">
          {isFiltered(query) ? `${count(rows.length)} of ${plural(table.length, "trajectory", "trajectories")}` : plural(table.length, "trajectory", "trajectories")}
        </span>
        {query.get("q")?.trim() && <span class="muted">{searchHelp()}</span>}
        <Choice
          label="Order"
          value={query.get("sort") ?? "seq:desc"}
          options={[
            ["seq:desc", "Newest"],
            ["reward:asc", "Worst"],
            ["reward:desc", "Best"],
            ["tokens:desc", "Longest"],
          ]}
          onChoose={(value) => setQuery({ sort: value })}
        />
        <button type="button" aria-pressed={plot} onClick={() => setQuery({ plot: plot ? null : "1" })}>
          Scatter
        </button>
        {isFiltered(query) && (
          <button type="button" onClick={() => setQuery(Object.fromEntries(FILTER_NAMES.map((name) => [name, null])))}>
            Clear filters
          </button>
        )}
      </div>
      {plot && <Scatter table={table} rows={rows} query={query} onOpen={open} />}
      {rows.length === 0 ? (
        <Notice>No trajectory passes these filters.</Notice>
      ) : (
        <VirtualTable label="Trajectories" columns={columns} rows={rows} rowKey={seq} sorted={sort} onSort={toSort} at={at} onOpen={open} />
      )}
    </>
  );
}

function useColumns(run: string, table: GrowingTable, query: URLSearchParams): ColumnOf[] {
  const [low, high] = extent(table.column("reward"));
  const many = choices(table, "env").length > 1;
  const carried = listQuery(query);
  const plain = (name: string, title: string, width: string, help?: string): ColumnOf => ({
    name, title, width, help, align: "right",
    cell: (row) => number(table.number(name, row)),
  }); // prettier-ignore
  const columns: ColumnOf[] = [
    {
      name: "seq", title: "#", width: "72px", align: "right", help: "order in which they were finished",
      cell: (row) => <a href={link(["runs", run, "trajectories", table.text("seq", row)], carried)}>{table.text("seq", row)}</a>,
    },
    { name: "reward", title: "Reward", width: "112px", align: "right", help: "none where nothing was scored: a failed episode, or an example of the warm-up", cell: (row) => <Reward value={table.number("reward", row)} low={low} high={high} without={unscored(table, row)} /> },
    { name: "status", title: "Status", width: "112px", cell: (row) => <State state={table.text("status", row)} /> },
    { name: "split", title: "Split", width: "64px", cell: (row) => table.text("split", row) },
    ...(many ? [{ name: "env", title: "Environment", width: "150px", cell: (row: number) => table.text("env", row) }] : []),
    plain("task_index", "Task", "64px"),
    {
      name: "group_index", title: "Sample", width: "76px", align: "right", help: "position in its group; opens the group side by side",
      cell: (row) => <a href={link(["runs", run, "groups", table.text("seq", row)])}>{number(table.number("group_index", row))}</a>,
    },
    plain("step", "Step", "64px", "training step that took it in"),
    { name: "advantage", title: "Advantage", width: "94px", align: "right", help: "mean over its trained tokens", cell: (row) => signed(table.number("advantage", row)) },
    plain("staleness", "Stale", "64px", "optimizer steps between its oldest token and its training"),
    { name: "gap", title: "Gap", width: "76px", align: "right", help: "mean absolute difference of logprobs between engine and trainer, in nats", cell: (row) => fixed(table.number("gap", row), 4) },
    plain("tokens", "Tokens", "72px", "response tokens"),
    plain("turns", "Turns", "64px"),
    { name: "media", title: "Media", width: "160px", cell: (row) => table.text("media", row).replaceAll("+", ", ") || <span class="muted">{DASH}</span> },
    { name: "created_at", title: "Time", width: "84px", align: "right", cell: (row) => clock(table.number("created_at", row) ?? 0) },
    { name: "error", title: "Error", width: "260px", cell: (row) => <span class="cut">{table.text("error", row)}</span> },
  ]; // prettier-ignore
  return columns.filter(({ name }) => ["seq", "reward", "status"].includes(name) || table.column(name).some((value) => value !== null && value !== ""));
}

/** What stands in place of a reward that there is not. */
function unscored(table: GrowingTable, row: number): string {
  return table.text("split", row) === "warmup" ? "example" : table.text("status", row).replace("_", " ");
}

function Filters(properties: { table: GrowingTable; query: URLSearchParams }) {
  const { table, query } = properties;
  const open = RANGES.some((range) => query.get(range.low) || query.get(range.high));
  return (
    <form class="filters" role="search" aria-label="Filter trajectories" onSubmit={(event) => event.preventDefault()}>
      <input type="search" placeholder="Search in what was said" aria-label="Search in what was said" title={searchHelp()} value={query.get("q") ?? ""} onInput={later((value) => setQuery({ q: value }))} />
      <Pick name="status" title="Status" options={choices(table, "status")} extra={[["not_ok", "not finished well"]]} query={query} />
      <Pick name="split" title="Split" options={choices(table, "split")} query={query} />
      <Pick name="env" title="Environment" options={choices(table, "env")} query={query} />
      <Pick name="media" title="Media" options={mediaKinds(table)} extra={[["none", "none"]]} query={query} />
      <details class="ranges" open={open}>
        <summary>Ranges</summary>
        <div>
          {RANGES.map(({ low, high, name }) => (
            <fieldset key={low}>
              <legend>{name}</legend>
              <input type="number" step="any" aria-label={`${name} from`} placeholder="from" value={query.get(low) ?? ""} onInput={(event) => setQuery({ [low]: event.currentTarget.value })} />
              <input type="number" step="any" aria-label={`${name} to`} placeholder="to" value={query.get(high) ?? ""} onInput={(event) => setQuery({ [high]: event.currentTarget.value })} />
            </fieldset>
          ))}
        </div>
      </details>
    </form>
  );
}

function Pick(properties: { name: string; title: string; options: string[]; extra?: [string, string][]; query: URLSearchParams }) {
  const { name, title, options, extra = [], query } = properties;
  const value = query.get(name) ?? "";
  if (options.length < 2 && !value) return null;
  return (
    <select aria-label={title} value={value} onChange={(event) => setQuery({ [name]: event.currentTarget.value })}>
      <option value="">{title}: all</option>
      {options.map((option) => (
        <option key={option} value={option}>
          {option.replace("_", " ")}
        </option>
      ))}
      {extra.map(([option, label]) => (
        <option key={option} value={option}>
          {label}
        </option>
      ))}
    </select>
  );
}

/** What a search looks through, where the server tells: of long episodes not all. */
function searchHelp(): string | undefined {
  const { searched } = siteInfo();
  return searched ? `The first ${count(searched)} characters of each episode are searched.` : undefined;
}

let waiting: ReturnType<typeof setTimeout> | undefined;

/** Waits until the typing rests. */
function later(change: (value: string) => void) {
  return (event: Event) => {
    const { value } = event.currentTarget as HTMLInputElement;
    clearTimeout(waiting);
    waiting = setTimeout(() => change(value), 200);
  };
}
