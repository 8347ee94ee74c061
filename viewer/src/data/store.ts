// What is known of one run, kept while the page is open, shared by its views, and grown by what the live stream announces.
import { isBundle, read, runPath } from "./client";
import { follow, type LiveState } from "./live";
import { GrowingTable } from "./table";
import type { Columnar, LiveChange, RunDetail, RunEvent, RunSummary } from "./types";

const PAGE = 10_000;
const RECHECKED = 2_000; // rows that are asked for again at once, as their training may have been announced

type Cursor = number | string | null;

export class RunStore {
  detail: RunDetail | null = null;
  readonly metrics = new GrowingTable("step");
  readonly trajectories = new GrowingTable("seq");
  events: RunEvent[] = [];
  live: LiveState = "off";
  /** Rows that the journal holds, where the server told. */
  total: number | null = null;
  trajectoriesLoaded = false;
  metricsLoaded = false;

  private readonly watchers = new Set<() => void>();
  private told = false;
  private metricsAt: Cursor = null;
  private eventsAt: Cursor = null;
  private seqAt = 0;
  /** Up to which row the older ones without a step were asked for again; from the first on once all were. */
  private recheckedTo = 0;
  private stop: (() => void) | null = null;
  private announced: LiveChange | null = null;
  private refreshing = false;
  /** The run's state when `detail` was read. */
  private readIn: RunSummary["state"] | null = null;
  private wanted = { metrics: 0, events: 0, trajectories: 0 };

  constructor(readonly run: string) {}

  /** Calls `watcher` at most once a frame when anything has changed. */
  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    if (!this.stop && !isBundle()) {
      this.stop = follow(
        this.run,
        (change) => this.announce(change),
        (live) => ((this.live = live), this.tell()),
      );
    }
    return () => {
      this.watchers.delete(watcher);
      setTimeout(() => {
        if (this.watchers.size === 0) {
          this.stop?.();
          this.stop = null;
          this.live = "off";
        }
      }, 1000);
    };
  }

  async loadDetail(): Promise<void> {
    this.detail = await read<RunDetail>(`${runPath(this.run)}/run.json`);
    this.readIn = this.detail.summary.state;
    this.tell();
  }

  async loadMetrics(): Promise<void> {
    this.wanted.metrics++;
    const part = await read<Columnar>(`${runPath(this.run)}/metrics.json`, { after: this.metricsAt });
    this.metrics.merge(part);
    this.metricsAt = part.next ?? this.metricsAt;
    this.metricsLoaded = true;
    this.tell();
  }

  async loadEvents(): Promise<void> {
    this.wanted.events++;
    const part = await read<{ events: RunEvent[]; next: Cursor }>(`${runPath(this.run)}/events.json`, { after: this.eventsAt });
    const known = new Set(this.events.map((event) => event.n));
    this.events = [...this.events, ...part.events.filter((event) => !known.has(event.n))];
    this.eventsAt = part.next ?? this.eventsAt;
    this.tell();
  }

  /** All trajectories' rows, or, once loaded, those that are new. */
  async loadTrajectories(): Promise<void> {
    this.wanted.trajectories++;
    for (;;) {
      const part = await this.rows(this.seqAt, PAGE);
      const came = part.columns.seq?.length ?? 0;
      this.seqAt = Math.max(this.seqAt, Number(part.columns.seq?.at(-1) ?? 0));
      this.total = part.total ?? null;
      const more = !isBundle() && came === PAGE;
      if (!more) this.trajectoriesLoaded = true;
      this.tell();
      if (!more) return;
    }
  }

  private async rows(after: number, limit: number): Promise<Columnar> {
    const part = await read<Columnar>(`${runPath(this.run)}/trajectories.json`, { after: after || null, limit });
    this.trajectories.merge(part);
    return part;
  }

  private announce(change: LiveChange): void {
    this.announced = { ...this.announced, ...change };
    if (this.detail) {
      if (change.state) this.detail.summary.state = change.state;
      if (change.status !== undefined) this.detail.status = change.status;
    }
    this.tell();
    void this.refresh();
  }

  /** Asks for what is new of the parts that some view has loaded; announcements meanwhile are served afterwards. */
  private async refresh(): Promise<void> {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      while (this.announced) {
        const change = this.announced;
        this.announced = null;
        const stepped = change.metrics !== undefined && change.metrics !== this.metricsAt;
        if (stepped && this.wanted.metrics) await this.loadMetrics();
        if (change.events !== undefined && change.events !== this.eventsAt && this.wanted.events) await this.loadEvents();
        if ((change.seq ?? 0) > this.seqAt && this.wanted.trajectories) await this.loadTrajectories();
        const turned = change.state !== undefined && change.state !== this.readIn; // reports are written at the end
        const over = turned && this.readIn === "running"; // nothing is announced any more
        if ((stepped || over) && this.wanted.trajectories) await this.recheck(over);
        if (this.detail && (stepped || turned)) await this.loadDetail();
      }
    } catch {
      // The server is gone for a moment; the next announcement asks again.
    } finally {
      this.refreshing = false;
    }
  }

  /**
   * Rows change once: when they have been trained on. Of those without a step the newest are asked for again each time, and of
   * the older ones a part in turn, or `all` of them: some never get a step, and a page that was away has missed when others did.
   */
  private async recheck(all: boolean): Promise<void> {
    const { trajectories } = this;
    const newest = Math.max(0, trajectories.length - RECHECKED);
    const waiting: number[] = [];
    for (let row = 0; row < trajectories.length; row++) {
      if (trajectories.value("step", row) === null && trajectories.value("split", row) === "train") waiting.push(row);
    }
    const seq = (row: number) => Number(trajectories.value("seq", row));
    const older = waiting.filter((row) => row < newest).map(seq);
    const recent = waiting.find((row) => row >= newest);
    if (recent !== undefined) await this.rows(seq(recent) - 1, RECHECKED);
    if (all || !older.some((one) => one > this.recheckedTo)) this.recheckedTo = 0;
    for (const one of older) {
      if (one <= this.recheckedTo) continue;
      this.recheckedTo = Number((await this.rows(one - 1, RECHECKED)).columns.seq?.at(-1) ?? one);
      if (!all) break;
    }
    if (waiting.length > 0) this.tell();
  }

  private tell(): void {
    if (this.told) return;
    this.told = true;
    requestAnimationFrame(() => {
      this.told = false;
      for (const watcher of [...this.watchers]) watcher();
    });
  }
}

const stores = new Map<string, RunStore>();

export function runStore(run: string): RunStore {
  let store = stores.get(run);
  if (!store) stores.set(run, (store = new RunStore(run)));
  return store;
}

/** After a new key: what was refused is asked for again. */
export function forgetRuns(): void {
  stores.clear();
}
