// Small pieces that all views are made of.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { ReadError } from "../data/client";
import { DASH, fixed } from "./format";
import type { Num } from "../data/types";

export function Panel(properties: { title: string; id?: string; side?: ComponentChildren; children: ComponentChildren; class?: string }) {
  const id = properties.id ?? properties.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  return (
    <section class={`panel ${properties.class ?? ""}`} aria-labelledby={`${id}-title`}>
      <header>
        <h2 id={`${id}-title`}>{properties.title}</h2>
        {properties.side && <div class="side">{properties.side}</div>}
      </header>
      <div class="body">{properties.children}</div>
    </section>
  );
}

/** Says why there is nothing to see. */
export function Notice(properties: { children: ComponentChildren; kind?: "note" | "problem" }) {
  return (
    <p class={`notice ${properties.kind ?? "note"}`} role={properties.kind === "problem" ? "alert" : undefined}>
      {properties.children}
    </p>
  );
}

export function Failure(properties: { error: Error; what: string }) {
  const status = properties.error instanceof ReadError ? properties.error.status : -1;
  return (
    <Notice kind="problem">
      <strong>{status === 404 ? `Not found: ${properties.what}.` : `${properties.what} cannot be shown.`}</strong> {properties.error.message}
    </Notice>
  );
}

export function Loading(properties: { what: string }) {
  return (
    <p class="notice loading" role="status">
      Loading {properties.what}…
    </p>
  );
}

const STATE_MARKS: Record<string, string> = { running: "●", done: "✓", stopped: "■", failed: "✕", unknown: "?", completed: "✓", truncated: "↦", timed_out: "⏱", cancelled: "■" };

/** A state or status, told by word, mark and colour. */
export function State(properties: { state: string }) {
  const { state } = properties;
  return (
    <span class={`state ${state}`}>
      <span aria-hidden="true">{STATE_MARKS[state] ?? "·"}</span> {state.replace("_", " ")}
    </span>
  );
}

/** A reward with a bar within the range of its run or group, so that rows can be compared at a glance; `without` stands where there is none. */
export function Reward(properties: { value: Num; low?: number; high?: number; without?: string }) {
  const { value, low = 0, high = 1, without = DASH } = properties;
  if (value === null) return <span class="muted">{without}</span>;
  const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0;
  return (
    <span class="reward">
      <span class="bar" aria-hidden="true">
        <span style={{ width: `${share * 100}%` }} />
      </span>
      {fixed(value)}
    </span>
  );
}

export function Facts(properties: { rows: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {properties.rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function CopyLine(properties: { text: string; label: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(properties.text);
      setCopied(true);
      setTimeout(() => setCopied(false), 2000);
    } catch {
      setCopied(false);
    }
  };
  return (
    <div class="copy-line">
      <code>{properties.text}</code>
      <button type="button" onClick={copy} aria-label={`Copy ${properties.label}`}>
        {copied ? "Copied" : "Copy"}
      </button>
    </div>
  );
}

/** Buttons of which one is chosen. */
export function Choice<T extends string>(properties: { label: string; options: [T, string][]; value: T; onChoose: (value: T) => void }) {
  return (
    <div class="choice" role="group" aria-label={properties.label}>
      {properties.options.map(([value, name]) => (
        <button key={value} type="button" aria-pressed={value === properties.value} onClick={() => properties.onChoose(value)}>
          {name}
        </button>
      ))}
    </div>
  );
}
