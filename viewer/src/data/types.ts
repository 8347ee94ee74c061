// The shapes of the read-only API under data/. Times are Unix seconds; null means not known.

export type Num = number | null;

export interface Site {
  mode: "live" | "bundle";
  version: string;
  keys: boolean;
  /** Characters of an episode, from its beginning, in which a text is searched. */
  searched?: number;
}

export interface RunSummary {
  name: string;
  env: string | null;
  model: string | null;
  mode: string | null;
  seed: Num;
  steps: Num;
  step: Num;
  state: "running" | "done" | "stopped" | "failed" | "unknown";
  reward: Num;
  reward_last10: Num;
  held_out: Num;
  held_out_ci95: Num;
  started: Num;
  updated: Num;
  problems: Num;
  notes?: Num;
  trajectories: Num;
  folder: string | null;
  /** Whether it only measured, so that there are no steps and no curves. */
  evaluation?: boolean;
  /** Whether these are episodes that a service played for its callers: nothing is trained, and nothing but a journal is kept. */
  played?: boolean;
}

export interface Finding {
  level: string;
  what: string;
  advice: string | null;
}

/** A mean with the half width of its 95% interval, over n values. */
export interface Estimate {
  mean: Num;
  ci95: Num;
  n: number;
}

/** What an evaluation found. */
export interface EvalReport {
  env: string;
  model: string;
  split: string;
  /** Tasks that were asked for, and those with an episode that counts. */
  of: number;
  tasks: number;
  episodes: number;
  complete: boolean;
  success: number;
  /** The column of the task rows by which `by_tag` is. */
  by: string | null;
  reward: Estimate;
  pass_at: Record<string, Estimate>;
  components: Record<string, Estimate>;
  by_tag: { tag: string; reward: Estimate; once: Estimate | null; tasks: number; failed: number }[];
  failures: { cause: string; episodes: number; example: string | null }[];
}

/** What the blindness check found: mean rewards with media changed, and a verdict on each sense. */
export interface SensesReport {
  ok: boolean;
  env: string;
  model: string;
  split: string;
  tasks: number;
  failed: number;
  verdicts: Record<string, Finding>;
  passes: SensePass[];
}

export interface SensePass {
  condition: string;
  kind: string;
  reward: Num;
  tasks: number;
  change: { mean: Num; low: Num; high: Num } | null;
}

export interface RunDetail {
  summary: RunSummary;
  config: Record<string, unknown> | null;
  origin: Record<string, unknown> | null;
  status: Record<string, unknown> | null;
  counts: Record<string, number> | null;
  findings: Finding[] | null;
  /** Steps that the doctor needs, where it could not judge; null: it has judged. */
  unjudged?: Num;
  report?: EvalReport | null;
  senses?: SensesReport | null;
  env: { description: string | null; rewards: string[]; tools: string[]; modalities: string[] } | null;
  splits: Record<string, number> | null;
  checkpoints: number[] | null;
}

export interface RunEvent {
  n: number;
  time: number;
  step: Num;
  kind: string;
  level: "ok" | "note" | "problem";
  what: string;
  advice: string | null;
  role: string | null;
}

export interface MediaEntry {
  kind: "image" | "audio" | "video";
  mime: string | null;
  size: Num;
  width: Num;
  height: Num;
  duration: Num;
  sampling_rate: Num;
  fps: Num;
  url: string;
  missing?: boolean;
}

export interface MediaRow extends MediaEntry {
  seq: number;
  sha256: string;
  trajectory_seq: Num;
}

export interface ToolCall {
  id?: string;
  function?: { name?: string; arguments?: string | Record<string, unknown> };
}

export interface Part {
  type: string;
  text?: string;
  image_url?: { url: string };
  audio_url?: { url: string };
  video_url?: { url: string };
  input_audio?: { data: string; format?: string };
  [more: string]: unknown;
}

export interface Message {
  role: string;
  content: string | Part[] | null;
  name?: string;
  tool_calls?: ToolCall[];
  tool_call_id?: string;
  reasoning_content?: string;
}

export interface TurnInfo {
  index: number;
  message: Num;
  finish_reason: string | null;
  reward: Num;
  seconds: Num;
  engine: string | null;
  prompt_tokens: Num;
  cached_tokens: Num;
  response_tokens: Num;
  unreadable_calls: Num;
  sampling: Record<string, unknown> | null;
  weight_versions: { version: number; start: number; end: number }[];
  placeholders: Record<string, number> | null;
}

export interface TokenSample {
  ids: number[];
  texts: string[];
  mask: number[];
  turn: number[];
  versions: number[];
  logprobs: Num[];
  trainer_logprobs: Num[] | null;
  entropy: Num[] | null;
  advantages: Num[] | null;
  /** Why each token is trained on or not: its number in the trajectory's `why`. */
  why?: number[];
}

export interface Member {
  seq: number;
  index: Num;
  reward: Num;
  status: string;
  advantage: Num;
  /** In a site of files: it has no page of its own there. */
  left_out?: boolean;
}

export interface TrajectoryDetail {
  seq: number;
  id: string;
  run: string;
  env: string;
  env_version: string | null;
  split: string;
  task_index: Num;
  seed: number | string | null;
  status: string;
  error: string | null;
  attempts: Num;
  reward: Num;
  rewards: Record<string, number> | null;
  weights?: Record<string, number> | null;
  group_id: string;
  group_index: Num;
  group_size: Num;
  group: Member[] | null;
  step: Num;
  advantage: Num;
  staleness: Num;
  gap: Num;
  version_min: Num;
  version_max: Num;
  created_at: Num;
  timings: Record<string, number> | null;
  info: Record<string, unknown> | null;
  messages: Message[];
  media: Record<string, MediaEntry>;
  turns: TurnInfo[];
  samples?: TokenSample[];
  why?: string[];
  replay: string | null;
  left_out?: boolean;
}

export interface GroupDetail {
  group_id: string;
  task_index: Num;
  split: string;
  state: string | null;
  failure: string | null;
  trajectories: TrajectoryDetail[];
}

export interface Seen {
  kind: "image" | "audio" | "video";
  sampling_rate?: number;
  samples?: number;
  wave?: string;
  features?: { shape: number[] };
  width?: number;
  height?: number;
  fps?: Num;
  frames?: string[];
  times?: number[];
  /** Placeholder tokens that stand for it in a prompt. */
  tokens?: number;
}

export interface Lane {
  name: string;
  spans: [number, number, string][];
}

export interface Timeline {
  from: number;
  to: number;
  lanes: Lane[];
}

export type Column = (number | string | null)[];

export interface Columnar {
  columns: Record<string, Column>;
  components?: Record<string, Num[]>;
  next: number | string | null;
  total?: number;
  reset?: boolean;
}

export interface LiveChange {
  metrics?: number | string;
  events?: number | string;
  seq?: number;
  status?: Record<string, unknown> | null;
  state?: RunSummary["state"];
}
